"""Spans that one program adds up from the first to the last: for prompts, and for large batches of trees.

Keys are summed as `spans` says. A program holds two partial softmaxes of its rows: `done`, of the spans that ended, and
`span`, of the present one:

    FIRST = 7, MOST = 32, CHUNK = 64, a row at position 300: the chunks 0 .. 63 and 64 .. 127 are added up, then 128 ..
    191 and 192 .. 255, which are added to the former sum at its end, then 256 .. 300

Import this module only where Triton is installed. Shapes: M rows of a tile, C = CHUNK keys, BLOCK_D* a head size or, of
values, a part of it.
"""

import triton
import triton.language as tl

from ..rounding import as_read
from .partial_softmax import attend_to_chunk, fold, score


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
    query, key_cache_ptr, value_cache_ptr, scales_ptr, positions_ptr, done, span, begin, end, log2, least, node,
    position, slope, length, column, inner, outer,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr, CHUNK: tl.constexpr, DK: tl.constexpr,
    BLOCK_DK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the chunks of the slots begin .. end to the present spans, and these to `done` where they end.

    log2 [M]: of the positions in a row's spans; least: the smallest of them. MASKED: False if every row sees every key.
    """
    dk, dv = tl.arange(0, BLOCK_DK), column + tl.arange(0, BLOCK_DV)
    for start in range(begin, end, CHUNK):
        # The keys and values of the chunk, and who sees them.
        slot = start + tl.arange(0, CHUNK)
        real_dk, real_dv = (dk < DK)[None, :], (dv < DV)[None, :]
        stored, seen, key_position = None, None, slot
        if MASKED:
            inside = slot < end
            stored = inside[:, None]
            real_dk, real_dv = real_dk & stored, real_dv & stored
            seen = inside[None, :] & (slot[None, :] - length <= node[:, None])
            if WINDOW is not None or slope is not None:
                new = tl.load(positions_ptr + slot - length, mask=inside & (slot >= length), other=0)
                key_position = tl.where(slot < length, slot, new.to(tl.int32))
            if WINDOW is not None:
                seen = seen & (position[:, None] - key_position[None, :] < WINDOW)
        keys = tl.load(key_cache_ptr + slot[:, None] * DK + dk[None, :], mask=real_dk, other=0.0)
        values = tl.load(value_cache_ptr + slot[:, None] * DV + dv[None, :], mask=real_dv, other=0.0)
        keys = as_read(keys, scales_ptr, slot, stored, 0, query.dtype)
        values = as_read(values, scales_ptr, slot, stored, 1, query.dtype)

        # Its partial softmax, and the end of spans.
        scores = score(query, keys, PRECISION)
        acc, peak, total = attend_to_chunk(
            scores, values, seen, slope, key_position, position, inner, outer, SOFTCAP, PRECISION
        )
        span = fold(span[0], span[1], span[2], acc, peak, total)
        if (start + CHUNK) & ((1 << least) - 1) == 0:
            ends = ((start + CHUNK) & ((1 << log2) - 1)) == 0
            done, span = _end_spans(done, ends, span)
    return done, span
