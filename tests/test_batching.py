"""Many requests at once: each gets what its own ``generate()`` gives, whoever is beside it."""

import functools
import random
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from spec_compile import speculate

MODEL = Path(__file__).parent.parent / "examples" / "tiny_coder"
TEXT = (Path(__file__).parent / "conftest.py").read_text()


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@functools.cache
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@functools.cache
def fast():
    return speculate(model(), algo="ngram", compile=False)


def config(**options):
    return ContinuousBatchingConfig(**options)


def generated(fast, prompt, seed=None, **options):
    """The tokens of a request's own ``generate()``."""
    if seed is not None:
        torch.manual_seed(seed)
    ids = torch.tensor([prompt])
    return fast.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def collect(manager, count):
    """The last outputs of `count` requests, by id."""
    outputs = {}
    for output in manager:
        if output.is_finished():
            outputs[output.request_id] = output
        if len(outputs) == count:
            break
    return outputs


class NoLetterE(LogitsProcessor):
    """A processor of one's own, which remembers how often it was called."""

    def __init__(self):
        self.calls = 0
        self.banned = [i for i in range(4096) if "e" in tokenizer().decode([i])]

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, self.banned] = -torch.inf
        return scores


class AtLength(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length, dtype=torch.bool)


def mixed_request(rng):
    """A prompt, and options of any kind that a request may have."""
    tokens = tokenizer()(TEXT).input_ids
    begin = rng.choice([0, 0, rng.randrange(len(tokens) // 2)])  # some prompts begin alike
    prompt = tokens[begin : begin + rng.choice([1, 2, 5, 17, 40, 90, 180])]
    options = {"max_new_tokens": rng.randint(1, 40)}
    options |= rng.choice(
        [
            {},
            {},
            {"min_new_tokens": 8, "eos_token_id": rng.sample(range(200, 400), 20)},
            {"eos_token_id": rng.sample(range(4096), 200)},
            {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
            {"do_sample": True, "temperature": 1.3, "min_p": 0.05, "top_k": 0},
            {"do_sample": True, "repetition_penalty": 1.2},
            {"repetition_penalty": 1.3},
            {"no_repeat_ngram_size": 3},
            {"stop_strings": ["\n\n", "import", "return"], "tokenizer": tokenizer()},
            {"do_sample": True, "stop_strings": ["def"], "tokenizer": tokenizer()},
            {"stopping_criteria": [AtLength(len(prompt) + rng.randint(1, 30))]},
        ]
    )
    if options.get("do_sample"):
        options["seed"] = rng.randrange(1 << 30)
    return prompt, options


def answers_are_those_of_generate(fast, count, seed, slots):
    """`count` mixed requests, some of which are cancelled; returns the outputs."""
    rng = random.Random(seed)
    requests = [mixed_request(rng) for _ in range(count)]
    cancelled = {f"r{number}" for number in rng.sample(range(count), count // 20)}
    manager = fast.init_continuous_batching(GenerationConfig(pad_token_id=0), config(max_requests_per_batch=slots))
    manager.start()
    try:
        for number, (prompt, options) in enumerate(requests):
            manager.add_request(prompt, f"r{number}", **options)
            if rng.random() < 0.3:
                time.sleep(rng.random() * 0.05)
        for name in cancelled:
            manager.cancel_request(name)
        outputs = collect(manager, count)
    finally:
        manager.destroy()
    fast.speculation.stats.reset()
    for number, (prompt, options) in enumerate(requests):
        output = outputs[f"r{number}"]
        assert output.error is None, output.error
        expected = generated(fast, prompt, pad_token_id=0, **options)
        if output.finish_reason == "cancelled":
            assert output.request_id in cancelled
            expected = expected[: len(output.generated_tokens)]
        assert output.generated_tokens == expected, (number, options)
    return outputs


HEADS = MODEL / "heads"
ALGORITHMS = {
    "eagle3": dict(draft=HEADS / "eagle3", num_steps=5),
    "eagle3 tree": dict(draft=HEADS / "eagle3", num_steps=5, topk=4, num_draft_tokens=16),
    "eagle3 drawn": dict(draft=HEADS / "eagle3", num_steps=4, draft_sample_method="probabilistic"),
    "mtp": dict(draft=HEADS / "mtp", num_steps=3),
    "dflash": dict(draft=HEADS / "dflash"),
    "dflash tree": dict(draft=HEADS / "dflash", topk=4, num_draft_tokens=16),
    "draft_model": dict(draft="itself", num_steps=4),
    "draft_model tree": dict(draft="itself", num_steps=3, topk=3),
}


OFTEN = {"eagle3 tree", "eagle3 drawn", "mtp", "dflash tree", "draft_model"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in OFTEN else pytest.mark.slow) for n in ALGORITHMS])
def test_every_algorithm(name):
    options = dict(ALGORITHMS[name])
    if options["draft"] == "itself":
        options["draft"] = model()
    one = speculate(model(), algo=name.split()[0], compile=False, check=False, **options)
    outputs = answers_are_those_of_generate(one, 8, seed=len(name), slots=3)
    steps = [output.speculation for output in outputs.values()]
    length = 1 + sum(each.accepted for each in steps) / sum(each.steps for each in steps)
    assert length > 0.9 * one.speculation.stats.accept_length


def test_mixed_requests():
    outputs = answers_are_those_of_generate(fast(), 60, seed=0, slots=8)
    assert {output.finish_reason for output in outputs.values()} >= {"stop", "length"}
    assert any(output.speculation.reused_prompt_tokens for output in outputs.values())


@pytest.mark.slow
def test_a_thousand_mixed_requests():
    answers_are_those_of_generate(fast(), 1000, seed=1, slots=16)
