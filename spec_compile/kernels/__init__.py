"""Kernels: what an op means in plain PyTorch (ops.py), and beside it, a file each, the Triton kernels for GPUs.

Whose attention runs is a choice: attention/ has the backends.
"""

import torch


def load(device: torch.device) -> None:
    """Register the ops that have kernels, and make ready what they share on a GPU; needs triton."""
    from . import add_rms_norm, compact, skinny_matmul, tree_attention  # noqa: F401

    skinny_matmul.prepare(device)
