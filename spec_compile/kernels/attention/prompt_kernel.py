"""Kernels of attention for a causal chunk larger than any tree, as prompts come in.

One kernel computes a tile of rows over a part of the cache, another merges the parts. The chunk is in the cache
already, after the committed slots. A row is one query head of one token (node). Both keep a running softmax (base 2;
Milakov & Gimelshein 2018) over the keys j so far:

    peak [BLOCK_M]             max_j score_j
    total [BLOCK_M]            sum_j 2 ** (score_j - peak)
    acc [BLOCK_M, BLOCK_DV]    sum_j 2 ** (score_j - peak) * value_j

Import this module only where Triton is installed. Shapes: BLOCK_M rows of a tile, BLOCK_N slots read at a time,
BLOCK_D* a head size.
"""

import triton
import triton.language as tl

from ..rounding import as_read
from .partial_softmax import with_alibi


@triton.jit
def _plan(
    lengths_ptr, positions_ptr, batch, stride_p, node, nodes, splits, least,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """How the slots that a tile's nodes see are split: length, first, stop, size, owner.

    The slots are first .. stop, committed ones and those of the chunk, in parts of `size`; `length` are committed.
    owner: the last split with work, which also adds the sinks. If some splits have no slots, it is the first of these.

    length = 1000, nodes 0 .. 31 of a tile, no window, splits = 4, BLOCK_N = 64, least = 64: first = 0, stop = 1032,
    size = 320, so that splits 0 to 3 have 320, 320, 320 and 72 slots, and owner = 3.
    """
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    stop = length + tl.minimum(tl.max(node, 0) + 1, nodes)
    first = tl.zeros_like(length)
    if WINDOW is not None:
        position = tl.load(positions_ptr + batch * stride_p + node, mask=node < nodes, other=1 << 30).to(tl.int32)
        first = tl.minimum(tl.maximum(tl.min(position, 0) - WINDOW + 1, 0), length)
        # Positions ascend in a chunk, so the window of its tokens can be counted in slots.
        first = tl.where(first < length, first, length + tl.maximum(tl.min(node, 0) - WINDOW + 1, 0))
    size = tl.maximum(tl.cdiv(tl.cdiv(stop - first, splits), BLOCK_N) * BLOCK_N, least)
    owner = tl.minimum(tl.cdiv(stop - first, size), splits - 1)
    return length, first, stop, size, owner


@triton.jit
def _step(
    q, k, v, seen, slope, key_position, position, acc, peak, total, inner, outer,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a block of keys k and values v to a running softmax.

    seen [BLOCK_M, BLOCK_N]: True where a row sees a key; None: everywhere. slope [BLOCK_M]: see `with_alibi`; None: no
    biases.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP:
        scores = 1 - 2 / (tl.exp2(scores * inner) + 1)  # tanh
    if slope is not None:
        scores = with_alibi(scores, slope, key_position, position, outer)
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1) * outer)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * outer - base[:, None])
    keep = tl.exp2(peak - base)
    total = total * keep + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    return acc, higher, total


@triton.jit
def _store_part(
    parts_ptr, sums_ptr, part, real, acc, peak, total,
    BLOCK_M: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Store a running softmax into parts [P, BLOCK_M, Dv] and sums [P, 2, BLOCK_M]. part: its number in P."""
    dv, r = tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_M)
    mask = real[:, None] & (dv < DV)[None, :]
    tl.store(parts_ptr + part * (BLOCK_M * DV) + r[:, None] * DV + dv[None, :], acc, mask=mask)
    tl.store(sums_ptr + part * (2 * BLOCK_M) + r, peak)
    tl.store(sums_ptr + part * (2 * BLOCK_M) + BLOCK_M + r, total)


@triton.jit
def _slot_position(positions_ptr, at, length, inside):
    """The positions of the tokens in the slots `at`: the slot itself if it is committed, else from `positions_ptr`."""
    new = tl.load(positions_ptr + at - length, mask=inside & (at >= length), other=0)
    return tl.where(at < length, at, new.to(tl.int32))


@triton.jit
def _attend_to_cache(
    query, key_cache_ptr, value_cache_ptr, scales_ptr, begin, end, first_node, node, position, slope, positions_ptr,
    length, acc, peak, total, inner, outer,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the slots begin .. end of a KV head to a running softmax. first_node: the lowest node of the tile."""
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    real_dk, real_dv = (dk < DK)[None, :], (dv < DV)[None, :]
    slot = tl.arange(0, BLOCK_N)
    # Blocks of BLOCK_N slots that every row of the tile sees need no mask.
    if WINDOW is None:
        unmasked_end = tl.minimum(end, length + first_node + 1)
        unmasked_end = begin + tl.maximum(unmasked_end - begin, 0) // BLOCK_N * BLOCK_N
        for start in range(begin, unmasked_end, BLOCK_N):
            at = start + slot
            keys = tl.load(key_cache_ptr + at[:, None] * DK + dk[None, :], mask=real_dk, other=0.0)
            values = tl.load(value_cache_ptr + at[:, None] * DV + dv[None, :], mask=real_dv, other=0.0)
            keys = as_read(keys, scales_ptr, at, None, 0, query.dtype)
            values = as_read(values, scales_ptr, at, None, 1, query.dtype)
            slot_position = at
            if slope is not None:
                slot_position = _slot_position(positions_ptr, at, length, at < end)
            acc, peak, total = _step(
                query, keys, values, None, slope, slot_position, position, acc, peak, total, inner, outer,
                SOFTCAP, PRECISION,
            )  # fmt: skip
        begin = unmasked_end
    # The other blocks, with a mask.
    for start in range(begin, end, BLOCK_N):
        at = start + slot
        inside = at < end
        keys = tl.load(key_cache_ptr + at[:, None] * DK + dk[None, :], mask=inside[:, None] & real_dk, other=0.0)
        values = tl.load(value_cache_ptr + at[:, None] * DV + dv[None, :], mask=inside[:, None] & real_dv, other=0.0)
        keys = as_read(keys, scales_ptr, at, inside[:, None], 0, query.dtype)
        values = as_read(values, scales_ptr, at, inside[:, None], 1, query.dtype)
        seen = inside[None, :] & (at[None, :] - length <= node[:, None])
        slot_position = at
        if WINDOW is not None or slope is not None:
            slot_position = _slot_position(positions_ptr, at, length, inside)
        if WINDOW is not None:
            seen = seen & (position[:, None] - slot_position[None, :] < WINDOW)
        acc, peak, total = _step(
            query, keys, values, seen, slope, slot_position, position, acc, peak, total, inner, outer,
            SOFTCAP, PRECISION,
        )  # fmt: skip
    return acc, peak, total


@triton.jit
def _add_sinks(sinks_ptr, head, real, acc, peak, total):
    """Add the heads' sinks to a running softmax: a key for each head, with a score and no value."""
    sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
    higher = tl.maximum(peak, sink)
    keep = tl.exp2(peak - higher)
    total = total * keep + tl.exp2(sink - higher)
    acc *= keep[:, None]
    return acc, higher, total


@triton.jit(do_not_specialize=["nodes", "splits", "least"])
def prompt_kernel(
    q_ptr,  # [B, H, N, Dk] by its strides
    key_cache_ptr, value_cache_ptr, scales_ptr,  # [B, Hkv, S, Dk], [B, Hkv, S, Dv], [B, Hkv, S, 2] or None
    lengths_ptr, positions_ptr, sinks_ptr, slopes_ptr,  # [B], [B, N] by its stride, [H] or None, [H] or None
    out_ptr,  # [B, N, H, Dv], written if there is one split
    parts_ptr, sums_ptr,  # else float32 [B * Hkv, tiles, splits, BLOCK_M, Dv] and [B * Hkv, tiles, splits, 2, BLOCK_M]
    stride_qb, stride_qh, stride_qn, stride_p, nodes, splits, least, capacity,
    inner, outer,  # factors of the scores inside and outside tanh
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, ONE_SPLIT: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of the cache for one tile of rows. Grid (tiles * splits, B * Hkv)."""
    # This program's tile, rows [BLOCK_M] of nodes and heads, and its split, slots begin .. end.
    tiles = tl.cdiv(nodes * GROUP, BLOCK_M)
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    tile = tiles - 1 - tile  # tiles that see most begin first
    batch, kv_head = (tl.program_id(1) // KV_HEADS).to(tl.int64), (tl.program_id(1) % KV_HEADS).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node, head = row // GROUP, kv_head * GROUP + row % GROUP
    length, first, stop, size, owner = _plan(
        lengths_ptr, positions_ptr, batch, stride_p, node, nodes, splits, least, WINDOW, BLOCK_N
    )
    key_cache_ptr += tl.program_id(1).to(tl.int64) * capacity * DK
    value_cache_ptr += tl.program_id(1).to(tl.int64) * capacity * DV
    if scales_ptr is not None:
        scales_ptr += tl.program_id(1).to(tl.int64) * capacity * 2
    begin = first + split * size
    end = tl.minimum(begin + size, tl.minimum(stop, capacity))
    if split > owner:
        return

    # Queries [BLOCK_M, BLOCK_DK], and their positions [BLOCK_M].
    real = row < nodes * GROUP
    dk = tl.arange(0, BLOCK_DK)[None, :]
    row_ptr = q_ptr + batch * stride_qb + head[:, None] * stride_qh + node[:, None] * stride_qn
    query = tl.load(row_ptr + dk, mask=real[:, None] & (dk < DK), other=0.0)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    positions_ptr += batch * stride_p
    position, slope = node, None
    if WINDOW is not None or slopes_ptr is not None:
        position = tl.load(positions_ptr + node, mask=real, other=0).to(tl.int32)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head, mask=real, other=0.0)

    # Attend to the cache, then to the sinks.
    acc, peak, total = _attend_to_cache(
        query, key_cache_ptr, value_cache_ptr, scales_ptr, begin, end, tile * BLOCK_M // GROUP, node, position, slope,
        positions_ptr, length, acc, peak, total, inner, outer,
        SOFTCAP, WINDOW, BLOCK_N, DK, BLOCK_DK, DV, BLOCK_DV, PRECISION,
    )  # fmt: skip
    if split == owner and sinks_ptr is not None:
        acc, peak, total = _add_sinks(sinks_ptr, head, real, acc, peak, total)

    # Store the result, or this split's part of it.
    if ONE_SPLIT:
        row_ptr = out_ptr + batch * nodes * (KV_HEADS * GROUP * DV) + (node * (KV_HEADS * GROUP) + head)[:, None] * DV
        dv = tl.arange(0, BLOCK_DV)
        tl.store(row_ptr + dv[None, :], acc / total[:, None], mask=real[:, None] & (dv < DV)[None, :])
    else:
        part = (tl.program_id(1) * tiles + tile).to(tl.int64) * splits + split
        _store_part(parts_ptr, sums_ptr, part, real, acc, peak, total, BLOCK_M, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["nodes", "splits", "least"])
def merge_parts_kernel(
    lengths_ptr, positions_ptr,  # [B], [B, N] by its stride
    out_ptr,  # [B, N, H, Dv], written
    parts_ptr, sums_ptr,  # float32 [B * Hkv, tiles, splits, BLOCK_M, Dv] and [B * Hkv, tiles, splits, 2, BLOCK_M]
    stride_p, nodes, splits, least,
    HEADS: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """out = acc / total of the running softmax over a row's parts, CHUNK parts at a time. Grid (N * H, B)."""
    # The row's tile, and how many parts it has.
    batch = tl.program_id(1).to(tl.int64)
    node, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    row = node * GROUP + head % GROUP
    tile = row // BLOCK_M
    tile_nodes = (tile * BLOCK_M + tl.arange(0, BLOCK_M)) // GROUP
    _, _, _, _, owner = _plan(
        lengths_ptr, positions_ptr, batch, stride_p, tile_nodes, nodes, splits, least, WINDOW, BLOCK_N
    )
    tiles = tl.cdiv(nodes * GROUP, BLOCK_M)
    part = ((batch * (HEADS // GROUP) + head // GROUP) * tiles + tile) * splits
    parts_ptr += (part * BLOCK_M + row % BLOCK_M) * DV
    sums_ptr += part * 2 * BLOCK_M + row % BLOCK_M

    # Add CHUNK parts at a time: peaks, totals [CHUNK], values [CHUNK, BLOCK_DV].
    dv = tl.arange(0, BLOCK_DV)
    peak, total = float("-inf"), 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, owner + 1, CHUNK):
        split = start + tl.arange(0, CHUNK)
        exists = split <= owner
        inside = exists[:, None] & (dv < DV)[None, :]
        peaks = tl.load(sums_ptr + split * (2 * BLOCK_M), mask=exists, other=float("-inf"))
        totals = tl.load(sums_ptr + split * (2 * BLOCK_M) + BLOCK_M, mask=exists, other=0.0)
        values = tl.load(parts_ptr + split[:, None] * (BLOCK_M * DV) + dv[None, :], mask=inside, other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        keep, weights = tl.exp2(peak - base), tl.exp2(peaks - base)
        total = total * keep + tl.sum(totals * weights, 0)
        acc = acc * keep + tl.sum(values * weights[:, None], 0)
        peak = higher
    tl.store(out_ptr + ((batch * nodes + node) * HEADS + head) * DV + dv, acc / total, mask=dv < DV)
