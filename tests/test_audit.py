"""audit(): says lossless of what is, and not of what is not."""

import functools
import json
from pathlib import Path

import pytest
import torch
from models import ADMITTED, prompts

import spec_compile
from spec_compile.__main__ import main
from spec_compile.audit import Greedy, Sampled
from spec_compile.runtime.walk import Walk

MORE = ["--dtype", "float32", "--options", json.dumps({"compile": False})]
PROMPTS = [row[0] for row in prompts()[0][:2]]


@functools.cache
def fast():
    return spec_compile.speculate(ADMITTED["llama"](), compile=False)


def test_lossless():
    report = spec_compile.audit(fast(), PROMPTS, max_new_tokens=24, samples=400, temperature=0.7, top_k=8)
    assert report.lossless and [row.verdict for row in report.greedy] == ["same", "same"]
    assert all(row.compared == 24 for row in report.greedy)
    assert all(row.contexts >= 1 and row.freedom >= 1 and row.p_value > 1e-3 for row in report.sampled)
    assert "lossless: 2 of 2 answers identical" in str(report)


def test_a_wrong_token_is_found_with_the_targets_logits(monkeypatch):
    choose = Walk._choose
    monkeypatch.setattr(Walk, "_choose", lambda *a: (choose(*a) + 1) % 96)
    report = spec_compile.audit(fast(), PROMPTS[:1], max_new_tokens=8, repetition_penalty=1.01)
    (row,) = report.greedy
    assert not report.lossless and row.verdict == "DIFFERENT" and row.place == 0
    logits = fast()(PROMPTS[0].view(1, -1)).logits[0, -1].detach()
    assert row.logits == pytest.approx((float(logits[row.plain]), float(logits[row.speculative])), abs=1e-4)
    assert "NOT LOSSLESS" in str(report)


def test_wrong_frequencies_are_found(monkeypatch):
    choose = Walk._choose
    monkeypatch.setattr(Walk, "_choose", lambda self, *a: choose(self, *a[:-1], a[-1] * 0.5))
    report = spec_compile.audit(fast(), PROMPTS[:1], max_new_tokens=8, samples=400, temperature=0.8)
    assert report.greedy[0].verdict == "same" and report.sampled[0].p_value < 1e-6 and not report.lossless


@pytest.mark.parametrize("gap, verdict", [(0.01, "near-tie"), (0.5, "DIFFERENT")])
def test_a_near_tie_is_no_fault(gap, verdict):
    assert Greedy(5, 3, 7, 8, (1.0, 1.0 - gap), noise=0.02).verdict == verdict


def test_p_values_are_those_of_the_chi_square_distribution():
    assert Sampled(100, 1, 3.841, 1).p_value == pytest.approx(0.05, abs=1e-4)
    assert Sampled(100, 1, 18.307, 10).p_value == pytest.approx(0.05, abs=1e-4)


@pytest.mark.parametrize(
    "error, given",
    [
        (TypeError, ["text without a tokenizer"]),
        (ValueError, []),
        (ValueError, [[]]),
        (ValueError, [torch.ones(2, 3, dtype=torch.int64)]),
        (ValueError, [[0.5]]),
    ],
)
def test_bad_prompts(error, given):
    with pytest.raises(error, match="prompts"):
        spec_compile.audit(fast(), given)


def test_command_line(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "def add(a, b):\n"}) + "\n")
    model = str(Path(__file__).parent.parent / "examples" / "tiny_coder")
    status = main(
        ["audit", "--model", model, "--prompts", str(path), "--max-new-tokens", "8", *MORE]
    )
    assert status == 0 and "lossless: 1 of 1" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["audit", "--model", model])
