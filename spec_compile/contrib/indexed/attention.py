"""Indexed attention on a GPU: `choice.append_and_choose` by a kernel, and attention to the chosen slots.

Import this module only where Triton is installed. A choice is the kernel of the scores, torch.topk, and a list of the
chosen slots in ascending order. Attention gathers the keys and values of that list, in parts of `SHARE` entries. While
a node sees no more than `topk` tokens the list has all of them, and programs without entries end at once, so that short
texts cost what they would cost without an indexer.

A chunk of a prompt has more tokens than it would pay to gather for each, so it attends to all slots under a mask.
"""

import math

import torch
import triton
from torch import Tensor

from ...kernels import ops
from ...kernels.attention.base import AttentionCall
from ...kernels.attention.partial_softmax import key_columns
from ...kernels.card import precision
from ...kernels.ops import only_chosen
from ...tree import MAX_NODES
from . import choice
from .attention_kernels import chosen_kernel, merge_chosen_kernel, scores_kernel

SHARE, BLOCK = 256, 32
"""Chosen slots of a program, and slots that it reads at a time. Other values give other bits."""
BLOCK_SLOTS = 64
"""Slots of a program of scores."""


def launch_choice(
    q: Tensor, k: Tensor, weights: Tensor, index_keys: Tensor, lengths: Tensor, visible: Tensor, topk: int
) -> Tensor:
    """`choice.append_and_choose` by the kernel."""
    ops.append(index_keys, k[:, None], lengths)
    return choice.largest(scores(q, index_keys, weights, visible), topk)


def scores(q: Tensor, index_keys: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
    """`choice.index_scores` of the cached keys [B, 1, S, D] by the kernel; float32 [B, N, S']."""
    batch, nodes, heads, size = q.shape
    slots = visible.shape[2]
    out = torch.empty(batch, nodes, slots, dtype=torch.float32, device=q.device)
    scores_kernel[(triton.cdiv(slots, BLOCK_SLOTS), nodes, batch)](
        q.contiguous(), index_keys, weights.contiguous(), visible.contiguous(), out, slots, index_keys.shape[2],
        HEADS=heads, BLOCK_H=max(triton.next_power_of_2(heads), 16), DIM=size, BLOCK_D=key_columns(size),
        BLOCK_S=BLOCK_SLOTS,
        PRECISION=precision(q.dtype, q.device), num_warps=4,
    )  # fmt: skip
    return out


def launch(call: AttentionCall, q: Tensor) -> Tensor:
    """Attention of q [B, H, N, Dk], rotated, to the slots `call.chosen`; the block is in the cache. -> [B, N, H, Dv].

    ValueError if the call has a feature that indexed attention never has.
    """
    for name in ("window", "softcap", "chunk", "slopes"):
        if getattr(call, name) is not None:
            raise ValueError(f"{name}: expected None with chosen slots, got {getattr(call, name)}")
    batch, heads, nodes, key_dim = q.shape
    if nodes > MAX_NODES:
        return _attend_under_mask(call, q)
    kv_heads, capacity, value_dim = *call.key_cache.shape[1:3], call.value_cache.shape[3]
    chosen = call.chosen.contiguous()
    topk, columns = chosen.shape[2], triton.next_power_of_2(value_dim)
    parts, rows = triton.cdiv(topk, SHARE), batch * nodes * heads
    acc = q.new_empty(rows, parts, value_dim, dtype=torch.float32)
    sums = q.new_empty(rows, parts, 2, dtype=torch.float32)
    chosen_kernel[(parts, nodes * heads, batch)](
        q, call.key_cache, call.value_cache, call.scales, chosen, acc, sums, *q.stride()[:3], nodes, capacity, topk,
        call.scale * math.log2(math.e), HEADS=heads, KV_HEADS=kv_heads, DK=key_dim,
        BLOCK_DK=triton.next_power_of_2(key_dim), DV=value_dim, BLOCK_DV=columns, SHARE=SHARE, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    out = call.empty_output()
    merge_chosen_kernel[(rows,)](
        acc, sums, call.sinks, out, parts, HEADS=heads, DV=value_dim, BLOCK_DV=columns, num_warps=1
    )
    return out


def _attend_under_mask(call: AttentionCall, q: Tensor) -> Tensor:
    """The same by `ops.masked_attention` over all slots."""
    slots, group = call.key_cache.shape[2], q.shape[1] // call.key_cache.shape[1]
    mask = ops.tree_mask(call.positions, call.lengths, call.ancestors, slots, None, group, q.dtype)
    keys, values = ops.as_read(call.key_cache, call.value_cache, call.scales, slots, q.dtype)
    mask = only_chosen(mask, call.chosen)
    return ops.masked_attention(q, keys, values, mask, call.sinks, call.scale, None).contiguous()
