"""Which cases of a sweep run by default."""

import itertools

import pytest


def thinned(step: int, *parts: list) -> list:
    """Parameters of the product of `parts`, whose tuples are spliced in. Those off every `step`-th diagonal are slow:
    with as many values as the second longest part has, each value remains, and of three parts each pair."""
    numbered = itertools.product(*(enumerate(part) for part in parts))
    return [
        pytest.param(
            *(value for _, item in case for value in (item if isinstance(item, tuple) else (item,))),
            marks=pytest.mark.slow if sum(number for number, _ in case) % step else [],
        )
        for case in numbered
    ]
