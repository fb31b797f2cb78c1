"""The part of tree attention below the last whole chunk of the cache: a tile of rows over some spans (see `spans`).

Import this module only where Triton is installed. Shapes as in `tree_kernels`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..rounding import as_read
from .chunk import attend_to_chunk, fold, score
from .spans import span_log2, turns
from .tree_tile import load_queries, prefetch_slots, store_part


@triton.jit
def _attend_to_slots(
    query, key_cache_ptr, value_cache_ptr, scales_ptr, parts_ptr, sums_ptr, begin, end, log2, part, rows, row, real,
    position, slope, column, inner, outer,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """The chunks of committed slots begin .. end, from the first to the last, into the parts of their spans, which have
    2 ** log2 positions; that of span 0 is `part`, and those behind it come before. position, slope [M]: of the rows.
    TOGETHER: spans at most.
    """
    dk, dv = tl.arange(0, BLOCK_DK), column + tl.arange(0, BLOCK_DV)
    peak = tl.full([query.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([query.shape[0]], tl.float32)
    acc = tl.zeros([query.shape[0], BLOCK_DV], tl.float32)
    for start in range(begin, end, CHUNK):
        slot = start + tl.arange(0, CHUNK)
        keys = tl.load(key_cache_ptr + slot[:, None] * DK + dk[None, :], mask=(dk < DK)[None, :], other=0.0)
        values = tl.load(value_cache_ptr + slot[:, None] * DV + dv[None, :], mask=(dv < DV)[None, :], other=0.0)
        keys = as_read(keys, scales_ptr, slot, None, 0, query.dtype)
        values = as_read(values, scales_ptr, slot, None, 1, query.dtype)
        scores = score(query, keys, PRECISION)
        seen = None
        if WINDOW is not None:
            seen = position[:, None] - slot[None, :] < WINDOW
        next_acc, next_peak, next_total = attend_to_chunk(
            scores, values, seen, slope, slot, position, inner, outer, SOFTCAP, PRECISION
        )
        acc, peak, total = fold(acc, peak, total, next_acc, next_peak, next_total)
        if TOGETHER > 1:
            # The next chunk lies in another span, or there is none.
            if ((start + CHUNK) >> log2 != start >> log2) | (start + CHUNK >= end):
                number = part - (start >> log2)
                store_part(parts_ptr, sums_ptr, number, rows, row, real, column, acc, peak, total, DV)
                acc, total = tl.zeros([query.shape[0], BLOCK_DV], tl.float32), tl.zeros([query.shape[0]], tl.float32)
                peak = tl.full([query.shape[0]], float("-inf"), tl.float32)
    if TOGETHER == 1:
        number = part - (begin >> log2)
        store_part(parts_ptr, sums_ptr, number, rows, row, real, column, acc, peak, total, DV)


@triton.jit
def attend_to_spans(
    q_ptr, key_cache_ptr, value_cache_ptr, scales_ptr, positions_ptr, slopes_ptr, parts_ptr, sums_ptr, stride_qh,
    stride_qn, nodes, length, edge, part, number, tile, column, inner, outer,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
    FIRST: tl.constexpr, MOST: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr, DV: tl.constexpr,
    BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """A tile of rows over TOGETHER spans: `number` such groups lie behind them, counted from the last one back, those
    of spans of the smaller size first. part: that of the last span. The pointers: of this row of the batch and KV head.
    """
    index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node, head = index // GROUP, index % GROUP
    real, row = node < nodes, index
    position, slope = tl.load(positions_ptr + node, mask=real, other=1 << 30).to(tl.int32), None
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head, mask=real, other=0.0)

    # Their slots, begin .. end, and the rows that have such spans.
    log2, turn = span_log2(length, FIRST, MOST)
    smaller = tl.cdiv(edge, 1 << log2)
    late = (number >= tl.cdiv(smaller, TOGETHER)) & (length + nodes > turn) & (MOST > 0)
    number -= tl.where(late, tl.cdiv(smaller, TOGETHER), 0)
    part += tl.where(late, smaller, 0)
    log2 += late.to(tl.int32)
    last = (edge - 1) >> log2
    newest = last - number * TOGETHER
    begin, end = tl.maximum(newest - (TOGETHER - 1), 0) << log2, tl.minimum((newest + 1) << log2, edge)
    if WINDOW is not None:
        begin = tl.maximum(begin, tl.maximum(tl.min(position, 0) - WINDOW + 1, 0) // CHUNK * CHUNK)
    if begin < end:
        if EARLY:
            prefetch_slots(key_cache_ptr, begin, end, DK, BLOCK_DK, 2 * CHUNK)
            prefetch_slots(value_cache_ptr + column, begin, end, DV, BLOCK_DV, 2 * CHUNK)
            gdc_wait()
        _attend_to_slots(
            load_queries(q_ptr + head * stride_qh + node * stride_qn, real, DK, BLOCK_DK), key_cache_ptr,
            value_cache_ptr, scales_ptr, parts_ptr, sums_ptr, begin, end, log2, part + last, nodes * GROUP, row,
            real & (turns(position, turn, length, nodes, MOST) == late), position, slope, column, inner, outer,
            SOFTCAP, WINDOW, CHUNK, DK, BLOCK_DK, DV, BLOCK_DV, PRECISION, TOGETHER,
        )  # fmt: skip
