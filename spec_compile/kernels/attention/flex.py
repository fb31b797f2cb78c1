"""Backend "flex": PyTorch's FlexAttention, with block masks that are computed from the lengths on the device.

Inductor makes one kernel of it inside a compiled region. If rounds are not compiled it runs unfused, which is slow and
holds all scores in memory.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    _apply_kernel_options,
    _identity,
    flex_attention,
)

from .. import HALF
from ..ops import append
from .base import Backend
from .call import AttentionCall, attention_function
from .flashinfer import add_sinks

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
    if not torch.compiler.is_dynamo_compiling() and get_proxy_mode() is not None:
        aux = None if sinks is None else AuxRequest(lse=True)
        out, sums = _traced(q, key_cache, value_cache, None if softcap is None else cap, blocks, scale, aux)
        return out if sinks is None else add_sinks(out, sums, sinks)
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
    read = [lengths]
    read += [] if ancestors is None else [ancestors]
    read += [] if window is None else [positions, places.scatter(1, own, positions)]  # positions of nodes and of slots

    def seen(batch, head, node, slot, lengths, *more):
        index = slot - lengths[batch]  # the slot's node; negative: a committed slot
        if ancestors is None:
            visible = index <= node
        else:
            bit = (more[0][batch, node] >> index.clamp(0, 63)) & 1
            visible = (index < 0) | ((index < 64) & (bit != 0))
        if window is not None:
            of_nodes, of_slots = more[-2:]
            visible = visible & (of_nodes[batch, node] - of_slots[batch, slot] < window)
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
    mask = BlockMask.from_kv_blocks(
        _dense(count.int()),
        _dense(indices.int()),
        *whole,
        BLOCK_SIZE=(QUERIES, BLOCK),
        mask_mod=lambda batch, head, node, slot: seen(batch, head, node, slot, *read),
        seq_lengths=(nodes, slots),
        compute_q_blocks=False,
    )
    mask.seen, mask.read = seen, tuple(read)
    return mask


def _traced(
    q: Tensor, keys: Tensor, values: Tensor, cap: Callable | None, mask: BlockMask, scale: float, aux: AuxRequest | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The outputs [B, N, H, Dv] and, if `aux` asks for them, the logarithms of the sums [B, N, H], by the operator that
    FlexAttention calls. A trace without Dynamo needs the tensors that the mask reads as arguments of their own."""
    options = _apply_kernel_options(q, keys, values, False, OPTIONS, aux)
    out, sums, *_ = torch.ops.higher_order.flex_attention(
        q, keys, values, cap or _identity, (*mask.as_tuple()[:-1], mask.seen), scale, options, (), mask.read
    )
    return out.transpose(1, 2), sums.transpose(1, 2) * math.log(2)


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
