"""The figures that `audit` has of a model whose weights were rounded, next to the model before that."""

import copy
import math

import pytest
import torch
from models import ADMITTED, prompts

import spec_compile
from spec_compile.tools.audit_report import Report, compare_rounding

ROWS = [row[0].view(1, -1) for row in prompts()[0][:2]]
OPTIONS = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False}


def test_a_model_is_equal_to_itself():
    model = ADMITTED["llama"]()
    rounding = compare_rounding(model, model, ROWS, ROWS, OPTIONS)
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
    assert compare_rounding(model, other, ROWS, ROWS, OPTIONS).same == [3, 7]


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
