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
from .chunk import attend_to_chunk, fold, score
from .spans import span_log2, turns


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
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The chunks of committed slots begin .. end, from the first to the last. position, slope [M]: of the rows.

    AHEAD: CHUNK, if the tensor cores form the scores of the next chunk while this one's weights are computed, which
    takes one more turn, whose chunk no row sees; else 0.
    """
    dk, dv = tl.arange(0, BLOCK_DK), column + tl.arange(0, BLOCK_DV)
    peak = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    acc = tl.zeros([query.shape[0], BLOCK_DV], tl.float32)
    scores = tl.full([query.shape[0], CHUNK], float("-inf"), tl.float32)
    for start in range(begin - AHEAD, end, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        next_slot, key_mask, value_mask = slot + AHEAD, dk < DK, dv < DV
        if AHEAD > 0:
            key_mask = key_mask & (tl.zeros_like(dk) + start < end - AHEAD)
            value_mask = value_mask & (tl.zeros_like(dv) + start >= begin)
        keys = tl.load(key_cache_ptr + next_slot[:, None] * DK + dk[None, :], mask=key_mask[None, :], other=0.0)
        values = tl.load(value_cache_ptr + slot[:, None] * DV + dv[None, :], mask=value_mask[None, :], other=0.0)
        keys = as_read(keys, scales_ptr, next_slot, None, 0, query.dtype)
        values = as_read(values, scales_ptr, slot, None, 1, query.dtype)
        next_scores = score(query, keys, PRECISION)
        if AHEAD == 0:
            scores = next_scores
        seen = None
        if WINDOW is not None:
            seen = position[:, None] - slot[None, :] < WINDOW
        next_acc, next_peak, next_total = attend_to_chunk(
            scores, values, seen, slope, slot, position, inner, outer, SOFTCAP, PRECISION
        )
        acc, peak, total = fold(acc, peak, total, next_acc, next_peak, next_total)
        scores = next_scores
    return acc, peak, total


@triton.jit
def _path_nodes(path_ptr, nodes, length, start, end, CHUNK: tl.constexpr):
    """Which node each of the positions start .. start + CHUNK is [C]; N where it is none, or does not lie before `end`.
    path_ptr: the path [N]; None: the nodes in their order."""
    position = start + tl.arange(0, CHUNK)
    step = position - length
    inside = (step >= 0) & (position < end)
    if path_ptr is None:
        node = tl.where(inside, step, nodes)
    else:
        node = tl.load(path_ptr + step, mask=inside, other=nodes)
    return node


@triton.jit
def _load_path(
    key_cache_ptr, value_cache_ptr, node, nodes, length, capacity, start, column,
    CHUNK: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The keys [C, BLOCK_DK] and values [C, BLOCK_DV] of the positions from `start` on, which are committed below
    `length` and `node` [C] from there on, and their slots [C]."""
    dk, dv = tl.arange(0, BLOCK_DK), column + tl.arange(0, BLOCK_DV)
    position = start + tl.arange(0, CHUNK)
    committed = position < length
    slot = tl.where(committed, position, length + node)
    stored = (committed | (node < nodes)) & (slot < capacity)
    mask = stored[:, None] & (dk < DK)[None, :]
    keys = tl.load(key_cache_ptr + slot[:, None] * DK + dk[None, :], mask=mask, other=0.0)
    mask = stored[:, None] & (dv < DV)[None, :]
    values = tl.load(value_cache_ptr + slot[:, None] * DV + dv[None, :], mask=mask, other=0.0)
    return keys, values, slot


@triton.jit
def _attend_to_path(
    query, keys, values, node, slot, scales_ptr, path_ptr, positions_ptr, nodes, length, capacity, start, bits, rank,
    position, slope, inner, outer,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The chunk that `_load_path` has loaded. bits [M]: the ancestors of the rows, if there is a path; rank [M]: where
    on it the rows are."""
    key_position = start + tl.arange(0, CHUNK)
    step = key_position - length
    committed, new = step < 0, node < nodes
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
    stored = ((committed | new) & (slot < capacity))[:, None]
    keys = as_read(keys, scales_ptr, slot, stored, 0, query.dtype)
    values = as_read(values, scales_ptr, slot, stored, 1, query.dtype)
    scores = score(query, keys, PRECISION)
    return attend_to_chunk(scores, values, seen, slope, key_position, position, inner, outer, SOFTCAP, PRECISION)


@triton.jit
def _load_queries(row_ptr, real, DK: tl.constexpr, BLOCK_DK: tl.constexpr):
    """[M, BLOCK_DK] of the rows at row_ptr [M]."""
    dk = tl.arange(0, BLOCK_DK)[None, :]
    return tl.load(row_ptr[:, None] + dk, mask=real[:, None] & (dk < DK), other=0.0)


@triton.jit
def _attend_to_tail(
    row_ptr, key_cache_ptr, value_cache_ptr, scales_ptr, path_ptr, positions_ptr, parts_ptr, sums_ptr, nodes, length,
    capacity, edge, reach, part, rows, row, real, bits, rank, position, slope, column, inner, outer,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr, DK: tl.constexpr,
    BLOCK_DK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """All chunks from `edge` on, into the parts from `part` on, also those behind the `reach` nodes of this path that
    another path of the batch may have."""
    # All is loaded at once, because one latency after the other is what a tail takes.
    path, loaded = (), ()
    for number in tl.static_range(PARTS):
        path += (_path_nodes(path_ptr, nodes, length, edge + number * CHUNK, length + reach, CHUNK),)
    if EARLY:
        gdc_wait()
    for number in tl.static_range(PARTS):
        chunk = _load_path(
            key_cache_ptr, value_cache_ptr, path[number], nodes, length, capacity, edge + number * CHUNK, column,
            CHUNK, DK, BLOCK_DK, DV, BLOCK_DV,
        )  # fmt: skip
        loaded += (chunk,)
    query = _load_queries(row_ptr, real, DK, BLOCK_DK)
    for number in tl.static_range(PARTS):
        if edge + number * CHUNK < length + nodes:
            acc = tl.zeros([query.shape[0], BLOCK_DV], tl.float32)
            peak = tl.full([query.shape[0]], float("-inf"), tl.float32)
            total = tl.zeros([query.shape[0]], tl.float32)
            if edge + number * CHUNK < length + reach:
                keys, values, slot = loaded[number]
                acc, peak, total = _attend_to_path(
                    query, keys, values, path[number], slot, scales_ptr, path_ptr, positions_ptr, nodes, length,
                    capacity, edge + number * CHUNK, bits, rank, position, slope, inner, outer,
                    SOFTCAP, WINDOW, CHUNK, PRECISION,
                )  # fmt: skip
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


@triton.jit(do_not_specialize=["nodes", "spans"])
def tree_kernel(
    q_ptr, key_cache_ptr, value_cache_ptr, scales_ptr, lengths_ptr, ancestors_ptr, tiles_ptr, positions_ptr, slopes_ptr,
    parts_ptr, sums_ptr, stride_qb, stride_qh, stride_qn, stride_p, nodes, capacity, spans, inner, outer,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr, FIRST: tl.constexpr, MOST: tl.constexpr, PARTS: tl.constexpr, PER_TILE: tl.constexpr,
    COLUMNS: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Partial softmaxes of tail tiles into the first PARTS parts, of spans into those behind them, the last one first.
    Grid (B * Hkv, spans * tiles of rows + tail tiles, blocks of Dv). inner, outer: factors of the scores in and behind
    tanh. AHEAD: see `_attend_to_slots`.
    """
    # The tail tile or the span of this program, and its rows [M]: nodes, and heads of the group.
    if EARLY:
        gdc_launch_dependents()  # the merge may take its place on the GPU, and wait there
    TILE_PARTS: tl.constexpr = (PER_TILE * GROUP + BLOCK_M - 1) // BLOCK_M
    batch, kv_head = (tl.program_id(0) // KV_HEADS).to(tl.int64), (tl.program_id(0) % KV_HEADS).to(tl.int64)
    program, column = tl.program_id(1), tl.program_id(2) * BLOCK_DV
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    rows = nodes * GROUP
    row_tiles = tl.cdiv(rows, BLOCK_M)
    tail = program - spans * row_tiles
    is_tail = tail >= 0
    tile = tl.where(is_tail, tail % TILE_PARTS, program % row_tiles)
    index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    reach, first, count, node, bits = _tail_tile(
        tiles_ptr, ancestors_ptr, batch, tail // TILE_PARTS, is_tail, index // GROUP, nodes, PER_TILE, COLUMNS
    )
    path_ptr = tiles_ptr
    if tiles_ptr is not None:
        path_ptr = tiles_ptr + (batch * nodes + tail // TILE_PARTS) * (COLUMNS + nodes) + COLUMNS
    real = index // GROUP < tl.where(is_tail, count, nodes)
    node, head = tl.where(is_tail, node, index // GROUP), index % GROUP
    positions_ptr += batch * stride_p
    position, slope = tl.load(positions_ptr + node, mask=real, other=1 << 30).to(tl.int32), None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + kv_head * GROUP + head, mask=real, other=0.0)

    # Its slots, begin .. end. Spans count from the last one back, those of the smaller size first.
    edge = length // CHUNK * CHUNK
    log2, turn = span_log2(length, FIRST, MOST)
    age, smaller = program // row_tiles, tl.cdiv(edge, 1 << log2)
    is_late = (age >= smaller) & (length + nodes > turn) & (MOST > 0)
    log2 += is_late.to(tl.int32)
    begin = ((edge - 1 >> log2) - age + tl.where(is_late, smaller, 0)) << log2
    is_idle, end = begin < 0, tl.minimum(begin + (1 << log2), edge)
    begin, end = tl.where(is_tail, edge, begin), tl.where(is_tail, length, end)
    if WINDOW is not None:
        begin = tl.maximum(begin, tl.maximum(tl.min(position, 0) - WINDOW + 1, 0) // CHUNK * CHUNK)
    is_idle = tl.where(is_tail, count * GROUP <= tile * BLOCK_M, is_idle | (begin >= end))
    if is_idle:
        return
    key_cache_ptr += tl.program_id(0).to(tl.int64) * capacity * DK
    value_cache_ptr += tl.program_id(0).to(tl.int64) * capacity * DV
    if scales_ptr is not None:
        scales_ptr += tl.program_id(0).to(tl.int64) * capacity * 2
    row_ptr = q_ptr + batch * stride_qb + (kv_head * GROUP + head) * stride_qh + node * stride_qn
    part, row = tl.program_id(0).to(tl.int64) * (PARTS + spans), node * GROUP + head
    if EARLY:
        _prefetch_slots(key_cache_ptr, begin, end, DK, BLOCK_DK, CHUNK)
        _prefetch_slots(value_cache_ptr + column, begin, end, DV, BLOCK_DV, CHUNK)

    # Their partial softmaxes.
    if is_tail:
        _attend_to_tail(
            row_ptr, key_cache_ptr, value_cache_ptr, scales_ptr, path_ptr, positions_ptr, parts_ptr, sums_ptr, nodes,
            length, capacity, edge, reach, part, rows, row, real, bits, first + index // GROUP, position, slope, column,
            inner, outer, SOFTCAP, WINDOW, CHUNK, PARTS, DK, BLOCK_DK, DV, BLOCK_DV, PRECISION, EARLY,
        )  # fmt: skip
    else:
        if EARLY:
            gdc_wait()
        acc, peak, total = _attend_to_slots(
            _load_queries(row_ptr, real, DK, BLOCK_DK), key_cache_ptr, value_cache_ptr, scales_ptr, begin, end, column,
            position, slope, inner, outer, SOFTCAP, WINDOW, CHUNK, DK, BLOCK_DK, DV, BLOCK_DV, PRECISION, AHEAD,
        )  # fmt: skip
        real = real & (turns(position, turn, length, nodes, MOST) == is_late)
        _store_part(parts_ptr, sums_ptr, part + PARTS + age, rows, row, real, column, acc, peak, total, DV)
