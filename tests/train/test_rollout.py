"""The rollout of heads in training: its kernels beside formulas, and its CUDA graphs beside launches."""

import contextlib
from unittest import mock

import models
import pytest
import torch
from trainings import NEEDS_GPU

from spec_compile.drafters.checkpoints.files import Target
from spec_compile.train import TRAINERS
from spec_compile.train import data as texts
from spec_compile.train import features as module
from spec_compile.train.attention import join, join_backward
from spec_compile.train.features import TargetFeatures
from spec_compile.train.options import TrainingOptions
from spec_compile.train.trainer import HeadTrainer, trained_parameters


def parts(batch, heads, slots, size, steps, dtype, device):
    """What `join` and `join_backward` take: (q, keys, values, causal, total), grad, dq."""
    g = torch.Generator().manual_seed(steps)

    def made(*shape):
        return torch.randn(shape, generator=g).to(device, dtype)

    q, causal, grad, dq = (made(batch, slots, heads, size).transpose(1, 2) for _ in range(4))
    keys, values = made(2, steps, batch, slots, heads, size)
    total = 3 * torch.randn(batch, heads, slots, generator=g).to(device)
    # The edges: a slot whose causal part has nearly all of the shares, and one where it has nearly none.
    total[0, 0, 0], total[-1, -1, -1] = 80.0, -80.0
    return (q, keys, values, causal, total), grad, dq


def compare_joins(sizes, dtype, device, tolerance):
    """The kernels against PyTorch's operations in float64."""
    kernel = pytest.importorskip("spec_compile.train.attention_kernels")
    inputs, grad, dq = parts(*sizes, dtype, device)
    exact = [part.double() for part in inputs]
    out, joint = kernel.join(*inputs, 0.3)
    wanted_out, wanted_joint = join(*exact, 0.3)
    assert out.dtype == dtype and joint.dtype == torch.float32 and out.shape == grad.shape
    mine = [out, joint, *kernel.join_backward(grad, *inputs[:3], out, joint, dq, 0.3)]
    theirs = join_backward(grad.double(), *exact[:3], out.double(), joint.double(), dq.double(), 0.3)
    for got, wanted in zip(mine, [wanted_out, wanted_joint, *theirs]):
        assert got.shape == wanted.shape and torch.allclose(got.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 64, 1), (2, 3, 5, 80, 7), (1, 2, 37, 128, 3), (3, 1, 11, 24, 2)], ids=str)
def test_drafted_keys_in_one_kernel(sizes):
    compare_joins(sizes, torch.float32, "cpu", 1e-4)


def test_joined_attention_differentiates():
    """`join_backward` against autograd through `join` in float64, for keys and values and the query's own part."""
    (q, keys, values, causal, total), grad, dq = parts(2, 2, 4, 8, 3, torch.float64, "cpu")
    q, keys, values = (part.detach().clone().requires_grad_() for part in (q, keys, values))
    out, joint = join(q, keys, values, causal, total.double(), 0.3)
    wanted = torch.autograd.grad((out * grad).sum(), [q, keys, values])
    got = join_backward(grad, q, keys, values, out, joint, dq, 0.3)
    for mine, theirs in zip((got[0] - dq, *got[1:]), wanted):
        assert torch.allclose(mine, theirs)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 64, 1), (2, 3, 511, 80, 7), (4, 9, 447, 64, 6), (2, 4, 300, 128, 3)], ids=str
)
def test_drafted_keys_on_a_gpu(sizes):
    compare_joins(sizes, torch.bfloat16, "cuda", 2e-2)


SIZES = (9, 9, 14, 9, 14, 14, 6, 9, 6, 6, 14)
"""Lengths of the batches of a training: three shapes that alternate, each of which is captured when it comes again."""


def train(algo, device, dtype, captures):
    """A few steps with AdamW: the losses, the gradients of each step by name, and the trainer."""
    torch.manual_seed(0)
    model = models.ADMITTED["llama"]().to(device, dtype)
    trainer = TRAINERS[algo](Target.of(model), TrainingOptions(ttt_steps=4), torch.arange(models.VOCAB))
    trainer._rows._graphs.captures = captures
    features = TargetFeatures(model, trainer.taps, trainer.kept)
    parameters = trained_parameters(trainer.module)
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, fused=device == "cuda")
    losses, gradients, mixed = [], [], device == "cuda" or dtype == torch.bfloat16
    for seed, size in enumerate(SIZES):
        generator = torch.Generator(device).manual_seed(seed)
        ids = torch.randint(3, models.VOCAB, (3, size), generator=torch.Generator().manual_seed(seed)).int()
        batch = texts.collate([texts.Document(row, torch.ones(size, dtype=torch.bool)) for row in ids])
        with torch.autocast(device, torch.bfloat16, enabled=mixed):
            loss = trainer.loss(batch, features(ids.long().to(device), trainer.learns_from_choices), generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        del loss  # as in the training's loop: a capture must not meet its nodes
        gradients.append({name: value.grad.detach().clone() for name, value in parameters.items()})
    return losses, gradients, trainer


def compare_trainings(one, other, tolerance):
    for (mine, my_gradients), (theirs, their_gradients) in zip(zip(*one[:2]), zip(*other[:2])):
        assert abs(mine - theirs) <= tolerance * abs(theirs)
        for name, wanted in their_gradients.items():
            assert (my_gradients[name] - wanted).norm() <= tolerance * wanted.norm() + 1e-7, name


CAPTURED = ("eagle3", "mtp", "dflash", "p_eagle")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algo", CAPTURED)
def test_a_captured_rollout_is_the_rollout(monkeypatch, algo, dtype):
    """Everything but CUDA's own part: a function stands for a graph, and runs anew on what the graphs share."""
    replays = []

    def record(function, pool, stream):
        function()
        replays.append(0)
        number = len(replays) - 1

        def replay():
            replays[number] += 1
            with torch.enable_grad():
                function()

        return replay, None

    monkeypatch.setattr(module, "record", record)
    captured, state = train(algo, "cpu", dtype, captures=True), torch.get_rng_state()
    assert replays == [3, 3, 3, 3, 2, 2] and captured[2]._rows._graphs.captures
    compare_trainings(captured, train(algo, "cpu", dtype, captures=False), 0)
    assert torch.equal(state, torch.get_rng_state())


def test_a_rollout_that_cannot_be_captured(monkeypatch):
    """It warns once, and goes on as if nothing had been tried; so it does if the backward alone fails."""
    plain = train("eagle3", "cpu", torch.float32, captures=False)
    for works in ([], [(lambda: None, None)]):
        monkeypatch.setattr(module, "record", mock.Mock(side_effect=[*works, RuntimeError("it waits")]))
        with pytest.warns(UserWarning, match="Eagle3Head cannot be captured.*slower: it waits") as caught:
            failed = train("eagle3", "cpu", torch.float32, captures=True)
        assert len(caught) == 1 and not failed[2]._rows._graphs.captures
        compare_trainings(failed, plain, 0)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("algo", CAPTURED)
def test_a_captured_rollout_on_a_gpu(recwarn, algo, dtype):
    """Losses and gradients of every step, with and without capture: shapes alternate, and weights change."""
    captured, plain = (train(algo, "cuda", dtype, captures) for captures in (True, False))
    graphs = captured[2]._rows._graphs.captured
    assert len(graphs) == 3 and None not in graphs.values()
    assert not [warning for warning in recwarn if "captured" in str(warning.message)]
    compare_trainings(captured, plain, 5e-2)
    assert captured[0][0] == pytest.approx(plain[0][0], rel=1e-5)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("noticed", [True, False])
def test_a_rollout_that_waits_on_a_gpu(monkeypatch, noticed):
    """It is not captured, whether that shows before the capture or in it, and then launched as before."""
    plain, normed = train("eagle3", "cuda", torch.bfloat16, captures=False), HeadTrainer._normed

    def waits(self, ids, *states):
        ids.sum().item()
        return normed(self, ids, *states)

    monkeypatch.setattr(HeadTrainer, "_normed", waits)
    if not noticed:
        monkeypatch.setattr(module, "waiting_refused", contextlib.nullcontext)
    stream = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="Eagle3Head cannot be captured"):
        failed = train("eagle3", "cuda", torch.bfloat16, captures=True)
    assert torch.cuda.current_stream() == stream and torch.cuda.get_sync_debug_mode() == 0
    compare_trainings(failed, plain, 5e-2)
