"""The training loop: its words, its curve and a way to stop it; the updates of Muon."""

import csv
import io
import signal
import threading
from functools import partial
from unittest import mock

import pytest
import torch
import trainings
from torch import nn
from trainings import CODER

from spec_compile.__main__ import main
from spec_compile.train import loop
from spec_compile.train.loop import Interrupts, Muon, Printer, matrices_of, orthogonalised
from spec_compile.train.save import CURVE, STATE

train = partial(trainings.train, batch_size=2)


def press_after(step):
    """A report of progress in which the user presses Ctrl-C."""

    def report(self, progress=None):
        if (progress or self).step == step:
            signal.raise_signal(signal.SIGINT)

    return report


@pytest.fixture(autouse=True)
def ctrl_c():
    """Python's own handler of Ctrl-C, which a shell leaves out of what it runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def often(monkeypatch):
    """Progress is reported after each step."""
    monkeypatch.setattr(loop, "REPORT_SECONDS", 0.0)


def test_ctrl_c_ends_in_one_line(command, often, tmp_path, capsys):
    with mock.patch.object(Printer, "__call__", press_after(2)):
        assert main([*command, "--steps", "4"]) == 130
    told = capsys.readouterr().err.splitlines()
    kept = tmp_path / "head"
    assert told[-1] == (
        f"python -m spec_compile train: stopped after step 2, which {kept} keeps; the same command goes on from there"
    )
    assert torch.load(kept / STATE, weights_only=False)["step"] == 2 and (kept / "model.safetensors").is_file()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert main([*command, "--steps", "4"]) == 0
    assert f"{kept}: 4 steps" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["load_model", "train_draft"])
def test_ctrl_c_before_the_first_step(command, capsys, place):
    with mock.patch(f"spec_compile.train.cli.{place}", side_effect=KeyboardInterrupt):
        assert main([*command, "--steps", "4"]) == 130
    told = capsys.readouterr().err.splitlines()
    assert told[-1].endswith("head keeps no checkpoint; the same command begins anew") and "Traceback" not in told
    with mock.patch("spec_compile.train.cli.load_model", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            main(["--traceback", *command])


def test_ctrl_c_in_another_command(capsys):
    with mock.patch("spec_compile.tools.cli.load_model", side_effect=KeyboardInterrupt):
        assert main(["audit", "--model", CODER, "--prompt", "def"]) == 130
    assert capsys.readouterr().err == "python -m spec_compile audit: stopped\n"


def test_the_second_ctrl_c_ends_at_once():
    with pytest.raises(KeyboardInterrupt):
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            assert interrupts.asked
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_of_others_stay():
    """Of the program that trains, and of a thread, which may set none."""
    mine, before = (lambda number, frame: None), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, mine)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)
    seen = []

    def other():
        with Interrupts():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_a_curve_is_kept(tmp_path):
    result = train(tmp_path / "head", steps=5)
    rows = list(csv.DictReader(io.StringIO((tmp_path / "head" / CURVE).read_text())))
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5]
    assert [float(row["loss"]) for row in rows] == pytest.approx(result.losses, rel=1e-5)
    measured = [(int(row["step"]), float(row["acceptance"])) for row in rows if row["acceptance"]]
    assert measured == result.evaluations and len(measured) >= 4
    assert f"`{CURVE}`" in (tmp_path / "head" / "README.md").read_text()


def test_too_few_minutes_are_said_to_be_too_few(tmp_path, monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: float(next(now)))  # each look at the clock takes a second
    with pytest.warns(UserWarning, match=r"minutes: 0\.5 are too few: enough for about \d+ steps of 2 sequences"):
        result = train(tmp_path / "few", steps=None, minutes=0.5)
    assert result.steps < loop.ENOUGH


@pytest.mark.filterwarnings("error")
def test_enough_steps_are_not_too_few(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "ENOUGH", 3)
    train(tmp_path / "head", steps=None, minutes=0.02)
    train(tmp_path / "other", steps=2)


def test_a_bar_is_there_before_the_first_report(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(loop.sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Printer():
        assert "the first step" in terminal.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_updates_are_those_of_pytorch(dtype):
    """Matrices of one shape are updated together; one without a gradient stays as it is."""
    shapes = [(12, 5), (5, 12), (12, 5), (8, 8), (1, 6), (12, 5)]
    g = torch.Generator().manual_seed(0)
    mine = [torch.randn(shape, generator=g, dtype=dtype).requires_grad_() for shape in shapes]
    theirs = [matrix.detach().clone().requires_grad_() for matrix in mine]
    one = Muon(mine)
    other = torch.optim.Muon(theirs, weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(4):
        for group in (*one.param_groups, *other.param_groups):
            group["lr"] = 0.01 * (step + 1)
        for a, b in zip(mine[:-1], theirs[:-1]):
            a.grad = torch.randn(a.shape, generator=g, dtype=dtype)
            b.grad = a.grad.clone()
        one.step()
        other.step()
    assert torch.equal(mine[-1], theirs[-1])
    for a, b in zip(mine, theirs):
        assert torch.allclose(a, b, atol=4e-3), (a - b).abs().max()


def test_singular_values_are_about_one():
    matrices = torch.randn(3, 40, 24, generator=torch.Generator().manual_seed(1))
    for x in (matrices, matrices.mT, torch.zeros(1, 4, 4) + torch.eye(4) * 1e-3):
        values = torch.linalg.svdvals(orthogonalised(x).float())
        assert values.min() > 0.5 and values.max() < 1.4


def test_only_linear_layers_are_matrices():
    module = nn.ModuleDict(
        {"layer": nn.Linear(4, 6), "one": nn.Linear(4, 1), "table": nn.Embedding(9, 4), "frozen": nn.Linear(4, 4)}
    )
    module["frozen"].weight.requires_grad_(False)
    assert [id(matrix) for matrix in matrices_of(module)] == [id(module["layer"].weight)]
