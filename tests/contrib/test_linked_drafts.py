"""DFlash 2, DSpark and Domino, whose drafts depend on each other: what is drafted against the formulas and against all
paths, and whole rounds against transformers' own decoding."""

import copy
import functools
import itertools
import re

import dflash_drafts as dflash
import draft_checkpoints as drafts
import draft_formulas as formulas
import draft_rounds as rounds
import models
import numpy as np
import pytest
import torch
from dflash_drafts import BLOCK, CONTEXTS, MASK, Meaning
from transformers import LlamaConfig

from spec_compile.contrib.linked.draft import LinkedDraft
from spec_compile.contrib.linked.transitions import Markov
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.drafters.modules.layers import LayerKnobs
from spec_compile.drafters.trees.propose import grow_lattice

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
}
SKIPPED = {"domino_shifted": 2}
"""Places that a head leaves as they are."""
ALL = pytest.mark.parametrize("name", drafts.LINKED)


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
        table = self.t["markov_head.markov_w1.weight"]
        reads = [self.normed[row][self.first + place], table[[int(self.root[row]), *path][-1]]]
        reads = np.concatenate(reads) if len(weight) > drafts.H else reads[0]
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
    chosen, sums = zip(*(right.chain(row, draft.transition.candidates) for row in range(len(CONTEXTS))))
    assert tokens.tolist() == [[root, *path] for root, path in zip([5, MASK, 40], chosen)]
    assert parents.tolist() == [list(range(-1, right.places))] * 3 and count.tolist() == [right.places + 1] * 3
    assert np.abs(scores[:, 1:].numpy() - np.stack(sums)).max() < 1e-4
    assert hint.tolist() == [round(np.exp(row).sum()) for row in sums]
    alone = [[right.ids[i] for i in row[right.first :].argmax(-1)] for row in right.logits]
    assert list(chosen) != alone  # the tokens before do matter


@pytest.mark.sweep(2)
@ALL
def test_trees_are_the_best_of_all_paths(load, name):
    _, draft, right = load(name)
    nodes, selects = 24, draft.transition.candidates is not None
    how = dict(topk=drafts.CANDIDATES, num_draft_tokens=nodes)
    _, (tokens, parents, _, hint, _, scores) = dflash.our_logits(draft, **how)
    for row in range(len(CONTEXTS)):
        paths = dflash.paths_of(tokens[row].tolist(), parents[row].tolist())
        best = right.best_paths(row, drafts.CANDIDATES, nodes - 1, selects)
        assert sorted(paths) == sorted(path for _, path in best)
        assert np.abs(scores[row, 1:].numpy() - [score for score, _ in best]).max() < 1e-4  # from the likeliest down
        assert hint[row] == round(sum(np.exp(score) for score, _ in best))
        assert all(parent < node for node, parent in enumerate(parents[row].tolist()))


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
        if draft.transition.candidates is not None:
            among = right.candidates(row, place, draft.transition.candidates)
            scores = np.where(np.isin(np.arange(len(scores)), among), scores, -np.inf)
        want = np.zeros(drafts.V)
        want[right.ids] = np.exp(scores - np.logaddexp.reduce(scores))
        assert np.abs(probs[row, place].numpy() - want).max() < 1e-5
        assert probs[row, place, tokens[row, place + 1]] > 0


def test_lattices_keep_every_path_that_can_win():
    """Random scores that depend on the whole path, with ties, against all paths."""
    generator = torch.Generator().manual_seed(0)
    for places, count, nodes in ((1, 3, 4), (3, 2, 15), (4, 3, 9), (4, 3, 64)):
        table = -torch.randint(0, 4, (places, 97, count), generator=generator).float()
        tokens = torch.arange(places * count).view(1, places, count)

        def follow(place, previous, state, table=table):
            code = (state[..., 0] * 5 + previous + 1) % 97
            return table[place][code.long()], code[..., None]

        root = torch.tensor([50])
        got = grow_lattice(root, tokens, follow, torch.zeros(1, 1), nodes)
        level, every = [(0.0, (), 0.0, 50)], {}
        for place in range(places):
            below = []
            for above, path, state, previous in level:
                code = (state * 5 + previous + 1) % 97
                for k in range(count):
                    token = int(tokens[0, place, k])
                    below.append((above + float(table[place, int(code), k]), (*path, token), code, token))
            every |= {path: score for score, path, *_ in below}
            level = below
        ids, parents, scores = (x[0].tolist() for x in got)
        paths = dflash.paths_of(ids, parents)
        assert len(set(paths)) == nodes - 1 and [every[path] for path in paths] == scores[1:]
        assert scores[1:] == sorted(every.values(), reverse=True)[: nodes - 1]
        assert all(parent < node for node, parent in enumerate(parents))


# --- checkpoints


def read(folder, written, tensors=(), **config):
    """Load a checkpoint with some tensors and keys of its config changed; None takes one out."""
    changed = {**written.tensors, **dict(tensors)}
    flags = {**written.config["dflash_config"], **config} if "dflash_config" in written.config else None
    config = {**written.config, **({"dflash_config": flags} if flags else config)}
    drafts.save(folder, config, {name: value for name, value in changed.items() if value is not None})
    return load_head(folder, written.target, "dflash")


@ALL
def test_every_tensor_is_needed(load, tmp_path, name):
    """Without it, or in another shape, loading stops, and says which."""
    written, *_ = load(name)
    own = re.compile("conv|selector|markov|gru|embed_proj|confidence")
    for tensor in filter(own.search, written.tensors):
        if ".1." not in tensor:  # one layer is enough
            with pytest.raises(ValueError, match=re.escape(tensor)):
                read(tmp_path, written, {tensor: None})
            with pytest.raises(ValueError, match=re.escape(tensor)):
                read(tmp_path, written, {tensor: written.tensors[tensor][:-1]})


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("dflash2", {"selector_top_k": 32}, "selector_top_k 32, at most 16 are built here"),
        ("dflash2", {"selector_rank": None}, "must have a selector_rank of 1 or more, it has None"),
        ("dflash2", {"conv_group_size": 24}, "conv_group_size 24, which does not divide its hidden_size"),
        ("dflash2", {"conv_kernel_size": 0}, "tensors that this format does not know: layers.0.attention_conv"),
        ("dflash2", {"markov_rank": 8}, "markov_rank and selector_rank, of which a draft can have one"),
        ("dspark", {"markov_head_type": "lstm"}, "markov_head_type 'lstm'; expected one of vanilla, gated, rnn"),
        ("dspark", {"markov_head_type": "gated"}, r"has no markov_head.gate_proj"),
        ("dspark", {"architectures": ["Gemma4DSparkModel"]}, "Gemma4DSparkModel has layers of Gemma 4"),
        ("dspark_projector", {"markov_rank": None}, "must have a markov_rank of 1 or more, it has None"),
        ("domino", {"gru_hidden_dim": None}, "must have a gru_hidden_dim of 1 or more, it has None"),
        ("domino", {"projector_type": "dflash"}, "tensors that this format does not know: embed_proj"),
        ("domino", {"dspine_config": {"top_k": 16}}, "dspine_config .* which is not known here"),
    ],
)
def test_configs_that_do_not_fit(load, tmp_path, name, config, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, load(name)[0], **config)


def test_what_was_loaded_is_told(load):
    for name, first, line in (
        (
            "dflash2",
            "DFlash 2 draft from",
            "each draft is chosen among the 4 likeliest of its place by a bias of rank 8",
        ),
        (
            "dspark",
            "DSpark (DeepSpec) draft from",
            "among all tokens by a bias of rank 8 that depends on the token before",
        ),
        ("domino", "Domino draft from", "that depends on all tokens before it in the block"),
    ):
        report = load(name)[1].report
        assert first in report[0] and any(line in told for told in report)


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


@functools.cache
def bigrams():
    """A target whose next token hangs on the last one, and a draft without a say whose table knows these pairs."""
    model = models.ADMITTED["llama"]()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.02
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=96
    )
    transition, knobs = Markov(64, 96, 96, 64), LayerKnobs(1, qk_norm=True)
    draft = LinkedDraft(config, embedding, output, (0, 1), 5, MASK, knobs, True, transition=transition)
    with torch.no_grad():
        draft.norm.weight.zero_()
        transition.markov_w1.weight.copy_(model.model(torch.arange(96)[:, None]).last_hidden_state[:, 0])
        transition.markov_w2.weight.copy_(output)
    return model, draft.requires_grad_(False).eval()


def test_drafts_that_fit_are_accepted():
    model, draft = bigrams()
    fast = models.speculate_captured(model, "dspark", draft=draft, adaptive=False, compile=False, max_cache_len=200)
    for batch in (1, 4):
        fast.speculation.stats.reset()
        ids = rounds.prompts(batch)
        assert torch.equal(rounds.generated(fast, ids), rounds.generated(model, ids))
        assert fast.speculation.stats.accept_length > 1.5


def test_drawn_drafts_are_accepted_as_often_as_the_distributions_overlap():
    """Leviathan et al. 2023, section 3.2: the chance is the sum of the lesser probabilities."""
    model, draft = bigrams()
    rows, options = 1000, dict(draft_sample_method="probabilistic", num_draft_tokens=2, compile=False)
    fast = models.speculate_captured(model, "dspark", draft=draft, check=False, max_cache_len=40, **options)
    ids = rounds.prompts(1, 12)
    with torch.no_grad():
        p = (model(ids).logits[0, -1] / 1.5).double().softmax(-1)
        transition = draft.transition
        q = (transition.markov_w2(transition.markov_w1(ids[0, -1])) / 1.5).double().softmax(-1)
    chance = torch.minimum(p, q).sum().item()
    rounds.generated(fast, ids, 2, do_sample=True, temperature=1.5, top_k=0, num_return_sequences=rows)
    accepted = sum(gained == 2 for gained in fast.speculation.stats.trace[0])
    assert 0.1 < chance < 0.9
    assert abs(accepted - rows * chance) < 4 * (rows * chance * (1 - chance)) ** 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", dflash.MODES)
@pytest.mark.parametrize("options", [dict(), dict(topk=drafts.CANDIDATES, num_draft_tokens=12)])
@pytest.mark.parametrize("name", ["dflash2", "dspark", "dspark_rnn", "domino"])
def test_drafts_and_tokens_are_the_cpus(load, name, options, mode):
    written, traces, ids = load(name)[0], [], rounds.prompts(3, 9)
    options = options | dict(draft=written.folder, adaptive=False, max_cache_len=120)
    for device, how in (("cuda", dflash.MODES[mode]), ("cpu", dict(compile=False))):
        model = copy.deepcopy(written.target).to(device)
        system = models.speculate_captured(model, "dflash", **options, **how)
        assert torch.equal(rounds.generated(system, ids.to(device)).cpu(), rounds.generated(written.target, ids))
        traces.append(system.speculation.stats.trace)
    assert traces[0] == traces[1]
