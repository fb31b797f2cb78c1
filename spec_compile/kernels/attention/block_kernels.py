"""Kernels of a block: its preparation for attention, attention of a causal chunk, and attention under any mask.

In the preparation queries and keys are normed and rotated, keys and values appended.

    query, key:  x -> rms_norm(x), if there are weights -> x * cos + rotate_half(x) * sin, if there are angles
    caches:      slot lengths[b] + n of KV head h gets key and value n, as they are or divided by their scales

Import this module only where Triton is installed. Shapes: R rows of a tile, D (Dk, Dv) a head size, BLOCK_D* the power
of two that holds it. `stride_kb, stride_kh, stride_kn` are the strides of k over rows of the batch, heads and tokens.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..primitives import as_stored, over_scale, place_of, scaled, sum_in_pairs
from .partial_softmax import attend_in_order, attend_to_chunk, fold, no_softmax, slopes_of, span_log2, store_part


@triton.jit
def load_rotated(
    row_ptr, dim, cos_ptr, sin_ptr, norm_ptr, eps, offset, mask,
    D: tl.constexpr, ALIGNED: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """`ops.rotated` of the rows at `row_ptr` [R, 1] -> [R, BLOCK_D], rounded once, after the rotation.

    With D = 4, x = [a, b, c, d] becomes [a cos - c sin, b cos - d sin, c cos + a sin, d cos + b sin], each with the
    cos and sin of its column. norm_ptr: weight [D] of a norm before the rotation, or None. cos_ptr, sin_ptr: [R, 1].
    dim [BLOCK_D].
    """
    # The column of each number's partner, in the other half.
    half: tl.constexpr = D // 2
    across = tl.where(dim < half, dim + half, dim - half)
    across = tl.multiple_of(tl.max_contiguous(across, ALIGNED), ALIGNED)[None, :]
    first, dim = (dim < half)[None, :], dim[None, :]

    # Each number x and its partner from the other half, both [R, BLOCK_D].
    loaded = tl.load(row_ptr + dim, mask=mask, other=0.0)
    dtype: tl.constexpr = loaded.dtype
    x = loaded.to(tl.float32)
    other = tl.load(row_ptr + across, mask=mask, other=0.0).to(tl.float32)

    # The norm of the row, and the rotation.
    if norm_ptr is not None:
        scale = tl.rsqrt(sum_in_pairs(x * x, x.shape[0], x.shape[1]) / D + eps)[:, None]
        x = scaled(x * scale, tl.load(norm_ptr + dim, mask=dim < D, other=0.0), offset, dtype, ROUND_FIRST)
        weight = tl.load(norm_ptr + across, mask=dim < D, other=0.0)
        other = scaled(other * scale, weight, offset, dtype, ROUND_FIRST)
    cos = tl.load(cos_ptr + dim, mask=mask, other=0.0).to(tl.float32)
    turned = tl.where(first, -other, other) * tl.load(sin_ptr + dim, mask=mask, other=0.0).to(tl.float32)
    return tl.fma(x, cos, turned).to(dtype)  # explicit, because a compiler could fuse the other product instead


@triton.jit(do_not_specialize=["nodes"])
def append_kernel(
    q_ptr, k_ptr, v_ptr,  # [B, H, N, Dk], [B, Hkv, N, Dk], [B, Hkv, N, Dv], by their strides
    rotated_ptr,  # [B, H, N, Dk], written
    key_cache_ptr, value_cache_ptr, scales_ptr,  # [P, Hkv, S, Dk], [P, Hkv, S, Dv], [P, Hkv, S, 2] or None, written
    table_ptr, lengths_ptr,  # [B, capacity / PAGE] or None (page b is row b), [B]
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,  # [B, N, Dk] or None, [Dk] or None
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    nodes, capacity, eps, offset,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DK: tl.constexpr,
    BLOCK_DK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, ALIGNED: tl.constexpr,
    ROUND_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of a head a program: keys and values go into the caches, queries to `rotated`.

    Grid (N / BLOCK, B, Hkv + H): the KV heads, then the query heads. Without rotation (N / BLOCK, B, Hkv).
    """
    if EARLY:
        gdc_launch_dependents()
    # This program's tokens, and where their angles begin.
    batch, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)[None, :]
    inside = (token < nodes)[:, None]
    mask = inside & (dk < DK)[None, :]
    angle = (batch * nodes + token)[:, None] * DK
    if table_ptr is not None:
        table_ptr += batch * (capacity // PAGE)
        own = tl.load(lengths_ptr + batch).to(tl.int32) + token
        place = place_of(table_ptr, own, (token < nodes) & (own < capacity), KV_HEADS, PAGE) + head * PAGE
    if EARLY:
        gdc_wait()

    # A KV head: the key, then the value, into the slot of each token.
    if head < KV_HEADS:
        row_ptr = k_ptr + batch * stride_kb + head * stride_kh + token[:, None] * stride_kn
        if cos_ptr is None:
            keys = tl.load(row_ptr + dk[None, :], mask=mask, other=0.0)
        else:
            keys = load_rotated(
                row_ptr, dk, cos_ptr + angle, sin_ptr + angle, k_norm_ptr, eps, offset, mask, DK, ALIGNED, ROUND_FIRST
            )
        row_ptr = v_ptr + batch * stride_vb + head * stride_vh + token[:, None] * stride_vn
        values = tl.load(row_ptr + dv, mask=inside & (dv < DV), other=0.0)

        # Store both, over their scales if the caches have some. Slots beyond the last one are not kept.
        slot = (tl.load(lengths_ptr + batch).to(tl.int32) + token)[:, None]
        at = (batch * KV_HEADS + head) * capacity + slot
        if table_ptr is not None:
            at = place[:, None]
        if scales_ptr is not None:
            keys, key_unit = over_scale(keys)
            values, value_unit = over_scale(values)
            tl.store(scales_ptr + at * 2, key_unit, mask=inside & (slot < capacity))
            tl.store(scales_ptr + at * 2 + 1, value_unit, mask=inside & (slot < capacity))
        tl.store(key_cache_ptr + at * DK + dk[None, :], as_stored(keys, key_cache_ptr), mask=mask & (slot < capacity))
        stored = inside & (slot < capacity) & (dv < DV)
        tl.store(value_cache_ptr + at * DV + dv, as_stored(values, value_cache_ptr), mask=stored)

    # A query head.
    elif cos_ptr is not None:
        head -= KV_HEADS
        row_ptr = q_ptr + batch * stride_qb + head * stride_qh + token[:, None] * stride_qn
        queries = load_rotated(
            row_ptr, dk, cos_ptr + angle, sin_ptr + angle, q_norm_ptr, eps, offset, mask, DK, ALIGNED, ROUND_FIRST
        )
        at = ((batch * HEADS + head) * nodes + token)[:, None] * DK
        tl.store(rotated_ptr + at + dk[None, :], queries, mask=mask)


# The kernel of attention for a causal chunk larger than any tree, as prompts come in.
#
# The chunk is in the cache already, after the committed slots, so a tile of rows attends to the cache only. A row is
# one query head of one token (node). Keys are summed as in `tree_kernel`: by chunks of CHUNK keys, chunks by the spans
# of the row's own position (`partial_softmax`), and spans from the first to the last. So a token's output has the bits
# that it has as a node of a tree.
#
# Shapes: M = BLOCK_M rows of a tile, BLOCK_D* a head size or, of values, a part of it.


@triton.jit(do_not_specialize=["nodes"])
def prompt_kernel(
    q_ptr,  # [B, H, N, Dk] by its strides
    key_cache_ptr, value_cache_ptr, scales_ptr,  # [P, Hkv, S, Dk], [P, Hkv, S, Dv], [P, Hkv, S, 2] or None
    table_ptr,  # [B, capacity / PAGE] or None (page b is row b)
    lengths_ptr, positions_ptr, sinks_ptr, slopes_ptr,  # [B], [B, N] by its stride, [H] or None, as `slopes_of` reads
    out_ptr,  # [B, N, H, Dv], written
    stride_qb, stride_qh, stride_qn, stride_p, nodes, capacity,
    inner, outer, stride_s,  # factors of the scores inside tanh, or None, and outside; the stride of nodes in slopes
    DISTANCES: tl.constexpr, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, FIRST: tl.constexpr, MOST: tl.constexpr, PAGE: tl.constexpr,
    DK: tl.constexpr, BLOCK_DK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of rows attends to all that it sees. Grid (tiles, B * Hkv, blocks of Dv); MOST is 0 with a window."""
    # This program's rows [M]: nodes and heads. Tiles that see most begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    pair, column = tl.program_id(1).to(tl.int64), tl.program_id(2) * BLOCK_DV
    batch, kv_head = pair // KV_HEADS, pair % KV_HEADS
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node, head = row // GROUP, kv_head * GROUP + row % GROUP
    real, first_node = row < nodes * GROUP, tile * BLOCK_M // GROUP
    length, first = tl.load(lengths_ptr + batch).to(tl.int32), pair * capacity
    if table_ptr is not None:
        table_ptr += batch * (capacity // PAGE)
        first = kv_head * PAGE
    key_cache_ptr += first * DK
    value_cache_ptr += first * DV
    positions_ptr += batch * stride_p
    if scales_ptr is not None:
        scales_ptr += first * 2

    # The slots that the tile sees, begin .. end; all rows see those below `common`. The sizes of the rows' spans.
    last_node = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, nodes - 1)
    begin, end = tl.zeros_like(length), tl.minimum(length + last_node + 1, capacity)
    common = tl.minimum(length + first_node + 1, end) // CHUNK * CHUNK
    log2, _ = span_log2(length + tl.minimum(node, nodes - 1), FIRST, MOST)
    least, _ = span_log2(length + first_node, FIRST, MOST)
    position = node
    if WINDOW is not None or slopes_ptr is not None:
        position = tl.load(positions_ptr + node, mask=real, other=1 << 30).to(tl.int32)
    slope = slopes_ptr
    if slopes_ptr is not None:
        slope = slopes_of(slopes_ptr, head, batch * nodes + node, real, stride_s, DISTANCES)
    if WINDOW is not None:
        # Positions ascend in a chunk, so the window of its tokens can be counted in slots.
        lowest = tl.minimum(tl.min(position, 0) - WINDOW + 1, length)
        lowest = tl.where(lowest < length, lowest, length + first_node - WINDOW + 1)
        begin = tl.maximum(lowest, 0) // CHUNK * CHUNK

    # Attend to the slots that all rows see, then to the others.
    dk = tl.arange(0, BLOCK_DK)[None, :]
    row_ptr = q_ptr + batch * stride_qb + head[:, None] * stride_qh + node[:, None] * stride_qn
    query = tl.load(row_ptr + dk, mask=real[:, None] & (dk < DK), other=0.0)
    done, span = no_softmax(BLOCK_M, BLOCK_DV), no_softmax(BLOCK_M, BLOCK_DV)
    for masked in tl.static_range(0 if WINDOW is None and slopes_ptr is None else 1, 2):
        done, span = attend_in_order(
            query, key_cache_ptr, value_cache_ptr, scales_ptr, table_ptr, None, positions_ptr, done, span, begin,
            end if masked else common, log2, least, node, position, slope, length, column, inner, outer,
            DISTANCES, WINDOW, masked == 1, CHUNK, KV_HEADS, PAGE, DK, DV, PRECISION,
        )  # fmt: skip
        begin = common
    acc, peak, total = fold(done[0], done[1], done[2], span[0], span[1], span[2])

    # A sink is a key without a value.
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        acc, peak, total = fold(acc, peak, total, tl.zeros_like(acc), tl.ceil(sink), tl.zeros_like(total))
        total += tl.exp2(sink - peak)

    # The output is the weighted sum over the sum of the weights.
    dv = column + tl.arange(0, BLOCK_DV)
    at = out_ptr + batch * nodes * (KV_HEADS * GROUP * DV) + (node * (KV_HEADS * GROUP) + head)[:, None] * DV
    tl.store(at + dv[None, :], acc / total[:, None], mask=real[:, None] & (dv < DV)[None, :])


# The kernels of `grouped`, out = softmax(scale * q k^T + mask) v: parts of the slots side by side, then their sum.
#
# Row r of a KV head is head r // N of its group and token r % N. With two heads a group and N = 3, row 4 is the second
# head of token 1.


@triton.jit(do_not_specialize=["nodes", "slots", "share", "rows"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr,  # [B, H, N, Dk], [B, Hkv, S, Dk], [B, Hkv, S, Dv] by their strides
    mask_ptr,  # [B, 1, N, S] bools by its strides; None: every row sees all slots
    sums_ptr, peaks_ptr,  # float32 [B * Hkv, parts, rows, Dv] and [B * Hkv, parts, 2, rows], written
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_mb, stride_mn, stride_ms, nodes, slots, share, rows, scale,
    KV_HEADS: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The partial softmax of all rows over `share` slots. Grid (parts, B * Hkv)."""
    # The rows' queries [BLOCK_M, BLOCK_DK].
    part, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, kv_head = pair // KV_HEADS, pair % KV_HEADS
    row, dk, dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    head, node = kv_head * (rows // nodes) + row // nodes, row % nodes
    q_ptr += batch * stride_qb + head[:, None] * stride_qh + node[:, None] * stride_qn
    query = tl.load(q_ptr + dk[None, :], mask=(row < rows)[:, None] & (dk < DK)[None, :], other=0.0)
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh

    # One block of slots after the other; a block that no row sees is not read.
    acc, peak, total = no_softmax(BLOCK_M, BLOCK_DV)
    for start in range(part * share, tl.minimum((part + 1) * share, slots), BLOCK_N):
        slot = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        seen = (row < rows)[:, None] & (slot < slots)[None, :]
        if mask_ptr is not None:
            shown = mask_ptr + batch * stride_mb + node[:, None] * stride_mn + slot[None, :] * stride_ms
            seen = seen & (tl.load(shown, mask=seen, other=0) != 0)  # guard: mask
        if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
            inside = (slot < slots)[:, None]
            keys = tl.load(k_ptr + slot[:, None] * stride_ks + dk[None, :], mask=inside & (dk < DK)[None, :], other=0.0)
            of_value = slot[:, None] * stride_vs + dv[None, :]
            values = tl.load(v_ptr + of_value, mask=inside & (dv < DV)[None, :], other=0.0)
            next_acc, next_peak, next_total = attend_to_chunk(
                query, keys, values, seen, None, slot, node, None, scale * 1.4426950408889634, 1, PRECISION
            )
            acc, peak, total = fold(acc, peak, total, next_acc, next_peak, next_total)

    # The part.
    at = pair * tl.num_programs(0) + part
    store_part(sums_ptr, peaks_ptr, at, rows, row, row < rows, 0, acc, peak, total, DV)


@triton.jit(do_not_specialize=["nodes", "parts"])
def merge_kernel(
    sums_ptr, peaks_ptr, out_ptr,  # as `attend_kernel` has written them; [B, N, H, Dv], written
    nodes, parts, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The sum of all parts of a row, from the first to the last, over its total. Grid (rows, B * Hkv)."""
    row, pair, rows = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    dv = tl.arange(0, BLOCK_DV)
    acc, peak, total = tl.zeros([BLOCK_DV], tl.float32), float("-inf"), 0.0

    # Add the parts in their order.
    for part in range(parts):
        at = pair * parts + part
        next_acc = tl.load(sums_ptr + (at * rows + row) * DV + dv, mask=dv < DV, other=0.0)
        next_peak = tl.load(peaks_ptr + at * 2 * rows + row)
        next_total = tl.load(peaks_ptr + (at * 2 + 1) * rows + row)
        acc, peak, total = fold(acc, peak, total, next_acc, next_peak, next_total)

    # A row that sees nothing gets zeros.
    batch, head = pair // KV_HEADS, pair % KV_HEADS * GROUP + row // nodes
    at = ((batch * nodes + row % nodes) * (KV_HEADS * GROUP) + head) * DV
    out = tl.where(total > 0, acc / tl.where(total > 0, total, 1.0), 0.0)  # guard: nothing-is-seen
    tl.store(out_ptr + at + dv, out, mask=dv < DV)
