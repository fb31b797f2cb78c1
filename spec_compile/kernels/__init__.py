"""Kernels: what an op means in plain PyTorch (ops.py), and beside it, a file each, the Triton kernels for GPUs.

Whose attention runs is a choice: attention/ has the backends.
"""

import torch

HALF = (torch.bfloat16, torch.float16)


def load(device: torch.device) -> None:
    """Register the ops that have kernels, and make ready what they share on a GPU; needs triton."""
    from . import compact, counters, gated_norm, l2_norm, linear, norm, row_scan  # noqa: F401
    from .attention import tree_attention  # noqa: F401
    from .experts import route  # noqa: F401
    from .linear import float32  # noqa: F401

    counters.prepare(device)
