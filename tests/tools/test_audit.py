"""audit(): says lossless of what is, and not of what is not."""

import functools
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from models import ADMITTED, prompts
from transformers import AutoModelForCausalLM, AutoTokenizer

import spec_compile
from spec_compile.__main__ import main
from spec_compile.graph import calls
from spec_compile.kernels.attention import attention_calls
from spec_compile.runtime.verify import host
from spec_compile.runtime.verify.host import HostAcceptor
from spec_compile.runtime.verify.sample import probabilities, uniform
from spec_compile.tools.audit import Bits, Distance, Greedy, Logits, Report, Sampled, _nearly_kept
from spec_compile.tools.audit_answers import Manner
from spec_compile.tools.audit_logits import Reference, first_difference, plain_steps

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from common import DEMO_MODEL, HERE, prompts_of

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
    assert report.logits.positions == 48 and report.logits.verdict == "same"
    assert str(report).count("lossless") == 1 and "\nlossless: 2 of 2 answers identical" in str(report)


def test_a_wrong_token_is_found_with_the_targets_logits(monkeypatch):
    choose = HostAcceptor._choose
    monkeypatch.setattr(HostAcceptor, "_choose", lambda *a: (choose(*a) + 1) % 96)
    report = spec_compile.audit(fast(), PROMPTS[:1], max_new_tokens=8, repetition_penalty=1.01)
    (row,) = report.greedy
    assert not report.lossless and row.verdict == "DIFFERENT" and row.position == 0
    logits = fast()(PROMPTS[0].view(1, -1)).logits[0, -1].detach()
    assert row.logits == pytest.approx((float(logits[row.plain]), float(logits[row.speculative])), abs=1e-4)
    assert "NOT LOSSLESS" in str(report)


def test_wrong_frequencies_are_found(monkeypatch):
    choose = HostAcceptor._choose
    monkeypatch.setattr(HostAcceptor, "_choose", lambda self, *a: choose(self, *a[:-2], a[-2] * 0.5, a[-1]))
    report = spec_compile.audit(fast(), PROMPTS[:1], max_new_tokens=8, samples=400, temperature=0.8)
    assert report.greedy[0].verdict == "same" and report.sampled[0].p_value < 1e-6 and not report.lossless


@pytest.mark.parametrize("gap, verdict", [(0.01, "near-tie"), (0.059, "near-tie"), (0.061, "DIFFERENT")])
def test_a_near_tie_is_within_three_standard_deviations(gap, verdict):
    assert Greedy(5, 3, 7, 8, (1.0, 1.0 - gap), noise=0.02).verdict == verdict


def test_an_answer_that_ends_early_is_no_near_tie():
    assert Greedy(5, 5, 7, None, noise=1e9).verdict == "DIFFERENT"


def test_in_float32_near_ties_are_1e_5_apart():
    model = ADMITTED["llama"]()
    scatter = Reference(model).scatter(PROMPTS[0].view(1, -1), 5)
    assert scatter.exact.shape == (5, model.config.vocab_size) and scatter.gaps.shape == (4, 5)
    largest = float(scatter.exact.abs().max())
    assert 5e-6 * largest < 3 * scatter.floor < 2e-5 * largest
    assert float(scatter.gaps.abs().max()) < 3 * scatter.floor


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3_moe"])
def test_the_float32_copy_of_a_bfloat16_model(name):
    model = ADMITTED[name]().bfloat16()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    reference = Reference(model)
    ids = PROMPTS[0].view(1, -1)
    assert reference.exact.dtype == torch.float32 and model.dtype == torch.bfloat16
    wide = ADMITTED[name]().bfloat16().float()
    torch.testing.assert_close(reference.scatter(ids, 3).exact, wide(ids).logits[0, -3:].detach())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


PLACES = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 0.1


def test_logits_beyond_the_noise_are_found():
    assert Logits.of(PLACES).verdict == Logits.of(PLACES + 0.02).verdict == "same"
    assert Logits.of(PLACES + 0.11).verdict == "DIFFERENT"
    assert Logits.of(torch.tensor([0.2])).verdict == "same"  # one place says nothing


def drawn(*chi_squares):
    """Frequencies of several prompts, each with one degree of freedom."""
    return [Sampled(400, 1, chi_square, 1) for chi_square in chi_squares]


@pytest.mark.parametrize(
    ("parts", "verdict", "told"),
    [
        (dict(greedy=[]), "NOT TESTED", "NOT TESTED"),
        (dict(greedy=[Greedy(8), Greedy(0)]), "NOT TESTED", "NOT TESTED"),
        (dict(sampled=[Sampled(400, 0, 0.0, 0, untested=400)]), "NOT TESTED", "NOT TESTED"),
        (dict(greedy=[Greedy(0), Greedy(2, 1, 5, None)]), "NOT LOSSLESS", "DIFFERENT"),
        (dict(logits=Logits.of(PLACES + 0.11)), "NOT LOSSLESS", "DIFFERENT"),
        (dict(graph=Logits.of(PLACES + 0.11)), "NOT LOSSLESS", "DIFFERENT"),
        # other bits and other answers count where equal ones were promised
        (dict(bits=Bits(3, 2, 0.25, "layer 7", True)), "NOT LOSSLESS",
         "2 of 3 answers with the same bits, logits up to 0.25 apart, first in layer 7"),
        (dict(bits=Bits(3, 2, 0.25, "layer 7")), "lossless", "2 of 3 answers with the same bits"),
        (dict(bits=Bits(3, 3, promised=True)), "lossless", "3 of 3"),
        (dict(requests=[Manner("together, 4 rows", True, True, of=3, equal=2)]), "NOT LOSSLESS",
         "drawn, together, 4 rows: 2 of 3 equal, promised, DIFFERENT"),
        (dict(requests=[Manner("together, 4 rows", True, False, of=3, equal=2)]), "lossless", "other answers"),
        # for all prompts together, unlikely frequencies are one in a thousand: these have 2e-3, 5e-4 and 1e-4
        (dict(sampled=drawn(9.6)), "lossless", ""),
        (dict(sampled=drawn(12.2)), "NOT LOSSLESS", ""),
        (dict(sampled=drawn(12.2, 1.0, 1.0)), "lossless", ""),
        (dict(sampled=drawn(15.2, 1.0, 1.0)), "NOT LOSSLESS", ""),
    ],
)  # fmt: skip
def test_verdicts(parts, verdict, told):
    report = Report(**dict(greedy=[Greedy(8)]) | parts)
    assert report.verdict == verdict and report.lossless == (verdict == "lossless") and told in str(report)
    assert verdict != "NOT TESTED" or "lossless" not in str(report)


def test_plain_steps_verify_roots_alone():
    engine = fast().speculation.engine
    ids, options = PROMPTS[0].view(1, -1), dict(max_new_tokens=12, do_sample=False)
    stats = engine.runtime.stats
    before = stats.steps
    with plain_steps(engine):
        answer = fast().generate(ids, **options)
        assert set(engine.runtime.stats.nodes) == {1} and engine.runtime.stats.accept_length == 1.0
    assert engine.runtime.stats is stats and stats.steps == before
    assert torch.equal(answer, fast().generate(ids, **options)) and stats.steps > before


@pytest.mark.parametrize("options", [dict(num_steps=3), dict(num_steps=2, topk=3, num_draft_tokens=6)])
def test_plain_steps_of_an_algorithm_with_one_size(options):
    model = ADMITTED["llama"]()
    options = dict(draft=ADMITTED["llama"](), adaptive=False, compile=False, **options)
    heads = spec_compile.speculate(model, "draft_model", **options)
    report = spec_compile.audit(heads, PROMPTS, max_new_tokens=12)
    assert report.lossless and report.bits.answers == 2 and report.accept_length > 1.5


def test_bits_and_distances_are_reported():
    report = spec_compile.audit(fast(), PROMPTS, max_new_tokens=24)
    bits = report.bits
    assert (bits.answers, bits.promised) == (2, False) and bits.largest < 1e-4 and report.lossless
    assert report.lookup == 2
    assert 0 < report.distance.ours[0] < report.distance.ours[1] < 1e-4 and report.distance.theirs[1] < 1e-4
    text = str(report)
    assert f"beside our own plain steps: {bits.same} of 2 answers with the same bits" in text
    assert "distance from float32, mean and largest: ours " in text
    assert "transformers' prompt lookup: 2 of 2 as its greedy answers" in text
    assert spec_compile.audit(fast(), PROMPTS, max_new_tokens=4, logits=False).bits is None


@pytest.mark.parametrize("number", [0, 1])
def test_the_first_layer_that_differs_is_named(monkeypatch, number):
    """A layer that adds something to rows beside others is found; on a CPU rounding differs, too, but by little."""
    monkeypatch.setattr(torch, "equal", functools.partial(torch.allclose, rtol=0, atol=1e-6))
    engine = spec_compile.speculate(ADMITTED["llama"]().double(), compile=False).speculation.engine
    text = PROMPTS[0].view(1, -1)
    assert first_difference(engine, text) == ""
    activations = calls(engine.captured.gm, torch.ops.aten.silu.default)
    activations[number].target = beside_others
    assert first_difference(engine, text) == f"layer {number}"


def beside_others(x):
    """SiLU, but a little more for rows that have others beside them."""
    return torch.nn.functional.silu(x) + (0.5 if x.shape[1] > 1 else 0.0)


def test_distances_are_of_all_positions():
    ours, theirs = torch.tensor([[1.0, 4.0], [3.0, 2.0]]), torch.tensor([[0.5, 1.0], [0.5, 0.75]])
    assert Distance.of(ours, theirs) == Distance((2.0, 4.0), (0.5, 1.0))


@functools.cache
def coder() -> tuple:
    """The demo model in bfloat16 and some prompts."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.bfloat16).eval()
    some = [prompts_of(name, HERE / "prompts", 1, tokenizer, 150) for name in ("code_completion", "maths")]
    return model, [ids for (ids,) in some]


def scaled(model, factor: float):
    """A speculative copy whose attention has a scale `factor` times too large in every layer."""
    fast = spec_compile.speculate(model, compile=False, check=False)
    graph = fast.speculation.engine.runtime.verify
    attention = attention_calls(graph)
    for node in attention:
        node.update_kwarg("scale", node.kwargs["scale"] * factor)
    graph.gm.recompile()
    assert len(attention) == model.config.num_hidden_layers
    return fast


@pytest.mark.slow
def test_attention_scaled_by_a_hundredth_is_not_lossless():
    model, texts = coder()
    report = spec_compile.audit(scaled(model, 1.01), texts, max_new_tokens=48, pad_token_id=0)
    assert report.verdict == "NOT LOSSLESS", str(report)
    assert report.logits.verdict == report.graph.verdict == "DIFFERENT"


@pytest.mark.slow
def test_bfloat16_is_lossless():
    model, texts = coder()
    fast = spec_compile.speculate(model, compile=False)
    report = spec_compile.audit(fast, texts, max_new_tokens=48, pad_token_id=0)
    assert report.lossless and report.logits.positions > 60, str(report)
    assert abs(report.logits.excess) < 0.05 and abs(report.graph.excess) < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_bfloat16_is_lossless_on_a_gpu():
    _, texts = coder()
    fast = spec_compile.speculate(AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.bfloat16).cuda().eval())
    report = spec_compile.audit(fast, texts, max_new_tokens=96, pad_token_id=0, samples=400, temperature=0.8)
    assert report.lossless, str(report)


@pytest.mark.parametrize("samples", [1, 50, 99, -5])
def test_too_few_samples(samples):
    with pytest.raises(ValueError, match=r"samples: expected 0 or at least 100, got .* is not tested"):
        spec_compile.audit(fast(), PROMPTS, samples=samples)
    with pytest.raises(ValueError, match="sample_tokens: expected at least 1"):
        spec_compile.audit(fast(), PROMPTS, samples=100, sample_tokens=0)
    with pytest.raises(TypeError, match="samples: expected an integer"):
        spec_compile.audit(fast(), PROMPTS, samples=100.5)


def test_contexts_that_were_drawn_too_rarely_are_counted():
    report = spec_compile.audit(fast(), PROMPTS[:1], max_new_tokens=4, samples=100, sample_tokens=2)
    (row,) = report.sampled
    assert row.contexts == 1 and row.untested > 3 and report.lossless
    assert f"{row.untested:9}" in str(report).splitlines()[-2] and "too rare" in str(report)


@pytest.mark.filterwarnings("ignore:num_beams")
def test_transformers_own_loop_is_no_evidence():
    report = spec_compile.audit(fast(), PROMPTS[:1], max_new_tokens=4, num_beams=2)
    assert report.verdict == "NOT TESTED" and report.greedy[0].compared == 0


def test_a_token_that_the_target_never_gives():
    assert Sampled(100, 1, float("inf"), 0).p_value == 0.0  # of a target with one choice
    assert Sampled(100, 1, 0.0, 0).p_value == 1.0


def test_rounding_may_decide_which_token_is_cut_off():
    """With top_k=3 and the third and the fourth token alike, either is the last; no other token may be drawn."""
    model, prompt = ADMITTED["llama"](), PROMPTS[0].view(1, -1)
    order = model(prompt).logits[0, -1].argsort(descending=True).tolist()
    with torch.no_grad():
        model.lm_head.weight[order[3]] = model.lm_head.weight[order[2]]
    scores, reference = torch.full([96], -math.inf), Reference(model)
    scores[order[:3]] = model(prompt).logits[0, -1, order[:3]].detach()
    assert _nearly_kept(reference, prompt, scores, order[3])
    assert not _nearly_kept(reference, prompt, scores, order[4]) and not _nearly_kept(
        reference, prompt, scores, order[95]
    )
    scores[order[0]] = -math.inf  # a bad word, which is likelier than those that are kept
    assert not _nearly_kept(reference, prompt, scores, order[0])


BROKEN_SAMPLERS = {
    "temperature ignored": (host, "probabilities", lambda scores, raw: probabilities(scores * 0.6, raw)),
    "the same number every time": (host, "uniform", lambda seed, rows, gained: torch.full(rows.shape, 0.3).double()),
    "numbers that ignore the row": (host, "uniform", lambda seed, rows, gained: uniform(0, rows * 0, gained)),
}


@pytest.mark.parametrize("broken", BROKEN_SAMPLERS)
def test_broken_samplers_are_found(monkeypatch, broken):
    monkeypatch.setattr(*BROKEN_SAMPLERS[broken])
    report = spec_compile.audit(fast(), PROMPTS[:1], max_new_tokens=4, samples=600, temperature=0.6)
    assert report.verdict == "NOT LOSSLESS", str(report)


def test_requests_in_many_ways():
    report = spec_compile.audit(fast(), PROMPTS, max_new_tokens=8, logits=False, requests=True, pad_token_id=0)
    assert report.lossless and len(report.requests) == 7
    text = str(report)
    assert "requests, next to each by itself:\n  by themselves, in another order: 2 of 2 equal, not promised" in text
    assert "after a common prefix, 4 rows: 2 of 2 equal, not promised, same" in text
    assert spec_compile.audit(fast(), PROMPTS[:1], max_new_tokens=4, logits=False).requests == []


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


def test_command_line(tmp_path, capsys, monkeypatch):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "def add(a, b):\n"}) + "\n")
    command = ["audit", "--model", str(DEMO_MODEL), "--prompts", str(path), "--max-new-tokens", "8", *MORE]
    assert main(command) == 0
    assert "lossless: 1 of 1" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["audit", "--model", str(DEMO_MODEL)])
    for report, status in ((Report(), 3), (Report(greedy=[Greedy(8, 2, 5, None)]), 1)):
        monkeypatch.setattr("spec_compile.tools.cli.speculate", lambda model, algo, **options: model)
        monkeypatch.setattr("spec_compile.tools.cli.audit", lambda *a, report=report, **k: report)
        assert main(command) == status


def test_command_line_with_too_few_samples(capsys):
    assert main(["audit", "--model", "no such model", "--prompt", "a", "--samples", "50"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "samples: expected 0 or at least 100, got 50" in line
