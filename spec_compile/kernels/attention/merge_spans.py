"""The kernel that adds up what the spans and tail tiles of tree attention found, in the order of their positions.

Import this module only where Triton is installed. The order depends on the positions alone: a span's chunks are added
from the first to the last, of which those behind the committed slots' last whole chunk come from the tail, and then
the spans are added by their numbers.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..pairs import sum_in_pairs, sum_rows_in_pairs
from .chunk import power_of_2
from .spans import span_of

SPANS = tl.constexpr(16)
"""Spans that are added at a time, of numbers from a multiple of it on; those that do not exist count as zeros."""


@triton.jit(do_not_specialize=["nodes", "spans"])
def merge_spans_kernel(
    lengths_ptr, positions_ptr, sinks_ptr, out_ptr, parts_ptr, sums_ptr, stride_p, nodes, spans,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, FIRST: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [B, N, H, Dv] from the parts of `tree_kernel`, one row a program. Grid (N * H, B)."""
    # The row, and the spans that it sees below `edge`, first .. last.
    if EARLY:
        gdc_launch_dependents()
    GROWS: tl.constexpr = WINDOW is None
    batch = tl.program_id(1).to(tl.int64)
    node, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    rows, row = nodes * GROUP, node * GROUP + head % GROUP
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    edge = length // CHUNK * CHUNK
    last = span_of(edge - 1, FIRST, GROWS)
    first = tl.zeros_like(length)
    if WINDOW is not None:
        position = tl.load(positions_ptr + batch * stride_p + node).to(tl.int32)
        lowest = tl.maximum(position - WINDOW + 1, 0)
        first = tl.where(lowest < edge, span_of(lowest, FIRST, GROWS), last + 1)
    tail_parts = tl.cdiv(length + nodes - edge, CHUNK)
    part = (batch * (HEADS // GROUP) + head // GROUP) * (PARTS + spans)
    parts_ptr += (part * rows + row) * DV
    sums_ptr += part * 2 * rows + row
    if EARLY:
        gdc_wait()

    # The largest peak of all parts, and of the sink.
    index = tl.arange(0, BLOCK_PARTS)
    stored = tl.where(index < PARTS, index < tail_parts, index - PARTS <= last - first)
    peak = tl.max(tl.load(sums_ptr + index * 2 * rows, mask=stored, other=float("-inf")), 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        peak = tl.maximum(peak, tl.ceil(sink * 1.4426950408889634))

    # The spans [SPANS, BLOCK_DV], each below `edge` first, then what the tail has of it.
    dv = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    total = tl.zeros([1], tl.float32)
    lowest_span = tl.minimum(first, span_of(edge, FIRST, GROWS))  # a window may leave nothing but the tail
    for start in range(lowest_span // SPANS * SPANS, span_of(edge + (tail_parts - 1) * CHUNK, FIRST, GROWS) + 1, SPANS):
        span = start + tl.arange(0, SPANS)
        exists = (span >= first) & (span <= last)
        number = PARTS + last - span
        share = power_of_2(tl.load(sums_ptr + number * 2 * rows, mask=exists, other=float("-inf")) - peak)
        weights = tl.load(sums_ptr + (number * 2 + 1) * rows, mask=exists, other=0.0) * share
        mask = exists[:, None] & (dv < DV)[None, :]
        values = tl.load(parts_ptr + number[:, None] * rows * DV + dv[None, :], mask=mask, other=0.0) * share[:, None]
        for tail in tl.static_range(PARTS):
            tail_span = span_of(edge + tail * CHUNK, FIRST, GROWS)
            here = span == tl.where(tail_parts > tail, tail_span, -1)
            share = power_of_2(tl.load(sums_ptr + tail * 2 * rows + span * 0, mask=here, other=float("-inf")) - peak)
            weights += tl.load(sums_ptr + (tail * 2 + 1) * rows + span * 0, mask=here, other=0.0) * share
            mask = here[:, None] & (dv < DV)[None, :]
            tail_values = tl.load(parts_ptr + tail * rows * DV + span[:, None] * 0 + dv[None, :], mask=mask, other=0.0)
            values += tail_values * share[:, None]
        acc += tl.reshape(sum_rows_in_pairs(values, 1, SPANS, BLOCK_DV), [BLOCK_DV])
        total += sum_in_pairs(tl.reshape(weights, [1, SPANS]), 1, SPANS)
    if sinks_ptr is not None:
        total += tl.exp2(tl.fma(sink, 1.4426950408889634, -peak))
    tl.store(out_ptr + ((batch * nodes + node) * HEADS + head) * DV + dv, acc / total, mask=dv < DV)
