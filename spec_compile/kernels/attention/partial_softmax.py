"""Partial softmaxes: attention to one chunk of keys by itself, the exact sum of such results, and the order of the sum.

Import this module only where Triton is installed. Shapes: M rows of a tile, C keys of a chunk, D* a head size. A
partial softmax (base 2; Milakov & Gimelshein 2018) over keys j is

    peak [M]       an integer, ceil(max_j score_j)
    total [M]      sum_j 2 ** (score_j - peak)
    acc [M, Dv]    sum_j 2 ** (score_j - peak) * value_j

so that acc / total is the attention to these keys. Because peaks are integers, every factor between two of them is a
power of two, and to scale by it rounds nothing. So a partial result may be scaled at any time, and only the order in
which partial results are added decides the bits of their sum. Example: peaks 5 and 3 give acc + next_acc * 2 ** -2.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..primitives import as_read, page_ahead, page_of


def key_columns(size: int) -> int:
    """The columns of a block of keys of `size` numbers: the power of two that holds them, and at least the 16 that a
    product on tensor cores sums. Example: 16 for heads of 8, 128 for heads of 80.
    """
    return max(triton.next_power_of_2(size), 16)


@triton.jit
def power_of_2(exponent):
    """2 ** exponent of float32 integers up to 0, exactly; 0 below -126."""
    return ((tl.maximum(exponent, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def slopes_of(slopes_ptr, head, node, real, stride_s, DISTANCES: tl.constexpr):
    """The slope of each row [M]; with DISTANCES > 1 where its biases by distance begin."""
    if DISTANCES > 1:
        return slopes_ptr + tl.where(real, node, 0) * stride_s + head * DISTANCES
    else:
        return tl.load(slopes_ptr + head, mask=real, other=0.0)


@triton.jit
def with_biases(scores, slope, key_position, position, outer, DISTANCES: tl.constexpr):
    """Scores [M, C] plus `ops.distance_biases` in base 2 over `outer`, because the caller multiplies all by it later.

    slope: see `slopes_of`. position [M]; key_position [C]. The product and the sum are an explicit fma, because a
    compiler could fuse them in one kernel and not in another.
    """
    if DISTANCES > 1:
        distance = tl.maximum(position[:, None] - key_position[None, :], 0)
        bias = tl.load(slope[:, None] + tl.minimum(distance, DISTANCES - 1)).to(tl.float32)
        return tl.fma(bias, 1.4426950408889634 / outer, scores)
    else:
        rounded = key_position.to(tl.float32).to(slope.dtype).to(tl.float32)
        distance = rounded[None, :] - position.to(tl.float32)[:, None]
        return tl.fma((slope.to(tl.float32) * (1.4426950408889634 / outer))[:, None], distance, scores)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b in float32. PRECISION: Triton's for float32, or "wide": numbers of 16 bits are multiplied as float32, by a
    GPU whose tensor cores Triton does not use."""
    if PRECISION == "wide":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def attend_to_chunk(
    query, keys, values, seen, slope, key_position, position, inner, outer,
    DISTANCES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The partial softmax acc, peak, total of query [M, Dk] over keys [C, Dk] and values [C, Dv].

    The score is outer * product, or with `inner` outer * tanh(inner * product / (2 log2 e)); see
    `tree_attention._factors`. seen [M, C]: True where a row sees a key; None: everywhere. slope, position [M],
    key_position [C]: see `with_biases`; slope None: no biases.
    """
    # Scores that nobody sees become minus infinity.
    scores = product(query, tl.trans(keys), PRECISION)
    if inner is not None:
        scores = 1 - 2 * (1 / (tl.exp2(scores * inner) + 1))  # tanh
    if slope is not None:
        scores = with_biases(scores, slope, key_position, position, outer, DISTANCES)
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))

    # Weights over a peak that is an integer, and their sums.
    peak = tl.ceil(tl.max(scores, 1) * outer)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(tl.fma(scores, outer, -base[:, None]))
    acc = product(weights.to(values.dtype), values, PRECISION)
    return acc, peak, tl.sum(weights, 1)


@triton.jit
def fold(acc, peak, total, next_acc, next_peak, next_total):
    """The sum of two partial softmaxes, of rows or of one row: acc [Dv], peak and total numbers. One that saw no key
    (peak: minus infinity) changes no bit of the other."""
    higher = tl.maximum(peak, next_peak)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    keep, take = power_of_2(peak - base), power_of_2(next_peak - base)
    total = total * keep + next_total * take
    if len(acc.shape) == 2:
        keep, take = keep[:, None], take[:, None]
    return acc * keep + next_acc * take, higher, total


@triton.jit
def store_part(parts_ptr, sums_ptr, part, rows, row, real, column, acc, peak, total, DV: tl.constexpr):
    """Store a partial softmax acc [M, BLOCK_DV], peak, total [M] into parts [P, rows, Dv] and sums [P, 2, rows].

    part: its number in P. row [M]: the rows. real [M]: True where the row exists and has this part.
    """
    dv = column + tl.arange(0, acc.shape[1])
    at = part * rows + row[:, None]
    tl.store(parts_ptr + at * DV + dv[None, :], acc, mask=real[:, None] & (dv < DV)[None, :])
    sums_ptr += part * (2 * rows) + row
    tl.store(sums_ptr, peak, mask=real)
    tl.store(sums_ptr + rows, total, mask=real)


# Spans: the stretches into which tree attention cuts a cache, and the kernel that adds up their partial softmaxes.
#
# The bounds of spans are a function of the token's position, so a token's keys are added up in the same order whatever
# tree it is in. Without a window a token at position p has at most MOST spans below it, all of 2 ** log2 positions;
# log2 is FIRST, and one more each time that there would be more spans.
#
#     FIRST = 7, MOST = 32:   p in 0 .. 4095 has spans of 128 positions, p in 4096 .. 8191 has 16 to 32 spans of 256
#
# A tree may reach the position where spans double; that position is `turn`. Then the nodes before `turn` have the
# smaller spans and the nodes from `turn` on the larger ones, and both sizes are computed: with 4,090 committed tokens
# and 16 nodes in a chain, nodes 0 to 5 have spans of 128 and nodes 6 to 15 have spans of 256. With a window all spans
# have 2 ** FIRST positions, and MOST is 0.
#
# The parts of a row of the batch and a KV head, in the memory that `tree_kernel` fills: the chunks of the tail from the
# first to the last (PARTS of them), then the smaller spans from the last to the first, then the larger ones likewise.
#
#     CHUNK = 64, 300 committed, 16 nodes: edge = 256, PARTS = 2
#     part 0: positions 256 .. 315, part 1: no key, part 2: span 1 (128 .. 255), part 3: span 0 (0 .. 127)
#
# Where a program takes all spans of its rows, part 2 has those that end at `edge` or below it, and part 3 the one that
# contains `edge`, which is empty here.


LOADED = tl.constexpr(8)
"""Spans that the merge loads at a time."""


def first_log2(least: int, window: int | None) -> int:
    """FIRST. least: positions of the smallest span, a power of two."""
    return max(least, 0 if window is None else triton.next_power_of_2(window) // 16).bit_length() - 1


def most_spans(capacity: int, first: int, most: int, window: int | None) -> int:
    """How many spans may lie below `capacity` and be seen by a tree. first, most: FIRST, MOST."""
    smallest = triton.cdiv(capacity, 1 << first)
    if window is not None:
        return min(smallest, triton.cdiv(window, 1 << first) + 1)
    return smallest if smallest <= most else most + most // 2


@triton.jit
def span_log2(length, FIRST: tl.constexpr, MOST: tl.constexpr):
    """log2 of the positions in a span for a token at position `length`, and `turn`.

    FIRST = 7, MOST = 32: length 4,000 gives 7 and 4,096; length 4,096 gives 8 and 8,192.
    """
    doublings = tl.zeros_like(length)
    if MOST > 0:
        spans = length // (MOST // 2) >> FIRST
        doublings = tl.maximum((spans.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, 0)  # floor(log2)
    return doublings + FIRST, MOST << (doublings + FIRST)


@triton.jit
def turns(position, turn, length, nodes, MOST: tl.constexpr):
    """True if a node at `position` of a tree has the larger spans."""
    return (position >= turn) & (length + nodes > turn) & (MOST > 0)


@triton.jit
def _load(parts_ptr, sums_ptr, number, rows, dv, DV: tl.constexpr):
    """The partial softmax of one row at `number`: acc [BLOCK_DV], peak and total.

    A negative number gives one that saw no key. A stored one that saw no key may lack its acc, which is not read.
    """
    exists = number >= 0
    acc = tl.load(parts_ptr + number * rows * DV + dv, mask=dv < tl.where(exists, DV, 0), other=0.0)
    peak = tl.load(sums_ptr + number * 2 * rows, mask=exists, other=float("-inf"))
    acc = tl.where(peak == float("-inf"), 0.0, acc)
    return acc, peak, tl.load(sums_ptr + (number * 2 + 1) * rows, mask=exists, other=0.0)


@triton.jit
def _sum_of_spans(parts_ptr, sums_ptr, first, end, number_of_0, rows, dv, DV: tl.constexpr, BLOCK_DV: tl.constexpr):
    """The sum of the spans first .. end of one row. LOADED of them are scaled to one peak before they are added.
    number_of_0: the part of span 0; span s is s parts before it."""
    acc, peak, total = tl.zeros([BLOCK_DV], tl.float32), float("-inf"), 0.0
    for start in range(first, end, LOADED):
        # Load some spans, and find the highest peak.
        parts = ()
        higher = peak
        for step in tl.static_range(LOADED):
            number = tl.where(start + step < end, number_of_0 - start - step, -1)
            loaded = _load(parts_ptr, sums_ptr, number, rows, dv, DV)
            parts += (loaded,)
            higher = tl.maximum(higher, loaded[1])

        # Scale all sums to it, and add them in their order.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        keep = power_of_2(peak - base)
        acc, total, peak = acc * keep, total * keep, higher
        for step in tl.static_range(LOADED):
            share = power_of_2(parts[step][1] - base)
            acc += parts[step][0] * share
            total += parts[step][2] * share
    return acc, peak, total


@triton.jit(do_not_specialize=["nodes", "spans"])
def merge_spans_kernel(
    lengths_ptr, positions_ptr, sinks_ptr, out_ptr,  # [B], [B, N] by its stride, [H] or None, [B, N, H, Dv]
    parts_ptr, sums_ptr,  # float32 [B * Hkv, PARTS + spans, N * GROUP, Dv] and [B * Hkv, PARTS + spans, 2, N * GROUP]
    stride_p, nodes, spans,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, FIRST: tl.constexpr,
    MOST: tl.constexpr, PARTS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, EARLY: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """out = acc / total of the sum of the row's parts; one row a program. Grid (N * H, B).

    Spans are added from the first to the last, and so are the chunks of a span. The chunks below `edge` of a span are
    a part already; those from `edge` on are parts of the tail. WHOLE: the spans that end at `edge` or below it are one
    part, and the one that contains it is the next.
    """
    # The row, and the numbers first .. last of the spans that it sees below `edge`.
    if EARLY:
        gdc_launch_dependents()
    batch = tl.program_id(1).to(tl.int64)
    node, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    rows, row = nodes * GROUP, node * GROUP + head % GROUP
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    position = tl.load(positions_ptr + batch * stride_p + node).to(tl.int32)
    edge = length // CHUNK * CHUNK
    log2, turn = span_log2(length, FIRST, MOST)
    late = turns(position, turn, length, nodes, MOST)
    newest = tl.where(late, PARTS + tl.cdiv(edge, 1 << log2), PARTS)  # the part of the last span
    log2 += late.to(tl.int32)
    last, tail_span = (edge - 1) >> log2, edge >> log2
    first = tl.zeros_like(length)
    if WINDOW is not None:
        lowest = tl.maximum(position - WINDOW + 1, 0)
        first = tl.where(lowest < edge, lowest >> log2, last + 1)
    part = (batch * (HEADS // GROUP) + head // GROUP) * (PARTS + spans)
    parts_ptr += (part * rows + row) * DV
    sums_ptr += part * 2 * rows + row
    if EARLY:
        gdc_wait()

    # Load the part below `edge` of the span that contains `edge`, and the chunks of the tail. They are added last, but
    # loaded first, so nothing waits for them.
    dv = tl.arange(0, BLOCK_DV)
    number = tl.where((tail_span == last) & (first <= last), newest, -1)
    if WHOLE:
        number = PARTS + 1
    span_acc, span_peak, span_total = _load(parts_ptr, sums_ptr, number, rows, dv, DV)
    tails, tail_parts = (), tl.cdiv(length + nodes - edge, CHUNK)
    for tail in tl.static_range(PARTS):
        number = tl.where(tail_parts > tail, tail_parts * 0 + tail, -1)
        tails += (_load(parts_ptr, sums_ptr, number, rows, dv, DV),)

    # Add the spans that end at `edge` or below it.
    if WHOLE:
        acc, peak, total = _load(parts_ptr, sums_ptr, PARTS, rows, dv, DV)
    else:
        acc, peak, total = _sum_of_spans(parts_ptr, sums_ptr, first, tail_span, newest + last, rows, dv, DV, BLOCK_DV)

    # Add the chunks of the tail to the span that contains `edge`. The first chunk of the next span begins a new sum.
    for tail in tl.static_range(PARTS):
        if tail > 0:
            if (edge + tail * CHUNK) >> log2 != (edge + (tail - 1) * CHUNK) >> log2:
                acc, peak, total = fold(acc, peak, total, span_acc, span_peak, span_total)
                span_acc, span_peak, span_total = acc * 0.0, peak * 0 + float("-inf"), total * 0.0
        next_acc, next_peak, next_total = tails[tail]
        span_acc, span_peak, span_total = fold(span_acc, span_peak, span_total, next_acc, next_peak, next_total)
    acc, peak, total = fold(acc, peak, total, span_acc, span_peak, span_total)

    # A sink is a key without a value.
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        acc, peak, total = fold(acc, peak, total, acc * 0.0, tl.ceil(sink), 0.0)
        total += tl.exp2(sink - peak)
    tl.store(out_ptr + ((batch * nodes + node) * HEADS + head) * DV + dv, acc / total, mask=dv < DV)


# Spans that one program adds up from the first to the last: for prompts, and for large batches of trees.
#
# Keys are summed as above. A program holds two partial softmaxes of its rows: `done`, of the spans that ended, and
# `span`, of the present one:
#
#     FIRST = 7, MOST = 32, CHUNK = 64, a row at position 300: the chunks 0 .. 63 and 64 .. 127 are added up, then
#     128 .. 191 and 192 .. 255, which are added to the former sum at its end, then 256 .. 300
#
# Shapes: M rows of a tile, C = CHUNK keys, BLOCK_D* a head size or, of values, a part of it.


@triton.jit
def no_softmax(rows: tl.constexpr, columns: tl.constexpr):
    """acc, peak, total of rows that saw no key."""
    acc, total = tl.zeros([rows, columns], tl.float32), tl.zeros([rows], tl.float32)
    return acc, tl.full([rows], float("-inf"), tl.float32), total


@triton.jit
def _end_spans(done, ends, span):
    """Add the spans of the rows where `ends` [M] to `done` -> done, and the present spans, which are empty there."""
    acc, peak, total = span
    nothing = no_softmax(acc.shape[0], acc.shape[1])
    done = fold(
        done[0], done[1], done[2], tl.where(ends[:, None], acc, 0.0), tl.where(ends, peak, nothing[1]),
        tl.where(ends, total, 0.0),
    )  # fmt: skip
    return done, (tl.where(ends[:, None], 0.0, acc), tl.where(ends, nothing[1], peak), tl.where(ends, 0.0, total))


@triton.jit
def attend_in_order(
    query, key_cache_ptr, value_cache_ptr, scales_ptr, table_ptr, page, positions_ptr, done, span, begin, end, log2,
    least, node, position, slope, length, column, inner, outer,
    DISTANCES: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, CHUNK: tl.constexpr,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the chunks of the slots begin .. end to the present spans, and these to `done` where they end.

    page: the page of slot `begin`, or None. log2 [M]: of the positions in a row's spans; least: the smallest of them;
    both None: no span ends. MASKED: False if all slots are stored and only a window hides them from rows.
    """
    dk, dv = tl.arange(0, query.shape[1]), column + tl.arange(0, done[0].shape[1])
    if table_ptr is not None and page is None:
        page = page_of(table_ptr, begin, end, PAGE)
    for start in range(begin, end, CHUNK):
        # The keys and values of the chunk, and who sees them.
        slot = start + tl.arange(0, CHUNK)
        real_dk, real_dv = (dk < DK)[None, :], (dv < DV)[None, :]
        stored, seen, key_position = None, None, slot
        if MASKED:
            inside = slot < end
            stored = inside[:, None]
            if table_ptr is not None:  # 0 * NaN is NaN, and anything may lie in the scratch page
                stored = (slot < tl.where(page == 0, 0, end))[:, None]
            real_dk, real_dv = real_dk & stored, real_dv & stored
            seen = inside[None, :] & (slot[None, :] - length <= node[:, None])
            if WINDOW is not None or slope is not None:
                new = tl.load(positions_ptr + slot - length, mask=inside & (slot >= length), other=0)
                key_position = tl.where(slot < length, slot, new.to(tl.int32))
        if WINDOW is not None:
            in_window = position[:, None] - key_position[None, :] < WINDOW
            seen = seen & in_window if MASKED else in_window
        keys_ptr, values_ptr, place = key_cache_ptr, value_cache_ptr, slot
        if table_ptr is not None:  # the next chunk's page is loaded a step before it is needed
            ahead = page_ahead(page, start, KV_HEADS, PAGE)
            keys_ptr, values_ptr, place = keys_ptr + ahead * DK, values_ptr + ahead * DV, slot + ahead
            page = page_of(table_ptr, start + CHUNK, end, PAGE)
        keys = tl.load(keys_ptr + slot[:, None] * DK + dk[None, :], mask=real_dk, other=0.0)
        values = tl.load(values_ptr + slot[:, None] * DV + dv[None, :], mask=real_dv, other=0.0)
        keys = as_read(keys, scales_ptr, place, stored, 0, query.dtype)
        values = as_read(values, scales_ptr, place, stored, 1, query.dtype)

        # Its partial softmax, and the end of spans.
        acc, peak, total = attend_to_chunk(
            query, keys, values, seen, slope, key_position, position, inner, outer, DISTANCES, PRECISION
        )
        span = fold(span[0], span[1], span[2], acc, peak, total)
        if log2 is not None:
            if (start + CHUNK) & ((1 << least) - 1) == 0:
                ends = ((start + CHUNK) & ((1 << log2) - 1)) == 0
                done, span = _end_spans(done, ends, span)
    return done, span
