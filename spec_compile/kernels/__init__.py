"""Kernels: what an op means in plain PyTorch (ops.py), and beside it, a file each, the Triton kernels for GPUs."""


def load() -> None:
    """Register the ops that have kernels; needs triton."""
    from . import compact, tree_attention  # noqa: F401
