"""Rows whose pages are taken for others: each request still gets what its own ``generate()`` gives, once."""

import functools
import gc
import weakref

import hybrids
import models
import pytest
import torch
from batch_requests import (
    ALGORITHMS,
    PROMPTS,
    TEXT,
    AtLength,
    answers_are_those_of_generate,
    collect,
    demo,
    generated,
    running,
    stopped,
    tokenizer,
)

from spec_compile import speculate
from spec_compile.batching.pages import row_pages
from spec_compile.cache import PAGE

LONG = tokenizer()(TEXT).input_ids
NO_END = dict(eos_token_id=None, pad_token_id=0)
ROOM = 256


@functools.cache
def fast(name="ngram"):
    options = ALGORITHMS.get(name, {}) | dict(adaptive=False, max_cache_len=ROOM)
    if options.get("draft") == "itself":
        options["draft"] = demo()
    return speculate(demo(), name.split()[0], compile=False, check=False, **options)


def pages(blocks):
    """Settings of a manager whose pool has so many pages."""
    return dict(num_blocks=blocks, page_size=PAGE)


def none_is_lost(scheduler):
    """Every page is free once kept prefixes are given up."""
    scheduler.prefixes.forget()
    assert scheduler.pages.free == scheduler.pages.usable
    for rows in (scheduler.decoder, scheduler.prefill):
        assert not rows.state.kv.table.any()


@pytest.mark.parametrize("count", [36, pytest.param(1000, marks=pytest.mark.slow)])
def test_mixed_requests_in_few_pages(count):
    fast().speculation.engine.idle_batch = None
    blocks = row_pages(fast().speculation.engine.runtime, ROOM)
    outputs = answers_are_those_of_generate(fast(), count, seed=1, slots=8, **pages(blocks))
    scheduler = fast().speculation.engine.idle_batch
    assert scheduler.preemptions >= count / 50 and {output.finish_reason for output in outputs.values()} >= {"stop"}
    none_is_lost(scheduler)


SETTINGS = [
    {},
    {"do_sample": True, "temperature": 0.8, "seed": 5},
    {"repetition_penalty": 1.3, "logprobs": 1},
    {"do_sample": True, "repetition_penalty": 1.2, "top_p": 0.8, "seed": 6, "streaming": True},
    {"stopping_criteria": True, "prompt_logprobs": 0, "streaming": True},
]
"""Tokens chosen in the round and on the host."""


@pytest.mark.sweep(["eagle3 tree"])
@pytest.mark.parametrize("name", ["ngram", *ALGORITHMS])
def test_rows_are_taken_at_any_time(name):
    """Every third round the row that was let in last is taken, in the middle of its prompt or of its answer."""
    manager, run = stopped(fast(name), max_requests_per_batch=4)
    prompts = [LONG[7 * n : 7 * n + length] for n, length in enumerate((5, 90, 40, 1, 170))]
    for number, (prompt, settings) in enumerate(zip(prompts, SETTINGS)):
        settings = dict(settings)
        if "stopping_criteria" in settings:
            settings["stopping_criteria"] = [AtLength(len(prompt) + 20)]
        manager.add_request(prompt, f"r{number}", max_new_tokens=24, eos_token_id=-1, **settings)
    scheduler, rounds = manager.scheduler, iter(range(1000))

    def take_a_row():
        if next(rounds) % 3 == 2 and len(scheduler.begun) > 1:
            scheduler._preempt(max(scheduler.begun, key=lambda each: each.turn))

    outputs = run(take_a_row)
    assert scheduler.preemptions > 2
    for number, (prompt, settings) in enumerate(zip(prompts, SETTINGS)):
        drawn = {
            key: value for key, value in settings.items() if key not in ("logprobs", "prompt_logprobs", "streaming")
        }
        new = 20 if drawn.pop("stopping_criteria", False) else 24
        output = outputs[f"r{number}"]
        assert output.error is None
        assert output.generated_tokens == generated(fast(name), prompt, max_new_tokens=new, **NO_END, **drawn), number
        assert len(output.prompt_scores) == (len(prompt) - 1 if "prompt_logprobs" in settings else 0)
        assert len(output.scores) == (24 if "logprobs" in settings else 0)
        streamed = [each for each in manager.output_router.output_queue.queue if each.request_id == f"r{number}"]
        lengths = [len(each.generated_tokens) for each in streamed]
        assert lengths == sorted({*lengths})
    none_is_lost(scheduler)
    manager.destroy()


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_states_of_rows_that_are_taken(name):
    plain, one = hybrids.system(name)
    manager, run = stopped(one, max_requests_per_batch=3)
    generator, rounds = torch.Generator().manual_seed(3), iter(range(1000))
    prompts = [torch.randint(3, models.VOCAB, (length,), generator=generator).tolist() for length in (40, 9, 150)]
    for number, prompt in enumerate(prompts):
        manager.add_request(prompt, f"r{number}", max_new_tokens=20, eos_token_id=-1)
    scheduler = manager.scheduler

    def take_a_row():
        if next(rounds) % 4 == 3 and len(scheduler.begun) > 1:
            scheduler._preempt(max(scheduler.begun, key=lambda each: each.turn))

    outputs = run(take_a_row)
    assert scheduler.preemptions > 1
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        wanted = hybrids.answer(plain, ids, torch.ones_like(ids), 20)[0, len(prompt) :].tolist()
        assert outputs[f"r{number}"].generated_tokens == wanted
    none_is_lost(scheduler)
    manager.destroy()


def test_the_request_that_was_let_in_first_goes_on():
    """Requests come back in the order in which they were let in, before those that have had no row yet."""
    manager, run = stopped(fast(), max_requests_per_batch=4, **pages(6))
    for number in range(4):
        manager.add_request(LONG[number : 60 + number], f"r{number}", max_new_tokens=150, eos_token_id=-1)
    preempted, scheduler = [], manager.scheduler
    preempt = scheduler._preempt
    scheduler._preempt = lambda sequence: (preempted.append(sequence.request_id), preempt(sequence))
    outputs = run()
    assert "r0" not in preempted and preempted and [*outputs] == ["r0", "r1", "r2", "r3"]
    assert manager.metrics()["preemptions_total"] == len(preempted)
    assert [output.created_time <= output.lifespan[0] for output in outputs.values()] == [True] * 4
    manager.destroy()


def test_a_request_is_cancelled_while_its_row_is_taken():
    manager, run = stopped(fast(), max_requests_per_batch=2)
    for number in range(2):
        manager.add_request(PROMPTS[number], f"r{number}", max_new_tokens=30, eos_token_id=-1)
    with torch.no_grad():
        for _ in range(4):
            manager._deliver(manager.scheduler.step())
        last = manager.scheduler.decoder.active[-1]
        manager.scheduler._preempt(last)
    assert last.tokens and not last.pages
    manager.cancel_request(last.request_id)
    outputs = run()
    assert outputs[last.request_id].finish_reason == "cancelled"
    assert outputs[last.request_id].generated_tokens == last.tokens
    none_is_lost(manager.scheduler)
    manager.destroy()


def test_a_prompt_that_is_processed_again_reuses_nothing():
    manager, run = stopped(fast(), max_requests_per_batch=2)
    manager.add_request(LONG[60:200], "again", max_new_tokens=4, eos_token_id=-1)
    scheduler = manager.scheduler
    with torch.no_grad():
        scheduler._change()
        scheduler.prefill.step(0, 0, None)
        (sequence,) = scheduler.begun
        scheduler._preempt(sequence)
    assert run()["again"].speculation.reused_prompt_tokens == 0
    manager.destroy()


def test_a_pool_is_given_back_at_once():
    """Without waiting for the garbage collector, because a GPU has no room for two."""
    manager, run = stopped(fast(), max_requests_per_batch=2)
    manager.add_request(PROMPTS[0], max_new_tokens=4)
    run()
    scheduler, decoder = weakref.ref(manager.scheduler), weakref.ref(manager.scheduler.decoder)
    manager.destroy()
    gc.disable()
    try:
        fast().destroy_cached_continuous_batching_manager()
        del manager, run
        assert scheduler() is None and decoder() is None
    finally:
        gc.enable()


def test_no_round_writes_without_pages():
    manager, _ = stopped(fast(), max_requests_per_batch=2)
    manager.add_request(PROMPTS[0], max_new_tokens=30, eos_token_id=-1, speculation=False)
    scheduler = manager.scheduler
    with torch.no_grad():
        for _ in range(3):
            scheduler.step()
        (sequence,) = scheduler.decoder.active
        pages, sequence.pages = sequence.pages, sequence.pages[:-1]
        scheduler.decoder.launch(scheduler.prefill)
        assert not len(scheduler.decoder.pipeline)
        sequence.pages = pages
        scheduler.decoder.launch(scheduler.prefill)
        assert len(scheduler.decoder.pipeline) == 1
        scheduler.decoder.collect()
    manager.destroy()


def test_sizes_that_are_refused():
    needed = row_pages(fast().speculation.engine.runtime, ROOM)
    for settings, words in (
        (pages(needed - 1), f"max_cache_len: a row of {ROOM} tokens takes {needed} pages .* memory for {needed - 1}"),
        (pages(0), "num_blocks: expected at least 1, got 0"),
        (dict(max_memory_percent=80.0), "max_memory_percent: expected a share above 0 and at most 1, got 80.0"),
        (dict(max_requests_per_batch=0), "max_requests_per_batch: expected at least 1, got 0"),
    ):
        fast().speculation.engine.idle_batch = None
        with pytest.raises(ValueError, match=words), running(fast(), **settings):
            pass
    with running(fast(), **pages(needed)) as manager:
        assert manager.metrics()["cache_tokens"] == needed * PAGE
        with pytest.raises(ValueError, match=f"a prompt of {ROOM} tokens .* holds {ROOM}"):
            manager.add_request([5] * ROOM)
    unlimited = speculate(demo(), compile=False, check=False)
    with running(unlimited, **pages(3)) as manager:
        assert 0 < manager.metrics()["slot_tokens"] < 3 * PAGE


def test_a_text_that_cannot_fit_ends_with_an_error(monkeypatch):
    """The others go on. (Only a pool that is smaller than a row can be too small for one request.)"""
    monkeypatch.setattr("spec_compile.batching.pages.fitting_capacity", lambda runtime, capacity, pages: capacity)
    fast().speculation.engine.idle_batch = None
    with running(fast(), max_requests_per_batch=2, **pages(3)) as manager:
        manager.add_request(PROMPTS[0], "grows", max_new_tokens=230, eos_token_id=-1)
        manager.add_request(LONG[:200], "long", max_new_tokens=8, eos_token_id=-1)
        manager.add_request(PROMPTS[1], "good", max_new_tokens=8, eos_token_id=-1)
        outputs = collect(manager, 3)
    for name in ("grows", "long"):
        assert outputs[name].finish_reason == "error"
        assert "takes 4 pages of 64 tokens with its next rounds, and there are 3" in outputs[name].error
    tokens = outputs["grows"].generated_tokens
    assert len(tokens) > 100 and tokens == generated(fast(), PROMPTS[0], max_new_tokens=230, **NO_END)[: len(tokens)]
    assert outputs["good"].generated_tokens == generated(fast(), PROMPTS[1], max_new_tokens=8, **NO_END)
    fast().speculation.engine.idle_batch = None
