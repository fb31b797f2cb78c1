"""The kernel of tree attention: a tile of rows attends to some spans of the cache, or to one tail.

Import this module only where Triton is installed. A row is one query head of one node: row = node * GROUP + head of the
group. The kernel forms the partial softmax (`partial_softmax`) of one chunk of CHUNK keys at a time, at positions that
are multiples of CHUNK:

- Below `edge`, the last multiple of CHUNK that is not above the committed length, keys are slots of the cache, and a
  program adds up the chunks of a span (`partial_softmax`), or of all spans where rows are many.
- From `edge` on, the keys are the last committed slots and then the nodes of a path from the root. A program gathers
  them for the nodes of a tail tile (`tail_tiles`), and each chunk stays a separate part.

    CHUNK = 64, 300 committed, a path of nodes 0, 1, 3: edge = 256
    the only chunk of the tail has slots 256 .. 299 and then 300, 301 and 303, at positions 300, 301 and 302

So both parts sum the same keys in the same order as they would if the path were committed. `merge_spans_kernel`
adds up the parts. Shapes: M = BLOCK_M rows of a tile, C = CHUNK keys, BLOCK_D* a head size or, of values, a part of it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..primitives import as_read, page_of, place_of, prefetch_l2
from .partial_softmax import attend_in_order, attend_to_chunk, no_softmax, slopes_of, span_log2, store_part, turns


@triton.jit
def _prefetch_slots(
    cache_ptr, table_ptr, begin, end, D: tl.constexpr, BLOCK_D: tl.constexpr, COUNT: tl.constexpr,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Fetch the first COUNT of the slots begin .. end to the L2 cache, by lines of 128 bytes. cache_ptr: [S, D]."""
    LINE: tl.constexpr = 1024 // cache_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = BLOCK_D // LINE if BLOCK_D > LINE else 1
    slot = tl.maximum(tl.minimum(begin + tl.arange(0, COUNT), end - 1), 0)
    if table_ptr is not None:
        slot = place_of(table_ptr, slot, slot >= 0, KV_HEADS, PAGE)
    column = tl.minimum(tl.arange(0, LINES) * LINE, D - 1)
    prefetch_l2((cache_ptr + slot[:, None] * D + column[None, :]).to(tl.int64))


@triton.jit
def _store_nothing(sums_ptr, part, rows, row, real):
    """Store the sums of a partial softmax that saw no key; its acc is never read."""
    sums_ptr += part * (2 * rows) + row
    tl.store(sums_ptr, tl.full(row.shape, float("-inf"), tl.float32), mask=real)
    tl.store(sums_ptr + rows, tl.zeros(row.shape, tl.float32), mask=real)


@triton.jit
def _load_queries(row_ptr, real, DK: tl.constexpr, BLOCK_DK: tl.constexpr):
    """The queries [M, BLOCK_DK] at row_ptr [M]."""
    dk = tl.arange(0, BLOCK_DK)[None, :]
    return tl.load(row_ptr[:, None] + dk, mask=real[:, None] & (dk < DK), other=0.0)


@triton.jit
def _rows_of_tile(tile, positions_ptr, nodes, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The rows [M] of a tile: their numbers, nodes, heads, True where they exist, and positions."""
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node = row // GROUP
    position = tl.load(positions_ptr + node, mask=node < nodes, other=1 << 30).to(tl.int32)
    return row, node, row % GROUP, node < nodes, position


@triton.jit
def _attend_to_slots(
    q_ptr, key_cache_ptr, value_cache_ptr, scales_ptr, table_ptr, positions_ptr, slopes_ptr, parts_ptr, sums_ptr,
    stride_qh, stride_qn, nodes, length, edge, part, number, tile, column, inner, outer, stride_s,
    DISTANCES: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
    FIRST: tl.constexpr, MOST: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DK: tl.constexpr,
    BLOCK_DK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """A tile of rows attends to a span: `number` counted from the last span back, first all smaller spans and then the
    larger ones. It is stored as a part.

    FIRST = 7, MOST = 8, edge = 960: number 0 is span 7 of 128 positions, number 7 is span 0. If the tree reaches turn =
    1024, number 8 is span 3 of 256 positions.

    WHOLE: to all slots below `edge`. The spans that end there or before are stored as part 0, and the span that
    contains `edge` as part `number`, which is 1.

    part: the number of the last span's part. Pointers point to this row of the batch and KV head.
    """
    # The rows of the tile.
    row, node, head, real, position = _rows_of_tile(tile, positions_ptr, nodes, GROUP, BLOCK_M)
    slope = slopes_ptr
    if slopes_ptr is not None:
        slope = slopes_of(slopes_ptr, head, node, real, stride_s, DISTANCES)

    # The slots begin .. end, and the sizes of all spans; or `late`: True if the span is one of the larger ones.
    least, turn = span_log2(length, FIRST, MOST)
    begin, end, log2 = tl.zeros_like(length), edge, None
    if WHOLE:
        log2 = least + turns(position, turn, length, nodes, MOST).to(tl.int32)
    else:
        smaller = tl.cdiv(edge, 1 << least)
        late = (number >= smaller) & (length + nodes > turn) & (MOST > 0)
        size = least + late.to(tl.int32)
        place = ((edge - 1) >> size) - number + tl.where(late, smaller, 0)
        begin, end = tl.maximum(place, 0) << size, tl.minimum((place + 1) << size, edge)
    if WINDOW is not None:
        begin = tl.maximum(begin, tl.maximum(tl.min(position, 0) - WINDOW + 1, 0) // CHUNK * CHUNK)

    # Attend, unless a window hides the span or no span has this number.
    if (begin < end) | WHOLE:
        page = None
        if table_ptr is not None:
            page = page_of(table_ptr, begin, end, PAGE)
        if EARLY:
            _prefetch_slots(key_cache_ptr, table_ptr, begin, end, DK, BLOCK_DK, 2 * CHUNK, KV_HEADS, PAGE)
            _prefetch_slots(value_cache_ptr + column, table_ptr, begin, end, DV, BLOCK_DV, 2 * CHUNK, KV_HEADS, PAGE)
            gdc_wait()
        query = _load_queries(q_ptr + head * stride_qh + node * stride_qn, real, DK, BLOCK_DK)
        nothing = no_softmax(BLOCK_M, BLOCK_DV)
        done, span = attend_in_order(
            query, key_cache_ptr, value_cache_ptr, scales_ptr, table_ptr, page, positions_ptr, nothing, nothing, begin,
            end, log2, least, node, position, slope, length, column, inner, outer,
            DISTANCES, WINDOW, WHOLE and WINDOW is not None, CHUNK, KV_HEADS, PAGE, DK, DV, PRECISION,
        )  # fmt: skip
        rows, of_row = nodes * GROUP, real
        if WHOLE:
            store_part(parts_ptr, sums_ptr, part, rows, row, real, column, done[0], done[1], done[2], DV)
        else:
            of_row = real & (turns(position, turn, length, nodes, MOST) == late)
        store_part(parts_ptr, sums_ptr, part + number, rows, row, of_row, column, span[0], span[1], span[2], DV)


@triton.jit
def _path_slots(
    path_ptr, table_ptr, nodes, reach, length, capacity, start,
    CHUNK: tl.constexpr, KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The nodes [C] at the positions start .. start + C of a path, N where there is none; where their keys lie in the
    cache [C]; and True where there are keys [C].

    A position below `length` is committed and its slot is the position; from there on the slot is length + node. With
    3 committed slots the path 0, 1, 3 of N = 5 nodes and positions 2 .. 6 give the nodes 5, 0, 1, 3, 5.

    path_ptr: the path [N] int32, padded with N, so that this load need not wait for `reach`, the length of the path.
    None: the path is nodes 0 .. reach.
    """
    position = start + tl.arange(0, CHUNK)
    step = position - length
    if path_ptr is None:
        node = tl.where((step >= 0) & (step < reach), step, nodes)
    else:
        node = tl.load(path_ptr + step, mask=(step >= 0) & (step < nodes), other=nodes)
    slot = tl.where(step < 0, position, length + node)
    stored = ((step < 0) | (node < nodes)) & (slot < capacity)
    if table_ptr is not None:
        slot = place_of(table_ptr, slot, stored, KV_HEADS, PAGE)
    return node, slot, stored


@triton.jit
def _attend_to_path(
    query, keys, values, node, slot, stored, scales_ptr, positions_ptr, nodes, length, start, last, position, slope,
    inner, outer,
    DISTANCES: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The partial softmax of a chunk of a path. last [M]: the last step of the path that a row sees."""
    # Who sees which key, by the steps of the path, and in a window by positions.
    key_position = start + tl.arange(0, CHUNK)
    step = key_position - length
    seen = step[None, :] <= last[:, None]
    if WINDOW is not None or slope is not None:
        new_position = tl.load(positions_ptr + node, mask=node < nodes, other=0).to(tl.int32)
        key_position = tl.where(step < 0, key_position, new_position)
    if WINDOW is not None:
        seen = seen & (position[:, None] - key_position[None, :] < WINDOW)

    # The partial softmax. Slots that do not exist are read as zeros.
    keys = as_read(keys, scales_ptr, slot, stored[:, None], 0, query.dtype)
    values = as_read(values, scales_ptr, slot, stored[:, None], 1, query.dtype)
    return attend_to_chunk(query, keys, values, seen, slope, key_position, position, inner, outer, DISTANCES, PRECISION)


@triton.jit
def _attend_to_tail(
    q_ptr, key_cache_ptr, value_cache_ptr, scales_ptr, table_ptr, path_ptr, positions_ptr, slopes_ptr, parts_ptr,
    sums_ptr, stride_qh, stride_qn, nodes, length, capacity, edge, part, tail, column, inner, outer, stride_s,
    DISTANCES: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, PER_TILE: tl.constexpr, COLUMNS: tl.constexpr, KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of a tail tile attend to the chunks from `edge` on; each chunk is stored as a part, from `part` on.

    Chunks beyond the end of this path are stored as such that saw no key, because longer paths of the tree may have
    them. Everything is loaded as early as possible, because the time of a tail is a sum of latencies.

    path_ptr: the path in the tile's row of `tail_tiles`, after the first COLUMNS numbers, which are read at negative
    offsets; None: a chain, so the path is all nodes. Other pointers point to this row of the batch and KV head.
    """
    # The rows' members of the tile, and heads. The tile has `count` nodes, at the steps from `first` on; its path has
    # `reach` nodes.
    TILE_PARTS: tl.constexpr = (PER_TILE * GROUP + BLOCK_M - 1) // BLOCK_M
    index = tail % TILE_PARTS * BLOCK_M + tl.arange(0, BLOCK_M)
    member, head = index // GROUP, index % GROUP
    first = tail // TILE_PARTS * PER_TILE
    count = tl.minimum(PER_TILE, nodes - first)
    reach = first + count
    if path_ptr is not None:
        reach = tl.load(path_ptr - COLUMNS)
        first = tl.load(path_ptr - COLUMNS + 1)
        count = tl.load(path_ptr - COLUMNS + 2)
    if count * GROUP <= tail % TILE_PARTS * BLOCK_M:
        return

    # The nodes of each chunk of the path, and their slots.
    path, loaded = (), ()
    for number in tl.static_range(PARTS):
        start = edge + number * CHUNK
        path += (_path_slots(path_ptr, table_ptr, nodes, reach, length, capacity, start, CHUNK, KV_HEADS, PAGE),)

    # Each row's node, and the last step that it sees.
    real, rank = member < count, first + member
    node, last = rank, rank
    if path_ptr is not None:
        node = tl.load(path_ptr + rank, mask=real, other=0)
        last = rank + tl.load(path_ptr - COLUMNS + 4)
    last = tl.minimum(last, reach - 1)
    position = node
    if WINDOW is not None or slopes_ptr is not None:
        position = tl.load(positions_ptr + node, mask=real, other=1 << 30).to(tl.int32)
    slope = slopes_ptr
    if slopes_ptr is not None:
        slope = slopes_of(slopes_ptr, head, node, real, stride_s, DISTANCES)
    if EARLY:
        _prefetch_slots(key_cache_ptr, table_ptr, edge, length, DK, BLOCK_DK, CHUNK, KV_HEADS, PAGE)
        _prefetch_slots(value_cache_ptr + column, table_ptr, edge, length, DV, BLOCK_DV, CHUNK, KV_HEADS, PAGE)
        gdc_wait()

    # Load the keys and values of all chunks, then attend to one after the other.
    dk, dv = tl.arange(0, BLOCK_DK)[None, :], column + tl.arange(0, BLOCK_DV)[None, :]
    for number in tl.static_range(PARTS):
        _, at, exists = path[number]
        keys_of_path = tl.load(key_cache_ptr + at[:, None] * DK + dk, mask=exists[:, None] & (dk < DK), other=0.0)
        values_of_path = tl.load(value_cache_ptr + at[:, None] * DV + dv, mask=exists[:, None] & (dv < DV), other=0.0)
        loaded += ((keys_of_path, values_of_path),)
    query = _load_queries(q_ptr + head * stride_qh + node * stride_qn, real, DK, BLOCK_DK)
    for number in tl.static_range(PARTS):
        start = edge + number * CHUNK
        if start < length + reach:
            keys, values = loaded[number]
            of_path, slot, stored = path[number]
            acc, peak, total = _attend_to_path(
                query, keys, values, of_path, slot, stored, scales_ptr, positions_ptr, nodes, length, start, last,
                position, slope, inner, outer, DISTANCES, WINDOW, CHUNK, PRECISION,
            )  # fmt: skip
            store_part(
                parts_ptr, sums_ptr, part + number, nodes * GROUP, node * GROUP + head, real, column, acc, peak, total,
                DV,
            )  # fmt: skip
        elif start < length + nodes:
            _store_nothing(sums_ptr, part + number, nodes * GROUP, node * GROUP + head, real)


@triton.jit(do_not_specialize=["nodes", "spans"])
def tree_kernel(
    q_ptr,  # [B, H, N, Dk] by its strides
    key_cache_ptr, value_cache_ptr, scales_ptr,  # [P, Hkv, S, Dk], [P, Hkv, S, Dv], [P, Hkv, S, 2] or None
    table_ptr, lengths_ptr,  # [B, capacity / PAGE] or None (page b is row b), [B]
    tiles_ptr,  # [B, N * (COLUMNS + N)], see `tail_tiles`; None: the nodes are a chain
    positions_ptr, slopes_ptr,  # [B, N] by its stride, as `slopes_of` reads
    parts_ptr, sums_ptr,  # float32 [B * Hkv, PARTS + spans, N * GROUP, Dv] and [B * Hkv, PARTS + spans, 2, N * GROUP]
    stride_qb, stride_qh, stride_qn, stride_p, nodes, capacity, spans,
    inner, outer, stride_s,  # factors of the scores inside tanh, or None, and outside; the stride of nodes in slopes
    DISTANCES: tl.constexpr, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, CHUNK: tl.constexpr, FIRST: tl.constexpr, MOST: tl.constexpr, PARTS: tl.constexpr,
    PER_TILE: tl.constexpr, COLUMNS: tl.constexpr, PAGE: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Partial softmaxes of tail tiles into the first PARTS parts, and of spans into the others, the last span first.

    Grid (B * Hkv, tail tiles + spans * tiles of rows, blocks of Dv). WHOLE: a program takes all spans of its rows, the
    grid has tiles of rows + tail tiles, and `spans` is 2, see `_attend_to_slots`. Programs that take longest begin
    first; those without work come last.
    """
    TILE_PARTS: tl.constexpr = (PER_TILE * GROUP + BLOCK_M - 1) // BLOCK_M
    if EARLY:
        gdc_launch_dependents()  # the merge may begin on the GPU and wait there

    # How many of the programs are tails, and this program's path if it is one.
    pair = tl.program_id(0).to(tl.int64)
    batch, kv_head = pair // KV_HEADS, pair % KV_HEADS
    program, column = tl.program_id(1), tl.program_id(2) * BLOCK_DV
    length, row_tiles = tl.load(lengths_ptr + batch).to(tl.int32), tl.cdiv(nodes * GROUP, BLOCK_M)
    tails, path_ptr, tail = tl.cdiv(nodes, PER_TILE) * TILE_PARTS, tiles_ptr, program
    if WHOLE:
        tail = program - row_tiles
    if tiles_ptr is not None:
        of_tile = tl.minimum(tl.maximum(tail, 0) // TILE_PARTS, nodes - 1)
        path_ptr += (batch * nodes + of_tile) * (COLUMNS + nodes) + COLUMNS
        tails = tl.load(path_ptr - COLUMNS + 3) * TILE_PARTS

    # The row of the batch and KV head.
    edge, first = length // CHUNK * CHUNK, pair * capacity
    if table_ptr is not None:
        table_ptr += batch * (capacity // PAGE)
        first = kv_head * PAGE
    q_ptr += batch * stride_qb + kv_head * GROUP * stride_qh
    key_cache_ptr += first * DK
    value_cache_ptr += first * DV
    positions_ptr += batch * stride_p
    if scales_ptr is not None:
        scales_ptr += first * 2
    if slopes_ptr is not None:
        slopes_ptr += batch * nodes * stride_s + kv_head * GROUP * DISTANCES

    # Attend to a tail, to a span, or to all spans.
    part = pair * (PARTS + spans)
    if (tail >= 0) & (tail < tails):
        _attend_to_tail(
            q_ptr, key_cache_ptr, value_cache_ptr, scales_ptr, table_ptr, path_ptr, positions_ptr, slopes_ptr,
            parts_ptr, sums_ptr, stride_qh, stride_qn, nodes, length, capacity, edge, part, tail, column, inner, outer,
            stride_s, DISTANCES, WINDOW, GROUP, BLOCK_M, CHUNK, PARTS, PER_TILE, COLUMNS, KV_HEADS, PAGE, DK,
            BLOCK_DK, DV, BLOCK_DV, PRECISION, EARLY,
        )  # fmt: skip
    elif (tail < 0) | (not WHOLE):
        number, tile = 1, program
        if not WHOLE:
            number, tile = (program - tails) // row_tiles, (program - tails) % row_tiles
        _attend_to_slots(
            q_ptr, key_cache_ptr, value_cache_ptr, scales_ptr, table_ptr, positions_ptr, slopes_ptr, parts_ptr,
            sums_ptr, stride_qh, stride_qn, nodes, length, edge, part + PARTS, number, tile, column, inner, outer,
            stride_s, DISTANCES, WINDOW, GROUP, BLOCK_M, CHUNK, FIRST, MOST, KV_HEADS, PAGE, DK, BLOCK_DK, DV, BLOCK_DV,
            PRECISION, EARLY, WHOLE,
        )  # fmt: skip
