"""Backend "flex": PyTorch's FlexAttention, with block masks made of the lengths on the device.

Inside a compiled region Inductor makes one kernel of it. Where rounds are not compiled it runs unfused: slow, and with
all scores in memory.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from .. import HALF
from ..ops import append
from .base import Backend
from .call import Call, attention_function
from .merge import add_sinks

BLOCK = 128
"""Slots of the cache that are skipped or computed together."""
QUERIES = 1 << 15
"""Queries that share a list of such blocks: all, so that no shape depends on how many there are."""
OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}
"""One kernel for all numbers of queries: that for few is chosen for the number at compilation."""


@attention_function
def attention(call: Call) -> Tensor:
    """The call. What lies in unseen slots of a block that is computed must be finite. -> [B, N, H, Dv]."""
    q, k, v, key_cache, value_cache, lengths, ancestors, positions, sinks, scale, softcap, window, *_ = call
    append(key_cache, k, lengths)
    append(value_cache, v, lengths)

    def cap(score, batch, head, node, slot):
        return torch.tanh(score / softcap) * softcap

    blocks = block_mask(key_cache.shape[2], lengths, ancestors, positions, window)
    out = flex_attention(
        q, key_cache, value_cache, None if softcap is None else cap, blocks, scale, q.shape[1] != k.shape[1],
        kernel_options=OPTIONS, return_aux=None if sinks is None else AuxRequest(lse=True),
    )  # fmt: skip
    if sinks is None:
        return out.transpose(1, 2)
    out, sums = out
    return add_sinks(out.transpose(1, 2), sums.lse.transpose(1, 2), sinks)


def block_mask(
    slots: int, lengths: Tensor, ancestors: Tensor | None, positions: Tensor, window: int | None
) -> BlockMask:
    """What `ops.tree_mask` means, as FlexAttention takes it: a function of places, the blocks of the cache where it is
    true without exception (none with a window), and those where it may be. They are counted on the device, and nothing
    waits for them."""
    nodes, device = positions.shape[1], positions.device
    places = torch.arange(slots, device=device).expand(len(lengths), -1)
    own = lengths[:, None] + torch.arange(nodes, device=device)
    there = places.scatter(1, own, positions)  # the position of what lies in each slot

    def seen(batch, head, node, slot):
        index = slot - lengths[batch]  # the slot's place in the block; negative: committed
        if ancestors is None:
            visible = index <= node
        else:
            bit = (ancestors[batch, node] >> index.clamp(0, 63)) & 1
            visible = (index < 0) | ((index < 64) & (bit != 0))
        if window is not None:
            visible = visible & (positions[batch, node] - there[batch, slot] < window)
        return visible

    blocks = (slots + BLOCK - 1) // BLOCK
    if window is None:
        first = lengths // BLOCK
        every = torch.arange(blocks, device=device, dtype=torch.int32).expand(len(lengths), -1)
        whole = _dense(first.int()), _dense(every.contiguous())
    else:
        first = (torch.minimum(positions.amin(1), lengths) - window + 1).clamp(min=0) // BLOCK
        whole = None, None
    count = (lengths + nodes + BLOCK - 1) // BLOCK - first
    indices = (first[:, None] + torch.arange(blocks, device=device)).clamp(max=blocks - 1)
    return BlockMask.from_kv_blocks(
        _dense(count.int()),
        _dense(indices.int()),
        *whole,
        BLOCK_SIZE=(QUERIES, BLOCK),
        mask_mod=seen,
        seq_lengths=(nodes, slots),
        compute_q_blocks=False,
    )


def _dense(x: Tensor) -> Tensor:
    """x [B] or [B, L] as [B, 1, 1] or [B, 1, 1, L] with the strides of a contiguous tensor, which FlexAttention's
    kernels rely on: for dimensions of one torch 2.11's Inductor would choose others."""
    row = x.stride(0)
    return x.as_strided((x.shape[0], 1, 1, *x.shape[1:]), (row, row, row, *x.stride()[1:]))


SIZES = frozenset(range(16, 257))
BACKEND = Backend(
    "flex",
    lambda use: attention,
    frozenset({"cuda"}),
    frozenset({*HALF, torch.float32}),
    uncompiled=False,  # it makes scalars on the host
    sizes=SIZES,
)
