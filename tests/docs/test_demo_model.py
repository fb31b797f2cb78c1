"""The demo model on real prompts, its draft heads, and how their prompts are made."""

import random
import sys
import textwrap
from pathlib import Path

import models
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_compile import speculate

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "tiny_coder")]

import heads  # noqa: E402
from common import DEMO_MODEL, PROMPTS, read_prompts  # noqa: E402

WORKLOADS = ("code_editing", "bug_fixing", "code_completion", "maths", "chat")
SHIPPED = DEMO_MODEL / "heads"
DRAFTS = [
    ("eagle3", dict(num_steps=5), 2.8),
    ("eagle3", dict(num_steps=5, topk=4, num_draft_tokens=16), 3.3),
    ("mtp", dict(num_steps=3), 2.3),
    ("dflash", {}, 1.8),
    ("dflash", dict(topk=4, num_draft_tokens=16), 2.2),
]
"""Algorithm, options, and an accept length well below what was measured."""


@pytest.fixture(scope="module")
def demo():
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return tokenizer, model, speculate(model, algo="ngram")


def inputs_of(tokenizer, workload, count):
    return [tokenizer(text, return_tensors="pt") for text in read_prompts(PROMPTS / f"{workload}.jsonl", count)]


def greedy(model, inputs, **options):
    return model.generate(**inputs, **dict(do_sample=False, max_new_tokens=64, pad_token_id=0) | options)


@pytest.fixture(scope="module")
def answers(demo):
    """Prompts of unseen benchmarks, and plain decoding's answers to them."""
    tokenizer, model, _ = demo
    prompts = [inputs for name in ("code_completion", "code_editing") for inputs in inputs_of(tokenizer, name, 2)]
    return [(inputs, greedy(model, inputs, max_new_tokens=40)) for inputs in prompts]


def test_fits_its_promises(demo):
    tokenizer, model, _ = demo
    size = sum(path.stat().st_size for path in DEMO_MODEL.iterdir() if path.suffix in (".safetensors", ".json"))
    assert size <= 16e6 and model.config.max_position_embeddings >= 2048
    code = 'def f(x):\n\treturn {"ä": x ** 2}  # π\r\n\n\n    12345'
    assert tokenizer.decode(tokenizer(code).input_ids) == code


@pytest.mark.slow
def test_it_copies_from_its_prompt(demo):
    tokenizer, _, fast = demo
    code = "def area(width, height):\n    if width < 0:\n        raise ValueError(width)\n    return width * height\n"
    prompt = f"Rename the function `area` to `surface`.\n\n```python\n{code}```\n\n```python\n"
    inputs = tokenizer(prompt, return_tensors="pt")
    answer = greedy(fast, inputs)[0, inputs.input_ids.shape[1] :]
    assert code.replace("area", "surface") in tokenizer.decode(answer)


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_real_prompts(demo, workload):
    tokenizer, model, fast = demo
    for inputs in inputs_of(tokenizer, workload, 2):
        assert torch.equal(greedy(fast, inputs), greedy(model, inputs))
    assert fast.speculation.stats.accept_length > 1
    assert fast.speculation.stats.seconds["compile"] > 0


@pytest.mark.slow
def test_a_padded_batch_of_real_prompts(demo):
    tokenizer, model, _ = demo
    fast = speculate(model, compile=False)
    texts = [read_prompts(PROMPTS / f"{name}.jsonl", 1)[0] for name in WORKLOADS]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    assert torch.equal(greedy(fast, inputs), greedy(model, inputs))


@pytest.mark.slow
def test_processors_while_rounds_are_still_being_compiled(demo):
    tokenizer, model, _ = demo
    fast = speculate(model)  # as in the other tests, so that Inductor knows its rounds already
    (inputs,) = inputs_of(tokenizer, "code_editing", 1)
    penalty = dict(max_new_tokens=32, repetition_penalty=1.1)
    assert torch.equal(greedy(fast, inputs, **penalty), greedy(model, inputs, **penalty))
    assert max(fast.speculation.stats.nodes) > 1


@pytest.mark.sweep("eagle3-options1-3.3")
@pytest.mark.parametrize("algo, options, least", DRAFTS)
def test_heads_draft_what_the_demo_model_says(demo, answers, algo, options, least):
    fast = models.speculate_captured(demo[1], algo, draft=SHIPPED / algo, adaptive=False, compile=False, **options)
    for inputs, answer in answers:
        assert torch.equal(greedy(fast, inputs, max_new_tokens=40), answer)
    assert fast.speculation.stats.accept_length > least


def test_they_are_small_and_say_what_they_are():
    assert {folder.name for folder in SHIPPED.iterdir()} == set(heads.HEADS)
    files = [path for path in SHIPPED.rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"README.md", "config.json", "model.safetensors"}
    assert sum(path.stat().st_size for path in files) <= 8 << 20
    for folder in SHIPPED.iterdir():
        card = (folder / "README.md").read_text()
        assert "accepted down to depth" in card and "## Data" in card


CODE = textwrap.dedent('''
    import math


    class Circle:
        """A circle."""

        def __init__(self, radius):
            self.radius = radius
            self.points = []

        @property
        def area(self):
            """Its area, which is
            never negative."""
            return math.pi * self.radius**2


    def scale(circle, factor):
        circle.radius *= factor
        return circle
''')


def test_code_prompts_end_where_a_body_begins():
    ends = {"def __init__(self, radius):", 'never negative."""', "def scale(circle, factor):"}
    alone = 0
    for seed in range(20):
        prompts = heads.code_prompts(CODE, random.Random(seed), 3)
        assert {prompt.rstrip("\n").split("\n")[-1].strip() for prompt in prompts} == ends
        for prompt in prompts:
            assert prompt.endswith("\n") and (prompt in CODE or textwrap.indent(prompt, "    ") in CODE)
            alone += prompt.startswith(("def", "@property"))
    assert 20 < alone < 60  # the others have code before them


def test_edit_prompts_leave_the_answer_to_the_model():
    prompts = [prompt for seed in range(20) for prompt in heads.edit_prompts(CODE, random.Random(seed), 2)]
    assert len(prompts) > 10
    assert all(prompt.endswith("\n") and len(prompt) < 2 * len(CODE) + 400 for prompt in prompts)
