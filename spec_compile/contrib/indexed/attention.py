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
import triton.language as tl
from torch import Tensor

from ...kernels import ops
from ...kernels.attention.base import AttentionCall, plain_attention
from ...kernels.attention.block_kernels import merge_kernel
from ...kernels.attention.partial_softmax import fold, key_columns, product
from ...kernels.card import precision
from ...kernels.primitives import place_of
from ...tree import MAX_NODES

SHARE, BLOCK = 256, 32
"""Chosen slots of a program, and slots that it reads at a time. Other values give other bits."""
BLOCK_SLOTS = 64
"""Slots of a program of scores."""


def scores(q: Tensor, index_keys: Tensor, weights: Tensor, visible: Tensor, table: Tensor | None = None) -> Tensor:
    """`choice.index_scores` of the cached keys [P, 1, S, D] by the kernel; float32 [B, N, S']."""
    batch, nodes, heads, size = q.shape
    slots, (table, page) = visible.shape[2], _pages(index_keys, table)
    out = torch.empty(batch, nodes, slots, dtype=torch.float32, device=q.device)
    scores_kernel[(triton.cdiv(slots, BLOCK_SLOTS), nodes, batch)](
        q.contiguous(), index_keys, table, weights.contiguous(), visible.contiguous(), out, slots,
        page * table.shape[1] if page else index_keys.shape[2], HEADS=heads,
        BLOCK_H=max(triton.next_power_of_2(heads), 16), DIM=size, BLOCK_D=key_columns(size), BLOCK_S=BLOCK_SLOTS,
        PAGE=page, PRECISION=precision(q.dtype, q.device), num_warps=4,
    )  # fmt: skip
    return out


def _pages(cache: Tensor, table: Tensor | None) -> tuple[Tensor | None, int]:
    """The table and the slots of a page; None and 0 if row b is page b."""
    return (table.contiguous(), cache.shape[2]) if ops.is_paged(table) else (None, 0)


def launch(call: AttentionCall, q: Tensor) -> Tensor:
    """Attention of q [B, H, N, Dk], rotated, to the slots `call.chosen`; the block is in the cache. -> [B, N, H, Dv].

    ValueError if the call has a feature that indexed attention never has.
    """
    for name in ("window", "softcap", "chunk", "slopes"):
        if getattr(call, name) is not None:
            raise ValueError(f"{name}: expected None with chosen slots, got {getattr(call, name)}")
    batch, heads, nodes, key_dim = q.shape
    if nodes > MAX_NODES:
        rotated = call._replace(q=q, k=None, v=None, cos=None, sin=None, q_norm=None, k_norm=None)
        return plain_attention(rotated, call.slots).contiguous()
    # A partial softmax for each part of the list of chosen slots.
    kv_heads, value_dim = call.key_cache.shape[1], call.value_cache.shape[3]
    chosen, (table, page) = call.chosen.contiguous(), _pages(call.key_cache, call.table)
    topk, columns = chosen.shape[2], triton.next_power_of_2(value_dim)
    parts, rows = triton.cdiv(topk, SHARE), nodes * heads
    acc = q.new_empty(batch, parts, rows, value_dim, dtype=torch.float32)
    sums = q.new_empty(batch, parts, 2, rows, dtype=torch.float32)
    chosen_kernel[(parts, rows, batch)](
        q, call.key_cache, call.value_cache, call.scales, table, chosen, call.sinks, acc, sums, *q.stride()[:3], nodes,
        call.slots, topk, call.scale * math.log2(math.e), HEADS=heads, KV_HEADS=kv_heads, PAGE=page, DK=key_dim,
        BLOCK_DK=triton.next_power_of_2(key_dim), DV=value_dim, BLOCK_DV=columns, SHARE=SHARE, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    # The parts of a row, merged in their order.
    out = call.empty_output()
    merge_kernel[(rows, batch)](
        acc, sums, out, nodes, parts, KV_HEADS=1, GROUP=heads, DV=value_dim, BLOCK_DV=columns, num_warps=1
    )
    return out


# The kernels. No program's work depends on other nodes or rows, so a node has the same bits in any tree. Chosen slots
# come in the order of their positions, whether their tokens are committed or ancestors in the tree.


@triton.jit(do_not_specialize=["slots", "capacity"])
def scores_kernel(
    q_ptr, keys_ptr,  # [B, N, H, D], [P, 1, S, D]
    table_ptr, weights_ptr,  # [B, capacity / PAGE] or None (page b is row b), float32 [B, N, H]
    visible_ptr, scores_ptr,  # bool [B, N, slots], float32 [B, N, slots], written
    slots, capacity,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """score = sum_h weight_h * relu(q_h . key) of BLOCK_S slots for one node. Grid (slots / BLOCK_S, N, B)."""
    node, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = batch * tl.num_programs(1) + node
    slot = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    head, dim = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    seen = tl.load(visible_ptr + row * slots + slot, mask=slot < slots, other=0) != 0
    scores = tl.full([BLOCK_S], float("-inf"), tl.float32)
    if tl.max(seen.to(tl.int32), 0) > 0:
        of_query = head[:, None] * DIM + dim[None, :]
        inside = (head < HEADS)[:, None] & (dim < DIM)[None, :]
        query = tl.load(q_ptr + row * HEADS * DIM + of_query, mask=inside, other=0.0)
        at = batch * capacity + slot
        if table_ptr is not None:
            at = place_of(table_ptr + batch * (capacity // PAGE), slot, slot < slots, 1, PAGE)
        of_key = at[:, None] * DIM + dim[None, :]
        keys = tl.load(keys_ptr + of_key, mask=seen[:, None] & (dim < DIM)[None, :], other=0.0)
        weights = tl.load(weights_ptr + row * HEADS + head, mask=head < HEADS, other=0.0)
        products = product(query, tl.trans(keys), PRECISION)
        scores = tl.where(seen, tl.sum(tl.maximum(products, 0.0) * weights[:, None], 0), float("-inf"))
    tl.store(scores_ptr + row * slots + slot, scores, mask=slot < slots)


@triton.jit(do_not_specialize=["nodes", "capacity", "topk"])
def chosen_kernel(
    q_ptr, key_cache_ptr, value_cache_ptr,  # [B, H, N, Dk] by its strides, [P, Hkv, S, Dk and Dv]
    scales_ptr, table_ptr,  # float32 [P, Hkv, S, 2] or None, [B, capacity / PAGE] or None (page b is row b)
    chosen_ptr, sinks_ptr,  # int32 [B, N, topk], [H] or None
    acc_ptr, sums_ptr,  # float32 [B, parts, H * N, Dv] and [B, parts, 2, H * N], written
    stride_qb, stride_qh, stride_qn, nodes, capacity, topk, outer,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The partial softmax of one query over SHARE of its chosen slots. Grid (parts, N * H, B)."""
    part, batch = tl.program_id(0), tl.program_id(2).to(tl.int64)
    node, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    q_ptr += batch * stride_qb + head * stride_qh + node * stride_qn
    query = tl.load(q_ptr + dk, mask=dk < DK, other=0.0).to(tl.float32)
    kv_head = head // (HEADS // KV_HEADS)
    first = (batch * KV_HEADS + kv_head) * capacity
    chosen_ptr += (batch * nodes + node) * topk

    # A running softmax over blocks of the list. Entries of -1 come last, and blocks with nothing else are passed over.
    # A sink is a key without a value, in the first part.
    acc, peak, total = tl.zeros([BLOCK_DV], tl.float32), float("-inf"), 0.0
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        peak = tl.where(part == 0, tl.ceil(sink), peak)
        total = tl.where(part == 0, tl.exp2(sink - tl.ceil(sink)), total)
    for start in range(part * SHARE, (part + 1) * SHARE, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        slot = tl.load(chosen_ptr + entry, mask=entry < topk, other=-1)
        seen = slot >= 0
        if tl.max(slot, 0) >= 0:
            at = first + slot
            if table_ptr is not None:
                at = place_of(table_ptr + batch * (capacity // PAGE), slot, seen, KV_HEADS, PAGE) + kv_head * PAGE
            of_key, of_value = at[:, None] * DK + dk[None, :], at[:, None] * DV + dv[None, :]
            keys = tl.load(key_cache_ptr + of_key, mask=seen[:, None] & (dk < DK)[None, :], other=0.0).to(tl.float32)
            values = tl.load(value_cache_ptr + of_value, mask=seen[:, None] & (dv < DV)[None, :], other=0.0)
            values = values.to(tl.float32)
            if scales_ptr is not None:
                keys *= tl.load(scales_ptr + at * 2, mask=seen, other=0.0)[:, None]
                values *= tl.load(scales_ptr + at * 2 + 1, mask=seen, other=0.0)[:, None]
            scores = tl.where(seen, tl.sum(keys * query[None, :], 1) * outer, float("-inf"))
            next_peak = tl.ceil(tl.max(scores, 0))
            weights = tl.exp2(scores - next_peak)
            next_acc, next_total = tl.sum(weights[:, None] * values, 0), tl.sum(weights, 0)
            acc, peak, total = fold(acc, peak, total, next_acc, next_peak, next_total)

    # The part's sum, peak and total, which `merge_kernel` reads.
    row, rows = head * nodes + node, HEADS * nodes
    at = batch * tl.num_programs(0) + part
    tl.store(acc_ptr + (at * rows + row) * DV + dv, acc, mask=dv < DV)
    tl.store(sums_ptr + at * 2 * rows + row, peak)
    tl.store(sums_ptr + (at * 2 + 1) * rows + row, total)
