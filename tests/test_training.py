"""Training of draft heads: what is learned against slow meanings, what is written against what is read, and that a
training which was interrupted gives the head of one that was not."""

import functools
import itertools
import json
import math
import os
import tempfile
from pathlib import Path
from unittest import mock

import models
import pytest
import test_dflash as dflash_formulas
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_compile import speculate, train_draft
from spec_compile.__main__ import main
from spec_compile.drafters.checkpoints.dflash import load_dflash
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.drafters.checkpoints.target import Target
from spec_compile.errors import UnsupportedModelError
from spec_compile.kernels import ops
from spec_compile.passes.tap_hidden_states import FINAL
from spec_compile.runtime.generate import SpeculativeMixin
from spec_compile.training import TRAINERS, loss, save
from spec_compile.training import data as texts
from spec_compile.training.attention import Causal, Rollout, joint_attention
from spec_compile.training.dflash import Blocks
from spec_compile.training.dflash import default_taps as block_taps
from spec_compile.training.eagle3 import default_taps, published_layer_ids
from spec_compile.training.features import TargetFeatures
from spec_compile.training.on_policy import continue_documents, prompts
from spec_compile.training.options import TrainingOptions
from spec_compile.training.progress import Printer, Progress, clock
from spec_compile.training.read import read
from spec_compile.training.trainer import trained_parameters

CODER = "examples/tiny_coder"
HEADS = ("eagle3", "eagle", "mtp")
ALGORITHMS = (*HEADS, "dflash")
SMALL = {"dflash": {"block_size": 4, "num_layers": 2}, "jetspec": {"block_size": 4, "num_layers": 2}}


def silent(progress):
    pass


@functools.cache
def target(name="llama"):
    return models.ADMITTED[name]()


@pytest.fixture(autouse=True)
def captured_once(monkeypatch):
    """A target whose weights stay as they are is captured once."""
    monkeypatch.setattr("spec_compile.api.capture", models.captured)


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(CODER)


def sequences(count=6, length=20, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(3, models.VOCAB, (count, length), generator=g).tolist()


def train(folder, algo="eagle3", model=None, **options):
    defaults = dict(data=sequences(), validation=sequences(), steps=4, progress=silent, **SMALL.get(algo, {}))
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
    """Three steps through the op against the slow meaning, grouped heads and shorter values included; and gradients."""
    shapes = [(2, heads[0], rows, 8), (2, heads[1], rows, 8), (2, heads[1], rows, value_size)]
    steps = [tensors(shapes, seed + i) for i in range(3)]
    groups = heads[0] // heads[1]
    keys, values = ([step[i].repeat_interleave(groups, 1) for step in steps] for i in (1, 2))
    rollout, outs = Rollout(3), []
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
    together, apart = Rollout(2), [Rollout(2), Rollout(2)]
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
    """Several rows have one teacher, whose logits are made once in a block."""
    states, weight, known, weights = tensors([(rows, 5), (words, 5), (rows, words), (rows,)], seed)
    teachers = torch.randint(rows, (rows,), generator=torch.Generator().manual_seed(seed)).sort().values
    teacher, asked = known[teachers], []

    def logits(positions):
        asked.append(positions.tolist())
        return known.detach()[positions]

    if frozen:
        weight = weight.detach()
    with mock.patch.dict(loss.LOGITS, cpu=3 * words):
        got = loss.soft_cross_entropy(states, weight, teachers, logits, weights.detach())
    assert asked == [sorted({*teachers[i : i + 3].tolist()}) for i in range(0, rows, 3)]
    slow = -sum(
        weights[r].detach() * (teacher[r].detach().softmax(-1) @ (weight @ states[r]).log_softmax(-1))
        for r in range(rows)
    )
    assert torch.allclose(got, slow)
    leaves = [states] if frozen else [states, weight]
    for mine, theirs in zip(torch.autograd.grad(3 * got, leaves), torch.autograd.grad(3 * slow, leaves)):
        assert torch.allclose(mine, theirs)


def test_the_loss_is_exact_in_mixed_precision():
    states, weight, teacher = tensors([(600, 8), (50, 8), (600, 50)], dtype=torch.float32)
    weights = torch.full((600,), 1 / 600)
    with torch.autocast("cpu", torch.bfloat16):
        got = loss.soft_cross_entropy(states, weight, torch.arange(600), teacher.detach().__getitem__, weights)
    shares = (states.bfloat16() @ weight.bfloat16().t()).float().log_softmax(-1)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(-(teacher.softmax(-1) * shares).sum(-1).mean().item(), rel=1e-5)


@pytest.mark.parametrize(("rows", "words"), [(5, 7), (3, 300)])
def test_the_loss_in_one_kernel(monkeypatch, rows, words):
    """Loss and gradient are those of PyTorch's operations, and the gradient takes the place of the logits."""
    distil_kernel = pytest.importorskip("spec_compile.kernels.distil_kernel")
    monkeypatch.setattr(distil_kernel, "BLOCK", 128)
    logits, teacher, weights = (t.detach() for t in tensors([(rows, words), (2, words), (rows,)], 1, torch.float32))
    shared = torch.arange(rows) % 2
    wanted = loss.distil(9 * logits, 9 * teacher, shared, weights)
    logits = 9 * logits
    losses, pull = distil_kernel.launch(logits, 9 * teacher, shared, weights)
    assert torch.allclose(losses, wanted[0], rtol=1e-5, atol=1e-5) and torch.allclose(pull, wanted[1], atol=1e-6)
    assert pull.data_ptr() == logits.data_ptr()


def made(algo, **options):
    """A trainer for the tiny target in float64, a batch with padding and unsupervised tokens, its features."""
    model = models.build("LlamaConfig", "LlamaForCausalLM", dict(models.GQA, rms_norm_eps=1e-5)).double()
    documents = read(sequences(3, 12), None, models.VOCAB)
    documents[1] = documents[1].piece(0, 9)
    documents[2].supervised[:6] = False
    counts = texts.count_tokens(documents, models.VOCAB)
    if algo in ("eagle3", "dflash", "jetspec"):
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
    """By the formula, slot by slot and step by step. weigh: (slots of a batch, counted rows of a step) -> of a row."""
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
    parameters = list(trained_parameters(trainer.module).values())
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
    _, documents, trainer, batch, features = made("eagle")
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


@pytest.mark.parametrize("algo", HEADS)
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
                    token = row if trainer.module.draft_to_target is None else int(trainer.module.draft_to_target[row])
                    alive = alive and token == int(choices[slot + 1 + step])
                    reached[step] += 1
                    right[step] += alive
    assert list(trainer.accepted(batch, features, 3)) == list(zip(reached, right))


def slow_blocks(model, documents, trainer, features):
    """(document, anchor, logits [slots, V]) of a block at every place, by the formulas, in a supervised text."""
    tensors = trainer.publish()[1]
    embedding, output = model.get_input_embeddings().weight.detach(), model.get_output_embeddings().weight.detach()
    for row, document in enumerate(documents):
        for anchor in range(1, len(document.ids) - 1):
            if document.supervised[anchor : anchor + 2].all():
                context = [state[row, :anchor] for state in features.states[:-1]]
                yield row, anchor, dflash_formulas.block_logits(
                    tensors, embedding, output, context, int(document.ids[anchor]), trainer.block_size,
                    dflash_formulas.Meaning(causal=(trainer.name == "jetspec",) * 2), mask=trainer.mask, theta=10000.0,
                )  # fmt: skip


@pytest.mark.parametrize(("algo", "together"), [("dflash", 1), ("dflash", 256), ("jetspec", 10)])
def test_blocks_learn_what_blocks_draft(algo, together):
    """DFlash and JetSpec: loss and acceptance against blocks drafted one by one, by the formulas."""
    model, documents, trainer, batch, features = made(algo, block_size=5, num_layers=2)
    logits = model(batch.ids).logits.detach()
    total = weights = 0.0
    counts = [[0, 0] for _ in range(4)]
    for row, anchor, drafted in slow_blocks(model, documents, trainer, features):
        document, alive = documents[row], True
        for slot in range(1, 5):
            if anchor + slot >= len(document.ids) or not document.supervised[anchor + slot]:
                break
            teacher, weight = logits[row, anchor + slot - 1], 1.0 if algo == "jetspec" else math.exp(-(slot - 1) / 2.5)
            total -= weight * float(teacher.softmax(-1) @ torch.tensor(drafted[slot]).log_softmax(-1))
            weights += weight
            alive = alive and int(drafted[slot].argmax()) == int(teacher.argmax())
            counts[slot - 1][0] += 1
            counts[slot - 1][1] += alive
    with mock.patch("spec_compile.training.dflash.ROWS", together):
        got = trainer.loss(batch, features, torch.Generator().manual_seed(1))
        assert list(map(list, trainer.accepted(batch, features, 4))) == counts
    assert got.item() == pytest.approx(total / weights, rel=1e-5)
    got.backward()
    assert all(p.grad.abs().sum() > 0 for p in trained_parameters(trainer.module).values())


def test_blocks_begin_at_random_places():
    _, documents, trainer, batch, _ = made("dflash")
    draws = [trainer.draw_blocks(batch, 3, torch.Generator().manual_seed(seed)) for seed in range(40)]
    for row, document in enumerate(documents):
        possible = {n for n in range(1, len(document.ids) - 1) if document.supervised[n : n + 2].all()}
        real = [draw.anchors[row][draw.counted[row, :, 1]].tolist() for draw in draws]
        assert set().union(*real) == possible
        assert all(len(set(anchors)) == len(anchors) == 3 for anchors in real)
    everything = trainer.draw_blocks(batch, 99, torch.Generator().manual_seed(0))
    assert everything.anchors.shape[1] == 10
    assert everything.counted[1, :, 1].sum() == 7 and not everything.counted[1, 7:].any()


# Features


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize(("rows", "plain"), [(1, True), (2, False), (99, True), (99, False)])
def test_features_are_the_models_own(rows, plain):
    """A model that bounds its logits behind the output matrix makes them itself, row by row."""
    model = target() if plain else target("gemma2")
    batch = texts.collate(read([row[: 20 - 3 * n] for n, row in enumerate(sequences(3))], None, models.VOCAB))
    kept, before = torch.tensor([3, 4, 90]), hooks(model)
    features = TargetFeatures(model, (0, 1, model.config.num_hidden_layers, FINAL), kept)
    with (
        mock.patch("spec_compile.training.features.LOGITS", rows * 20 * models.VOCAB * 4),
        mock.patch("spec_compile.training.features.TOKENS", rows * 20),
        mock.patch.object(model.model, "forward", wraps=model.model.forward) as runs,
        mock.patch.object(model.lm_head, "forward", wraps=model.lm_head.forward) as products,
        torch.autocast("cpu", torch.bfloat16),  # which would cast the target's weights
    ):
        found = features(batch.ids)
    assert runs.call_count == {1: 3, 2: 2, 99: 1}[rows] and hooks(model) == before
    assert all((call.args[0].shape[1] == 0) == plain for call in products.call_args_list)
    logits = found.logits(torch.arange(batch.ids.numel())).view(*batch.ids.shape, -1)
    for row, document in enumerate(sequences(3)):
        ids = torch.tensor([document[: 20 - 3 * row]])
        out = model(ids, output_hidden_states=True)
        states = [*out.hidden_states[:2], found.states[2][row : row + 1, : ids.shape[1]], out.hidden_states[-1]]
        for mine, theirs in zip(found.states, states):
            assert torch.allclose(mine[row, : ids.shape[1]], theirs[0], atol=1e-5)
        assert torch.equal(found.choices[row, : ids.shape[1]], out.logits[0].argmax(-1))
        assert torch.allclose(logits[row, : ids.shape[1]], out.logits[0][:, kept], atol=1e-5)
    assert torch.allclose(model.model.norm(found.states[2]), found.states[3])


def test_features_are_captured_once_a_shape(monkeypatch):
    """Ids of a shape that has come before are computed by what was captured of it; without it, as before."""
    features, seen = TargetFeatures(target(), (1, 2)), []
    features._graphs.captures = True
    batches = [torch.tensor(sequences(2, size, seed)) for seed, size in enumerate((9, 9, 7, 9, 7, 9))]

    class Captured:
        def __init__(self, function, arguments, pool):
            self.function = function
            seen.append(tuple(arguments[0].shape))

        def __call__(self, ids):
            seen.append("replayed")
            return self.function(ids)

    monkeypatch.setattr("spec_compile.training.features.Captured", Captured)
    found = [features(ids).states for ids in batches]
    assert seen == [(2, 9), "replayed", "replayed", (2, 7), "replayed", "replayed"]
    monkeypatch.setattr("spec_compile.training.features.Captured", mock.Mock(side_effect=RuntimeError("it waits")))
    features._graphs.captured.clear()
    with pytest.warns(UserWarning, match="LlamaForCausalLM cannot be captured.*slower: it waits"):
        again = [features(ids).states for ids in batches]
    assert all(torch.equal(*pair) for states in zip(found, again) for pair in zip(*states))


# Whole trainings


OWN = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
"""Greedy decoding that does not end by itself."""


@functools.cache
def overfitted(algo):
    """A head trained on three answers of the target, each of 20 tokens after 10, and evaluated on the same."""
    folder = Path(tempfile.mkdtemp(), algo)
    options = {
        "eagle3": {"steps": 80, "ttt_steps": 3},
        "eagle": {"steps": 280},
        "mtp": {"steps": 80},
        "dflash": {"steps": 80},
    }[algo]
    few = dict(data=sequences(3), validation=sequences(3))
    return train(folder, algo, sequence_length=30, learning_rate=5e-3, on_policy=OWN, **few, **options)


@pytest.mark.sweep("eagle3")
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_one_batch_is_learned(algo):
    before = {name: value.clone() for name, value in target().state_dict().items()}
    result = overfitted(algo)
    assert result.acceptance >= 0.99
    assert result.acceptance_by_depth[0] == result.acceptance == result.evaluations[-1][1]
    assert result.acceptance_by_depth == sorted(result.acceptance_by_depth, reverse=True)
    assert len(result.losses) == result.steps and result.losses[-1] < 0.7 * result.losses[0]
    assert result.tokens == result.steps * 3 * 30
    assert len(result.evaluations) == 10
    assert all(torch.equal(value, before[name]) for name, value in target().state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in target().parameters())


@pytest.mark.sweep("eagle3 mtp")
@pytest.mark.parametrize("algo", HEADS)
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


def test_a_dflash_draft_loads_as_it_was_trained():
    result = overfitted("dflash")
    draft = load_dflash(result.path, target())
    saved = torch.load(result.path / save.STATE, weights_only=True)["weights"]
    assert saved.keys() == dict(draft.named_parameters()).keys() - {"embedding", "head_weight"}
    assert all(torch.equal(saved[name], dict(draft.named_parameters())[name]) for name in saved)
    assert (draft.block_size, draft.taps, draft.sample_from_anchor) == (4, (1, 2), False)
    config = json.loads((result.path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 4
    texts_seen = torch.load(result.path / save.TEXTS, weights_only=True)["texts"][0]
    said = torch.cat([ids[supervised] for ids, supervised in texts_seen])
    unsaid = max({*range(models.VOCAB)} - set(said.tolist()))
    assert config["dflash_config"] == {"target_layer_ids": [0, 1], "mask_token_id": unsaid}


def drafted_tokens(trainer, text):
    """Of each depth the tokens [B, T] that are drafted from each slot of text [B, T + 1]."""
    features, weight = TargetFeatures(target(), trainer.taps)(text, choices=False), trainer.module.head_weight
    if trainer.name not in SMALL:
        unrolled = trainer.unroll(text, trainer.project(features.states), Rollout(3), 3)
        return [(normed @ weight.T).argmax(-1) for _, normed in unrolled]
    batch = texts.collate(read(text.tolist(), None, models.VOCAB))
    anchors = torch.arange(1, text.shape[1]).expand(len(text), -1)
    shape = (*anchors.shape, trainer.block_size)
    normed = trainer.draft(batch, features, Blocks(anchors, torch.ones(shape), torch.zeros(shape)))
    return (normed @ weight.T).argmax(-1).unbind(2)[1:]


@pytest.mark.sweep("eagle3-40")
@pytest.mark.parametrize(
    ("algo", "steps"), [("eagle3", 40), ("eagle", 80), ("mtp", 40), ("dflash", 40), ("jetspec", 40)]
)
@torch.no_grad()
def test_rounds_accept_what_training_unrolls(tmp_path, algo, steps):
    """A half-trained head in whole rounds, against what its training unrolls from the slots they start at."""
    prompts = torch.tensor(sequences(4))[:, :10]
    options = SMALL.get(algo, {} if algo == "eagle" else {"ttt_steps": 3})
    schedule = {} if algo in SMALL else {"num_steps": 3}
    with torch.enable_grad():
        result = train(
            tmp_path / algo, algo, data=sequences(4), validation=sequences(4), on_policy=OWN, sequence_length=74,
            steps=steps, learning_rate=5e-3, **options,
        )  # fmt: skip
    assert 0.6 < result.acceptance < 0.99
    fast = speculate(target(), algo, draft=result.path, compile=False, check=False, max_cache_len=200, **schedule)
    text = target().generate(prompts, max_new_tokens=64, **OWN)
    assert torch.equal(fast.generate(prompts, max_new_tokens=64, **OWN), text)

    trainer = TRAINERS[algo](Target.of(target()), TrainingOptions(**options), torch.ones(models.VOCAB).long())
    trainer.module.load_state_dict(torch.load(result.path / save.STATE, weights_only=True)["weights"])
    if algo in SMALL:
        config = json.loads((result.path / "config.json").read_text())
        trainer.mask = config["dflash_config"]["mask_token_id"]
        assert config["dflash_config"].get("causal_head", False) == (algo == "jetspec")
    tokens = drafted_tokens(trainer, text)  # each is kept
    rounds, right = 0, [0] * 3
    for row in range(4):
        root = 10
        while root < 74 - 4:
            gained = 0
            while gained < 3 and tokens[gained][row, root - 1] == text[row, root + 1 + gained]:
                right[gained] += 1
                gained += 1
            rounds, root = rounds + 1, root + 1 + gained
    shares = [count / rounds for count in right]
    assert fast.speculation.stats.acceptance_by_depth == pytest.approx(shares, abs=0.06)  # at the end rounds are cut


@pytest.mark.sweep(2)
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_an_interrupted_training_goes_on_bit_for_bit(tmp_path, algo):
    options = dict(data=sequences(13), validation=0.2, steps=12, batch_size=4, checkpoint_minutes=0)
    whole = train(tmp_path / "whole", algo, **options)
    torch.manual_seed(99)
    with mock.patch("spec_compile.training.loop.REPORT_SECONDS", 0.0):
        for stop in (5, 6, 11):

            def interrupt(progress, stop=stop):
                if progress.step == stop:
                    raise KeyboardInterrupt

            with pytest.raises(KeyboardInterrupt):
                train(tmp_path / "parts", algo, progress=interrupt, **options)
    parts = train(tmp_path / "parts", algo, **options)
    assert parts.losses == whole.losses and parts.evaluations == whole.evaluations
    assert parts.acceptance_by_depth == whole.acceptance_by_depth
    assert (parts.steps, parts.tokens) == (whole.steps, whole.tokens) == (12, whole.tokens)
    mine, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("parts", "whole"))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    again = train(tmp_path / "parts", algo, **options)
    assert again.losses == whole.losses and again.acceptance_by_depth == whole.acceptance_by_depth
    longer = train(tmp_path / "parts", algo, **options | {"steps": 14})
    assert longer.losses[:12] == whole.losses and longer.steps == 14


@pytest.mark.slow
def test_text_of_the_targets_own_is_written_once(tmp_path):
    options = dict(on_policy=dict(do_sample=True, temperature=1.5), steps=3, sequence_length=16, seed=3)
    state = torch.get_rng_state()
    first = train(tmp_path / "a", **options)
    assert torch.equal(torch.get_rng_state(), state)
    second = train(tmp_path / "b", **options)
    assert first.losses == second.losses
    with mock.patch("spec_compile.training.train.continue_documents", side_effect=AssertionError):
        assert train(tmp_path / "a", **options | {"steps": 4}).losses[:3] == first.losses
    (tmp_path / "b" / save.STATE).unlink()  # as if it had been interrupted before the first checkpoint
    for name in ("config.json", "model.safetensors", "README.md"):
        (tmp_path / "b" / name).unlink()
    other = train(tmp_path / "b", **options | {"data": sequences(seed=1)})
    assert other.losses == train(tmp_path / "c", **options | {"data": sequences(seed=1)}).losses


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    folder, options = tmp_path / "head", dict(steps=6, checkpoint_minutes=0)
    whole = train(tmp_path / "whole", **options)
    real, calls = torch.save, []

    def full(content, path):
        calls.append(path)
        real(content, path)
        if len(calls) == 3:
            path.write_bytes(path.read_bytes()[:100])
            raise OSError(28, "No space left on device")

    with mock.patch("torch.save", full), pytest.raises(OSError, match="No space"):
        train(folder, **options)
    assert torch.load(folder / save.STATE, weights_only=True)["step"] == 2
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.json", save.CURVE, "model.safetensors", save.STATE,
    ]  # fmt: skip
    assert load_head(folder, target(), "eagle3").hidden_size == 64
    assert train(folder, **options).losses == whole.losses


def test_a_file_is_replaced_at_once(tmp_path):
    """Until the new one is complete and renamed, the old one is there."""
    path, seen = tmp_path / "file", []
    path.write_text("old")
    rename = os.replace

    def watched(source, destination):
        seen.append((Path(source).read_text(), path.read_text()))
        rename(source, destination)

    with mock.patch("os.replace", watched):
        save.replace(path, lambda partial: partial.write_text("new"))
    assert seen == [("new", "old")] and path.read_text() == "new"


def test_a_process_killed_while_it_writes(tmp_path):
    """Half a file beside the last good one is no file; nor is it in the way of a first training."""
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / f"{save.STATE}.partial").write_bytes(b"half")
    train(folder)
    (folder / f"{save.STATE}.partial").write_bytes(b"half")
    assert train(folder, steps=5).steps == 5


def test_training_by_the_clock(tmp_path):
    result = train(tmp_path / "head", steps=None, minutes=0.02, resume=False)
    assert 1.2 <= result.seconds < 5 and result.steps == len(result.losses) > 3
    assert train(tmp_path / "head", steps=None, minutes=0.02).steps == result.steps


def test_it_says_how_it_goes(tmp_path, capsys):
    seen = []
    with mock.patch("spec_compile.training.loop.REPORT_SECONDS", 0.0):
        train(tmp_path / "a", steps=5, progress=seen.append)
    assert [p.step for p in seen] == [1, 2, 3, 4, 5] and [p.share for p in seen] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert seen[0].acceptance is not None and all(p.loss > 0 and p.tokens_per_second > 0 for p in seen)
    assert seen[-1].seconds_left == 0 < seen[0].seconds_left
    train(tmp_path / "b", steps=5, validation=0, progress=None)
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "reading the text for LlamaForCausalLM" and told[1].startswith("training on ")
    assert told[2].startswith(" 20%  step 1  loss ") and told[-1].startswith("100%  step 5  loss ")
    assert "first drafts accepted -  " in told[-1] and "0:00 left" in told[-1]
    with Printer() as printer:
        for step in range(1, 1001):
            printer(Progress(step, step / 1000, 1.0, None, 1.0, 1.0, 1.0))
    lines = capsys.readouterr().err.splitlines()
    assert [line[:4] for line in lines] == ["  0%", *(f"{10 * n:3}%" for n in range(1, 11))]
    assert clock(59.6) == "1:00" and clock(3661) == "1:01:01"
    assert "17.0%" in str(Progress(3, 0.5, 1.0, 0.17, 1e6, 60.0, 60.0))


def test_a_loss_that_overflows(tmp_path):
    options = dict(steps=8, checkpoint_minutes=0)
    with pytest.raises(FloatingPointError, match=r"nan.*learning_rate below 1e\+30"):
        train(tmp_path / "head", learning_rate=1e30, clip=1e30, warmup=0.0, **options)


def test_inside_inference_mode(tmp_path):
    with torch.inference_mode():
        assert train(tmp_path / "head").steps == 4


def test_a_model_in_bfloat16(tmp_path):
    model = models.ADMITTED["llama"]().bfloat16()
    result = train(tmp_path / "head", model=model, steps=30, learning_rate=5e-3, ttt_steps=2)
    assert result.losses[-1] < 0.5 * result.losses[0]
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16, torch.int64, torch.bool}
    weights = torch.load(tmp_path / "head" / save.STATE, weights_only=True)["weights"]
    assert {value.dtype for value in weights.values()} == {torch.float32}
    assert load_head(tmp_path / "head", model, "eagle3").head_weight.dtype == torch.bfloat16


ARCHITECTURES = ("qwen3", "gpt2", "gemma2", "mixtral", "deepseek_v3", "gpt_oss")
PAIRS = [("mtp", name) for name in ARCHITECTURES]  # it has the target's own layers
PAIRS += [("eagle3", "gpt2"), ("eagle3", "gpt_oss"), ("eagle", "gemma2"), ("eagle", "deepseek_v3"), ("dflash", "qwen3")]
PAIRS += [("dflash", "mixtral")]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("algo", "name"),
    [
        pytest.param(*pair, marks=[] if pair in PAIRS else pytest.mark.slow)
        for pair in itertools.product(ALGORITHMS, ARCHITECTURES)
    ],
)
def test_other_architectures(tmp_path, algo, name):
    model = target(name)
    if algo == "mtp" and name == "gpt2":
        with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel.*use algo='eagle3'"):
            train(tmp_path / "head", algo, model=model)
        return
    result = train(tmp_path / "head", algo, model=model, steps=8, learning_rate=5e-3)
    assert result.losses[-1] < result.losses[0]
    load = load_dflash if algo == "dflash" else load_head
    assert load(tmp_path / "head", model).hidden_size == 64


# What is written

LAYER = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj"]
LAYER = {f"{part}.weight" for part in [*LAYER, "mlp.down_proj", "post_attention_layernorm"]}


def test_published_eagle3(tmp_path):
    train(tmp_path / "head", draft_vocab_size=30, taps=[0, 2], num_key_value_heads=1, intermediate_size=40)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    middle = {f"midlayer.{name}" for name in {*LAYER, "hidden_norm.weight", "input_layernorm.weight"}}
    assert set(tensors) == {*middle, "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    kept = torch.arange(30) + tensors["d2t"]
    assert torch.equal(kept, tensors["t2d"].nonzero()[:, 0]) and len(tensors["t2d"]) == models.VOCAB
    counts = torch.bincount(torch.tensor(sequences()).flatten(), minlength=models.VOCAB)
    left = torch.ones(models.VOCAB, dtype=torch.bool).index_fill(0, kept, False)
    assert 2 in kept and counts[left].max() <= sorted(counts[kept].tolist())[1]  # the end of sequence is kept anyway
    assert tensors["lm_head.weight"].shape == (30, 64) and tensors["midlayer.mlp.up_proj.weight"].shape == (40, 64)
    assert tensors["fc.weight"].shape == (64, 128) and tensors["midlayer.self_attn.k_proj.weight"].shape == (16, 128)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == 30
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 2], "use_aux_hidden_state": True}
    assert config["tie_word_embeddings"] is False and config["torch_dtype"] == "float32"
    head = load_head(tmp_path / "head", target(), "eagle3")
    assert head.taps == (0, 2) and torch.equal(head.draft_to_target, kept)


def test_published_eagle3_of_several_layers(tmp_path):
    train(tmp_path / "head", num_layers=2)
    names = set(load_file(tmp_path / "head" / "model.safetensors"))
    further = {f"layers.1.{name}" for name in {*LAYER, "input_layernorm.weight"}}
    assert {name for name in names if name.startswith("layers.1.")} == further
    assert {"layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"} < names
    assert load_head(tmp_path / "head", target(), "eagle3").layers == 2


def test_published_eagle(tmp_path):
    train(tmp_path / "head", "eagle", num_layers=2)
    names = set(load_file(tmp_path / "head" / "model.safetensors"))
    second = {f"layers.1.{name}" for name in {*LAYER, "input_layernorm.weight"}}
    assert names == {"fc.weight", *(f"layers.0.{name}" for name in LAYER), *second}
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["bias"] is False and config["num_hidden_layers"] == 2


def test_published_dflash(tmp_path):
    train(tmp_path / "head", "dflash", num_layers=1, taps=[0, 1])
    names = set(load_file(tmp_path / "head" / "model.safetensors"))
    parts = [*LAYER, "input_layernorm.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    assert names == {"fc.weight", "hidden_norm.weight", "norm.weight", *(f"layers.0.{part}" for part in parts)}
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["model_type"] == "qwen3" and config["num_target_layers"] == 2
    assert config["dflash_config"]["target_layer_ids"] == [-1, 0]


def test_published_mtp(tmp_path):
    train(tmp_path / "head", "mtp", model=target("qwen3_moe"))
    names = set(load_file(tmp_path / "head" / "model.safetensors"))
    outer = {f"mtp.{name}.weight" for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    parts = [*(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"))]
    parts += ["input_layernorm", "post_attention_layernorm", "mlp.gate"]
    parts += [f"mlp.experts.{i}.{part}_proj" for i in range(4) for part in ("gate", "up", "down")]
    assert names == outer | {f"mtp.layers.0.{part}.weight" for part in parts}
    assert json.loads((tmp_path / "head" / "config.json").read_text())["num_nextn_predict_layers"] == 1


def test_the_card(tmp_path):
    result = train(tmp_path / "head", steps=3)
    card = (tmp_path / "head" / "README.md").read_text()
    for part in ("eagle3 draft for LlamaForCausalLM", "| steps | 3 |", "| seed | 0 |", "| tokens seen | 360 |"):
        assert part in card
    assert f"{result.acceptance:.1%}" in card and " ".join(f"{a:.3f}" for a in result.acceptance_by_depth) in card


@given(st.integers(1, 200))
def test_default_taps_can_be_published(layers):
    taps = default_taps(layers)
    ids = published_layer_ids(taps, layers)
    if layers >= 7:
        assert taps == (2, layers // 2, layers - 3) and ids == [1, layers // 2 - 1, layers - 4]
    read = tuple(i + 1 for i in ids) if ids[0] == 1 else tuple(ids)
    assert read == taps and len(set(taps)) == len(taps) and taps[-1] <= layers
    taps = block_taps(layers)
    assert taps == tuple(sorted(set(taps))) and taps[-1] <= layers and len(taps) == min(5, layers)
    if layers == 36:
        assert taps == (2, 10, 18, 26, 34)  # z-lab's Qwen3-8B: outputs of layers 1, 9, 17, 25, 33


# Data


def chatter(template):
    made = AutoTokenizer.from_pretrained(CODER)
    made.chat_template = template
    return made


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
TURNS += "{% if add_generation_prompt %}<assistant>{% endif %}"
THINKS = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}hm {% endif %}"
THINKS += "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TALK = [
    {"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three?"}, {"role": "assistant", "content": "four"},
]  # fmt: skip


def parts(document):
    """What is not supervised, and what is."""
    decode = tokenizer().decode
    return [decode(document.ids[document.supervised == wanted]) for wanted in (False, True)]


def test_reading_texts(tmp_path):
    end = tokenizer().eos_token
    (document,) = read(["x = 1\n", "  \n"], tokenizer())
    assert parts(document) == ["", "x = 1\n" + end]
    (document,) = read([{"prompt": "x = ", "completion": "1"}], tokenizer())
    assert parts(document) == ["x = ", "1" + end]
    ids = torch.tensor([4, 5, 6])
    first, second = read(iter([ids, [7, 8]]), vocab_size=9)
    assert first.ids.tolist() == [4, 5, 6] and second.supervised.tolist() == [True, True]
    (tmp_path / "a.txt").write_text("y = 2\n")
    assert parts(read(tmp_path / "a.txt", tokenizer())[0]) == ["", "y = 2\n" + end]
    rows = [{"text": "z"}, {"prompt": "a", "completion": "b"}, {"messages": TALK}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    assert len(read(str(tmp_path / "b.jsonl"), chatter(TURNS))) == 3


def test_reading_conversations():
    (document,) = read([{"messages": TALK}], chatter(TURNS))
    assert parts(document) == ["<user>one?</s><assistant><user>three?</s><assistant>", "two</s>four</s>"]
    assert tokenizer().decode(document.ids) == "<user>one?</s><assistant>two</s><user>three?</s><assistant>four</s>"
    first, second = read([{"messages": TALK}], chatter(THINKS))
    assert parts(first) == ["<user>one?</s><assistant>", "hm two</s>"]
    assert parts(second) == ["<user>one?</s><assistant>two</s><user>three?</s><assistant>", "hm four</s>"]
    (document,) = read([{"messages": TALK[:3]}], chatter(TURNS))
    assert parts(document) == ["<user>one?</s><assistant>", "two</s>"]


def test_reading_prompts_without_an_answer(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n\n{"prompt": "x = "}\n')
    document, prompt = read(tmp_path / "a.jsonl", tokenizer(), on_policy=True)
    assert parts(document) == ["", "x" + tokenizer().eos_token] and parts(prompt) == ["x = ", ""]
    assert prompts(prompt, 99) == [tokenizer()("x = ").input_ids] and prompts(prompt, len(prompt.ids)) == []
    with pytest.raises(ValueError, match=r'a.jsonl:3: there is no "completion"; pass on_policy=True'):
        read(tmp_path / "a.jsonl", tokenizer())
    with pytest.raises(ValueError, match=r"data\[0\]: the conversation has no answer; pass on_policy=True"):
        read([{"messages": TALK[:1]}], chatter(TURNS))
    with pytest.raises(TypeError, match=r"data\[0\]: expected text, got NoneType"):
        read([{"prompt": None}], tokenizer(), on_policy=True)
    assert texts.split([prompt], 0.5, 0) == ([prompt], [])


def test_reading_conversations_that_end_with_the_user():
    (document,) = read([{"messages": TALK[:1]}], chatter(TURNS), on_policy=True)
    assert parts(document) == ["<user>one?</s><assistant>", ""]
    (document,) = read([{"messages": TALK[:3]}], chatter(TURNS), on_policy=True)
    assert parts(document) == ["<user>one?</s><assistant><user>three?</s><assistant>", "two</s>"]
    whole = "<user>one?</s><assistant>two</s><user>three?</s><assistant>"
    assert tokenizer().decode(document.ids) == tokenizer().decode(prompts(document, 999)[0]) == whole
    first, second = read([{"messages": TALK[:3]}], chatter(THINKS), on_policy=True)
    assert parts(first) == ["<user>one?</s><assistant>", "hm two</s>"] and parts(second) == [whole, ""]
    (document,) = read([{"messages": TALK}], chatter(TURNS), on_policy=True)  # its last answer is replaced
    assert tokenizer().decode(prompts(document, 999)[0]) == whole


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 7), st.integers(0, 5), st.integers(3, 12))
def test_batches_hold_every_piece_once(lengths, size, seed, length):
    documents = [
        texts.Document(torch.arange(n, dtype=torch.int32) + 100 * i, torch.ones(n, dtype=torch.bool))
        for i, n in enumerate(lengths)
    ]
    pieces = texts.cut(documents, length, 3)
    wanted = [
        tuple(range(100 * i + b, 100 * i + min(b + length, n)))
        for i, n in enumerate(lengths)
        for b in range(0, n, length)
        if min(b + length, n) - b >= 3
    ]
    assert [tuple(piece.ids.tolist()) for piece in pieces] == wanted
    if not pieces:
        return
    batches = texts.Batches(pieces, size, seed)
    orders = []
    for epoch in range(2):
        seen = []
        for step in range(epoch * len(batches), (epoch + 1) * len(batches)):
            batch = batches[step]
            lengths_there = batch.next_supervised.sum(1) + 1
            assert batch.tokens == lengths_there.sum() and len(batch.ids) <= size
            seen += [tuple(row[:n].tolist()) for row, n in zip(batch.ids, lengths_there)]
            for ahead in range(3):
                slots, places = batch.slots(ahead)
                width = batch.ids.shape[1]
                expected = [
                    (row * (width - 1) + slot, row * width + slot + 1 + ahead)
                    for row, n in enumerate(lengths_there.tolist())
                    for slot in range(n - 2 - ahead)
                ]
                assert list(zip(slots.tolist(), places.tolist())) == expected
        assert sorted(seen) == sorted(wanted)
        orders.append(seen)
    again = texts.Batches(pieces, size, seed)
    assert torch.equal(again[len(batches)].ids, batches[len(batches)].ids)
    assert texts.Batches(pieces, size, seed)[0].ids.tolist() == texts.Batches(pieces, size, seed)[0].ids.tolist()
    if len(pieces) > 20:
        assert orders[0] != orders[1]


def test_long_batches_have_few_widths():
    pieces = read([[5] * length for length in (63, 65, 70, 128, 129)])
    assert [texts.collate([piece]).ids.shape[1] for piece in pieces] == [63, 128, 128, 128, 192]
    batch = texts.collate(pieces[1:3])
    assert batch.tokens == 135 and not batch.next_supervised[0, 64:].any() and batch.next_supervised[1, :69].all()
    assert not batch.ids[1, 70:].any()


def test_held_out_documents():
    documents = read(sequences(20))
    kept, held = texts.split(documents, 0.2, 0)
    assert len(kept) == 16 and len(held) == 4 and {id(d) for d in kept + held} == {id(d) for d in documents}
    assert [id(d) for d in texts.split(documents, 0.2, 1)[1]] != [id(d) for d in held]
    assert len(texts.split(documents, 0.001, 0)[1]) == 1
    ((start,), (end,)) = texts.split(documents[:1], 0.25, 0)
    assert torch.equal(torch.cat([start.ids, end.ids]), documents[0].ids) and len(end.ids) == 5
    assert [len(batch.ids) for batch in texts.sample(documents, 3, 100)] == [3, 2]
    assert sum(len(batch.ids) for batch in texts.sample(documents, 3, 1000)) == 20


@pytest.mark.slow
def test_continuations():
    model = target()
    documents = read([[5, 6, 7, 8], list(range(3, 15))], vocab_size=models.VOCAB)
    documents[0].supervised[:3] = False
    options = dict(do_sample=False, pad_token_id=0)
    for eos in (None, int(model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=1, **options)[0, -1])):
        found = continue_documents(model, documents, 10, 0, {**options, "eos_token_id": eos})
        assert [document.supervised.tolist().index(True) for document in found] == [3, 5, 1]
        for document in found:
            start = int((~document.supervised).sum())
            alone = model.generate(
                document.ids[None, :start].long(), max_new_tokens=len(document.ids) - start, **options, eos_token_id=eos
            )
            assert document.ids.tolist() == alone[0].tolist() and document.supervised[start:].all()
            assert len(document.ids) == start + 5 or int(document.ids[-1]) == eos
        with mock.patch("spec_compile.training.on_policy.CACHE", 1):
            apart = continue_documents(model, documents, 10, 0, {**options, "eos_token_id": eos})
        for one, document in zip(apart, found):  # by itself, each goes on to the whole length
            assert one.ids[: len(document.ids)].tolist() == document.ids.tolist()
            assert len(one.ids) == 10 or int(one.ids[-1]) == eos


def unanswered(count=5):
    """Prompts of 4, 7, 10 ... tokens."""
    documents = read([ids[: 4 + 3 * n] for n, ids in enumerate(sequences(count))])
    return [texts.Document(document.ids, torch.zeros_like(document.supervised)) for document in documents]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("nodes", [1, 8])
def test_answers_are_transformers_own(nodes):
    """Whatever our generate() drafts, in batches of one size, of which the last is filled up."""
    model, lines, shapes, generate = target(), [], [], SpeculativeMixin.generate
    options = dict(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)

    def ours(self, ids, **arguments):
        shapes.append(tuple(ids.shape))
        return generate(self, ids, **arguments)

    with (
        mock.patch.object(SpeculativeMixin, "generate", ours),
        mock.patch.multiple("spec_compile.training.on_policy", ROWS={"cpu": 3}, NODES={"cpu": nodes}),
    ):
        answers = continue_documents(model, unanswered(), 64, 0, options, lines.append)
    theirs = [model.generate(document.ids[None].long(), **options)[0].tolist() for document in unanswered()]
    assert [document.ids.tolist() for document in answers] == theirs
    assert [int(document.supervised.sum()) for document in answers] == [24] * 5
    assert shapes == [(3, 10), (3, 16)]
    assert lines[0] == "LlamaForCausalLM writes 5 answers, 3 at a time" and lines[1].startswith("5 answers of 120 tok")


@pytest.mark.slow
def test_answers_of_a_model_that_cannot_be_made_fast(recwarn):
    options = dict(max_new_tokens=9, do_sample=False, pad_token_id=0)
    ours = continue_documents(target(), unanswered(), 64, 0, options)
    assert not [w for w in recwarn if "on_policy" in str(w.message)]
    for error in (UnsupportedModelError("model: no"), RuntimeError("a step cannot be captured: no")):
        with (
            mock.patch("spec_compile.training.on_policy.speculate", side_effect=error),
            pytest.warns(UserWarning, match="on_policy: transformers' own generate.. writes the answers.*no$"),
        ):
            theirs = continue_documents(target(), unanswered(), 64, 0, options)
        assert [document.ids.tolist() for document in theirs] == [document.ids.tolist() for document in ours]


def test_training_on_prompts_alone(tmp_path, capsys):
    rows = [json.dumps({"prompt": f"def f{n}(x):\n"}) for n in range(6)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    model = AutoModelForCausalLM.from_pretrained(CODER, dtype="float32", num_hidden_layers=1)
    fast = speculate(model, compile=False, check=False)
    before = {name: (p.data_ptr(), p.clone()) for name, p in model.named_parameters()}
    capsys.readouterr()
    result = train_draft(
        fast, data=tmp_path / "data.jsonl", output=tmp_path / "head", tokenizer=tokenizer(), validation=0.2, steps=2,
        on_policy=dict(max_new_tokens=12, do_sample=False), sequence_length=32, ttt_steps=2, intermediate_size=32,
    )  # fmt: skip
    assert result.steps == 2 and result.acceptance is not None
    assert all(p.data_ptr() == before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters())
    lines = capsys.readouterr().err.splitlines()[1:]
    assert "writes 6 answers, 6 at a time" in lines[0] and lines[1].startswith("6 answers of ") and len(lines) == 5
    for options, message in (
        (dict(sequence_length=9, validation=0), "data: no prompt leaves room for an answer in the 9 tokens"),
        (dict(sequence_length=3), "sequence_length: a draft of this depth needs at least"),
        (dict(validation=[{"prompt": "x = 1\n" * 99}]), "validation: no prompt leaves room.*Give shorter ones"),
    ):
        options = dict(sequence_length=32, ttt_steps=2, steps=2, on_policy=True) | options
        data = [{"prompt": "def f(x):\n    return x + 1 - 2 * 3\n"}]
        with pytest.raises(ValueError, match=message):
            train_draft(model, data=data, output=tmp_path / "no", tokenizer=tokenizer(), **options)


# Errors


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(algo="eagle4"), ValueError, "algo: expected one of eagle3.*Did you mean 'eagle'"),
        (dict(algo=3), TypeError, "algo: expected a string"),
        (dict(data=[]), ValueError, "data: it holds no text"),
        (dict(data=[[]]), ValueError, "data: it holds no text"),
        (dict(data=["  "]), ValueError, "data: it holds no text"),
        (dict(data=["x"]), TypeError, r"data\[0\] is text: pass its tokenizer"),
        (dict(data=[[1, 2], [3, 96]]), ValueError, r"data\[1\]: expected token ids below 96, got 3 to 96"),
        (dict(data=[[1.5, 2.0]]), TypeError, r"data\[0\]: expected token ids of one sequence"),
        (dict(data=[3]), TypeError, r"data\[0\]: expected a text, token ids or a mapping, got int"),
        (dict(data=[["a", "b"]]), TypeError, r"data\[0\]: expected a text, token ids"),
        (dict(data=[{"body": "x"}]), ValueError, r"data\[0\]: expected \"text\".*got \['body'\]"),
        (dict(data=7), TypeError, "data: expected a file or an iterable"),
        (dict(data={"text": "x"}), TypeError, "data: expected a file or an iterable"),
        (dict(data="nowhere.jsonl"), ValueError, "data: expected a .txt or .jsonl file.*does not exist"),
        (dict(data="def f(): pass"), ValueError, "data: expected a .txt or .jsonl file, or a list of texts"),
        (dict(data=[[5] * 8] * 4), ValueError, "data: no sequence.*has the 9 tokens.*longest has 8"),
        (
            dict(data=[[5] * 20] * 2 + [[5] * 4] * 9, validation=0.1),
            ValueError,
            "validation: no sequence.*or validation=0",
        ),
        (dict(validation=[[5] * 4]), ValueError, "validation: no sequence.*the longest has 4"),
        (dict(on_policy="yes"), TypeError, "on_policy: expected True, False or options for generate"),
        (dict(validation=1.0), ValueError, "validation: expected a share"),
        (dict(validation=[9.5]), TypeError, r"validation\[0\]: expected a text"),
        (dict(sequence_length=8), ValueError, "sequence_length: a draft of this depth needs at least 9 tokens, got 8"),
        (dict(sequence_length=600), ValueError, "sequence_length: LlamaForCausalLM holds 512 tokens, got 600"),
        (dict(sequence_lenght=8), TypeError, "unknown option 'sequence_lenght'. Did you mean 'sequence_length'"),
        (dict(minutes=3), ValueError, "steps and minutes: give one"),
        (dict(steps=0), ValueError, "steps must be from 1"),
        (dict(steps=True), TypeError, "steps must be an int"),
        (dict(steps=None, minutes=0), ValueError, "minutes must be positive"),
        (dict(steps=None, minutes="3"), TypeError, "minutes must be a number, not str"),
        (dict(batch_size=0), ValueError, "batch_size must be from 1"),
        (dict(seed=-1), ValueError, "seed must be from 0"),
        (dict(learning_rate=0.0), ValueError, "learning_rate must be positive"),
        (dict(learning_rate=math.nan), ValueError, "learning_rate must be positive"),
        (dict(warmup=1.0), ValueError, "warmup must be a share"),
        (dict(warmup=-0.1), ValueError, "warmup must be a share"),
        (dict(checkpoint_minutes=-1), ValueError, "checkpoint_minutes must be finite and not negative"),
        (dict(checkpoint_minutes=None), TypeError, "checkpoint_minutes must be a number"),
        (dict(head_dim=12), ValueError, "head_dim: expected a multiple of 8 up to 256, got 12"),
        (dict(num_key_value_heads=3), ValueError, "num_key_value_heads: 4 query heads cannot share 3"),
        (dict(draft_vocab_size=97), ValueError, "draft_vocab_size: expected 2 to 96, the target's vocabulary, got 97"),
        (dict(draft_vocab_size=1), ValueError, "draft_vocab_size: expected 2 to 96"),
        (dict(taps=(1, 2)), ValueError, "taps: expected states from 0 to 2, ascending, the first of them not 1"),
        (dict(taps=(0, 3)), ValueError, "taps: expected states from 0 to 2"),
        (dict(taps=(2, 0)), ValueError, "taps: expected states from 0 to 2, ascending"),
        (dict(taps=()), ValueError, "taps: expected states"),
        (dict(algo="eagle", ttt_steps=3), ValueError, "ttt_steps: algo='eagle' has no such option"),
        (dict(algo="dflash", taps=(0, 3)), ValueError, "taps: expected states from 0 to 2, ascending, got 0, 3"),
        (dict(algo="dflash", block_size=1), ValueError, "block_size must be from 2 to 64"),
        (dict(algo="dflash", draft_vocab_size=9), ValueError, "draft_vocab_size: algo='dflash' has no such option"),
        (dict(algo="nextn", num_layers=2), ValueError, "num_layers: algo='mtp' has no such option"),
    ],
)
def test_errors_come_before_work(tmp_path, options, error, message):
    with (
        mock.patch("spec_compile.training.loop.Loop.run", side_effect=AssertionError),
        pytest.raises(error, match=message),
    ):
        train(tmp_path / "head", **options)
    assert not (tmp_path / "head").exists()


def test_models_without_a_draft(tmp_path):
    with pytest.raises(TypeError, match="model: expected a transformers causal language model"):
        train(tmp_path / "head", model=torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="output layer with a bias"):
        train(tmp_path / "head", model=target("phi"))
    with pytest.raises(ValueError, match="training mode"):
        train(tmp_path / "head", model=models.ADMITTED["llama"]().train())
    with pytest.raises(UnsupportedModelError, match="recurrent state"):
        train(tmp_path / "head", model=models.REFUSED["rwkv"]())
    with pytest.raises(UnsupportedModelError, match=r"Gemma3ForCausalLM.*use algo='eagle3'"):
        train(tmp_path / "head", "mtp", model=target("gemma3"))


def test_folders_that_are_something_else(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"output: .*file is a file"):
        train(tmp_path / "file")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"output: .*model exists and holds config.json; choose another folder"):
        train(tmp_path / "model")
    folder = tmp_path / "head"
    train(folder)
    other = models.build("LlamaConfig", "LlamaForCausalLM", models.GQA, {"seed": 5})
    for options, found in (
        (dict(model=other), "target"), (dict(algo="eagle"), "algo 'eagle3' where this one has 'eagle'"),
        (dict(data=sequences(seed=4)), "data"), (dict(batch_size=3), "batch_size 8 where this one has 3"),
        (dict(num_layers=2), "num_layers None where this one has 2"), (dict(on_policy=True), "on_policy"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"output: .*holds the training of another head, with {found}"):
            train(folder, **options)
    with pytest.raises(ValueError, match="holds a training; pass resume=True"):
        train(folder, resume=False)
    torch.save({"version": 0}, folder / save.STATE)
    with pytest.raises(ValueError, match="no training state that this version"):
        train(folder)
    (folder / save.STATE).write_bytes(b"")
    with pytest.raises(ValueError, match="cannot be read"):
        train(folder)


def test_conversations_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"data\[0\]: messages need a tokenizer with a chat template"):
        read([{"messages": TALK}], tokenizer())
    with pytest.raises(ValueError, match="no answer of the assistant follows"):
        read([{"messages": TALK}], chatter(TURNS.replace("<assistant>", "<helper>")))
    with pytest.raises(TypeError, match=r"data\[0\]: expected text, got int"):
        read([{"prompt": "a", "completion": 3}], tokenizer())
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\nx = 1\n')
    with pytest.raises(ValueError, match=r"a.jsonl:2: not JSON"):
        read(tmp_path / "a.jsonl", tokenizer())


def test_the_command_line(tmp_path, capsys):
    transformers.utils.logging.enable_progress_bar()  # scripts that other tests run turn it off
    rows = [json.dumps({"text": f"def f{n}(x):\n    return x + {n} - {n}\n"}) for n in range(6)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))
    options = json.dumps({"sequence_length": 16, "batch_size": 2, "ttt_steps": 2, "intermediate_size": 32})
    status = main(
        ["train", "--model", CODER, "--data", str(tmp_path / "data.jsonl"), "--output", str(tmp_path / "head"),
         "--steps", "2", "--dtype", "float32", "--validation", "0.2", "--options", options]
    )  # fmt: skip
    assert status == 0
    said = capsys.readouterr()
    assert "2 steps" in said.out
    assert "Loading" not in said.err and len(said.err.splitlines()) == 5  # no bar where there is no terminal
    assert transformers.utils.logging.is_progress_bar_enabled()
    assert (tmp_path / "head" / "model.safetensors").is_file()


# GPU

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_on_a_gpu(dtype):
    """The kernel against PyTorch's operations in float64, for whole trainings' sizes."""
    logits, teacher, weights = (t.detach().cuda() for t in tensors([(300, 49152), (40, 49152), (300,)], 0, dtype))
    logits, teacher, shared = 5 * logits, 5 * teacher, torch.randint(40, (300,), device="cuda")
    wanted = loss.distil(logits.double(), teacher.double(), shared, weights.double())
    losses, pull = loss.distil(logits, teacher, shared, weights.float())
    assert torch.allclose(losses.double(), wanted[0], rtol=1e-4)
    assert (pull.double() - wanted[1]).norm() < (1e-5 if dtype == torch.float32 else 1e-2) * wanted[1].norm()


@pytest.mark.gpu
@NEEDS_GPU
def test_features_on_a_gpu(recwarn):
    """What is captured and replayed is what the model computes."""
    model = models.ADMITTED["llama"]().cuda()
    features = TargetFeatures(model, (0, 1, FINAL))
    for seed, size in enumerate((70, 70, 130, 70, 130, 70, 130)):
        ids = torch.tensor(sequences(4, size, seed)).cuda()
        found, out = features(ids), model(ids, output_hidden_states=True)
        for mine, theirs in zip(found.states, (*out.hidden_states[:2], out.hidden_states[2])):
            assert torch.allclose(mine, theirs, atol=1e-4)
        assert (found.choices == out.logits.argmax(-1)).float().mean() > 0.99
    assert len(features._graphs.captured) == 2 and None not in features._graphs.captured.values()
    assert not [w for w in recwarn if "captured" in str(w.message)]


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_rollout_on_a_gpu(rows):
    shapes = [(2, 4, rows, 64), (2, 2, rows, 64), (2, 2, rows, 64)]
    steps = [[t.detach().cuda().bfloat16().requires_grad_() for t in tensors(shapes, i)] for i in range(3)]
    wide = [[t.detach().float().requires_grad_() for t in step] for step in steps]
    weights = torch.randn(3, 2, rows, 4, 64, device="cuda")
    rollout, mine, theirs = Rollout(3), [], []
    for i, (step, exact) in enumerate(zip(steps, wide)):
        with rollout:
            mine.append(ops.attention(*step, None, 0.125, None, None, 0))
        keys, values = ([one[n].repeat_interleave(2, 1) for one in wide[: i + 1]] for n in (1, 2))
        theirs.append(joint_attention(exact[0], keys, values, scale=0.125).transpose(1, 2))
        assert mine[-1].dtype == torch.bfloat16
    got = torch.autograd.grad(sum((a * w).sum() for a, w in zip(mine, weights)), [t for s in steps for t in s])
    want = torch.autograd.grad(sum((a * w).sum() for a, w in zip(theirs, weights)), [t for s in wide for t in s])
    for a, b in zip([*mine, *got], [*theirs, *want]):
        assert (a.float() - b).norm() < 0.02 * b.norm() + 1e-3


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("algo", [*ALGORITHMS, "jetspec"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_on_a_gpu(tmp_path, algo, dtype):
    """It learns, is interrupted, goes on, and the draft loads on the same device."""
    model = models.ADMITTED["llama"]().to("cuda", dtype)
    options = dict(steps={"eagle": 600}.get(algo, 250), learning_rate=5e-3, checkpoint_minutes=0.01)
    assert train(tmp_path / "head", algo, model=model, **options | {"steps": 50}).steps == 50
    result = train(tmp_path / "head", algo, model=model, **options)
    assert result.acceptance > 0.9 and result.steps == options["steps"]
    load = load_dflash if algo in SMALL else load_head
    assert load(tmp_path / "head", model).embedding.device.type == "cuda"


@pytest.mark.gpu
@NEEDS_GPU
def test_answers_on_a_gpu(recwarn):
    """Those of transformers, in batches of one captured size; drawn ones differ."""
    model = models.ADMITTED["llama"]().to("cuda")
    options = dict(max_new_tokens=40, do_sample=False, pad_token_id=0)
    documents = unanswered(4) * 5
    with mock.patch("spec_compile.training.on_policy.ROWS", {"cuda": 16}):
        answers = continue_documents(model, documents, 256, 0, options)
    assert not [w for w in recwarn if "on_policy" in str(w.message)]
    for document, answer in zip(documents[:4], answers):
        theirs = model.generate(document.ids[None].long().cuda(), **options)[0].tolist()
        assert answer.ids.tolist() == theirs
    assert [answer.ids.tolist() for answer in answers] == [answer.ids.tolist() for answer in answers[:4]] * 5
    sampled = continue_documents(model, documents, 256, 0, options | dict(do_sample=True))
    assert len({tuple(answer.ids.tolist()) for answer in sampled[::4]}) > 1
