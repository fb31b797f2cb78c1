"""How many tokens of each prompt the next chunk has, while other requests run rounds."""

from collections.abc import Callable

ABOUT = 1.5
"""A chunk that takes so many times as long as a round takes about as long."""
STEPS = 4
"""Prompts that need more chunks of the largest size are not planned to their ends."""


def choose_size(
    missing: list[int], waiting: int, decoding: int, sizes: list[int], cost: Callable[[int, int], float],
    round_cost: float,
) -> int:  # fmt: skip
    """The size of the next chunk.

    While a chunk is computed, all rows wait. While a round is computed, the rows of the prompts that are not done wait.
    So that size is taken with which the rows lose the least time until all prompts are done. While `decoding` rows
    decode, a chunk takes about as long as a round, and longer only in proportion if more prompts wait than rows decode:
    rows that wait have their share of the time, as rows that decode have.

    missing: tokens that each prompt under way still needs, above zero. waiting: rows that are free for more prompts,
    which wait. decoding: rows that decode. sizes: to choose from, descending. cost: of a chunk by (number of prompts,
    size). round_cost: of a round, in the same unit.
    """
    prompts = len(missing)
    if decoding:
        longest = ABOUT * max(round_cost * max(1, (prompts + waiting) / decoding), cost(prompts, sizes[-1]))
        sizes = [size for size in sizes if cost(prompts, size) <= longest]
    if max(missing) > STEPS * sizes[0]:
        return max(sizes, key=lambda size: sum(min(tokens, size) for tokens in missing) / cost(prompts, size))

    def lost(missing: list[int], size: int) -> float:
        """For each row, if all further chunks have this size."""
        total = 0.0
        while missing:
            total += cost(len(missing), size)
            missing = [tokens - size for tokens in missing if tokens > size]
            total += round_cost * len(missing) / (prompts + decoding)
        return total

    def least(first: int) -> float:
        """For each row, if the next chunk has the size `first`."""
        rest = [tokens - first for tokens in missing if tokens > first]
        later = [size for size in sizes if rest and STEPS * size >= max(rest)]
        waiting = round_cost * len(rest) / (prompts + decoding)
        return cost(prompts, first) + waiting + min((lost(rest, size) for size in later), default=0.0)

    return min(reversed(sizes), key=least)
