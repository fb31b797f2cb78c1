"""The sizes of the steps that process a prompt."""

from collections.abc import Iterator

SIZES = {"cpu": (*range(512, 0, -32),), "cuda": (2048, 512, 128, 32)}
"""Tokens of each row that a step may take, largest first. On a CPU one compiled step takes any number of tokens, and
takes longer for more: 200 tokens of SmolLM2-135M in 4 bits take 70 ms as 224 and 84 ms as 256."""
FIXED = {"cpu": 32, "cuda": 128}
"""The fixed cost of a step, in tokens: the weights are read once a step."""


def chunks(tokens: int, sizes: tuple[int, ...], fixed: int) -> Iterator[int]:
    """Sizes of the steps for `tokens` tokens. The last step may be larger than the rest if it is cheaper than several:
    with sizes (512, 128, 32) and fixed 32, 600 tokens give 512, 128, and 140 tokens give 128, 32.

    A prompt that goes on after some of its steps has the rest of them: 1,200 tokens give 512, 512, 128, 32, 32 and from
    the first `common_end` on, after 512 of them, 512, 128, 32, 32.
    """
    while tokens > sizes[0]:
        yield sizes[0]
        tokens -= sizes[0]
    while tokens > 0:
        size = _cheapest(tokens, sizes, fixed)[1]
        yield size
        tokens -= size


def common_end(tokens: int, sizes: tuple[int, ...]) -> int:
    """The last of the ends of steps for `tokens` tokens that the steps of every longer text have, too: with sizes (512,
    128, 32) of 1,200 tokens 1,024, of 500 none, which is 0."""
    return max(tokens, 0) // sizes[0] * sizes[0]


def _cheapest(tokens: int, sizes: tuple[int, ...], fixed: int) -> tuple[int, int]:
    """(cost, first size) of the cheapest steps for at most sizes[0] tokens."""
    enough = min(size for size in sizes if size >= tokens)
    at_once = enough + fixed, enough
    first = max((size for size in sizes if size < tokens), default=None)
    if first is None:
        return at_once
    return min(at_once, (first + fixed + _cheapest(tokens - first, sizes, fixed)[0], first))
