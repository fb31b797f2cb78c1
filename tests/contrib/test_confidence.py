"""The prediction of acceptance: its formula, what it changes (hints and the order of nodes), and what it never changes
(answers); hints of drafts without one."""

import math
from types import SimpleNamespace

import dflash_drafts as dflash
import draft_checkpoints as drafts
import draft_rounds as rounds
import models
import numpy as np
import pytest
import torch
from dflash_drafts import BLOCK, CONTEXTS, Meaning

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
def read(load, tmp_path):
    """A function: load a flavour with some tensors and keys of its config changed; None takes a tensor out."""

    def read(name, tensors=(), **config):
        written, _ = load(name)
        changed = {**written.tensors, **dict(tensors)}
        if "dflash_config" in written.config and config:
            config = {"dflash_config": {**written.config["dflash_config"], **config}}
        kept = {name: value for name, value in changed.items() if value is not None}
        drafts.save(tmp_path, {**written.config, **config}, kept)
        return load_head(tmp_path, written.target, "dflash")

    return read


def constant(load, name, logit):
    """Tensors of a prediction that is sigmoid(logit) everywhere."""
    return {WEIGHT: torch.zeros_like(load(name)[0].tensors[WEIGHT]), BIAS: torch.tensor([logit])}


# --- formulas


@pytest.mark.parametrize(("hidden_size", "rank", "dtype"), [(5, 3, torch.float32), (33, 0, torch.bfloat16)])
def test_predictions_are_their_formula(hidden_size, rank, dtype):
    """Where candidates share the state of their place, as where each has its own."""
    generator = torch.Generator().manual_seed(0)
    confidence = Confidence(hidden_size, rank).to(dtype)
    hidden = torch.randn(2, 3, 1, hidden_size, generator=generator).to(dtype)
    before = torch.randn(2, 3, 7, rank, generator=generator).to(dtype) if rank else None
    got = confidence(hidden, before)
    count = 7 if rank else 1
    joined = hidden.expand(-1, -1, count, -1).double()
    joined = torch.cat([joined, before.double()], dim=3) if rank else joined
    want = (joined @ confidence.proj.weight[0].double() + confidence.proj.bias.double()).sigmoid().log()
    assert got.dtype == torch.float32 and got.shape == (2, 3, count)
    assert (got - want).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)


def test_extreme_predictions_are_finite_or_impossible():
    confidence = Confidence(1)
    with torch.no_grad():
        confidence.proj.weight.fill_(1.0)
        confidence.proj.bias.zero_()
        got = confidence(torch.tensor([[-200.0], [200.0], [math.inf]]))
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
@pytest.mark.parametrize(
    ("tensor", "change", "message"),
    [
        (WEIGHT, lambda x: x[:, :-1], "confidence_head.proj.weight is .*, expected"),
        (WEIGHT, lambda x: x.expand(2, -1), "confidence_head.proj.weight is .*, expected"),
        (BIAS, lambda x: x.expand(2), r"confidence_head.proj.bias is \[2\], expected \[1\]"),
        (WEIGHT, lambda x: None, "has no confidence_head.proj.weight"),
        (BIAS, lambda x: None, "has no confidence_head.proj.bias"),
        (WEIGHT, lambda x: x * math.nan, "confidence_head.proj.weight in .* holds NaN or infinity"),
    ],
)
def test_tensors_that_do_not_fit(load, read, name, tensor, change, message):
    with pytest.raises(ValueError, match=message):
        read(name, {tensor: change(load(name)[0].tensors[tensor])})


@EVERY
def test_a_prediction_that_is_not_enabled(load, read, name):
    """Its tensors may be absent; if they are there, the report names them."""
    for tensors in ({}, {WEIGHT: None, BIAS: None}):
        draft = read(name, tensors, enable_confidence_head=False)
        assert getattr(draft, "confidence", None) is None and not any(
            "the draft predicts" in line for line in draft.report
        )
        ignored = [line for line in draft.report if "ignored: confidence_head" in line]
        assert len(ignored) == 2 * (not tensors)
    with pytest.raises(ValueError, match=r"has no confidence_head.proj.weight, confidence_head.proj.bias"):
        read(name, {WEIGHT: None, BIAS: None})


def test_configs_that_contradict_themselves(load, read):
    for name in ("dflash_confident", "dflash2"):  # neither has the table that a prediction would read
        with pytest.raises(ValueError, match="confidence_head_with_markov, and no markov_rank"):
            read(name, enable_confidence_head=True, confidence_head_with_markov=True)
    with pytest.raises(ValueError, match=r"proj.weight is \[1, 72\], expected \[1, 64\]"):
        read("dspark", confidence_head_with_markov=False)
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


# --- hints and the order of nodes


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


@pytest.mark.parametrize("options", [{}, TREE], ids=["chain", "tree"])
def test_places_alone_decide_without_a_table(load, options):
    """Scores are sums of log(c) in a chain, and of log(c) + log(q) in a tree. With a table: see test_linked_drafts."""
    written, draft = load("dflash_confident")
    _, (tokens, parents, _, hint, _, scores) = dflash.our_logits(draft, **options)
    t = {name: np.asarray(value, dtype=np.float64) for name, value in written.tensors.items()}
    meaning, (states, roots) = Meaning(taps=(0, 4, 7), anchor=True), dflash.example(draft.taps)
    for row, past in enumerate(CONTEXTS):
        features = [state[row, :past] for state in states]
        normed = dflash.block_states(t, draft.embedding.detach(), features, int(roots[row]), BLOCK, meaning)
        chances = -np.log1p(np.exp(-(normed @ t[WEIGHT][0] + t[BIAS][0])))
        q = dflash.head_logits(normed, draft.head_weight.detach(), meaning)
        q = q - np.logaddexp.reduce(q, axis=1, keepdims=True)
        want, places = [0.0], [-1]
        for token, parent in list(zip(tokens[row].tolist(), parents[row].tolist()))[1:]:
            places.append(places[parent] + 1)
            want.append(want[parent] + chances[places[-1]] + (q[places[-1], token] if options else 0.0))
        assert np.abs(scores[row].numpy() - want).max() < 1e-4 and want == sorted(want, reverse=True)
        assert abs(int(hint[row]) - np.exp(want[1:]).sum()) < 0.5 + 1e-4


@pytest.mark.sweep(5)
@EVERY
@pytest.mark.parametrize("options", [{}, dict(size=3), dict(num_draft_tokens=4)])
def test_chains_are_the_same_with_any_confidence(load, read, name, options):
    kept, other = load(name)[1], read(name, constant(load, name, 1.0))
    (*trees, hint, _, scores), (*others, _, _, _) = (dflash.our_logits(draft, **options)[1] for draft in (kept, other))
    assert all(torch.equal(a, b) for a, b in zip(trees, others))
    assert torch.equal(hint, expected_drafts(scores))


@pytest.mark.sweep(4)
@EVERY
def test_doubtful_places_are_drafted_broadly(load, read, name):
    """If hardly anything is accepted, all children of the root come before any of their children."""
    parents = dflash.our_logits(read(name, constant(load, name, -30.0)), **TREE)[1][1]
    assert parents[:, 1 : 1 + drafts.CANDIDATES].tolist() == [[0] * drafts.CANDIDATES] * len(CONTEXTS)
    deep = dflash.our_logits(read(name, constant(load, name, 30.0)), **TREE)[1][1]
    assert (deep[:, 1 : 1 + drafts.CANDIDATES] > 0).any()


@pytest.mark.parametrize("name", ["dspark", "dspark_gated", "dspark_rnn", "dspark_projector"])
def test_the_token_before_a_draft_decides(load, read, name):
    """The prediction doubts all that comes after the likeliest first token, and nothing after the other ones."""
    trees = [dflash.our_logits(read(name, constant(load, name, x)), **TREE)[1] for x in (30.0, -30.0)]
    (sure, parents), broad = (tree[0].tolist() for tree in trees[0][:2]), trees[1][0][0].tolist()
    root, first, *others = broad[: 1 + drafts.CANDIDATES]
    assert sure[1] == first and 1 in parents
    table = load(name)[0].tensors["markov_head.markov_w1.weight"]
    reads = torch.cat([table[[root, first, *others]], torch.ones(2 + len(others), 1)], dim=1)
    logits = torch.tensor([9.0, -30.0] + [9.0] * len(others))
    solved = torch.linalg.lstsq(reads, logits[:, None], driver="gelsd").solution[:, 0]
    weight = torch.cat([torch.zeros(drafts.H), solved[:-1]])[None]
    draft = read(name, {WEIGHT: weight, BIAS: solved[-1:]})
    tokens, parents = (x[0].tolist() for x in dflash.our_logits(draft, **TREE)[1][:2])
    doubted = next(node for node, parent in enumerate(parents) if parent == 0 and tokens[node] == first)
    assert doubted not in parents and any(parent > 0 for parent in parents)


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
