"""The draft heads that come with the demo model, and how their prompts are made."""

import random
import sys
import textwrap
from pathlib import Path

import models
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "examples" / "tiny_coder")]

import heads  # noqa: E402
from common import DEMO_MODEL, read_prompts  # noqa: E402

SHIPPED = DEMO_MODEL / "heads"
NEW = 40
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
    """The model, prompts of unseen benchmarks, and plain decoding's answers to them."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    names = ("code_completion", "code_editing")
    texts = [text for name in names for text in read_prompts(ROOT / "benchmarks" / "prompts" / f"{name}.jsonl", 2)]
    prompts = [tokenizer(text, return_tensors="pt") for text in texts]
    return model, prompts, [model.generate(**prompt, **fixed(tokenizer.pad_token_id)) for prompt in prompts]


def fixed(pad: int = 0) -> dict:
    return dict(do_sample=False, max_new_tokens=NEW, pad_token_id=pad)


@pytest.mark.sweep("eagle3-options1-3.3")
@pytest.mark.parametrize("algo, options, least", DRAFTS)
def test_heads_draft_what_the_demo_model_says(demo, algo, options, least):
    model, prompts, answers = demo
    fast = models.speculate_captured(model, algo, draft=SHIPPED / algo, adaptive=False, compile=False, **options)
    for prompt, answer in zip(prompts, answers):
        assert torch.equal(fast.generate(**prompt, **fixed()), answer)
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
