"""Attention of blocks in training, with a derivative: a slot sees its block, and the context before the block's anchor.

Shapes: as in `kernels.block_attention_kernel`.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.ops import masked_attention
from .data import WIDTH

ROWS = 256
"""Slots of blocks that attend together on a CPU, each to the context and to all of these slots, most of them masked."""


class BlockLayout(NamedTuple):
    """The place of blocks in a context.

    anchors: [B, n] int64; the length of the context that a block sees, ascending
    size: T, slots of a block
    causal: True if a slot does not see later slots of its block
    """

    anchors: Tensor
    size: int
    causal: bool


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, layout: BlockLayout, scale: float
) -> Tensor:
    """The attention of all slots, [B, H, S, D].

    q: [B, H, S, D]
    k, v: [B, Hkv, S, D]; of the slots
    keys, values: [B, Hkv, L, D]; of the context, which the blocks of a row share
    """
    if q.device.type == "cpu" or q.dtype == torch.float64:
        return plain_block_attention(q, k, v, keys, values, layout, scale)
    return _BlockAttention.apply(q, k, v, keys, values, layout, scale)


def plain_block_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, layout: BlockLayout, scale: float
) -> Tensor:
    """`block_attention` by masks, for some blocks at a time."""
    groups, parts, size = q.shape[1] // k.shape[1], [], layout.size
    step = max(1, ROWS // size)
    for begin in range(0, layout.anchors.shape[1], step):
        anchors = layout.anchors[:, begin : begin + step]
        seen = min(keys.shape[2], -(-int(anchors.max()) // WIDTH) * WIDTH)
        slots = slice(begin * size, (begin + step) * size)
        # The keys and values of these slots follow those of the context.
        own_q, own_k, own_v = (heads[:, :, slots] for heads in (q, k, v))
        joined = (torch.cat(pair, dim=2) for pair in ((keys[:, :, :seen], own_k), (values[:, :, :seen], own_v)))
        mask = _mask(layout._replace(anchors=anchors), seen, q.dtype).repeat(1, 1, groups, 1)
        parts.append(masked_attention(own_q, *joined, mask, None, scale, None))
    return torch.cat(parts, dim=1).transpose(1, 2)


def _mask(layout: BlockLayout, seen: int, dtype: torch.dtype) -> Tensor:
    """0 or minus infinity, [B, 1, S, seen + S]."""
    anchors, size, causal = layout
    context = torch.arange(seen, device=anchors.device) < anchors.repeat_interleave(size, dim=1)[:, :, None]
    slot = torch.arange(anchors.shape[1] * size, device=anchors.device)
    block = slot[:, None] // size == slot // size
    block = block & (slot[:, None] >= slot) if causal else block
    visible = torch.cat([context, block.expand(len(anchors), -1, -1)], dim=2)[:, None]
    return torch.zeros(visible.shape, dtype=dtype, device=anchors.device).masked_fill_(~visible, -math.inf)


class _BlockAttention(torch.autograd.Function):
    """The kernels as a function of autograd. They compute in the dtype of a matrix product of q."""

    @staticmethod
    def forward(ctx, q, k, v, keys, values, layout, scale):
        from .block_attention_kernel import forward

        if torch.is_autocast_enabled(q.device.type):
            dtype = torch.get_autocast_dtype(q.device.type)
            q, k, v, keys, values = (heads.to(dtype) for heads in (q, k, v, keys, values))
        ctx.layout, ctx.scale = layout, scale
        out, total = forward(q, k, v, keys, values, layout.anchors, layout.size, scale, layout.causal)
        ctx.save_for_backward(q, k, v, keys, values, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        from .block_attention_kernel import backward

        *given, out, total = ctx.saved_tensors
        anchors, size, causal = ctx.layout
        grads = backward(grad.to(out.dtype), *given, anchors, out, total, size, ctx.scale, causal)
        return *grads, None, None
