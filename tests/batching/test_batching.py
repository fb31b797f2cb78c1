"""Many requests at once: each gets what its own ``generate()`` gives, whoever is beside it."""

import asyncio
import functools
import queue
import time
import weakref

import pytest
import torch
from batch_requests import (
    ALGORITHMS,
    PROMPTS,
    AtLength,
    answer,
    answers_are_those_of_generate,
    collect,
    config,
    demo,
    generated,
    running,
    tokenizer,
)
from transformers import GenerationConfig, LogitsProcessor, MaxLengthCriteria

from spec_compile import speculate
from spec_compile.batching import scheduler
from spec_compile.runtime.draft_budget import WholeTreeBudget


@functools.cache
def fast():
    return speculate(demo(), algo="ngram", compile=False)


@pytest.fixture
def manager():
    with running(fast()) as manager:
        yield manager


@pytest.mark.sweep(["eagle3 tree"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm(name):
    options = ALGORITHMS[name] | dict(adaptive=False)  # every round drafts, or else measured costs would decide
    if options["draft"] == "itself":
        options["draft"] = demo()
    one = speculate(demo(), algo=name.split()[0], compile=False, check=False, **options)
    outputs = answers_are_those_of_generate(one, 8, seed=len(name), slots=3)
    steps = [output.speculation for output in outputs.values()]
    length = 1 + sum(each.accepted for each in steps) / sum(each.steps for each in steps)
    if "ngram" in options:  # generate() drafts from the answers that the batch has left
        assert length > 1.5 and len(one.speculation.ngram) > 0
    else:
        assert length > 0.9 * one.speculation.stats.accept_length


def test_a_silent_draft_knows_a_row_that_still_runs(monkeypatch):
    """All drafts of a request are accepted that goes on from the row of another one, which drafts nothing."""
    one = speculate(demo(), algo="draft_model", draft=demo(), num_steps=3, compile=False, check=False)
    monkeypatch.setattr(WholeTreeBudget, "choose", lambda policy, *known: 4)
    monkeypatch.setattr(scheduler, "KEPT", 64)
    prompt = PROMPTS[0] * 3
    text = prompt + generated(demo(), prompt, max_new_tokens=200, eos_token_id=None)
    options = dict(eos_token_id=-1, do_sample=False)

    def ask_in_between(ids, scores, **_):
        if ids.shape[1] == len(prompt) + 180:
            manager.add_request(text[: len(prompt) + 178], "second", max_new_tokens=12, **options)
        return torch.zeros(len(ids), dtype=torch.bool)

    with one.continuous_batching_context_manager(GenerationConfig(pad_token_id=0), warmup=False) as manager:
        first = dict(max_new_tokens=200, speculation=False, stopping_criteria=[ask_in_between])
        manager.add_request(prompt, "first", **first, **options)
        second = collect(manager, 2)["second"]
    assert second.generated_tokens == text[len(prompt) + 178 :][:12]
    assert second.speculation.reused_prompt_tokens >= 128 > len(prompt)
    assert second.speculation.per_step_accepted == [3, 3, 3]


def test_mixed_requests():
    outputs = answers_are_those_of_generate(fast(), 30, seed=0, slots=8)
    assert {output.finish_reason for output in outputs.values()} >= {"stop", "length"}
    assert any(output.speculation.reused_prompt_tokens for output in outputs.values())


@pytest.mark.parametrize("drawn", [{}, {"do_sample": True, "seed": 3}], ids=["greedy", "sampled"])
def test_an_end_at_the_limit_is_a_stop(manager, drawn):
    """An end, a stop string or a criterion that the last permitted token meets; vLLM and OpenAI say stop, too."""
    prompt, options = PROMPTS[0], {"max_new_tokens": 6, **drawn}
    expected = generated(fast(), prompt, **options)
    assert expected[-1] not in expected[:-1]
    stops = tokenizer().decode(expected[-2:])
    met = [
        {"eos_token_id": expected[-1]},
        {"stop_strings": [stops]},
        {"stopping_criteria": [AtLength(len(prompt) + 6)]},
    ]
    unmet = [{}, {"eos_token_id": 4095}, {"stop_strings": ["never"]}]
    longer = [AtLength(len(prompt) + 7), MaxLengthCriteria(len(prompt) + 6)]
    unmet.append({"stopping_criteria": longer, "max_new_tokens": 40})
    for wanted, cases in (("stop", met), ("length", unmet)):
        for case in cases:
            output = answer(manager, prompt, tokenizer=tokenizer(), **options | case)
            assert (output.finish_reason, output.generated_tokens) == (wanted, expected), case


def test_a_stop_string_may_begin_in_the_prompt_unless_the_request_says_no(manager):
    prompt = PROMPTS[0]
    whole = generated(fast(), prompt, max_new_tokens=8)
    stop = tokenizer().decode(prompt[-1:] + whole[:1])
    for option, tokens in (({}, 1), ({"stops_in_prompt": True}, 1), ({"stops_in_prompt": False}, 8)):
        options = {"stop_strings": stop, "tokenizer": tokenizer(), "max_new_tokens": 8} | option
        assert answer(manager, prompt, **options).generated_tokens == whole[:tokens]
    with pytest.raises(TypeError, match="stops_in_prompt: expected a bool"):
        manager.add_request(prompt, stops_in_prompt="no")


def test_several_sequences_are_the_rows_of_one_call(manager):
    options = dict(do_sample=True, max_new_tokens=10, num_return_sequences=3)
    torch.manual_seed(5)
    expected = fast().generate(torch.tensor([PROMPTS[0]]), **options)[:, len(PROMPTS[0]) :].tolist()
    name = manager.add_request(PROMPTS[0], seed=5, **options)
    outputs = collect(manager, 3)
    assert [outputs[f"{name}__child#{i}"].generated_tokens for i in range(2)] == expected[:2]
    assert outputs[name].generated_tokens == expected[2]


def test_a_request_fills_its_row_if_nothing_says_otherwise():
    with running(fast(), max_requests_per_batch=1) as manager:
        (sequence,) = manager._intake.sequences(PROMPTS[0], manager.generation_config, "a", eos_token_id=-1)
        assert sequence.longest == manager.scheduler.capacity


def test_streams_grow_round_by_round(manager):
    name = manager.add_request(PROMPTS[0], max_new_tokens=30, streaming=True, record_timestamps=True)
    outputs = list(manager.request_id_iter(name))
    last = outputs[-1]
    assert last.generated_tokens == generated(fast(), PROMPTS[0], max_new_tokens=30)
    assert len(outputs) == last.speculation.steps == len(last.speculation.per_step_tokens)
    for output, gained in zip(outputs, torch.tensor(last.speculation.per_step_tokens).cumsum(0).tolist()):
        assert output.generated_tokens == last.generated_tokens[:gained]
    assert [output.is_finished() for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(last.timestamps) == 30 and last.created_time <= last.lifespan[0] <= last.first_token_time


def test_handlers_are_called_in_their_event_loop(manager):
    async def answers():
        loop, results = asyncio.get_running_loop(), []
        done = [loop.create_future() for _ in PROMPTS]

        def keep(number, output):
            results.append(output)
            if output.is_finished():
                done[number].set_result(output)

        for number, prompt in enumerate(PROMPTS):
            manager.register_result_handler(f"h{number}", functools.partial(keep, number))
            manager.add_request(prompt, f"h{number}", max_new_tokens=8, streaming=number == 0)
        return [output.generated_tokens for output in await asyncio.gather(*done)], results

    tokens, results = asyncio.run(answers())
    assert tokens == [generated(fast(), prompt, max_new_tokens=8) for prompt in PROMPTS]
    assert [output.request_id for output in results].count("h1") == 1
    assert not manager.output_router.result_handlers


def test_cancelled_requests_leave_and_the_others_go_on():
    with running(fast(), max_requests_per_batch=1) as manager:
        manager.add_request(PROMPTS[0], "runs", max_new_tokens=1000, streaming=True, eos_token_id=-1)
        manager.add_request(PROMPTS[1], "waits", max_new_tokens=5)
        manager.add_request(PROMPTS[2], "stays", max_new_tokens=5)
        next(iter(manager))
        for name in ("runs", "waits", "nobody"):
            manager.cancel_request(name)
        outputs = collect(manager, 3)
    assert [outputs[name].finish_reason for name in ("runs", "waits", "stays")] == ["cancelled", "cancelled", "length"]
    tokens = outputs["runs"].generated_tokens
    assert tokens == generated(fast(), PROMPTS[0], max_new_tokens=1000, eos_token_id=-1, pad_token_id=0)[: len(tokens)]
    assert outputs["waits"].generated_tokens == []
    assert outputs["stays"].generated_tokens == generated(fast(), PROMPTS[2], max_new_tokens=5)


def test_a_full_queue_is_said_at_once():
    manager = fast().init_continuous_batching(None, config(max_queue_size=2))
    for prompt in PROMPTS[:2]:
        manager.add_request(prompt, max_new_tokens=4)
    begin = time.perf_counter()
    with pytest.raises(queue.Full, match="max_queue_size: 2"):
        manager.add_request(PROMPTS[2], max_new_tokens=4)
    assert time.perf_counter() - begin < 5
    assert manager.metrics()["requests_rejected_total"]["queue_full"] == 1
    manager.start()
    try:
        assert len(collect(manager, 2)) == 2
        manager.add_request(PROMPTS[2], max_new_tokens=4)
        assert len(collect(manager, 1)) == 1
    finally:
        manager.destroy()
    with pytest.raises(RuntimeError):
        manager.add_request(PROMPTS[2])


@pytest.mark.parametrize(
    "options, message",
    [({"max_requests_per_batch": 0}, "max_requests_per_batch"), ({"scheduler_type": "prefill_first"}, "fifo")],
)
def test_bad_settings_of_a_manager(options, message):
    with pytest.raises(ValueError, match=message):
        fast().init_continuous_batching(None, config(**options))


class Breaks(LogitsProcessor):
    def __init__(self, after):
        self.after = after

    def __call__(self, input_ids, scores):
        self.after -= 1
        if self.after < 0:
            raise ArithmeticError("the processor broke")
        return scores


def test_an_error_of_one_request_is_its_own():
    with running(fast()) as manager:
        manager.add_request(PROMPTS[0], "good", max_new_tokens=20)
        manager.add_request(PROMPTS[1], "breaks", max_new_tokens=20, logits_processor=[Breaks(3)])
        manager.add_request(PROMPTS[2], "begins badly", max_new_tokens=20, logits_processor=[Breaks(0)])
        outputs = collect(manager, 3)
        assert manager.is_running()
    assert outputs["good"].generated_tokens == generated(fast(), PROMPTS[0], max_new_tokens=20)
    assert outputs["breaks"].error == "the processor broke" and outputs["breaks"].finish_reason == "error"
    expected = generated(fast(), PROMPTS[1], max_new_tokens=20)
    tokens = outputs["breaks"].generated_tokens
    assert tokens == expected[: len(tokens)]
    assert outputs["begins badly"].generated_tokens == []


def test_what_kills_the_thread_fails_all_once_and_says_so(manager, monkeypatch):
    monkeypatch.setattr(manager.scheduler.decoder, "launch", lambda *_: 1 / 0)
    names = [manager.add_request(prompt, max_new_tokens=4) for prompt in PROMPTS]
    manager._generation_thread.join()
    outputs = [manager.output_router.output_queue.get_nowait() for _ in names]
    assert {output.request_id for output in outputs} == {*names}
    assert all(output.finish_reason == "error" and "division" in output.error for output in outputs)
    assert isinstance(manager.background_thread_status.fatal_error, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="died"):
        manager.add_request(PROMPTS[0])


def test_stopping_at_once_fails_what_is_under_way(manager):
    manager.add_request(PROMPTS[0], "a", max_new_tokens=1000, streaming=True, eos_token_id=-1)
    next(iter(manager))
    manager.stop(hard_stop=True)
    while not (output := manager.output_router.output_queue.get_nowait()).is_finished():
        pass
    assert output.finish_reason == "error" and "stopped" in output.error and output.generated_tokens


def test_generate_goes_between_the_rounds(manager):
    manager.add_request(PROMPTS[0], "long", max_new_tokens=300, eos_token_id=-1, streaming=True)
    next(iter(manager))
    assert generated(fast(), PROMPTS[1], max_new_tokens=6) == generated(demo(), PROMPTS[1], max_new_tokens=6)
    with pytest.raises(RuntimeError, match="is running"):
        fast().speculation.refresh()
    with manager.pause():
        rounds = manager.metrics()["rounds_total"]
        time.sleep(0.1)
        assert manager.metrics()["rounds_total"] == rounds
    tokens = collect(manager, 1)["long"].generated_tokens
    assert tokens == generated(demo(), PROMPTS[0], max_new_tokens=300, eos_token_id=-1, pad_token_id=0)


def test_a_model_that_has_changed_is_refused(manager):
    attention = fast().speculation.original.model.layers[0].self_attn
    try:
        attention.scaling *= 2
        output = answer(manager, PROMPTS[0], max_new_tokens=4)
    finally:
        attention.scaling /= 2
    assert output.finish_reason == "error" and "scaling" in output.error


def test_the_rows_of_a_destroyed_manager_are_given_back():
    """Also while somebody holds the manager."""
    fast().speculation.engine.idle_batch = None
    with running(fast()) as manager:
        answer(manager, PROMPTS[0], max_new_tokens=4)
        rows = weakref.ref(manager.scheduler.decoder.all)
    assert rows() is not None and manager.metrics()["slots"]
    fast().destroy_cached_continuous_batching_manager()
    assert rows() is None and not manager.is_running()


def test_metrics_add_up():
    seen = []
    with running(fast(), max_requests_per_batch=2) as manager:
        manager.observers.append(seen.append)
        for prompt in PROMPTS:
            manager.add_request(prompt, max_new_tokens=25)
        outputs = collect(manager, 3)
    metrics, steps = manager.metrics(), [output.speculation for output in outputs.values()]
    assert [output.request_id for output in seen] == [*outputs]
    assert metrics["slots"] == 2 and metrics["requests_running"] == metrics["requests_waiting"] == 0
    assert metrics["cache_tokens"] >= 2 * metrics["slot_tokens"] and metrics["cache_usage"] == 0
    assert metrics["generation_tokens_total"] == 75 and metrics["requests_finished_total"]["length"] == 3
    assert metrics["draft_tokens_total"] == sum(sum(each.per_step_drafted) for each in steps)
    assert metrics["accepted_tokens_total"] == sum(sum(each.per_step_accepted) for each in steps)
    assert sum(metrics["accepted_tokens_per_position_total"]) == metrics["accepted_tokens_total"]
    assert sum(sum(each.per_step_tokens) for each in steps) == 75


def ask_with_references(one, references):
    """The last outputs of requests for the same 40 tokens at once, of which some have a reference."""
    with running(one) as manager:
        for reference in references:
            manager.add_request(PROMPTS[0], max_new_tokens=40, eos_token_id=-1, reference=reference)
        outputs = [*collect(manager, len(references)).values()]
    return sorted(outputs, key=lambda output: output.request_id)


@pytest.mark.parametrize("share_text", [True, False])
def test_a_reference_is_of_one_request_only(share_text):
    one = speculate(demo(), compile=False, check=False, share_text=share_text, adaptive=False)
    wanted = generated(speculate(demo(), compile=False, check=False), PROMPTS[0], max_new_tokens=40, eos_token_id=[])
    expected = [PROMPTS[0] + wanted, [7, 8, 9]]
    told, untold = ask_with_references(one, [expected, None])
    assert told.generated_tokens == untold.generated_tokens == wanted
    shorter = told.speculation.steps * (1 if share_text else 2)  # an answer that is shared is drafted from afterwards
    assert told.speculation.steps <= 5 and untold.speculation.steps > shorter
    assert not one.speculation.engine.runtime.algorithm.ngram.private
    other = speculate(demo(), compile=False, check=False, share_text=share_text, adaptive=False)
    ask_with_references(other, [None, None])
    left, usual = ({n: s.speculation.ngram.stats()[n] for n in ("tokens", "streams")} for s in (one, other))
    assert left == usual == {"tokens": 2 * len(PROMPTS[0] + wanted) if share_text else 0, "streams": 0}


def test_references_join_other_drafts():
    options = ALGORITHMS["eagle3 union"] | dict(adaptive=False, share_text=False)
    options["ngram"] = {"share_text": options.pop("share_text")}
    one = speculate(demo(), "eagle3", compile=False, check=False, **options)
    wanted = generated(one, PROMPTS[0], max_new_tokens=40, eos_token_id=[])
    told, untold = ask_with_references(one, [PROMPTS[0] + wanted, None])
    assert told.generated_tokens == untold.generated_tokens == wanted
    assert told.speculation.steps < untold.speculation.steps
    assert not one.speculation.engine.runtime.algorithm.ngram.private


def test_references_that_are_refused():
    with running(fast()) as manager:
        room = manager.scheduler.capacity
        for reference, error, words in (
            ([4096], ValueError, "reference holds token id 4096"), ("text", TypeError, "reference must be a 1-D"),
            ([1] * (room + 1), ValueError, f"reference: {room + 1} tokens"),
            ([[1] * room, [1]], ValueError, f"reference: {room + 2} tokens"),
        ):  # fmt: skip
            with pytest.raises(error, match=words):
                manager.add_request(PROMPTS[0], max_new_tokens=2, reference=reference)
        assert len(answer(manager, PROMPTS[0], max_new_tokens=2, reference=[[1] * room, []]).generated_tokens) == 2
    head = speculate(demo(), "eagle3", compile=False, check=False, **ALGORITHMS["eagle3"])
    with running(head) as manager:
        with pytest.raises(ValueError, match="reference: only n-grams copy from a reference; pass ngram=True"):
            manager.add_request(PROMPTS[0], max_new_tokens=2, reference=[1])
