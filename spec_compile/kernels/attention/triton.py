"""Backend "triton": the kernels of our own (`kernels.tree_attention`), which have all features, and rotate."""

from collections.abc import Callable

import torch

from .. import HALF
from .base import Backend, Use

OLDEST = (8, 9)
"""The first compute capability with float8_e4m3fn."""


def load(use: Use) -> Callable:
    from . import tree_attention  # noqa: F401

    if use.fp8 and (here := torch.cuda.get_device_capability()) < OLDEST:
        numbers = "{}.{}, got {}.{}".format(*OLDEST, *here)
        raise ValueError(f"kv_cache_dtype: 'fp8' needs a GPU of compute capability {numbers}; pass 'auto'")
    return torch.ops.spec_compile.tree_attention.default


BACKEND = Backend(
    "triton", load, frozenset({"cuda"}), frozenset({*HALF, torch.float32}), rotates=True, ready=lambda *_: True,
    fp8=True, prompts_captured=True,
)  # fmt: skip
