"""A soak: requests of all kinds, some malformed, some cancelled, over managers in turn and changing weights."""

import gc
import queue
import random
import threading
from collections import Counter

import psutil
import pytest
import torch
from batch_requests import MODEL, collect, compare, config, mixed_request
from transformers import AutoModelForCausalLM, GenerationConfig

from spec_compile import speculate

MALFORMED = [
    {"max_new_tokens": 10**9},
    {"max_new_tokens": "9"},
    {"temperature": -1.0, "do_sample": True},
    {"top_p": float("nan"), "do_sample": True},
    {"temprature": 1.0},
    {"num_beams": 4},
    {"stop_strings": [""]},
    {"sequence_bias": [[[5], 1.0]] * 100_000},
    {"eos_token_id": "</s>"},
    {"seed": 1 << 70, "do_sample": True},
    {"input_ids": []},
    {"input_ids": [4096]},
    {"input_ids": [5] * 10**5},
    {"input_ids": "text"},
]
MEGABYTES = 1 << 20


def soak(fast, rng, count, slots):
    """Hand in `count` requests to a manager of their own, and compare all answers; returns how they ended."""
    requests, refused = {}, 0
    before = fast.speculation.engine.idle_batch
    manager = fast.init_continuous_batching(GenerationConfig(pad_token_id=0), config(max_requests_per_batch=slots))
    assert before is None or manager.scheduler is before  # the rows, with all that is compiled, serve again
    if fast.speculation.options.compile:
        manager.warmup()
    manager.start()
    cancelled = set()
    try:
        for number in range(count):
            prompt, options = mixed_request(rng)
            if rng.random() < 0.1:
                bad = dict(rng.choice(MALFORMED))
                with pytest.raises((TypeError, ValueError)):
                    manager.add_request(bad.pop("input_ids", prompt), f"bad{number}", **bad)
                refused += 1
                continue
            name = f"r{number}"
            requests[name] = prompt, options
            manager.add_request(prompt, name, streaming=rng.random() < 0.2, **options)
            if rng.random() < 0.1:
                manager.cancel_request(name)
                cancelled.add(name)
        outputs = collect(manager, len(requests))
        with pytest.raises(queue.Empty):  # each ended once
            while not manager.output_router.output_queue.get_nowait().is_finished():
                pass
        assert manager.active_requests == 0 and not manager.scheduler.is_busy
    finally:
        manager.destroy()
    assert manager.metrics()["requests_rejected_total"]["invalid"] == refused
    compare(fast, manager, requests, outputs, share=100)
    assert {name for name in outputs if outputs[name].finish_reason == "cancelled"} <= cancelled
    return Counter(output.finish_reason for output in outputs.values())


def step(model, rng):
    """Train a little, or write to the weights in a way that torch does not count."""
    with torch.no_grad():
        for part in model.model.layers:
            weight = part.mlp.down_proj.weight
            (weight if rng.random() < 0.5 else weight.data).mul_(1 + 0.1 * rng.random())


def soaks(compiled, managers, count):
    """Soak managers in turn, with other weights each."""
    rng = random.Random(7)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, num_hidden_layers=3).eval()
    fast = speculate(model, compile=compiled, max_cache_len=512)
    threads, memory, ends = [], [], Counter()
    for _ in range(managers):
        ends += soak(fast, rng, count, slots=6)
        step(model, rng)
        gc.collect()
        memory.append(psutil.Process().memory_info().rss)
        threads.append(threading.active_count())
    assert {*threads} == {threads[0]}  # the first one has torch's own, which compile
    assert max(memory[len(memory) // 2 :]) - memory[len(memory) // 2 - 1] < 48 * MEGABYTES, memory
    return ends


@pytest.mark.slow
def test_managers_in_turn_over_weights_that_change():
    ends = soaks(False, managers=3, count=20)
    assert ends["cancelled"] and ends["length"] and ends["stop"]


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_thousand_requests(compiled):
    ends = soaks(compiled, managers=10, count=100)
    assert ends.total() > 800
