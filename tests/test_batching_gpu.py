"""Many requests at once on a GPU: captured rounds over rows that requests enter and leave."""

import functools

import pytest
import test_batching as batching
import torch
from transformers import GenerationConfig

from spec_compile import speculate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODES = {"graphs": {}, "eager graphs": dict(compile=False), "eager": dict(cuda_graphs=False, compile=False)}


@functools.cache
def model():
    return batching.AutoModelForCausalLM.from_pretrained(batching.MODEL, dtype=torch.float32).to("cuda")


@pytest.mark.parametrize("mode", MODES)
def test_mixed_requests(mode):
    fast = speculate(model(), max_cache_len=512, **MODES[mode])
    outputs = batching.answers_are_those_of_generate(fast, 60, seed=0, slots=8)
    assert any(output.speculation.reused_prompt_tokens for output in outputs.values())


@pytest.mark.parametrize("name", batching.ALGORITHMS)
def test_every_algorithm(name):
    options = dict(batching.ALGORITHMS[name])
    if options["draft"] == "itself":
        options["draft"] = model()
    fast = speculate(model(), algo=name.split()[0], max_cache_len=512, check=False, compile=False, **options)
    batching.answers_are_those_of_generate(fast, 30, seed=len(name), slots=8)


def test_a_warm_manager_builds_nothing_and_waits_for_nothing():
    fast = speculate(model(), max_cache_len=512, compile=False)
    manager = fast.init_continuous_batching(GenerationConfig(pad_token_id=0), batching.config(max_requests_per_batch=8))
    manager.warmup()
    sessions = manager.scheduler.decoder.lanes._sessions.values()
    steps = {key for session in sessions for key in session.steps}
    seconds = fast.speculation.stats.seconds["compile"]
    manager.start()
    try:
        for number in range(30):
            manager.add_request(batching.PROMPTS[number % 3], max_new_tokens=5 + number)
        outputs = batching.collect(manager, 30)
    finally:
        manager.destroy()
    assert {key for session in sessions for key in session.steps} == steps
    assert fast.speculation.stats.seconds["compile"] == seconds
    assert all(output.error is None for output in outputs.values())
