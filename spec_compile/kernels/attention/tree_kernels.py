"""The kernel of tree attention: one span of the cache, or one tail tile, for a tile of rows.

Import this module only where Triton is installed. A row is one query head of one node, its number node * GROUP + head
of the group. The slots below `edge`, the last multiple of CHUNK that is not above the committed length, are read by
spans (`spans`); what lies behind, the last committed slots and the tree itself, by tail tiles (`tail_tiles`). Both form
the partial softmax of one chunk of keys at a time with the same code (`chunk`). Shapes: M = BLOCK_M rows of a tile, C =
CHUNK keys, BLOCK_D* a head size or, of values, a part of it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..ptx import prefetch_l2
from ..rounding import as_read
from .chunk import attend_to_chunk, fold
from .spans import span_bounds, span_of


@triton.jit
def _prefetch_slots(cache_ptr, begin, end, D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr):
    """Fetch the first CHUNK of the slots begin .. end to the L2 cache, by lines of 128 bytes."""
    LINE: tl.constexpr = 1024 // cache_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = BLOCK_D // LINE if BLOCK_D > LINE else 1
    slot = tl.maximum(tl.minimum(begin + tl.arange(0, CHUNK), end - 1), 0)
    column = tl.minimum(tl.arange(0, LINES) * LINE, D - 1)
    prefetch_l2((cache_ptr + slot[:, None] * D + column[None, :]).to(tl.int64))


@triton.jit
def _store_part(parts_ptr, sums_ptr, part, rows, row, real, column, acc, peak, total, DV: tl.constexpr):
    """A partial softmax into parts [P, rows, Dv] and sums [P, 2, rows] at `part`."""
    dv = column + tl.arange(0, acc.shape[1])
    at = part * rows + row[:, None]
    tl.store(parts_ptr + at * DV + dv[None, :], acc, mask=real[:, None] & (dv < DV)[None, :])
    sums_ptr += part * (2 * rows) + row
    tl.store(sums_ptr, peak, mask=real)
    tl.store(sums_ptr + rows, total, mask=real)


@triton.jit
def _attend_to_slots(
    query, key_cache_ptr, value_cache_ptr, scales_ptr, begin, end, column, position, slope, inner, outer,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The chunks of committed slots begin .. end, from the first to the last. position, slope [M]: of the rows."""
    dk, dv = tl.arange(0, BLOCK_DK), column + tl.arange(0, BLOCK_DV)
    peak = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    acc = tl.zeros([query.shape[0], BLOCK_DV], tl.float32)
    for start in range(begin, end, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        keys = tl.load(key_cache_ptr + slot[:, None] * DK + dk[None, :], mask=(dk < DK)[None, :], other=0.0)
        values = tl.load(value_cache_ptr + slot[:, None] * DV + dv[None, :], mask=(dv < DV)[None, :], other=0.0)
        seen = None
        if WINDOW is not None:
            seen = position[:, None] - slot[None, :] < WINDOW
        keys = as_read(keys, scales_ptr, slot, None, 0, query.dtype)
        values = as_read(values, scales_ptr, slot, None, 1, query.dtype)
        next_acc, next_peak, next_total = attend_to_chunk(
            query, keys, values, seen, slope, slot, position, inner, outer, SOFTCAP, PRECISION
        )
        acc, peak, total = fold(acc, peak, total, next_acc, next_peak, next_total)
    return acc, peak, total


@triton.jit
def _attend_to_path(
    query, key_cache_ptr, value_cache_ptr, scales_ptr, path_ptr, positions_ptr, nodes, length, capacity, start, bits,
    rank, column, position, slope, inner, outer,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The chunk of the positions from `start` on, of which those from `length` on are the nodes of a path.

    path_ptr: the path [N]; None: the nodes in their order. bits [M]: the ancestors of the rows, if there is a path;
    rank [M]: where on it the rows are.
    """
    dk, dv = tl.arange(0, BLOCK_DK), column + tl.arange(0, BLOCK_DV)
    # The slot of each position [C], which is that of a committed token or of a node: N where there is none.
    key_position = start + tl.arange(0, CHUNK)
    step = key_position - length
    node = tl.where(step < 0, nodes, step)
    if path_ptr is not None:
        node = tl.load(path_ptr + step, mask=(step >= 0) & (step < nodes), other=nodes)
    committed, new = step < 0, node < nodes
    slot = tl.where(committed, key_position, length + node)
    stored = (committed | new) & (slot < capacity)
    mask = stored[:, None] & (dk < DK)[None, :]
    keys = tl.load(key_cache_ptr + slot[:, None] * DK + dk[None, :], mask=mask, other=0.0)
    mask = stored[:, None] & (dv < DV)[None, :]
    values = tl.load(value_cache_ptr + slot[:, None] * DV + dv[None, :], mask=mask, other=0.0)
    # What each row sees of them [M, C].
    if path_ptr is None:
        seen = (step[None, :] <= rank[:, None]) & (committed | new)[None, :]
    else:
        seen = ((bits[:, None] >> tl.where(new, node, 0).to(tl.int64)[None, :]) & 1) != 0
        seen = committed[None, :] | (seen & new[None, :])
    if WINDOW is not None or slope is not None:
        new_position = tl.load(positions_ptr + node, mask=new, other=0).to(tl.int32)
        key_position = tl.where(committed, key_position, new_position)
    if WINDOW is not None:
        seen = seen & (position[:, None] - key_position[None, :] < WINDOW)
    keys = as_read(keys, scales_ptr, slot, stored[:, None], 0, query.dtype)
    values = as_read(values, scales_ptr, slot, stored[:, None], 1, query.dtype)
    return attend_to_chunk(query, keys, values, seen, slope, key_position, position, inner, outer, SOFTCAP, PRECISION)


@triton.jit
def _attend_to_tail(
    query, key_cache_ptr, value_cache_ptr, scales_ptr, path_ptr, positions_ptr, parts_ptr, sums_ptr, nodes, length,
    capacity, edge, reach, part, rows, row, real, bits, rank, position, slope, column, inner, outer,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All chunks from `edge` on, into the parts from `part` on, also those behind the `reach` nodes of this path that
    another path of the batch may have."""
    tail_parts, parts = tl.cdiv(length + reach - edge, CHUNK), tl.cdiv(length + nodes - edge, CHUNK)
    for number in tl.range(0, tail_parts, num_stages=1):
        acc, peak, total = _attend_to_path(
            query, key_cache_ptr, value_cache_ptr, scales_ptr, path_ptr, positions_ptr, nodes, length, capacity,
            edge + number * CHUNK, bits, rank, column, position, slope, inner, outer,
            SOFTCAP, WINDOW, CHUNK, DK, BLOCK_DK, DV, BLOCK_DV, PRECISION,
        )  # fmt: skip
        _store_part(parts_ptr, sums_ptr, part + number, rows, row, real, column, acc, peak, total, DV)
    for number in tl.range(tail_parts, parts, num_stages=1):
        acc = tl.zeros([query.shape[0], BLOCK_DV], tl.float32)
        peak, total = tl.full([query.shape[0]], float("-inf"), tl.float32), tl.zeros([query.shape[0]], tl.float32)
        _store_part(parts_ptr, sums_ptr, part + number, rows, row, real, column, acc, peak, total, DV)


@triton.jit
def _tail_tile(
    tiles_ptr, ancestors_ptr, batch, tile, is_tail, member, nodes, PER_TILE: tl.constexpr, COLUMNS: tl.constexpr
):
    """A row of the table of `tail_tiles`: length of the path, where on it the tile's nodes begin, and their count. Also
    the nodes of the rows `member` [M], and their ancestors."""
    first = tile * PER_TILE
    count = tl.minimum(PER_TILE, nodes - first)
    reach, node = first + count, first + member
    bits = node
    if tiles_ptr is not None:
        tiles_ptr += (batch * nodes + tile) * (COLUMNS + nodes)
        reach = tl.load(tiles_ptr, mask=is_tail, other=0)
        first = tl.load(tiles_ptr + 1, mask=is_tail, other=0)
        count = tl.load(tiles_ptr + 2, mask=is_tail, other=0)
        node = tl.load(tiles_ptr + COLUMNS + first + member, mask=member < count, other=0)
        bits = tl.load(ancestors_ptr + batch * nodes + node, mask=member < count, other=0)
    return reach, first, count, node, bits


@triton.jit(do_not_specialize=["nodes", "tails", "spans"])
def tree_kernel(
    q_ptr, key_cache_ptr, value_cache_ptr, scales_ptr, lengths_ptr, ancestors_ptr, tiles_ptr, positions_ptr, slopes_ptr,
    parts_ptr, sums_ptr, stride_qb, stride_qh, stride_qn, stride_p, nodes, capacity, tails, spans, inner, outer,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr, FIRST: tl.constexpr, PARTS: tl.constexpr, PER_TILE: tl.constexpr, COLUMNS: tl.constexpr,
    DK: tl.constexpr, BLOCK_DK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Partial softmaxes of tail tiles into the first PARTS parts, of spans into those behind them, the last one first.
    Grid (B * Hkv, tails + spans * tiles of rows, blocks of Dv). inner, outer: factors of the scores in and behind tanh.
    """
    # The tail tile or the span of this program, and its rows [M]: nodes, and heads of the group.
    if EARLY:
        gdc_launch_dependents()  # the merge may take its place on the GPU, and wait there
    GROWS: tl.constexpr = WINDOW is None
    TILE_PARTS: tl.constexpr = (PER_TILE * GROUP + BLOCK_M - 1) // BLOCK_M
    batch, kv_head = (tl.program_id(0) // KV_HEADS).to(tl.int64), (tl.program_id(0) % KV_HEADS).to(tl.int64)
    program, column = tl.program_id(1), tl.program_id(2) * BLOCK_DV
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    is_tail, rows = program < tails, nodes * GROUP
    row_tiles = tl.cdiv(rows, BLOCK_M)
    tile = tl.where(is_tail, program % TILE_PARTS, (program - tails) % row_tiles)
    index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    reach, first, count, node, bits = _tail_tile(
        tiles_ptr, ancestors_ptr, batch, program // TILE_PARTS, is_tail, index // GROUP, nodes, PER_TILE, COLUMNS
    )
    path_ptr = tiles_ptr
    if tiles_ptr is not None:
        path_ptr = tiles_ptr + (batch * nodes + program // TILE_PARTS) * (COLUMNS + nodes) + COLUMNS
    real = index // GROUP < tl.where(is_tail, count, nodes)
    node, head = tl.where(is_tail, node, index // GROUP), index % GROUP
    positions_ptr += batch * stride_p
    position, slope = node, None
    if WINDOW is not None or slopes_ptr is not None:
        position = tl.load(positions_ptr + node, mask=real, other=1 << 30).to(tl.int32)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + kv_head * GROUP + head, mask=real, other=0.0)

    # Its slots, begin .. end.
    edge = length // CHUNK * CHUNK
    age = (program - tails) // row_tiles
    last = span_of(edge - 1, FIRST, GROWS)
    begin, end = span_bounds(tl.maximum(last - age, 0), FIRST, GROWS)
    begin, end = tl.where(is_tail, edge, begin), tl.where(is_tail, length, tl.minimum(end, edge))
    if WINDOW is not None:
        begin = tl.maximum(begin, tl.maximum(tl.min(position, 0) - WINDOW + 1, 0) // CHUNK * CHUNK)
    is_idle = tl.where(is_tail, count * GROUP <= tile * BLOCK_M, (age > last) | (begin >= end))
    if is_idle:
        return
    key_cache_ptr += tl.program_id(0).to(tl.int64) * capacity * DK
    value_cache_ptr += tl.program_id(0).to(tl.int64) * capacity * DV
    if scales_ptr is not None:
        scales_ptr += tl.program_id(0).to(tl.int64) * capacity * 2
    if EARLY:
        _prefetch_slots(key_cache_ptr, begin, end, DK, BLOCK_DK, CHUNK)
        _prefetch_slots(value_cache_ptr + column, begin, end, DV, BLOCK_DV, CHUNK)
        gdc_wait()

    # Queries [M, BLOCK_DK], and the partial softmaxes.
    dk = tl.arange(0, BLOCK_DK)[None, :]
    row_ptr = q_ptr + batch * stride_qb + (kv_head * GROUP + head)[:, None] * stride_qh + node[:, None] * stride_qn
    query = tl.load(row_ptr + dk, mask=real[:, None] & (dk < DK), other=0.0)
    part, row = tl.program_id(0).to(tl.int64) * (PARTS + spans), node * GROUP + head
    if is_tail:
        _attend_to_tail(
            query, key_cache_ptr, value_cache_ptr, scales_ptr, path_ptr, positions_ptr, parts_ptr, sums_ptr, nodes,
            length, capacity, edge, reach, part, rows, row, real, bits, first + index // GROUP, position, slope, column,
            inner, outer, SOFTCAP, WINDOW, CHUNK, DK, BLOCK_DK, DV, BLOCK_DV, PRECISION,
        )  # fmt: skip
    else:
        acc, peak, total = _attend_to_slots(
            query, key_cache_ptr, value_cache_ptr, scales_ptr, begin, end, column, position, slope, inner, outer,
            SOFTCAP, WINDOW, CHUNK, DK, BLOCK_DK, DV, BLOCK_DV, PRECISION,
        )  # fmt: skip
        _store_part(parts_ptr, sums_ptr, part + PARTS + age, rows, row, real, column, acc, peak, total, DV)
