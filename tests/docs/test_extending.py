"""What docs/extending.md shows: a way of drafting in one file with one entry."""

import sys
from pathlib import Path

import models
import pytest
import torch

from spec_compile import speculate

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from medusa import MedusaHeads


@pytest.fixture(scope="module")
def medusa():
    """A tiny model, and heads that were fitted to its own texts."""
    model = models.ADMITTED["llama"]()
    ids, mask = torch.randint(3, models.VOCAB, (4, 8)), torch.ones(4, 8, dtype=torch.int64)
    texts = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=48, eos_token_id=None)
    return model, MedusaHeads(model).fit(model, texts), ids, texts


def answer(net, ids, **options):
    return net.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, eos_token_id=None, **options)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", [1, 4])
def test_medusa_writes_the_same_tokens(medusa, rows, compile):
    model, heads, ids, texts = medusa
    fast = speculate(model, "medusa", draft=heads, adaptive=False, compile=compile, max_cache_len=100)
    assert torch.equal(answer(fast, ids[:rows], do_sample=False), texts[:rows])
    assert fast.speculation.stats.accept_length > 1.3
    sampled = [answer(net, ids[:rows], do_sample=True, top_k=5).shape for net in (fast, model)]
    assert sampled[0] == sampled[1]


def test_medusa_names_its_options(medusa):
    with pytest.raises(TypeError, match="draft: expected MedusaHeads, got NoneType"):
        speculate(medusa[0], "medusa", compile=False)
    with pytest.raises(ValueError, match="num_draft_tokens must be at most"):
        speculate(medusa[0], "medusa", draft=medusa[1], topk=1, compile=False)
