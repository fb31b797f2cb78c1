"""Backend "flex": PyTorch's FlexAttention, with block masks that are computed from the lengths on the device.

Inductor makes one kernel of it inside a compiled region. If rounds are not compiled it runs unfused, which is slow and
holds all scores in memory.
"""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from .. import HALF
from ..ops import append
from .base import Backend
from .call import AttentionCall, attention_function
from .merge import add_sinks

BLOCK = 128
"""Slots of a block; a block of the cache is skipped or computed as a unit."""
QUERIES = 1 << 15
"""Queries that share a list of blocks: all of them, so that no shape depends on their number."""
OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}
"""One kernel for any number of queries; the decoding kernel would be chosen by the number at compilation."""


@attention_function
def attention(call: AttentionCall) -> Tensor:
    """The call. -> [B, N, H, Dv]. Values in unseen slots of a computed block must be finite."""
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
    """`ops.tree_mask` as FlexAttention takes it, computed on the device without waiting for it.

    It has a function `seen` of indices, the blocks of the cache that are seen completely (none with a window), and the
    blocks where a slot may be seen. 300 committed slots and 5 nodes with BLOCK = 128: blocks 0 and 1 are seen
    completely, and block 2 (slots 256 .. 383) in part.
    """
    nodes, device = positions.shape[1], positions.device
    places = torch.arange(slots, device=device).expand(len(lengths), -1)
    own = lengths[:, None] + torch.arange(nodes, device=device)
    there = places.scatter(1, own, positions)  # the position of the token in each slot

    def seen(batch, head, node, slot):
        index = slot - lengths[batch]  # the slot's node; negative: a committed slot
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
    """x [B] or [B, L] as [B, 1, 1] or [B, 1, 1, L] with the strides of a contiguous tensor.

    FlexAttention's kernels rely on these strides; torch 2.11's Inductor would choose others for dimensions of size 1.
    """
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
