"""The sizes of the steps that process a prompt."""

from collections.abc import Iterator

SIZES = {"cpu": (512, 128, 32), "cuda": (2048, 512, 128, 32)}
"""Tokens of each row that a step may take, largest first."""
FIXED = {"cpu": 32, "cuda": 128}
"""The fixed cost of a step, in tokens: the weights are read once a step."""


def chunks(tokens: int, sizes: tuple[int, ...], fixed: int) -> Iterator[int]:
    """Sizes of the steps for `tokens` tokens. The last step may be larger than the rest if it is cheaper than several:
    with sizes (512, 128, 32) and fixed 32, 600 tokens give 512, 128, and 140 tokens give 128, 32."""
    while tokens > sizes[0]:
        yield sizes[0]
        tokens -= sizes[0]
    while tokens > 0:
        size = _cheapest(tokens, sizes, fixed)[1]
        yield size
        tokens -= size


def _cheapest(tokens: int, sizes: tuple[int, ...], fixed: int) -> tuple[int, int]:
    """(cost, first size) of the cheapest steps for at most sizes[0] tokens."""
    enough = min(size for size in sizes if size >= tokens)
    at_once = enough + fixed, enough
    first = max((size for size in sizes if size < tokens), default=None)
    if first is None:
        return at_once
    return min(at_once, (first + fixed + _cheapest(tokens - first, sizes, fixed)[0], first))
