"""A soak: requests of all kinds, some cancelled, over managers in turn, few pages and changing weights."""

import gc
import random
import threading
from collections import Counter
from contextlib import nullcontext

import psutil
import pytest
import torch
from batch_requests import ALGORITHMS, MODEL, answers_are_those_of_generate, ask, compare, running
from transformers import AutoModelForCausalLM

from spec_compile import speculate
from spec_compile.batching.pages import row_pages
from spec_compile.cache import PAGE

MEGABYTES = 1 << 20


def step(model, rng):
    """Train a little, or write to the weights in a way that torch does not count."""
    with torch.no_grad():
        for part in model.model.layers:
            weight = part.mlp.down_proj.weight
            (weight if rng.random() < 0.5 else weight.data).mul_(1 + 0.1 * rng.random())


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiled, managers, count", [(False, 3, 20), (False, 10, 100), (True, 10, 100)], ids=["short", "eager", "compiled"]
)
def test_managers_in_turn_over_weights_that_change(compiled, managers, count):
    """The rows, with all that is compiled, serve again, and neither memory nor threads are lost."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, num_hidden_layers=3).eval()
    fast = speculate(model, compile=compiled, max_cache_len=512)
    threads, memory, schedulers, ends = [], [], set(), Counter()
    for number in range(managers):
        outputs = answers_are_those_of_generate(fast, count, seed=number, slots=6)
        ends += Counter(output.finish_reason for output in outputs.values())
        schedulers.add(fast.speculation.engine.idle_batch)
        step(model, random.Random(number))
        gc.collect()
        memory.append(psutil.Process().memory_info().rss)
        threads.append(threading.active_count())
    assert ends["length"] and ends["stop"] and len(schedulers) == 1
    assert {*threads} == {threads[0]}  # the first manager has torch's own, which compile
    assert max(memory[len(memory) // 2 :]) - memory[len(memory) // 2 - 1] < 48 * MEGABYTES, memory


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    "device, name, waves",
    [
        pytest.param("cpu", "ngram", 3, marks=pytest.mark.slow, id="short"),
        pytest.param("cpu", "ngram", 20, marks=pytest.mark.slow, id="cpu"),
        *(pytest.param("cuda", name, 20, marks=ON_GPU, id=name) for name in ("ngram", "eagle3 tree")),
    ],
)
def test_rows_are_taken_over_weights_that_change(device, name, waves):
    """Waves of 50 requests to one manager, whose pages are too few for all rows, so that they are taken from each
    other. The weights step between the waves, and kept prefixes of the old ones serve no request."""
    layers = dict(num_hidden_layers=3) if name == "ngram" else {}  # the head is of the whole model
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, **layers).eval().to(device)
    options, rng = ALGORITHMS.get(name, {}) | dict(max_cache_len=256, check=False, compile=False), random.Random(waves)
    fast, ends, reused = speculate(model, name.split()[0], **options), Counter(), 0
    pool = dict(num_blocks=row_pages(fast.speculation.engine.runtime, 256) + 2, page_size=PAGE)
    with running(fast, max_requests_per_batch=8, **pool) as manager:
        for _ in range(waves):
            requests, outputs = ask(manager, 50, rng)
            compare(fast, manager, requests, outputs)
            ends += Counter(output.finish_reason for output in outputs.values())
            reused += sum(output.speculation.reused_prompt_tokens > 0 for output in outputs.values())
            with manager.pause() if rng.random() < 0.5 else nullcontext():
                step(model, rng)
        assert manager.scheduler.preemptions >= waves and reused >= waves
    assert ends["cancelled"] and ends["length"] and ends["stop"]
