"""Losses of draft heads, and the attention of their training, against slow meanings."""

import itertools
from unittest import mock

import models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from position_weights import slow_weights
from torch.nn import functional as F
from trainings import HEADS, NEEDS_GPU, made

from spec_compile.kernels import ops
from spec_compile.passes.outputs import FINAL
from spec_compile.train import loss
from spec_compile.train.attention import Causal, Rollout, joint_attention
from spec_compile.train.loss import FIXED, NAMES, PositionWeights
from spec_compile.train.trainer import trained_parameters

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
    with mock.patch("spec_compile.train.attention.CHUNK", 3):
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
def test_cross_entropy(rows, words, frozen, seed):
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
        got = loss.distil_all([(states, weight)], teachers, logits, weights.detach()).loss
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
        got = loss.distil_all([(states, weight)], torch.arange(600), teacher.detach().__getitem__, weights).loss
    shares = (states.bfloat16() @ weight.bfloat16().t()).float().log_softmax(-1)
    assert got.dtype == torch.float32
    assert got.item() == pytest.approx(-(teacher.softmax(-1) * shares).sum(-1).mean().item(), rel=1e-5)


@settings(max_examples=15)
@given(st.integers(1, 9), st.integers(2, 12), st.integers(0, 99))
def test_two_products_and_an_l1_distance(rows, words, seed):
    """As PyTorch differentiates it."""
    shapes = [(rows, 5), (words, 5), (rows, 3), (words, 3), (rows, words), (rows,)]
    *flat, known, weights = tensors(shapes, seed)
    with mock.patch.dict(loss.LOGITS, cpu=3 * words):
        products = [(flat[0], flat[1].detach()), (flat[2], flat[3])]
        made = loss.distil_all(products, torch.arange(rows), known.detach().__getitem__, weights.detach(), MIX)
    shares = (flat[0] @ flat[1].T + flat[2] @ flat[3].T).softmax(-1)
    distance = (shares - known.softmax(-1)).abs().sum(-1)
    slow = weights.detach() @ (0.3 * -(known.detach().softmax(-1) * shares.log()).sum(-1) + 0.7 * distance)
    assert torch.allclose(made.loss, slow)
    assert torch.allclose(made.overlaps, torch.minimum(shares, known.softmax(-1)).sum(-1))
    leaves = [flat[0], flat[2], flat[3]]
    for mine, theirs in zip(torch.autograd.grad(made.loss, leaves), torch.autograd.grad(slow, leaves)):
        assert torch.allclose(mine, theirs)


MIX = loss.Mix(cross_entropy=0.3, l1=0.7)


@pytest.mark.parametrize(("rows", "words", "mix"), [(5, 7, loss.CROSS_ENTROPY), (3, 300, MIX)])
def test_the_loss_in_one_kernel(monkeypatch, rows, words, mix):
    """Loss and gradient are those of PyTorch's operations, and the gradient takes the place of the logits."""
    distil_kernel = pytest.importorskip("spec_compile.train.distil_kernel")
    monkeypatch.setattr(distil_kernel, "BLOCK", 128)
    logits, teacher, weights = (t.detach() for t in tensors([(rows, words), (2, words), (rows,)], 1, torch.float32))
    shared = torch.arange(rows) % 2
    wanted = loss.distil(9 * logits, 9 * teacher, shared, weights, mix)
    logits, choices = 9 * logits, teacher.argmax(-1)[shared]
    for mine, theirs in zip(distil_kernel.confidence(logits, choices), loss.confidence(logits, teacher, shared)):
        assert mine.dtype == theirs.dtype and torch.allclose(mine.float(), theirs.float())
    losses, pull, overlaps = distil_kernel.launch(logits, 9 * teacher, shared, weights, *mix)
    assert torch.allclose(overlaps, wanted[2], atol=1e-6)
    assert torch.allclose(losses, wanted[0], rtol=1e-5, atol=1e-5) and torch.allclose(pull, wanted[1], atol=1e-6)
    assert pull.data_ptr() == logits.data_ptr()


def differentiable(q, k, v, sinks, scale, window, softcap, layer, chosen=None):
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


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_on_a_gpu(dtype):
    """The kernel against PyTorch's operations in float64, for whole trainings' sizes."""
    logits, teacher, weights = (t.detach().cuda() for t in tensors([(300, 49152), (40, 49152), (300,)], 0, dtype))
    logits, teacher, shared = 5 * logits, 5 * teacher, torch.randint(40, (300,), device="cuda")
    for mix in (loss.CROSS_ENTROPY, MIX):
        check_the_loss(logits.clone(), teacher, shared, weights, mix)


def check_the_loss(logits, teacher, shared, weights, mix):
    dtype, wide = logits.dtype, (logits.double(), teacher.double(), shared)
    for mine, theirs in zip(loss.confidence(logits, teacher, shared), loss.confidence(*wide)):
        assert torch.allclose(mine.double(), theirs.double(), rtol=1e-4)
    wanted = loss.distil(*wide, weights.double(), mix)
    losses, pull, _ = loss.distil(logits, teacher, shared, weights.float(), mix)
    assert torch.allclose(losses.double(), wanted[0], rtol=1e-4)
    assert (pull.double() - wanted[1]).norm() < (1e-5 if dtype == torch.float32 else 1e-2) * wanted[1].norm()


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


OPEN = [name for name in NAMES if name != FIXED]
ROWS = st.lists(st.lists(st.tuples(*[st.floats(0.05, 1.0)] * 2, st.booleans(), st.booleans()), max_size=5), max_size=6)
"""Chains of rows: (fixed weight, probability, right, counted). A row that is not counted is left out."""


@settings(max_examples=25)
@given(ROWS, st.sampled_from(OPEN), st.integers(1, 7))
def test_weights_of_positions(chains, name, size):
    """Blocks of whole chains have the weights of one block, whatever their size."""
    chains = [{p: row[:3] for p, row in enumerate(chain) if row[3]} for chain in chains]
    rows = [(n, p, *row) for n, chain in enumerate(chains) for p, row in chain.items()]
    numbers, places, fixed, q, right = (torch.tensor(part) for part in zip(*rows)) if rows else [torch.zeros(0)] * 5
    weigh = PositionWeights(name, fixed.float(), numbers.long(), places.long())
    blocks = weigh.blocks(size)
    assert [n for block in blocks for n in range(len(rows))[block]] == list(range(len(rows)))
    assert all({n for n, *_ in rows[a]}.isdisjoint({n for n, *_ in rows[b]}) for a, b in itertools.pairwise(blocks))
    got = torch.cat([weigh(block, q[block].float(), right[block].bool()) for block in blocks])
    extra = sum(fixed.tolist()) / max(1, sum(map(bool, chains)))
    wanted = [weight for chain in chains for weight in slow_weights(name, chain, extra).values()]
    assert got.tolist() == pytest.approx(wanted, rel=1e-4)


def test_a_row_without_weight_is_no_link():
    weigh = PositionWeights("dpace", torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 0]), torch.arange(3))
    got = weigh(slice(0, 3), torch.tensor([0.5, 0.1, 0.5]), torch.tensor([True] * 3))
    assert got.tolist() == pytest.approx([0.75 + 0.75**2, 0.0, 0.75**2])


def test_the_chain_term_is_the_expected_accepted_length():
    """Its gradient is that of the mean over positions m of the probability that m drafts are right."""
    g = torch.Generator().manual_seed(0)
    states = torch.randn(6, 4, generator=g, dtype=torch.float64, requires_grad=True)
    matrix, choices = torch.randn(9, 4, generator=g, dtype=torch.float64), torch.randint(9, (6,), generator=g)
    teacher = torch.zeros(6, 9, dtype=torch.float64).scatter(1, choices[:, None], 1e3)
    fixed, numbers = torch.rand(6, generator=g, dtype=torch.float64), torch.tensor([0, 0, 0, 0, 1, 1])
    weigh = PositionWeights("chain", fixed, numbers, torch.tensor([0, 1, 2, 3, 0, 1]))
    made = loss.distil_all([(states, matrix)], torch.arange(6), teacher.__getitem__, weigh)
    q = (states @ matrix.T).softmax(-1).gather(1, choices[:, None])[:, 0]
    lengths = [q[rows].cumprod(0).mean() for rows in (slice(0, 4), slice(4, 6))]
    slow = fixed @ -q.log() - loss.EXTRA * fixed.sum() / 2 * sum(lengths)
    scale = made.weights[5] / (fixed[5] + loss.EXTRA * fixed.sum() / 2 / 2 * q[4:].prod())
    wanted = torch.autograd.grad(slow * scale.detach(), states)[0]
    assert torch.allclose(torch.autograd.grad(made.loss, states)[0], wanted)
    assert made.weights.sum() == pytest.approx(1)
