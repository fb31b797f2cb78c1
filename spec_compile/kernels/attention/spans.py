"""Spans: the stretches into which tree attention cuts a cache, at bounds that depend on the token's position alone.

Import this module only where Triton is installed. Without a window a token has at most MOST spans below it, a power of
two, all of one size, which doubles where there would be more. A tree in which that happens, at the position `turn`, has
spans of both sizes: those of its tokens before `turn`, and behind them in number those of its tokens from `turn` on.
With a window (MOST is 0) all spans have 2 ** FIRST positions.
"""

import triton
import triton.language as tl


def first_log2(least: int, window: int | None) -> int:
    """FIRST. least: positions of the smallest span, a power of two."""
    return max(least, 0 if window is None else triton.next_power_of_2(window) // 16).bit_length() - 1


def most_spans(capacity: int, first: int, most: int, window: int | None) -> int:
    """How many spans may lie below `capacity` and in sight of a tree. first, most: FIRST, MOST."""
    smallest = triton.cdiv(capacity, 1 << first)
    if window is not None:
        return min(smallest, triton.cdiv(window, 1 << first) + 1)
    return smallest if smallest <= most else most + most // 2


@triton.jit
def span_log2(length, FIRST: tl.constexpr, MOST: tl.constexpr):
    """The size of the spans of a token at position `length`, as a power of two, and `turn`."""
    doublings = tl.zeros_like(length)
    if MOST > 0:
        spans = length // (MOST // 2) >> FIRST
        doublings = tl.maximum((spans.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, 0)  # floor(log2)
    return doublings + FIRST, MOST << (doublings + FIRST)


@triton.jit
def turns(position, turn, length, nodes, MOST: tl.constexpr):
    """Whether a node at `position` of a tree has the larger spans."""
    return (position >= turn) & (length + nodes > turn) & (MOST > 0)
