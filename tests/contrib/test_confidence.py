"""The prediction of acceptance: what it changes (hints), and what it never changes (answers); hints of drafts without
one. test_linked_drafts.py has its formula, and the order of nodes."""

import math
from types import SimpleNamespace

import changed_drafts as changed
import dflash_drafts as dflash
import draft_checkpoints as drafts
import draft_rounds as rounds
import models
import pytest
import torch
from dflash_drafts import BLOCK, CONTEXTS

from spec_compile.contrib.linked.draft import LinkedDraft
from spec_compile.contrib.linked.transitions import Confidence, Markov
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.drafters.modules.layers import LayerKnobs
from spec_compile.drafters.trees.grow import chain_scores, expected_drafts
from spec_compile.drafters.trees.propose import BlockProposer
from spec_compile.runtime.state import State

PUBLISHED = (
    "dspark", "dspark_gated", "dspark_rnn", "dspark_projector", "dspark_speculators", "dflash_confident",
)  # fmt: skip
"""Flavours whose checkpoints have a prediction."""
WEIGHT, BIAS = "confidence_head.proj.weight", "confidence_head.proj.bias"
TREE = dict(topk=drafts.CANDIDATES, num_draft_tokens=11)
PLACES = BLOCK
EVERY = pytest.mark.parametrize("name", PUBLISHED)


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A function: name of a flavour -> what was written, and its draft."""
    return drafts.loader(
        tmp_path_factory.mktemp("confidence"), lambda written: (load_head(written.folder, written.target, "dflash"),)
    )


@pytest.fixture
def read(tmp_path):
    """A function: load a flavour with some tensors and flags of its config changed; None takes a tensor out."""

    def read(name, tensors=(), **flags):
        nested = flags and name in ("dspark_projector", "dflash2")
        return changed.read(tmp_path, name, tensors, **{"dflash_config": flags} if nested else flags)

    return read


def constant(load, name, logit):
    """Tensors of a prediction that is sigmoid(logit) everywhere."""
    return {WEIGHT: torch.zeros_like(load(name)[0].tensors[WEIGHT]), BIAS: torch.tensor([logit])}


# --- hints


def test_extreme_predictions_are_finite_or_impossible():
    confidence = Confidence(1)
    with torch.no_grad():
        confidence.proj.weight.fill_(1.0)
        confidence.proj.bias.zero_()
        got = torch.nn.functional.logsigmoid(confidence.logits(torch.tensor([[-200.0], [200.0], [math.inf]])))
    assert got.tolist() == [-200.0, 0.0, 0.0]


def test_expected_drafts():
    chances = torch.tensor([[0.9, 0.5, 0.5], [0.9, 0.9, 0.9], [0.4, 1.0, 1.0], [1.0, 0.0, 1.0]])  # 1.575, 2.439, 1.2, 1
    assert expected_drafts(chain_scores(chances.log())).tolist() == [2, 2, 1, 1]
    tree = torch.tensor([[1.0, 0.5, 0.4, 0.5, 0.3], [1.0, math.nan, 0.9, math.nan, 0.9]]).log()
    assert expected_drafts(tree).tolist() == [2, 2]
    assert expected_drafts(torch.zeros(2, 1)).tolist() == [0, 0]  # the root is no draft
    assert expected_drafts(tree).dtype == torch.int64


@pytest.mark.parametrize("topk", [1, 2])
def test_drafts_without_a_prediction_expect_their_probabilities(topk):
    """A chain of the likeliest tokens, of 0.9, 0.8 and 0.6, and a tree that has the second ones, too."""
    proposed, chances = [], torch.tensor([[0.9, 0.08, 0.02], [0.8, 0.2, 0.0], [0.6, 0.3, 0.1]])
    state = SimpleNamespace(tree_tokens=torch.tensor([[4], [5]]), propose=lambda *tree: proposed.append(tree))
    BlockProposer(3, topk, 4 if topk == 1 else 5, False).propose(state, chances.log().expand(2, -1, -1))
    _, _, _, hint, _, scores = proposed[0]
    want = [0.9, 0.72, 0.432] if topk == 1 else [0.9, 0.72, 0.432, 0.216]  # the fourth: 0.9 * 0.8 * 0.3
    assert (scores[:, 1:].exp() - torch.tensor(want)).abs().max() < 1e-6
    assert hint.tolist() == [2, 2]  # 2.052 and 2.268


# --- checkpoints


@EVERY
def test_a_prediction_is_read_and_told(load, name):
    written, draft = load(name)
    assert torch.equal(draft.confidence.proj.weight, written.tensors[WEIGHT])
    assert torch.equal(draft.confidence.proj.bias, written.tensors[BIAS])
    assert not draft.confidence.proj.weight.requires_grad
    reads = "its place and the token before it" if draft.confidence.rank else "its place"
    assert f"the draft predicts from {reads} how likely each draft is to be accepted" in draft.report
    assert not any("confidence_head" in line for line in draft.report)


@EVERY
def test_a_prediction_that_is_not_enabled(read, name):
    """Its tensors may be absent; if they are there, the report names them."""
    for tensors in ({}, {WEIGHT: None, BIAS: None}):
        draft = read(name, tensors, enable_confidence_head=False)
        assert getattr(draft, "confidence", None) is None and "the draft predicts" not in "".join(draft.report)
        ignored = [line for line in draft.report if "ignored: confidence_head" in line]
        assert len(ignored) == 2 * (not tensors)
    with pytest.raises(ValueError, match=r"has no confidence_head.proj.weight, confidence_head.proj.bias"):
        read(name, {WEIGHT: None, BIAS: None})


def test_a_prediction_reads_the_token_before_it_unless_it_says_otherwise(read):
    assert read("dspark", confidence_head_with_markov=None).confidence.rank == drafts.RANK  # as DSpark does


def test_drafts_made_by_hand(load):
    target = load("dspark")[0].target
    shared = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    how = target.config, *shared, (0, 1), 5, dflash.MASK, LayerKnobs(1, qk_norm=True), True
    for transition, table in ((None, 0), (Markov(drafts.H, drafts.V, drafts.V, 4), 4)):
        with pytest.raises(ValueError, match=f"reads 6 numbers of the token before, and the .* table has {table};"):
            LinkedDraft(*how, transition=transition, confidence=Confidence(drafts.H, 6))
        for rank in (0, table):
            confidence = Confidence(drafts.H, rank)
            assert LinkedDraft(*how, transition=transition, confidence=confidence).confidence is confidence


@pytest.mark.sweep(5)
@EVERY
@pytest.mark.parametrize("options", [{}, TREE], ids=["chain", "tree"])
def test_confidence_is_the_hint(load, read, name, options):
    """0 without any, as many as the tree expects with full confidence."""
    low, high = (dflash.our_logits(read(name, constant(load, name, x)), **options)[1] for x in (-9.0, 30.0))
    assert low[3].tolist() == [0] * len(CONTEXTS)
    if not options:
        assert high[3].tolist() == [PLACES] * len(CONTEXTS)  # all are accepted, however unlikely each is
    else:
        unpredicted = dflash.our_logits(read(name, enable_confidence_head=False), **options)[1]
        assert all(torch.equal(a, b) for a, b in zip(high[:4], unpredicted[:4]))  # c = 1 leaves all as it is
        assert torch.equal(high[3], expected_drafts(unpredicted[5])) and high[3].max() > 0


@pytest.mark.parametrize("name", ["dspark", "dflash_confident"])
def test_drawn_drafts_have_no_hint(read, load, name):
    """A drawn token that decides how many are verified would no longer have the draft's distribution."""
    drawing = dict(
        temperature=torch.full((3,), 0.8), seed=7, numbers=torch.arange(3),
        prompt_lengths=torch.ones(3, dtype=torch.int64), is_eos=torch.zeros(3, drafts.V, dtype=torch.bool),
    )  # fmt: skip
    draft = read(name, constant(load, name, 30.0))
    *_, hint, probs, _ = dflash.our_logits(draft, state=drawing, draft_sample_method="probabilistic")[1]
    assert probs is not None and hint.tolist() == [0] * len(CONTEXTS)


# --- whole rounds


@pytest.mark.sweep("chain-dspark_rnn")
@EVERY
@pytest.mark.parametrize(
    "options", [{}, TREE, dict(topk=2, num_draft_tokens=8, ngram=True)], ids=["chain", "tree", "union"]
)
def test_answers_do_not_depend_on_confidence(load, read, name, options, monkeypatch):
    hints, propose = [], State.propose

    def watched(state, tokens, parents, count, hint, *more):
        hints[-1].append(hint.tolist())
        propose(state, tokens, parents, count, hint, *more)

    monkeypatch.setattr(State, "propose", watched)
    written, draft = load(name)
    prompts = rounds.prompts(2, 7)
    plain = rounds.generated(written.target, prompts, 9)
    for one in (draft, read(name, constant(load, name, -9.0)), read(name, constant(load, name, 9.0))):
        hints.append([])
        fast = models.speculate_captured(
            written.target, "dspark", draft=one, compile=False, max_cache_len=64, adaptive=False, **options
        )
        for batch in (1, 2):
            assert torch.equal(rounds.generated(fast, prompts[:batch], 9), plain[:batch])
    assert hints[1] != hints[2]
