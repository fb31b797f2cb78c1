"""Kernels: ops in plain PyTorch (`ops`), and Triton kernels for GPUs, a file for each.

`attention` has the backends of attention, `linear` the matrix products, `experts` the products of mixtures, and
`recurrence` the layers with states.
"""

import torch

from ..compat import use_own_caches

HALF = (torch.bfloat16, torch.float16)


def load(device: torch.device) -> None:
    """Register the ops that have kernels, and allocate the counters that they share on a GPU. Needs Triton.

    OSError if there is no folder for what is compiled.
    """
    use_own_caches()
    from . import copies, launching, linear, norms, row_scan  # noqa: F401
    from .attention import tree_attention  # noqa: F401
    from .experts import route  # noqa: F401
    from .linear import float32, low_rank_kernel  # noqa: F401
    from .together import ahead, set_up_compiler

    launching.prepare(device)
    ahead(set_up_compiler)
