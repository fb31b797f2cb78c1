"""xgrammar itself, where it is installed: JSON of a schema from the demo model, by n-grams and by a head."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_compile import speculate

xgrammar = pytest.importorskip("xgrammar")
from xgrammar.contrib.hf import LogitsProcessor  # noqa: E402

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = EXAMPLES / "tiny_coder"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "values": {"type": "array", "items": {"type": "integer"}, "maxItems": 5},
    },
    "required": ["name", "values"],
}
PROMPTS = ['default = {"name": "mean", "values": [1, 2, 3]}\nresult = ', "def mean(values):\n"]
DRAFTS = {"ngram": dict(algo="ngram"), "eagle3": dict(algo="eagle3", draft=DEMO / "heads" / "eagle3")}


@pytest.fixture(scope="module")
def demo():
    """The demo model, prompts of two rows, and grammars: JSON, and a line of code."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=model.config.vocab_size)
    )
    grammars = [
        compiler.compile_json_schema(SCHEMA),
        compiler.compile_regex(r"    return [a-z]+\([a-z]+\) / [0-9]{1,3}"),
    ]
    return model, tokenizer(PROMPTS, return_tensors="pt", padding=True), grammars


@pytest.fixture(scope="module", params=DRAFTS)
def fast(request, demo):
    return speculate(demo[0], compile=False, adaptive=False, **DRAFTS[request.param])


def generated(model, inputs, grammars, rows, **options):
    """New tokens of the first rows."""
    inputs, options = {name: value[:rows] for name, value in inputs.items()}, dict(max_new_tokens=48) | options
    output = model.generate(**inputs, logits_processor=[LogitsProcessor(grammars)], **options)
    return output[:, inputs["input_ids"].shape[1] :]


@pytest.mark.sweep(5)
@pytest.mark.parametrize("options", [{}, dict(eos_token_id=None), dict(repetition_penalty=1.1)])
@pytest.mark.parametrize("rows", [1, 2])
def test_greedy_tokens_are_those_of_transformers(rows, options, demo, fast):
    model, inputs, grammars = demo
    options = dict(do_sample=False) | options
    expected = generated(model, inputs, grammars[:rows], rows, **options)
    steps, tokens = fast.speculation.stats.steps, fast.speculation.stats.tokens
    assert torch.equal(generated(fast, inputs, grammars[:rows], rows, **options), expected)
    assert fast.speculation.stats.tokens - tokens > fast.speculation.stats.steps - steps  # drafts were accepted


def test_the_example(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["json_schema.py", "--eager"])
    runpy.run_path(str(EXAMPLES / "json_schema.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert '{"name": "mean", "values": [1, 2, 3]}' in printed and "accept length" in printed
