"""Many requests at once on a GPU: captured rounds over rows that requests enter and leave."""

import functools
import threading

import batch_requests as batching
import pytest
import torch
from transformers import AutoModelForCausalLM

from spec_compile import speculate
from spec_compile.runtime.round import PREFILL_SIZES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MODES = {"graphs": {}, "eager graphs": dict(compile=False), "eager": dict(cuda_graphs=False, compile=False)}


@functools.cache
def model():
    return AutoModelForCausalLM.from_pretrained(batching.MODEL, dtype=torch.float32).to("cuda")


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
    with batching.running(fast, warmup=True, max_requests_per_batch=8) as manager:
        sessions = manager.scheduler.decoder._sessions.values()
        steps = {key for session in sessions for key in session.made}
        seconds = fast.speculation.stats.seconds["compile"]
        for number in range(30):
            manager.add_request(batching.PROMPTS[number % 3], max_new_tokens=5 + number)
        outputs = batching.collect(manager, 30)
    assert {key for session in sessions for key in session.made} == steps
    assert fast.speculation.stats.seconds["compile"] == seconds
    assert all(output.error is None for output in outputs.values())


COMPILED = ["ngram", "eagle3 tree", "eagle3 union"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_and_captured_batches(monkeypatch, name, dtype):
    """The answers of requests are those of single calls, in bfloat16 by the bits that rounds have in any batch. Chunks
    have one size, because each size has its own bits and a busy manager chooses by measured times."""
    monkeypatch.setitem(PREFILL_SIZES, "cuda", (32,))
    options = dict(batching.ALGORITHMS.get(name, {}))
    fast = speculate(model().to(dtype), algo=name.split()[0], max_cache_len=512, check=False, **options)
    tokens = batching.tokenizer()(batching.TEXT).input_ids
    prompts = [tokens[7 * number : 7 * number + 17] for number in range(24)]
    settings = [{}, {"do_sample": True, "temperature": 0.8}, {"do_sample": True, "top_p": 0.9, "top_k": 40}]
    try:
        with batching.running(fast, warmup=True, max_requests_per_batch=8) as manager:
            names = [
                manager.add_request(prompt, max_new_tokens=20 + number, seed=number, **settings[number % 3])
                for number, prompt in enumerate(prompts)
            ]
            outputs = batching.collect(manager, len(names))
        differing = []
        for number, (prompt, request) in enumerate(zip(prompts, names)):
            expected = batching.generated(
                fast, prompt, seed=number, pad_token_id=0, max_new_tokens=20 + number, **settings[number % 3]
            )
            if outputs[request].generated_tokens != expected:
                differing.append((number, outputs[request].error))
        assert differing == []
    finally:
        model().to(torch.float32)


def test_requests_are_prepared_while_rounds_are_captured():
    """Each new mixture of settings captures a round, while other threads prepare requests on the GPU."""
    fast = speculate(model(), max_cache_len=512, compile=False)
    settings = [
        {"temperature": 0.7}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.2},
        {"bad_words_ids": [[5], [6, 7]]}, {"suppress_tokens": [*range(50, 90)]}, {"no_repeat_ngram_size": 3},
    ]  # fmt: skip

    def add(thread):
        for number in range(12):
            options = settings[(number + thread) % len(settings)] | {"temperature": 0.5 + number / 20 + thread / 100}
            manager.add_request(batching.PROMPTS[number % 3], max_new_tokens=12, do_sample=True, seed=number, **options)

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    with batching.running(fast, max_requests_per_batch=8) as manager:
        for thread in threads:
            thread.start()
        outputs = batching.collect(manager, 48)
        for thread in threads:
            thread.join()
    assert all(output.error is None and len(output.generated_tokens) for output in outputs.values())
