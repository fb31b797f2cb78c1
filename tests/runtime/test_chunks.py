"""The steps in which a prompt is processed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_compile.runtime.prefill_chunks import FIXED, SIZES, chunks


def without_waste(tokens, sizes):
    """The largest steps that fit, down to the smallest."""
    while tokens > 0:
        size = next((size for size in sizes if size <= tokens), sizes[-1])
        yield size
        tokens -= size


@given(st.integers(1, 200_000), st.sampled_from(sorted(SIZES)))
def test_all_tokens_at_no_more_than_it_costs_without_waste(tokens, device):
    sizes, fixed = SIZES[device], FIXED[device]
    found = list(chunks(tokens, sizes, fixed))
    assert set(found) <= set(sizes)
    assert sum(found[:-1]) < tokens <= sum(found)
    assert sum(found) + fixed * len(found) <= sum(size + fixed for size in without_waste(tokens, sizes))


@pytest.mark.parametrize(
    "tokens, expected",
    [(0, []), (1, [32]), (33, [128]), (300, [512]), (1025, [512, 512, 32]), (2047, [2048]), (4100, [2048, 2048, 32])],
)
def test_steps_on_a_gpu(tokens, expected):
    assert list(chunks(tokens, SIZES["cuda"], FIXED["cuda"])) == expected


def test_a_limit_on_the_steps():
    assert list(chunks(100, (32,), 128)) == [32, 32, 32, 32]
