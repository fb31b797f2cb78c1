"""Backend "sdpa": plain PyTorch, the reference. On a GPU it looks at the whole capacity of the cache."""

import torch
from torch import Tensor

from .. import ops
from .base import HALF, Backend


@torch.fx.node.has_side_effect
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    positions: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """See `base.Backend`. Shapes depend on no value, so that a CUDA graph can hold it; what lies in unseen slots is
    multiplied by 0 and must be finite. -> [B, N, H, Dv]."""
    group = q.shape[1] // k.shape[1]
    mask = ops.tree_mask(positions, lengths, ancestors, key_cache.shape[2], window, group, q.dtype)
    return ops.tree_attention(q, k, v, key_cache, value_cache, lengths, mask, sinks, scale, softcap)


BACKEND = Backend("sdpa", lambda use: attention, frozenset({"cpu", "cuda"}), HALF | {torch.float32, torch.float64})
