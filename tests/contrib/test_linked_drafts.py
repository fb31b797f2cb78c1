"""DFlash 2, DSpark and Domino, whose drafts depend on each other: what is drafted against the formulas and against all
paths, and whole rounds against transformers' own decoding."""

import itertools

import bigrams
import dflash_drafts as dflash
import draft_checkpoints as drafts
import draft_formulas as formulas
import draft_rounds as rounds
import models
import numpy as np
import pytest
import torch
from dflash_drafts import BLOCK, CONTEXTS, MASK, Meaning

from spec_compile.drafters.checkpoints.load import load_head

MEANINGS = {
    "dflash2": Meaning(windows=(9, 9), multiplier=0.7, softcap=20.0),
    "dflash2_speculators": Meaning(windows=(7, 7)),
    "dspark": Meaning(taps=(0, 4, 7), anchor=True),
    "dspark_gated": Meaning(taps=(0, 4, 7), anchor=True),
    "dspark_rnn": Meaning(taps=(0, 4, 7), anchor=True),
    "dspark_projector": Meaning(anchor=True),
    "dspark_speculators": Meaning(anchor=True),
    "domino": Meaning(),
    "domino_shifted": Meaning(anchor=True),
    "dflash_confident": Meaning(taps=(0, 4, 7), anchor=True),
}
SKIPPED = {"domino_shifted": 2}
"""Places that a head leaves as they are."""
ALL = pytest.mark.parametrize("name", MEANINGS)
"""The last one has a prediction of acceptance alone."""


# --- the formulas


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def bias(t, embedding, hidden, tokens):
    """What the tokens [x_0 ... x_k] before a place add to its logits [Vd], hidden [h] being its normed state."""
    if "candidate_selector.successor_codebook" in t:
        left, right = (t[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
        return right @ (left[tokens[-1]] * (t["candidate_selector.hidden_projection.weight"] @ hidden[-1]))
    if "prefix_gru.weight_ih_l0" in t:
        return t["embed_proj.2.weight"] @ domino_readout(t, embedding, hidden, tokens)
    if "markov_head.markov_w1.weight" not in t:
        return 0.0
    before = t["markov_head.markov_w1.weight"][tokens]
    query, state = before[-1], np.zeros_like(before[0])
    if "markov_head.gate_proj.weight" in t:
        joined = np.concatenate([hidden[-1], before[-1]])
        query = sigmoid(formulas.linear(t, "markov_head.gate_proj", joined)) * before[-1]
    if "markov_head.joint_proj.weight" in t:
        for place, word in enumerate(before):
            joined = np.concatenate([state, word, hidden[place]])
            gate, candidate, out = np.split(formulas.linear(t, "markov_head.joint_proj", joined), 3)
            state, query = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate), np.tanh(out)
    return t["markov_head.markov_w2.weight"] @ query


def domino_readout(t, embedding, hidden, tokens):
    """PyTorch's GRU over the tokens, and the first half of the readout."""
    gru = torch.nn.GRU(drafts.H, 12, bias=False, batch_first=True, dtype=torch.float64)
    for name in ("weight_ih_l0", "weight_hh_l0"):
        getattr(gru, name).data = torch.from_numpy(t[f"prefix_gru.{name}"])
    state = gru(torch.from_numpy(embedding[tokens])[None])[1][0, 0].detach().numpy()
    wide = t["embed_proj.0.weight"] @ np.concatenate([hidden[-1], state])
    return wide * sigmoid(wide)


class Right:
    """What a checkpoint's head says by the formulas, in float64."""

    def __init__(self, written, name):
        self.meaning, self.skipped = MEANINGS[name], SKIPPED.get(name, 0)
        self.t = {n: np.asarray(value, dtype=np.float64) for n, value in written.tensors.items()}
        self.embedding = written.target.get_input_embeddings().weight.detach().double().numpy()
        output = self.t["lm_head.weight"] if "d2t" in self.t else written.target.get_output_embeddings().weight.detach()
        states, self.root = dflash.example(self.meaning.taps)
        self.ids = drafts.draft_to_target().tolist() if "d2t" in self.t else list(range(drafts.V))
        given = [[f[b, :p] for f in states] for b, p in enumerate(CONTEXTS)]
        blocks = [(features, int(root), BLOCK, self.meaning) for features, root in zip(given, self.root)]
        self.normed = [dflash.block_states(self.t, self.embedding, *block) for block in blocks]
        self.logits = [dflash.head_logits(normed, output, self.meaning) for normed in self.normed]
        self.first = 0 if self.meaning.anchor else 1
        self.places = BLOCK - self.first

    def scores(self, row, path):
        """Logits [Vd] of the place behind the root and the tokens of `path`."""
        place = len(path)
        logits, hidden = self.logits[row][self.first :], self.normed[row][self.first :]
        if place < self.skipped:
            return logits[place]
        tokens = [int(self.root[row]), *path]
        return logits[place] + bias(self.t, self.embedding, hidden[: place + 1], tokens)

    def log_confidence(self, row, path):
        """log(c) of the place after the root and the tokens of `path`; None if the checkpoint does not predict it."""
        if "confidence_head.proj.weight" not in self.t:
            return None
        weight, place = self.t["confidence_head.proj.weight"][0], len(path)
        reads = self.normed[row][self.first + place]
        if len(weight) > drafts.H:
            table = self.t["markov_head.markov_w1.weight"]
            reads = np.concatenate([reads, table[[int(self.root[row]), *path][-1]]])
        return np.log(sigmoid(weight @ reads + self.t["confidence_head.proj.bias"][0]))

    def candidates(self, row, place, count):
        """The rows of the output matrix of the likeliest tokens of a place, by the block alone."""
        return np.argsort(-self.logits[row][self.first + place], kind="stable")[:count]

    def chain(self, row, candidates=None):
        """The chain, and the sums of the logarithms of its drafts' chances."""
        path, chances = [], []
        for place in range(self.places):
            scores, predicted = self.scores(row, path), self.log_confidence(row, path)
            among = np.arange(len(scores)) if candidates is None else self.candidates(row, place, candidates)
            scores = scores[among] - np.logaddexp.reduce(scores[among])
            chances.append(scores.max() if predicted is None else predicted)
            path.append(self.ids[among[scores.argmax()]])
        return path, np.cumsum(chances)

    def best_paths(self, row, candidates, count, selects):
        """The `count` best paths over the candidates, by trying all; selects: the candidates are all there is."""
        level, found = [(0.0, ())], []
        for place in range(self.places):
            among, below = self.candidates(row, place, candidates), []
            alone = self.logits[row][self.first + place]
            others = np.log(1 - np.exp(alone[among] - np.logaddexp.reduce(alone)).sum())
            for above, path in level:
                scores = self.scores(row, path)[among]
                total = np.logaddexp.reduce(scores)
                if not selects:
                    total = np.logaddexp(total, others + np.logaddexp.reduce(alone))
                above += self.log_confidence(row, path) or 0.0
                below += [(above + s - total, (*path, self.ids[i])) for s, i in zip(scores, among)]
            found += below
            level = sorted(below, reverse=True)[:count]  # no path below another can be among the best
        return sorted(found, reverse=True)[:count]


def candidates_of(draft):
    """The number of tokens of each place among which the draft selects, or None."""
    return getattr(draft.transition, "candidates", None)


# --- blocks


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A function: name of a flavour -> what was written, its draft, and what it says by the formulas."""
    return drafts.loader(
        tmp_path_factory.mktemp("linked"),
        lambda written: (load_head(written.folder, written.target, "dflash"), Right(written, written.folder.name)),
    )


@pytest.mark.sweep(2)
@ALL
def test_blocks_and_chains_are_their_formulas(load, name):
    _, draft, right = load(name)
    logits, (tokens, parents, count, hint, _, scores) = dflash.our_logits(draft)
    assert (draft.taps, draft.sample_from_anchor, draft.block_size) == (right.meaning.taps, right.meaning.anchor, BLOCK)
    assert dflash.difference(logits, right.logits) < 1e-5
    chosen, sums = zip(*(right.chain(row, candidates_of(draft)) for row in range(len(CONTEXTS))))
    assert tokens.tolist() == [[root, *path] for root, path in zip([5, MASK, 40], chosen)]
    assert parents.tolist() == [list(range(-1, right.places))] * 3 and count.tolist() == [right.places + 1] * 3
    assert np.abs(scores[:, 1:].numpy() - np.stack(sums)).max() < 1e-4
    assert hint.tolist() == [round(np.exp(row).sum()) for row in sums]
    alone = [[right.ids[i] for i in row[right.first :].argmax(-1)] for row in right.logits]
    assert (list(chosen) == alone) == (name == "dflash_confident")  # elsewhere the tokens before do matter


@pytest.mark.sweep(2)
@ALL
def test_trees_are_the_best_of_all_paths(load, name):
    _, draft, right = load(name)
    nodes, selects = 24, candidates_of(draft) is not None
    how = dict(topk=drafts.CANDIDATES, num_draft_tokens=nodes)
    _, (tokens, parents, _, hint, _, scores) = dflash.our_logits(draft, **how)
    for row in range(len(CONTEXTS)):
        paths = dflash.paths_of(tokens[row].tolist(), parents[row].tolist())
        best = right.best_paths(row, drafts.CANDIDATES, nodes - 1, selects)
        assert sorted(paths) == sorted(path for _, path in best)
        assert np.abs(scores[row, 1:].numpy() - [score for score, _ in best]).max() < 1e-4  # from the likeliest down
        assert hint[row] == round(sum(np.exp(score) for score, _ in best))
        assert all(parent < node for node, parent in enumerate(parents[row].tolist()))


@pytest.mark.sweep(2)
@ALL
def test_drawn_drafts_come_from_the_formulas(load, name):
    """What each token was drawn from, which verification divides by."""
    _, draft, right = load(name)
    drawing = dict(
        temperature=torch.full((3,), 0.8), seed=7, numbers=torch.arange(3),
        prompt_lengths=torch.ones(3, dtype=torch.int64), is_eos=torch.zeros(3, drafts.V, dtype=torch.bool),
    )  # fmt: skip
    _, (tokens, *_, probs, _) = dflash.our_logits(draft, state=drawing, draft_sample_method="probabilistic")
    for row, place in itertools.product(range(3), range(right.places)):
        scores = right.scores(row, tokens[row, 1 : place + 1].tolist()) / 0.8
        if candidates_of(draft):
            among = right.candidates(row, place, candidates_of(draft))
            scores = np.where(np.isin(np.arange(len(scores)), among), scores, -np.inf)
        want = np.zeros(drafts.V)
        want[right.ids] = np.exp(scores - np.logaddexp.reduce(scores))
        assert np.abs(probs[row, place].numpy() - want).max() < 1e-5
        assert probs[row, place, tokens[row, place + 1]] > 0


# --- checkpoints


def test_what_was_loaded_is_told(load):
    for name, first, line in (
        ("dflash2", "DFlash 2 draft", "each draft is chosen among the 4 likeliest of its place by a bias of rank 8"),
        ("dspark", "DSpark (DeepSpec) draft", "all tokens by a bias of rank 8 that depends on the token before"),
        ("domino", "Domino draft", "that depends on all tokens before it in the block"),
    ):
        report = load(name)[1].report
        assert f"{first} from" in report[0] and any(line in told for told in report)


# --- whole rounds


@pytest.mark.sweep("domino")
@pytest.mark.parametrize("name", ["dflash2", "dspark_rnn", "domino"])
def test_tokens_are_plain_decodings(load, name):
    written, *_ = load(name)
    prompts = rounds.prompts(4, 9)
    plain = rounds.generated(written.target, prompts, 8)
    for options in (dict(), dict(topk=drafts.CANDIDATES, num_draft_tokens=12)):
        fast = models.speculate_captured(
            written.target, name.split("_")[0], draft=written.folder, compile=False, max_cache_len=64, **options
        )
        for batch in (1, 4):
            assert torch.equal(rounds.generated(fast, prompts[:batch], 8), plain[:batch])


def test_drafts_that_fit_are_accepted():
    model = bigrams.target()
    how = dict(draft=bigrams.table(), adaptive=False, compile=False, max_cache_len=200)
    fast = models.speculate_captured(model, "dspark", **how)
    for batch in (1, 4):
        fast.speculation.stats.reset()
        ids = rounds.prompts(batch)
        assert torch.equal(rounds.generated(fast, ids), rounds.generated(model, ids))
        assert fast.speculation.stats.accept_length > 1.5
