"""Training of draft heads: what is learned against slow meanings, what is written against what is read, and that a
training which was interrupted gives the head of one that was not."""

import functools
import json
import math
import tempfile
from pathlib import Path
from unittest import mock

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoTokenizer

from spec_compile import speculate, train_draft
from spec_compile.__main__ import main
from spec_compile.drafters.checkpoints import load_head
from spec_compile.drafters.draft_block import FINAL
from spec_compile.drafters.draft_target import Target
from spec_compile.errors import UnsupportedModelError
from spec_compile.kernels import ops
from spec_compile.training import TRAINERS, data as texts, loss, save
from spec_compile.training.attention import Causal, Rollout, joint_attention
from spec_compile.training.eagle3 import default_taps, published_layer_ids
from spec_compile.training.features import TargetFeatures
from spec_compile.training.on_policy import continue_documents
from spec_compile.training.options import TrainingOptions
from spec_compile.training.progress import Progress, clock
from spec_compile.training.trainer import own_parameters

CODER = "examples/tiny_coder"
ALGORITHMS = ("eagle3", "eagle", "mtp")


def silent(progress):
    pass


@functools.cache
def target(name="llama"):
    return models.ADMITTED[name]()


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(CODER)


def sequences(count=6, length=20, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, models.VOCAB, (count, length), generator=g).tolist()


def train(folder, algo="eagle3", model=None, **options):
    defaults = dict(data=sequences(), validation=sequences(), steps=4, progress=silent)
    return train_draft(model or target(), algo, output=folder, **defaults | options)


# Attention


def tensors(shapes, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=dtype, requires_grad=True) for shape in shapes]


def slow_joint(q, keys, values, sinks, scale, window, softcap):
    """Row by row, key by key: (step, place) of everything the row sees."""
    out = torch.zeros(*q.shape[:3], values[0].shape[3], dtype=q.dtype)
    last = len(keys) - 1
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for t in range(q.shape[2]):
                seen = [(0, s) for s in range(t + 1)] + [(j, t) for j in range(1, last + 1)]
                seen = [(j, s) for j, s in seen if window is None or (t + last) - (s + j) < window]
                scores = torch.stack([scale * (q[b, h, t] @ keys[j][b, h, s]) for j, s in seen])
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                total = scores.exp().sum() + (0 if sinks is None else sinks[h].exp())
                out[b, h, t] = sum(score.exp() / total * values[j][b, h, s] for score, (j, s) in zip(scores, seen))
    return out


@given(
    st.integers(1, 7), st.integers(0, 3), st.sampled_from([None, 2, 4]), st.sampled_from([None, 1.5]), st.booleans(),
    st.integers(0, 99),
)  # fmt: skip
def test_joint_attention(rows, later, window, softcap, sinks, seed):
    shape = (2, 2, rows, 8)
    q, sink, *own = tensors([shape, (2,), *[shape] * (2 * later + 2)], seed)
    sink = sink if sinks else None
    keys, values = own[: later + 1], own[later + 1 :]
    with mock.patch("spec_compile.training.attention.CHUNK", 3):
        got = joint_attention(q, keys, values, sink, 0.4, window, softcap)
    assert torch.allclose(got, slow_joint(q, keys, values, sink, 0.4, window, softcap), atol=1e-10)


@given(st.integers(1, 9), st.sampled_from([(4, 2), (2, 2)]), st.sampled_from([8, 6]), st.integers(0, 99))
def test_rollout_attends_and_differentiates(rows, heads, value_size, seed):
    """Three steps through the op, grouped heads and shorter values included, against the slow meaning; and gradients."""
    shapes = [(2, heads[0], rows, 8), (2, heads[1], rows, 8), (2, heads[1], rows, value_size)]
    steps = [tensors(shapes, seed + i) for i in range(3)]
    groups = heads[0] // heads[1]
    keys, values = ([step[i].repeat_interleave(groups, 1) for step in steps] for i in (1, 2))
    rollout, outs = Rollout(), []
    for i, step in enumerate(steps):
        with rollout:
            outs.append(ops.attention(*step, None, 0.4, None, None, 0))
        slow = slow_joint(step[0], keys[: i + 1], values[: i + 1], None, 0.4, None, None)
        assert torch.allclose(outs[-1], slow.transpose(1, 2), atol=1e-6)
    leaves = [leaf for step in steps for leaf in step]
    weights = torch.randn(3, *outs[0].shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    got = torch.autograd.grad(sum((out * w).sum() for out, w in zip(outs, weights)), leaves)
    slow = [
        joint_attention(step[0], keys[: i + 1], values[: i + 1], scale=0.4).transpose(1, 2)
        for i, step in enumerate(steps)
    ]
    wanted = torch.autograd.grad(sum((out * w).sum() for out, w in zip(slow, weights)), leaves)
    for mine, theirs in zip(got, wanted):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_layers_have_histories_of_their_own():
    steps = [tensors([(1, 2, 5, 8)] * 3, seed, torch.float32) for seed in range(4)]
    together, apart = Rollout(), [Rollout(), Rollout()]
    for number, step in enumerate(steps):
        layer = number % 2
        with together:
            got = ops.attention(*step, None, 0.4, None, None, layer)
        with apart[layer]:
            assert torch.equal(got, ops.attention(*step, None, 0.4, None, None, 0))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -0.2, 0.1, 0.0])])
def test_causal_is_the_op(window, softcap, sinks):
    q, k, v = tensors([(2, 4, 7, 8), (2, 2, 7, 8), (2, 2, 7, 8)], dtype=torch.float32)
    arguments = (q, k, v, sinks, 0.4, window, softcap, 0)
    with Causal():
        got = ops.attention(*arguments)
    assert got.requires_grad
    assert torch.allclose(got, ops.attention(*arguments), atol=1e-6)


# Loss


@given(st.integers(1, 9), st.integers(2, 12), st.booleans(), st.integers(0, 99))
def test_soft_cross_entropy(rows, words, frozen, seed):
    states, weight, teacher, weights = tensors([(rows, 5), (words, 5), (rows, words), (rows,)], seed)
    if frozen:
        weight = weight.detach()
    with mock.patch.object(loss, "LOGITS", 3 * words):
        got = loss.soft_cross_entropy(states, weight, lambda here: teacher.detach()[here], weights.detach())
    slow = -sum(
        weights[r].detach() * (teacher[r].detach().softmax(-1) @ (weight @ states[r]).log_softmax(-1))
        for r in range(rows)
    )
    assert torch.allclose(got, slow)
    leaves = [states] if frozen else [states, weight]
    for mine, theirs in zip(torch.autograd.grad(3 * got, leaves), torch.autograd.grad(3 * slow, leaves)):
        assert torch.allclose(mine, theirs)


def made(algo, **options):
    """A trainer for the tiny target in float64, a batch with padding and unsupervised tokens, its features."""
    model = models.ADMITTED["llama"]().double()
    documents = texts.read(sequences(3, 12), None, models.VOCAB)
    documents[1] = documents[1].piece(0, 9)
    documents[2].supervised[:6] = False
    counts = texts.count_tokens(documents, models.VOCAB)
    if algo == "eagle3":
        options["taps"] = (0, 1)  # transformers gives the state after the last layer behind the final norm
    trainer = TRAINERS[algo](Target.of(model), TrainingOptions(**options), counts)
    batch = texts.collate(documents)
    return model, documents, trainer, batch, TargetFeatures(model, trainer.taps, trainer.kept)(batch.ids)


def differentiable(q, k, v, sinks, scale, window, softcap, layer):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)


def drafts(model, head, ids, slot, steps):
    """normed [H] of each step that continues `slot` of one text: the head run over all that lies before, no cache."""
    states = model(ids[None], output_hidden_states=True).hidden_states
    tapped = [states[-1 if tap == FINAL else tap][:, : slot + 1].detach() for tap in head.taps]
    state = head.project(tapped)
    for step in range(steps):
        tokens = ids[None, 1 : slot + 2 + step]
        recycled, normed = head(tokens, torch.arange(tokens.shape[1])[None], state)
        state = torch.cat([state, recycled[:, -1:]], dim=1)
        yield normed[0, -1]


def slow_rollout_loss(model, documents, trainer, steps, decay, kept, weigh):
    """By the formula, slot by slot and step by step. weigh: (slots of a batch, counted rows of a step) -> a row's share."""
    head, width, total = trainer.module, max(len(d.ids) for d in documents), 0.0
    parts = [[] for _ in range(steps)]
    for document in documents:
        ids = document.ids.long()
        logits = model(ids[None]).logits[0].detach()
        for slot in range(len(ids) - 2):
            for step, normed in enumerate(drafts(model, head, ids, slot, min(steps, len(ids) - 2 - slot))):
                if document.supervised[slot + 2 + step]:
                    teacher = logits[slot + 1 + step]
                    wanted = teacher[kept].softmax(-1) * float(teacher.argmax() in kept)
                    parts[step].append(-wanted @ (head.head_weight @ normed).log_softmax(-1))
    for step, rows in enumerate(parts):
        total = total + decay**step * weigh(len(documents) * (width - 1), len(rows)) * sum(rows)
    return total


@pytest.mark.parametrize("size", [None, 30])
@pytest.mark.parametrize("layers", [1, 2])
def test_training_time_test_is_drafting(size, layers):
    """Loss and gradients are those of drafting from every slot by itself, which sees no cache and no mask."""
    model, documents, trainer, batch, features = made(
        "eagle3", draft_vocab_size=size, num_layers=layers, ttt_steps=4, learning_rate=1e-3
    )
    kept = torch.arange(models.VOCAB) if size is None else trainer.kept
    assert len(kept) == (size or models.VOCAB)
    got = trainer.loss(batch, features, torch.Generator())
    parameters = list(own_parameters(trainer.module).values())
    with mock.patch.object(ops, "attention", differentiable):
        slow = slow_rollout_loss(model, documents, trainer, 4, 0.8, kept, lambda slots, rows: 1 / slots)
        wanted = torch.autograd.grad(slow, parameters)
    assert got.item() == pytest.approx(slow.item(), rel=1e-5)
    for mine, theirs in zip(torch.autograd.grad(got, parameters), wanted):
        assert torch.allclose(mine, theirs, atol=1e-5 * float(theirs.abs().max()) + 1e-9)


def test_loss_of_multi_token_prediction():
    model, documents, trainer, batch, features = made("mtp", ttt_steps=3)
    got = trainer.loss(batch, features, torch.Generator())
    shares = 1 + 0.6 + 0.36
    with mock.patch.object(ops, "attention", differentiable):
        slow = slow_rollout_loss(
            model, documents, trainer, 3, 0.6, torch.arange(models.VOCAB), lambda slots, rows: 1 / rows / shares
        )
    assert got.item() == pytest.approx(slow.item(), rel=1e-5)


def test_loss_of_eagle():
    model, documents, trainer, batch, features = made("eagle")
    got = trainer.loss(batch, features, torch.Generator().manual_seed(5))
    noise = torch.rand(features.states[0].shape, generator=torch.Generator().manual_seed(5)) - 0.5
    noisy = features.states[0] + (noise * 0.2 * 512 / 12).double()
    slow, rows = 0.0, 0
    head, weight = trainer.module, trainer.module.head_weight
    for b, document in enumerate(documents):
        for t in range(len(document.ids) - 2):
            if document.supervised[t + 2]:
                ids = batch.ids[b : b + 1, 1 : t + 2]
                out = head(ids, torch.arange(t + 1)[None], noisy[b : b + 1, : t + 1])[0][0, -1].detach()
                true = features.states[0][b, t + 1]
                gap = (out - true).abs()
                distance = torch.where(gap < 1, 0.5 * gap**2, gap - 0.5).mean()
                slow += distance - 0.1 * (weight @ true).softmax(-1) @ (weight @ out).log_softmax(-1)
                rows += 1
    assert got.item() == pytest.approx(float(slow) / rows, rel=1e-5)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_acceptance_is_of_drafts_from_every_slot(algo):
    model, documents, trainer, batch, features = made(algo)
    reached, right = [0] * 3, [0] * 3
    with torch.no_grad():
        for document in documents:
            ids = document.ids.long()
            choices = model(ids[None]).logits[0].argmax(-1)
            for slot in range(len(ids) - 2):
                alive = True
                for step, normed in enumerate(drafts(model, trainer.module, ids, slot, min(3, len(ids) - 2 - slot))):
                    if not document.supervised[slot + 2 : slot + 3 + step].all():
                        break
                    row = int((trainer.module.head_weight @ normed).argmax())
                    token = row if trainer.module.hot_ids is None else int(trainer.module.hot_ids[row])
                    alive = alive and token == int(choices[slot + 1 + step])
                    reached[step] += 1
                    right[step] += alive
    assert list(trainer.accepted(batch, features, 3)) == list(zip(reached, right))


# Features


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize("rows", [1, 2, 99])
def test_features_are_the_models_own(rows):
    model = target()
    batch = texts.collate(texts.read([row[: 20 - 3 * n] for n, row in enumerate(sequences(3))], None, models.VOCAB))
    kept, before = torch.tensor([3, 4, 90]), hooks(model)
    with mock.patch("spec_compile.training.features.LOGITS", rows * 20 * models.VOCAB * 4):
        found = TargetFeatures(model, (0, 1, 2, FINAL), kept)(batch.ids)
    assert hooks(model) == before
    for row, document in enumerate(sequences(3)):
        ids = torch.tensor([document[: 20 - 3 * row]])
        out = model(ids, output_hidden_states=True)
        states = [*out.hidden_states[:2], found.states[2][row : row + 1, : ids.shape[1]], out.hidden_states[2]]
        for mine, theirs in zip(found.states, states):
            assert torch.allclose(mine[row, : ids.shape[1]], theirs[0], atol=1e-5)
        assert torch.equal(found.choices[row, : ids.shape[1]], out.logits[0].argmax(-1))
        assert torch.allclose(found.logits[row, : ids.shape[1]], out.logits[0][:, kept], atol=1e-5)
    assert torch.allclose(model.model.norm(found.states[2]), found.states[3])


# Whole trainings


OWN = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
"""Greedy decoding that does not end by itself."""


@functools.cache
def overfitted(algo):
    """A head trained on six answers of the target, each of 20 tokens after 10, and evaluated on the same."""
    folder = Path(tempfile.mkdtemp(), algo)
    options = {"eagle3": {"steps": 260, "ttt_steps": 3}, "eagle": {"steps": 600}, "mtp": {"steps": 200}}[algo]
    return train(folder, algo, sequence_length=30, learning_rate=5e-3, on_policy=OWN, **options)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_one_batch_is_learned(algo):
    before = {name: value.clone() for name, value in target().state_dict().items()}
    result = overfitted(algo)
    assert result.acceptance >= 0.99
    assert result.acceptance_by_depth[0] == result.acceptance == result.evaluations[-1][1]
    assert result.acceptance_by_depth == sorted(result.acceptance_by_depth, reverse=True)
    assert len(result.losses) == result.steps and result.losses[-1] < 0.7 * result.losses[0]
    assert result.tokens == result.steps * 6 * 30
    assert len(result.evaluations) == 10
    assert all(torch.equal(value, before[name]) for name, value in target().state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in target().parameters())


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_head_loads_as_it_was_trained(algo):
    result = overfitted(algo)
    head = load_head(result.path, target(), algo)
    saved = torch.load(result.path / save.STATE, weights_only=True)["weights"]
    assert len(saved) == len([name for name, _ in head.named_parameters() if name not in ("embedding",)]) - (
        0 if algo == "eagle3" else 1
    )
    trainer = TRAINERS[algo](Target.of(target()), TrainingOptions(ttt_steps=None), torch.ones(models.VOCAB).long())
    trainer.module.load_state_dict(saved)
    ids, positions = torch.tensor(sequences())[:, 1:], torch.arange(19).expand(6, -1)
    features = TargetFeatures(target(), head.taps)(torch.tensor(sequences()))
    state = [state[:, :-1] for state in features.states]
    assert head.taps == trainer.taps and torch.equal(head.project(state), trainer.module.project(state))
    outputs = zip(head(ids, positions, head.project(state)), trainer.module(ids, positions, head.project(state)))
    assert all(torch.equal(mine, theirs) for mine, theirs in outputs)
    assert torch.equal(head.head_weight, trainer.module.head_weight)


@pytest.mark.parametrize(("algo", "steps"), [("eagle3", 100), ("eagle", 150), ("mtp", 80)])
@torch.no_grad()
def test_rounds_accept_what_training_unrolls(tmp_path, algo, steps):
    """A half-trained head in whole rounds, against the drafts that its training unrolls from the slots they start at."""
    prompts = torch.tensor(sequences(8))[:, :10]
    options = {} if algo == "eagle" else {"ttt_steps": 3}
    with torch.enable_grad():
        result = train(
            tmp_path / algo, algo, data=sequences(8), validation=sequences(8), on_policy=OWN, sequence_length=74,
            steps=steps, learning_rate=5e-3, **options,
        )  # fmt: skip
    assert 0.6 < result.acceptance < 0.99
    fast = speculate(target(), algo, draft=result.path, num_steps=3, compile=False, max_cache_len=200)
    text = target().generate(prompts, max_new_tokens=64, **OWN)
    assert torch.equal(fast.generate(prompts, max_new_tokens=64, **OWN), text)

    trainer = TRAINERS[algo](Target.of(target()), TrainingOptions(**options), torch.ones(models.VOCAB).long())
    trainer.module.load_state_dict(torch.load(result.path / save.STATE, weights_only=True)["weights"])
    features = TargetFeatures(target(), trainer.taps)(text)
    normed = [out for _, out in trainer.unroll(text, trainer.project(features), Rollout(), 3)]
    tokens = [(out @ trainer.module.head_weight.T).argmax(-1) for out in normed]  # every token is kept
    rounds, right = 0, [0] * 3
    for row in range(8):
        root = 10
        while root < 74 - 4:
            gained = 0
            while gained < 3 and tokens[gained][row, root - 1] == text[row, root + 1 + gained]:
                right[gained] += 1
                gained += 1
            rounds, root = rounds + 1, root + 1 + gained
    shares = [count / rounds for count in right]
    assert fast.speculation.stats.acceptance_by_depth == pytest.approx(shares, abs=0.04)
