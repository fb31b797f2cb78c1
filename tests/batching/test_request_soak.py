"""A soak: requests of all kinds, some cancelled, over managers in turn and changing weights."""

import gc
import random
import threading
from collections import Counter

import psutil
import pytest
import torch
from batch_requests import MODEL, answers_are_those_of_generate
from transformers import AutoModelForCausalLM

from spec_compile import speculate

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
