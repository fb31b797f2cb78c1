"""What a person sees who waits for a training: words from the start, a curve, and a way to stop."""

import csv
import io
import signal
import threading
from unittest import mock

import models
import pytest
import torch

from spec_compile import train_draft
from spec_compile.__main__ import main
from spec_compile.train import loop
from spec_compile.train import loop as progress
from spec_compile.train.loop import Interrupts, Printer
from spec_compile.train.save import CURVE, STATE

CODER = "examples/tiny_coder"


def sequences(count=8, length=24):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 90, (length,), generator=generator).tolist() for _ in range(count)]


def train(folder, **options):
    defaults = dict(data=sequences(), validation=sequences(4), steps=4, batch_size=2, progress=lambda progress: None)
    return train_draft(models.ADMITTED["llama"](), "eagle3", output=folder, **{**defaults, **options})


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


@pytest.fixture
def command(tmp_path, two_layers):
    (tmp_path / "text.txt").write_text("def add(a, b):\n    return a + b\n" * 40)
    words = ["train", "--model", CODER, "--data", str(tmp_path / "text.txt"), "--output", str(tmp_path / "head")]
    return [*words, "--validation", "0", "--options", '{"batch_size": 1, "sequence_length": 64}']


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


def test_a_training_that_was_stopped_is_the_same_in_the_end(tmp_path, often):
    whole = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt, match=r"stopped after step 3, which .*parts keeps"):
        train(tmp_path / "parts", progress=press_after(3))
    parts = train(tmp_path / "parts")
    assert parts.losses == whole.losses and parts.evaluations == whole.evaluations
    assert (tmp_path / "parts" / CURVE).read_text() == (tmp_path / "whole" / CURVE).read_text()


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


def test_the_first_step_is_reported(tmp_path):
    seen = []
    train(tmp_path / "head", steps=6, progress=seen.append)
    assert seen[0].step == 1 and seen[-1].step == 6


def test_words_from_the_start(command, capsys):
    assert main([*command, "--steps", "2"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0] == f"loading {CODER}"
    assert any(line.startswith("reading the text") for line in told) and any("training on" in line for line in told)


def test_a_bar_is_there_before_the_first_report(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(progress.sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Printer():
        assert "the first step" in terminal.getvalue()
