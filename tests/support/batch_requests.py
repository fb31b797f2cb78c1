"""Requests to a manager over the demo model, and the answers that `generate()` gives to them one at a time."""

import functools
import random
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StoppingCriteria
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from spec_compile.runtime.request import seed_of
from spec_compile.runtime.verify.sample import uniform

MODEL = Path(__file__).parents[2] / "examples" / "tiny_coder"
TEXT = (MODEL / "data.py").read_text().split("\n\n\n", 1)[1][:1200]
"""A text that prompts are cut from, of more than 300 tokens."""


@functools.cache
def demo():
    """The demo model, in float32."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


def config(**options):
    if "page_size" in options and not hasattr(ContinuousBatchingConfig, "page_size"):  # transformers 5.17
        options["block_size"] = options.pop("page_size")
    return ContinuousBatchingConfig(**options)


def generated(fast, prompt, seed=None, **options):
    """The tokens of a request's own ``generate()``."""
    if seed is not None:
        torch.manual_seed(seed)
    ids = torch.tensor([prompt], device=fast.device)
    return fast.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def collect(manager, count):
    """The last outputs of `count` requests, by id."""
    outputs, deadline = {}, time.monotonic() + 120
    while len(outputs) < count:
        output = manager.get_result(timeout=1)
        assert time.monotonic() < deadline and (output or manager.is_running())
        deadline = time.monotonic() + 120 if output else deadline
        if output and output.is_finished():
            outputs[output.request_id] = output
    return outputs


def answer(manager, *prompt, **options):
    """The last output of a request."""
    name = manager.add_request(*prompt, **options)
    return collect(manager, 1)[name]


@contextmanager
def running(fast, warmup=False, **options):
    """A manager, started; at the end it is destroyed, and no thread is left."""
    manager = fast.init_continuous_batching(GenerationConfig(pad_token_id=0), config(**options))
    if warmup:
        manager.warmup()
    manager.start()
    try:
        yield manager
    finally:
        manager.destroy()
        assert not manager.is_running()


@contextmanager
def managed(fast, slots=1):
    """A running manager with so few rows that a request may take that of the one before it."""
    try:
        with running(fast, max_requests_per_batch=slots) as manager:
            yield manager
    finally:
        fast.destroy_cached_continuous_batching_manager()


def stopped(fast, **options):
    """A manager whose rounds the test runs, and a function that does so and tells who ends, in order; it calls `watch`
    after each round."""
    fast.speculation.engine.idle_batch = None
    manager = fast.init_continuous_batching(GenerationConfig(pad_token_id=0), config(**options))

    def run(watch=lambda: None):
        with torch.no_grad():
            while manager.scheduler.is_busy:
                manager._deliver(manager.scheduler.step())
                watch()
        outputs = [output for output in manager.output_router.output_queue.queue if output.is_finished()]
        return {output.request_id: output for output in outputs}

    return manager, run


class AtLength(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        is_long = input_ids.shape[1] >= self.length
        return torch.full((len(input_ids),), is_long, dtype=torch.bool, device=input_ids.device)


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


def is_near_tie(fast, manager, prompt, options, tokens, expected):
    """Whether two answers part where rounding decides: two logits are equal but for that, one of them among the top k
    and one not, say, or a random number lies at the border of two tokens. Rounding depends on the number of rows that
    are computed together."""
    seed = options.get("seed")
    options = {name: value for name, value in options.items() if name not in ("seed", "tokenizer", "stop_strings")}
    begin = next(place for place, pair in enumerate(zip(tokens, expected)) if pair[0] != pair[1])
    ids = torch.tensor([prompt + tokens[:begin]], device=fast.device)
    (sequence,) = manager._intake.sequences(prompt, GenerationConfig(pad_token_id=0), **options)
    logits = fast.speculation.original(ids).logits[:, -1].detach().double()
    scores = sequence.request.processors(ids, logits)[0]
    if not options.get("do_sample"):
        best = scores.topk(2).values
        return bool(best[0] - best[1] < 1e-4)
    is_kept = scores.isfinite()
    if not is_kept.all() and logits[0, is_kept].min() - logits[0, ~is_kept].max() < 1e-4:
        return True
    borders = scores.softmax(dim=0).cumsum(dim=0).cpu()
    number = uniform(seed_of(seed), torch.tensor(0), torch.tensor(begin))
    low, high = sorted((tokens[begin], expected[begin]))
    return bool((borders[[low, high - 1]] - number).abs().max() < 1e-6)


def compare(fast, manager, requests, outputs, share=200):
    """Compare outputs with the answers of `generate()`. requests: (prompt, options) by name. At most one answer of
    `share` may part at a near-tie."""
    ties = 0
    for name, (prompt, options) in requests.items():
        output = outputs[name]
        assert output.error is None, output.error
        expected = generated(fast, prompt, pad_token_id=0, **options)
        if output.finish_reason == "cancelled":
            expected = expected[: len(output.generated_tokens)]
        if output.generated_tokens != expected:
            ties += 1
            assert is_near_tie(fast, manager, prompt, options, output.generated_tokens, expected), (name, options)
    assert ties <= -(-len(requests) // share)


def ask(manager, count, rng):
    """`count` mixed requests, some of which are cancelled: the requests and their outputs, by name."""
    requests = {f"r{number}": mixed_request(rng) for number in range(count)}
    cancelled = rng.sample([*requests], count // 20)
    for name, (prompt, options) in requests.items():
        manager.add_request(prompt, name, **options)
        if rng.random() < 0.3:
            time.sleep(rng.random() * 0.05)
    for name in cancelled:
        manager.cancel_request(name)
    outputs = collect(manager, count)
    assert {name for name in outputs if outputs[name].finish_reason == "cancelled"} <= {*cancelled}
    return requests, outputs


def answers_are_those_of_generate(fast, count, seed, slots, **settings):
    """The outputs of `ask`, which are compared. settings: of the manager's config"""
    with running(fast, max_requests_per_batch=slots, **settings) as manager:
        requests, outputs = ask(manager, count, random.Random(seed))
    fast.speculation.stats.reset()
    compare(fast, manager, requests, outputs)
    return outputs


HEADS = MODEL / "heads"
ALGORITHMS = {
    "eagle3": dict(draft=HEADS / "eagle3", num_steps=5),
    "eagle3 tree": dict(draft=HEADS / "eagle3", num_steps=5, topk=4, num_draft_tokens=16),
    "eagle3 drawn": dict(draft=HEADS / "eagle3", num_steps=4, draft_sample_method="probabilistic"),
    "mtp": dict(draft=HEADS / "mtp", num_steps=3),
    "dflash": dict(draft=HEADS / "dflash"),
    "dflash tree": dict(draft=HEADS / "dflash", topk=4, num_draft_tokens=16),
    "eagle3 union": dict(draft=HEADS / "eagle3", num_steps=5, topk=4, num_draft_tokens=16, ngram=True),
    "dflash union": dict(draft=HEADS / "dflash", num_draft_tokens=16, ngram=True),
    "draft_model": dict(draft="itself", num_steps=4),
    "draft_model tree": dict(draft="itself", num_steps=3, topk=3),
}


def write_modules(folder: Path) -> Path:
    """Write a checkpoint of three modules of multi-token prediction: the demo model's, and two that are like it."""
    tensors, generator = load_file(HEADS / "mtp" / "model.safetensors"), torch.Generator().manual_seed(2)
    for name, weight in [*tensors.items()]:
        for number in (1, 2) if name.startswith("mtp.layers.0.") else ():
            noise = 0.1 * weight.float().std() * torch.randn(weight.shape, generator=generator)
            tensors[name.replace("layers.0", f"layers.{number}")] = (weight + noise).to(weight.dtype)
    save_file(tensors, folder / "model.safetensors")
    shutil.copy(HEADS / "mtp" / "config.json", folder)
    return folder


PROMPTS = [tokenizer()(text).input_ids for text in ("def mean(values):\n", "class Stack:\n", "import json\n")]
