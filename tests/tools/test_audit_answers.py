"""Answers to one request in many ways, which are counted, and of a model before its weights were rounded."""

import copy
import functools
import math

import pytest
import torch
from models import ADMITTED, prompts

import spec_compile
from spec_compile.batching.sequence import BatchSequence
from spec_compile.tools.audit import Report
from spec_compile.tools.audit_answers import AGAIN, InManyWays, Manner, compare_rounding, promises

PROMPTS = [row[0].tolist() for row in prompts()[0][:3]]
OPTIONS = dict(max_new_tokens=10, pad_token_id=0, eos_token_id=None)
SCORES = "log-probabilities by score()"


@functools.cache
def fast():
    return spec_compile.speculate(ADMITTED["llama"](), compile=False, check=False, max_cache_len=512)


def ways(seed=None):
    return InManyWays(fast(), PROMPTS, OPTIONS, seed)


def test_every_way_is_compared():
    manners = [*ways().run([2, 2])]
    assert len({manner.name for manner in manners}) == 7  # each batch once
    assert all(manner.of == len(PROMPTS) and not manner.promised and not manner.drawn for manner in manners)
    assert all(manner.equal == manner.of for manner in manners if manner.name != SCORES)
    reused = {manner.name: manner.reused for manner in manners}
    assert reused["after a common prefix, 2 rows"] > 0


def test_drawn_answers_have_their_own_seeds():
    manners = [*ways(seed=4).run([2])]
    assert all(manner.drawn for manner in manners)
    assert all(manner.equal == manner.of for manner in manners if manner.name != SCORES)
    assert not any("half" in manner.name for manner in manners)
    assert ways(seed=4)._generate(ways(seed=4)._asked[1]) != ways(seed=5)._generate(ways(seed=5)._asked[1])


def test_another_answer_is_found(monkeypatch):
    gain = BatchSequence.gain
    monkeypatch.setattr(BatchSequence, "gain", lambda self, tokens: gain(self, [(token + 1) % 96 for token in tokens]))
    for manner in ways().run([2]):
        if manner.name == AGAIN:
            assert manner.equal == manner.of
        elif manner.name != SCORES:
            assert manner.equal == 0 and manner.first_differences == [0, 0, 0]


def test_what_is_promised(monkeypatch):
    """Bits of rounds and of prompts."""
    runtime = fast().speculation.engine.runtime
    for graph in (runtime.verify, runtime.prefill, None):
        monkeypatch.setattr(
            "spec_compile.tools.audit_answers.variant_parts", lambda each, graph=graph: ["a product"] * (each is graph)
        )
        assert promises(fast()) == (graph is None)


def test_differences_are_counted():
    manner = Manner("together", drawn=False, promised=False)
    for ours, expected in (([1, 2], [1, 2]), ([1, 2], [1, 2, 3]), ([1], [2])):
        manner.compare(ours, expected)
    assert (manner.of, manner.equal, manner.first_differences) == (3, 1, [0, 2])


# A model whose weights were rounded, next to the same model before.

ROWS = [row[0].view(1, -1) for row in prompts()[0][:2]]
GREEDY = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False}


def test_a_model_is_equal_to_itself():
    model = ADMITTED["llama"]()
    rounding = compare_rounding(model, model, ROWS, ROWS, GREEDY)
    assert rounding.predicted == rounding.agreeing == sum(ids.shape[1] - 1 for ids in ROWS)
    losses = [model(ids, labels=ids).loss * (ids.shape[1] - 1) for ids in ROWS]
    expected = math.exp(float(sum(losses).detach()) / rounding.predicted)
    assert rounding.perplexity == pytest.approx((expected, expected), rel=1e-5)
    assert rounding.same == [None, None] and "2 of 2 answers equal" in str(rounding)


def test_the_first_token_that_differs_is_found(monkeypatch):
    model, other = ADMITTED["llama"](), ADMITTED["llama"]()

    def generate(ids, **options):
        answer = model.generate(ids, **options)
        if ids.shape == ROWS[0].shape and torch.equal(ids, ROWS[0]):
            answer[0, ids.shape[1] + 3] += 1
            return answer
        return answer[:, :-1]

    monkeypatch.setattr(other, "generate", generate)
    assert compare_rounding(model, other, ROWS, ROWS, GREEDY).same == [3, 7]


def test_an_audit_of_rounded_weights():
    model = ADMITTED["llama"]()
    fast = spec_compile.speculate(copy.deepcopy(model), weights="int4", compile=False)
    report = spec_compile.audit(fast, ROWS, max_new_tokens=8, logits=False, unrounded=model)
    before, after = report.rounding.perplexity
    assert before != after and after < 1.5 * before and report.rounding.agreeing <= report.rounding.predicted
    assert report.lossless and "rounding of weights: perplexity" in str(report)
    assert "rounding" not in str(Report())


def test_models_that_cannot_be_compared_are_refused():
    model = ADMITTED["llama"]()
    fast = spec_compile.speculate(model, compile=False)
    other = copy.deepcopy(model)
    other.resize_token_embeddings(32)
    with pytest.raises(ValueError, match=r"unrounded: expected the model before .* with 96 tokens, got 32"):
        spec_compile.audit(fast, ROWS, unrounded=other)
    with pytest.raises(ValueError, match="prompts: with unrounded, expected at least one of two tokens"):
        spec_compile.audit(fast, [torch.tensor([5])], unrounded=model)
