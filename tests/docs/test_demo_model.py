"""The demo model on real prompts, through the compiled rounds: every token as transformers' greedy decoding."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_compile import speculate

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from common import DEMO_MODEL, read_prompts  # noqa: E402

WORKLOADS = ("code_editing", "bug_fixing", "code_completion", "maths", "chat")
NEW = 64


@pytest.fixture(scope="module")
def demo():
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    return tokenizer, model, speculate(model, algo="ngram")


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
    answer = fast.generate(**inputs, do_sample=False, max_new_tokens=64)[0, inputs.input_ids.shape[1] :]
    assert code.replace("area", "surface") in tokenizer.decode(answer)


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_real_prompts(demo, workload):
    tokenizer, model, fast = demo
    fixed = dict(do_sample=False, max_new_tokens=NEW, pad_token_id=tokenizer.pad_token_id)
    for text in read_prompts(ROOT / "benchmarks" / "prompts" / f"{workload}.jsonl", 2):
        inputs = tokenizer(text, return_tensors="pt")
        assert torch.equal(fast.generate(**inputs, **fixed), model.generate(**inputs, **fixed))
    assert fast.speculation.stats.accept_length > 1
    assert fast.speculation.stats.seconds["compile"] > 0


@pytest.mark.slow
def test_a_padded_batch_of_real_prompts(demo):
    tokenizer, model, _ = demo
    fast = speculate(model, compile=False)
    texts = [read_prompts(ROOT / "benchmarks" / "prompts" / f"{name}.jsonl", 1)[0] for name in WORKLOADS]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    fixed = dict(do_sample=False, max_new_tokens=64, pad_token_id=tokenizer.pad_token_id)
    assert torch.equal(fast.generate(**inputs, **fixed), model.generate(**inputs, **fixed))


@pytest.mark.slow
def test_processors_while_rounds_are_still_being_compiled(demo):
    tokenizer, model, _ = demo
    fast = speculate(model)  # as in the other tests, so that Inductor knows its rounds already
    inputs = tokenizer(read_prompts(ROOT / "benchmarks" / "prompts" / "code_editing.jsonl", 1)[0], return_tensors="pt")
    fixed = dict(do_sample=False, max_new_tokens=32, repetition_penalty=1.1, pad_token_id=tokenizer.pad_token_id)
    assert torch.equal(fast.generate(**inputs, **fixed), model.generate(**inputs, **fixed))
    assert max(fast.speculation.stats.nodes) > 1
