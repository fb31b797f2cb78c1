"""Which cases of a sweep run by default; `make test-all` runs them all.

@pytest.mark.sweep(3)                # every third case runs by default, and the others are slow
@pytest.mark.sweep("llama gemma3")   # the cases of these ids do; a list if ids have spaces
"""

import itertools

import pytest

SELDOM = set(
    "cohere cohere2 gemma gemma2 glm4 gpt_bigcode gpt_neox granite mistral nemotron olmo2 olmo3 opt phi phi3 qwen2 "
    "qwen2_moe smollm3 stablelm starcoder2".split()
)
"""Architectures, each of which takes seconds to be captured. Their cases are slow unless a mark names cases by id;
`pytest.mark.seldom("gpt2")` adds to them."""


def mark(items: list) -> None:
    """Mark the collected cases that are slow. Cases on a GPU are not. Raises AssertionError if a mark names a case that
    its test does not have."""
    collected: dict[tuple[str, str], list] = {}
    for item in items:
        if item.get_closest_marker("gpu") is None:
            collected.setdefault((item.path, item.originalname), []).append(item)
    for cases in collected.values():
        default = _default(cases)
        for case in cases:
            if case.name not in default:
                case.add_marker(pytest.mark.slow)


def _default(cases: list) -> set[str]:
    """The names of the cases of a test that are not slow."""
    test, marker = cases[0].originalname, cases[0].get_closest_marker("sweep")
    default = marker.args[0] if marker else 1
    if isinstance(default, int) or len(cases) == 1:  # perhaps one case was asked for by its name
        more = cases[0].get_closest_marker("seldom")
        seldom = SELDOM.union(more.args if more else ())
        names = [case.name for case in cases if not _words(case) & seldom]
        return set(names[:: default if isinstance(default, int) else 1])
    names = {f"{test}[{each}]" for each in (default.split() if isinstance(default, str) else default)}
    assert names <= {case.name for case in cases}, f"sweep: {cases[0].nodeid} and its like are other cases"
    return names


def _words(case) -> set[str]:
    """The parameters of a case that are text."""
    parameters = case.callspec.params.values() if hasattr(case, "callspec") else ()
    return {value for value in parameters if isinstance(value, str)}


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
