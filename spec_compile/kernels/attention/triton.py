"""Backend "triton": the kernels of our own (`kernels.tree_attention`), which have all features, and rotate."""

from collections.abc import Callable

import torch

from .base import HALF, Backend


def load() -> Callable:
    from .. import tree_attention  # noqa: F401

    return torch.ops.spec_compile.tree_attention.default


BACKEND = Backend("triton", load, frozenset({"cuda"}), HALF | {torch.float32}, rotates=True)
