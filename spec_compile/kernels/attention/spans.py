"""Spans: the stretches into which tree attention cuts a cache, at positions that depend on no length and no tree.

Import this module only where Triton is installed. Without a window the first eight spans have 2 ** FIRST positions
each, and there are eight more for every doubling of the position, so that a long context has few. With a window all
spans have 2 ** FIRST positions (GROWS is False).
"""

import triton
import triton.language as tl


def first_log2(least: int, window: int | None) -> int:
    """FIRST. least: positions of the smallest span, a power of two."""
    return max(least, 0 if window is None else triton.next_power_of_2(window) // 16).bit_length() - 1


def most_spans(capacity: int, first: int, window: int | None) -> int:
    """How many spans may lie below `capacity` and in sight of a token. first: FIRST."""
    if window is not None:
        return min(triton.cdiv(capacity, 1 << first), triton.cdiv(window, 1 << first) + 1)
    doublings = max((max(capacity - 1, 0) >> (first + 3)).bit_length() - 1, 0)
    return 8 * doublings + (max(capacity - 1, 0) >> (first + doublings)) + 1


@triton.jit
def span_of(position, FIRST: tl.constexpr, GROWS: tl.constexpr):
    """The number of the span in which a position lies; -1 of position -1."""
    if GROWS:
        exponent = ((position >> (FIRST + 3)).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # floor(log2)
        doublings = tl.where(position < 0, 0, tl.maximum(exponent, 0))
        span = 8 * doublings + (position >> (FIRST + doublings))
    else:
        span = position >> FIRST
    return span


@triton.jit
def span_bounds(span, FIRST: tl.constexpr, GROWS: tl.constexpr):
    """The first position of a span, and that of the next."""
    doublings = tl.zeros_like(span)
    if GROWS:
        doublings = tl.maximum((span >> 3) - 1, 0)
    begin = (span - 8 * doublings) << (FIRST + doublings)
    return begin, begin + (1 << (FIRST + doublings))
