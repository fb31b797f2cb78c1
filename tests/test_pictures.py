"""Prompts with pictures: the same tokens as transformers' generate()."""

import functools
import warnings

import pytest
import torch
from models import speculate_captured
from picture_models import NAMES, inputs, model

COUNTS = {"no picture": (0,), "one": (1,), "two": (2,), "padding on the left": (2, 1), "some rows": (1, 0, 2)}
NEW = 32


@functools.cache
def fast(name):
    return speculate_captured(model(name), compile=False)


def both(name, *, silent=True, **arguments):
    """The tokens of transformers and ours; the latter must come without a warning."""
    arguments = dict(max_new_tokens=NEW, do_sample=False) | arguments
    want = model(name).generate(**arguments)
    with warnings.catch_warnings():
        if silent:
            warnings.simplefilter("error")
        return want, fast(name).generate(**arguments)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("name", NAMES)
def test_the_same_tokens(name, counts):
    want, got = both(name, **inputs(name, counts))
    assert torch.equal(want, got)


@pytest.mark.parametrize("name", NAMES)
def test_another_picture_another_answer(name):
    """So the tests above would see it if a picture was lost."""
    arguments = inputs(name)
    first = fast(name).generate(**arguments, max_new_tokens=NEW, do_sample=False)
    arguments["pixel_values"] = arguments["pixel_values"].flip(-1) + 1
    assert not torch.equal(first, fast(name).generate(**arguments, max_new_tokens=NEW, do_sample=False))


@pytest.mark.parametrize("name", NAMES)
def test_trees_are_drafted_from_what_follows_a_picture(name):
    arguments = inputs(name)
    answer = fast(name).generate(**arguments, max_new_tokens=NEW, do_sample=False)
    fast(name).speculation.stats.reset()
    again = fast(name).generate(**arguments, max_new_tokens=NEW, do_sample=False)
    stats = fast(name).speculation.stats
    assert torch.equal(answer, again) and stats.rounds < NEW / 2
