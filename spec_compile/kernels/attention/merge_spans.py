"""The kernel that adds up what the spans and tail tiles of tree attention found, in the order of their positions.

Import this module only where Triton is installed. The order depends on the positions alone: a span's chunks are added
from the first to the last, of which those behind the committed slots' last whole chunk come from the tail, and the
spans are added from the first to the last.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .chunk import power_of_2
from .spans import span_log2, turns

SPANS = tl.constexpr(8)
"""Spans that are loaded at a time."""


@triton.jit
def _load(parts_ptr, sums_ptr, number, rows, dv, DV: tl.constexpr):
    """The partial softmax of one row at `number`: acc [BLOCK_DV], peak and total. One that saw nothing, if number is
    negative; such a one may have been stored without its acc."""
    exists = number >= 0
    acc = tl.load(parts_ptr + number * rows * DV + dv, mask=dv < tl.where(exists, DV, 0), other=0.0)
    peak = tl.load(sums_ptr + number * 2 * rows, mask=exists, other=float("-inf"))
    acc = tl.where(peak == float("-inf"), 0.0, acc)
    return acc, peak, tl.load(sums_ptr + (number * 2 + 1) * rows, mask=exists, other=0.0)


@triton.jit
def _fold(acc, peak, total, next_acc, next_peak, next_total):
    """`chunk.fold` of one row."""
    higher = tl.maximum(peak, next_peak)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    keep, take = power_of_2(peak - base), power_of_2(next_peak - base)
    return acc * keep + next_acc * take, higher, total * keep + next_total * take


@triton.jit(do_not_specialize=["nodes", "spans"])
def merge_spans_kernel(
    lengths_ptr, positions_ptr, sinks_ptr, out_ptr, parts_ptr, sums_ptr, stride_p, nodes, spans,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, FIRST: tl.constexpr,
    MOST: tl.constexpr, PARTS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [B, N, H, Dv] from the parts of `tree_kernel`, one row a program. Grid (N * H, B)."""
    # The row, and the spans that it sees below `edge`, first .. last.
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

    # The span in which `edge` lies, of which these are the keys below, and the chunks of the tail. They are added last,
    # but loaded first, so that nothing waits for them.
    dv = tl.arange(0, BLOCK_DV)
    number = tl.where((tail_span == last) & (first <= last), newest, -1)
    span_acc, span_peak, span_total = _load(parts_ptr, sums_ptr, number, rows, dv, DV)
    tails, tail_parts = (), tl.cdiv(length + nodes - edge, CHUNK)
    for tail in tl.static_range(PARTS):
        number = tl.where(tail_parts > tail, tail_parts * 0 + tail, -1)
        tails += (_load(parts_ptr, sums_ptr, number, rows, dv, DV),)

    # The spans that end at `edge` or below it. What is loaded at a time shares a peak; because peaks are integers, to
    # scale by them rounds nothing.
    acc, peak, total = tl.zeros([BLOCK_DV], tl.float32), float("-inf"), 0.0
    for start in range(first, tail_span, SPANS):
        parts = ()
        higher = peak
        for step in tl.static_range(SPANS):
            number = tl.where(start + step < tail_span, newest + last - start - step, -1)
            loaded = _load(parts_ptr, sums_ptr, number, rows, dv, DV)
            parts += (loaded,)
            higher = tl.maximum(higher, loaded[1])
        base = tl.where(higher == float("-inf"), 0.0, higher)
        keep = power_of_2(peak - base)
        acc, total, peak = acc * keep, total * keep, higher
        for step in tl.static_range(SPANS):
            share = power_of_2(parts[step][1] - base)
            acc += parts[step][0] * share
            total += parts[step][2] * share

    # The span in which `edge` lies and the chunks of the tail, which may reach into the next span.
    for tail in tl.static_range(PARTS):
        if tail > 0:
            if (edge + tail * CHUNK) >> log2 != (edge + (tail - 1) * CHUNK) >> log2:
                acc, peak, total = _fold(acc, peak, total, span_acc, span_peak, span_total)
                span_acc, span_peak, span_total = acc * 0.0, peak * 0 + float("-inf"), total * 0.0
        next_acc, next_peak, next_total = tails[tail]
        span_acc, span_peak, span_total = _fold(span_acc, span_peak, span_total, next_acc, next_peak, next_total)
    acc, peak, total = _fold(acc, peak, total, span_acc, span_peak, span_total)

    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * 1.4426950408889634
        acc, peak, total = _fold(acc, peak, total, acc * 0.0, tl.ceil(sink), 0.0)
        total += tl.exp2(sink - peak)
    tl.store(out_ptr + ((batch * nodes + node) * HEADS + head) * DV + dv, acc / total, mask=dv < DV)
