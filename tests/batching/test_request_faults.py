"""Many requests under odd use: each gets what its own ``generate()`` gives, once, or an error by name."""

import copy
import functools
import itertools
import os
import queue
import threading
import time
import tracemalloc
from contextlib import contextmanager, suppress

import hypothesis.strategies as st
import pytest
import torch
from batch_requests import MODEL, PROMPTS, TEXT, answer, collect, config, generated, running, tokenizer
from hypothesis import given, settings
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    WatermarkingConfig,
)
from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.stopping_criteria import StopStringCriteria

from spec_compile import speculate
from spec_compile.batching.request_options import LONGEST_NGRAM, MOST_NUMBERS, StopStrings
from spec_compile.runtime.answer import Answer

LONG = tokenizer()(TEXT).input_ids[:100]
SECONDS = 60


@pytest.fixture(scope="module")
def model():
    """Two layers of the demo model, whose weights the tests change."""
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, num_hidden_layers=2).eval()


@pytest.fixture(scope="module")
def fast(model):
    return speculate(model, compile=False, check=False)


@pytest.fixture
def manager(fast):
    with running(fast) as manager:
        yield manager


@pytest.fixture
def idle(fast):
    """A manager that is not started."""
    manager = fast.init_continuous_batching(GenerationConfig(pad_token_id=0))
    yield manager
    manager.destroy()


@contextmanager
def meanwhile(work, threads=1):
    """Threads that do `work` again and again."""
    stop = threading.Event()

    def repeat():
        while not stop.is_set():
            work()

    started = [threading.Thread(target=repeat) for _ in range(threads)]
    for thread in started:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in started:
            thread.join()


# Weights that change


@pytest.fixture
def same_weights_after(model):
    before = copy.deepcopy(model.state_dict())
    yield
    model.load_state_dict(before)


def a_step(model):
    """Training: torch counts the writes of an optimizer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with torch.enable_grad():
        model(torch.tensor([LONG]), labels=torch.tensor([LONG])).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def a_write_of_data(model):
    """torch does not count it."""
    for part in model.model.layers:
        part.self_attn.v_proj.weight.data.mul_(-1.0)


CHANGES = [a_step, a_write_of_data]


@pytest.mark.usefixtures("same_weights_after")
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["running", "paused", "the next manager"])
def test_weights_that_change_between_requests(model, fast, change, when):
    """What an earlier request has left of a prompt that begins alike is of the old weights."""
    with running(fast) as manager:
        assert answer(manager, LONG, max_new_tokens=8).generated_tokens == generated(fast, LONG, max_new_tokens=8)
        if when == "running":
            change(model)
        elif when == "paused":
            with manager.pause():
                change(model)
        output = answer(manager, LONG, max_new_tokens=8) if when != "the next manager" else None
    if when == "the next manager":
        change(model)
        with running(fast) as manager:
            output = answer(manager, LONG, max_new_tokens=8)
    assert output.speculation.reused_prompt_tokens == 0
    assert output.generated_tokens == generated(model, LONG, max_new_tokens=8)
    with running(fast) as manager:
        assert answer(manager, LONG, max_new_tokens=8).speculation.reused_prompt_tokens > 0


@pytest.mark.usefixtures("same_weights_after")
def test_a_pause_is_distrusted(manager, model):
    """Weights are written to, uncounted, while a request is under way, whose row has keys and values of both."""
    manager.add_request(PROMPTS[0], "long", max_new_tokens=400, eos_token_id=-1, streaming=True)
    next(iter(manager))
    answer(manager, LONG, max_new_tokens=2)  # in another row than "long"
    manager.add_request(LONG, "before", max_new_tokens=4)
    outputs = collect(manager, 1)
    with manager.pause():
        a_write_of_data(model)
    manager.add_request(LONG, "other", max_new_tokens=4)
    outputs |= collect(manager, 2)
    text = (PROMPTS[0] + outputs["long"].generated_tokens)[:200]
    mixed = answer(manager, text, max_new_tokens=4)
    assert outputs["before"].speculation.reused_prompt_tokens > 0
    for output, prompt in ((outputs["other"], LONG), (mixed, text)):
        assert output.speculation.reused_prompt_tokens == 0
        assert output.generated_tokens == generated(model, prompt, max_new_tokens=4)


# Errors of one request


def test_a_prompt_that_fills_a_row_is_refused_and_the_others_go_on(fast):
    with running(fast, max_requests_per_batch=2) as manager:
        manager.add_request(PROMPTS[0], "good", max_new_tokens=20)
        room = manager.scheduler.capacity
        for length in (room, room + 1, 3 * room):
            with pytest.raises(ValueError, match=f"input_ids: a prompt of {length} tokens .* holds {room}"):
                manager.add_request([5] * length)
        manager.add_request([5] * (room - 1), "full")
        last = collect(manager, 2)
        assert len(last["full"].generated_tokens) == 1
        assert last["good"].generated_tokens == generated(fast, PROMPTS[0], max_new_tokens=20)


@pytest.mark.parametrize("part, method", [("prefill", "enter"), ("prefill", "shift"), ("decoder", "enter")])
def test_an_error_where_a_request_changes_places_is_its_own(fast, monkeypatch, part, method):
    with running(fast, max_requests_per_batch=3) as manager:
        holder = getattr(manager.scheduler, part)
        original = getattr(holder, method)

        def fail(job, *arguments):
            if job.request_id == "bad":
                raise MemoryError("no memory for it")
            return original(job, *arguments)

        monkeypatch.setattr(holder, method, fail)
        manager.add_request(PROMPTS[0], "good", max_new_tokens=12)
        manager.add_request(PROMPTS[1], "bad", max_new_tokens=12)
        manager.add_request(PROMPTS[2], "other", max_new_tokens=12)
        outputs = collect(manager, 3)
        assert manager.is_running() and not manager.scheduler.is_busy
    assert "no memory" in outputs["bad"].error
    for name, prompt in (("good", PROMPTS[0]), ("other", PROMPTS[2])):
        assert outputs[name].generated_tokens == generated(fast, prompt, max_new_tokens=12)


def test_an_error_while_a_request_leaves_keeps_its_answer(fast, manager, monkeypatch):
    drafter = manager.scheduler.decoder.all.drafter
    monkeypatch.setattr(drafter, "leave", lambda *arguments: 1 / 0)
    manager.observers.append(lambda output: 1 / 0)
    for number in range(2):
        output = answer(manager, PROMPTS[number], max_new_tokens=6)
        assert output.generated_tokens == generated(fast, PROMPTS[number], max_new_tokens=6)


class Chooses(LogitsProcessor):
    """Scores of another shape, or no numbers."""

    def __init__(self, kind):
        self.kind = kind

    def __call__(self, input_ids, scores):
        if self.kind == "too many":
            return torch.nn.functional.pad(scores, (0, 5), value=1e9)
        return torch.full_like(scores, {"nan": torch.nan, "nothing": -torch.inf}[self.kind])


@pytest.mark.parametrize("kind", ["too many", "nan", "nothing"])
@pytest.mark.parametrize("sampled", [False, True])
def test_scores_that_choose_no_token_end_their_own_request(fast, kind, sampled):
    with running(fast) as manager:
        manager.add_request(PROMPTS[0], "good", max_new_tokens=30)
        options = {"logits_processor": [Chooses(kind)], "do_sample": sampled, "max_new_tokens": 9}
        manager.add_request(PROMPTS[1], "odd", **options)
        outputs = collect(manager, 2)
        assert manager.is_running()
    assert outputs["good"].generated_tokens == generated(fast, PROMPTS[0], max_new_tokens=30)
    assert all(0 <= token < 4096 for token in outputs["odd"].generated_tokens)
    assert kind != "too many" or "vocabulary" in outputs["odd"].error


# Several sequences


class Remembers(LogitsProcessor):
    """Adds a growing bias, as a processor that counts its calls may."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores + 2.0 * torch.sin(torch.arange(scores.shape[1]) * self.calls)


REMEMBERING = {
    "guidance": lambda: {"guidance_scale": 1.7},
    "one's own": lambda: {"logits_processor": LogitsProcessorList([Remembers()])},
    "allowed tokens": lambda: {"prefix_allowed_tokens_fn": lambda row, ids: [5 + row, 9 + len(ids)]},
}


@pytest.mark.parametrize("name", REMEMBERING)
def test_each_sequence_has_what_remembers_for_itself(fast, manager, name):
    request = manager.add_request(PROMPTS[0], num_return_sequences=3, max_new_tokens=10, **REMEMBERING[name]())
    outputs = collect(manager, 3)
    ids = torch.tensor([PROMPTS[0]] * (3 if name == "allowed tokens" else 1))
    rows = fast.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, **REMEMBERING[name]())
    rows = rows[:, len(PROMPTS[0]) :].tolist()
    for number in range(3):
        output = outputs[f"{request}__child#{number}" if number < 2 else request]
        assert output.generated_tokens == rows[number % len(rows)]


def test_what_cannot_be_copied_is_refused_for_several_sequences(idle):
    processor = Remembers()
    processor.lock = threading.Lock()
    with pytest.raises(ValueError, match="num_return_sequences: each sequence needs logits_processor for itself"):
        idle.add_request(PROMPTS[0], num_return_sequences=2, max_new_tokens=3, logits_processor=[processor])


def test_cancelling_a_request_cancels_all_its_sequences(manager):
    options = {"num_return_sequences": 3, "do_sample": True, "max_new_tokens": 1500}
    name = manager.add_request(PROMPTS[0], generation_config=GenerationConfig(**options), eos_token_id=-1)
    manager.cancel_request(name)
    outputs = collect(manager, 3)
    assert {output.finish_reason for output in outputs.values()} == {"cancelled"}
    assert manager.active_requests == 0


# Batches


def test_generate_batch_gives_refused_prompts_their_error_and_the_others_their_answer(fast):
    outputs = fast.generate_batch([PROMPTS[0], [], PROMPTS[1], [4096]], max_new_tokens=6, warmup=False)
    values = [*outputs.values()]
    assert [each.status for each in values] == [RequestStatus.FINISHED, RequestStatus.FAILED] * 2
    assert "at least one token" in values[1].error and "4096" in values[3].error
    for number, prompt in ((0, PROMPTS[0]), (2, PROMPTS[1])):
        assert values[number].generated_tokens == generated(fast, prompt, max_new_tokens=6)
    with pytest.raises(ValueError, match="at least one token"):
        fast.generate_batch([[], []], warmup=False)
    with pytest.raises(TypeError, match="temprature"):
        fast.generate_batch(PROMPTS, temprature=1, warmup=False)


def test_generate_batch_takes_more_prompts_than_may_wait(fast):
    prompts = [PROMPTS[number % 3] + [number] for number in range(9)]
    options = {"continuous_batching_config": config(max_queue_size=2, max_requests_per_batch=1), "warmup": False}
    outputs = [*fast.generate_batch(prompts, max_new_tokens=4, **options).values()]
    assert [output.prompt_ids for output in outputs] == prompts
    for prompt, output in zip(prompts, outputs):
        assert output.generated_tokens == generated(fast, prompt, max_new_tokens=4)


def test_add_requests_hands_in_all_or_none(fast):
    manager = fast.init_continuous_batching(GenerationConfig(pad_token_id=0), config(max_queue_size=3))
    with pytest.raises(ValueError, match="4096"):
        manager.add_requests([PROMPTS[0], [4096]], max_new_tokens=3)
    with pytest.raises(queue.Full, match="max_queue_size: 3"):
        manager.add_requests([PROMPTS[0]] * 4, max_new_tokens=3)
    assert manager.active_requests == 0
    manager.destroy()


# Ends


@pytest.mark.slow
def test_every_request_that_was_taken_ends_although_the_manager_is_stopped_meanwhile(fast):
    """Threads add requests as fast as they can while others stop and start the manager at once."""
    taken, numbers, until = [], itertools.count(), time.monotonic() + 6
    with running(fast, max_requests_per_batch=2) as manager:

        def add():
            try:
                taken.append(manager.add_request(PROMPTS[0], f"r{next(numbers)}", max_new_tokens=2))
            except RuntimeError:
                time.sleep(0.001)

        with meanwhile(add, threads=3):
            for hard in itertools.cycle((True, False)):
                time.sleep(0.05)
                manager.stop(hard_stop=hard)
                manager.start()
                if time.monotonic() > until:
                    break
        manager.stop(hard_stop=True)
        ended = []
        while not manager.output_router.output_queue.empty():
            ended.append(manager.output_router.output_queue.get_nowait().request_id)
    assert len(taken) > 50 and sorted(ended) == sorted(taken)


@pytest.mark.parametrize("hard", [False, True])
def test_a_manager_that_stops_while_a_request_is_prepared_does_not_take_it(manager, monkeypatch, hard):
    prepare = manager._intake.sequences

    def prepare_and_stop(*arguments, **options):
        sequences = prepare(*arguments, **options)
        manager.stop(hard_stop=hard)
        return sequences

    monkeypatch.setattr(manager._intake, "sequences", prepare_and_stop)
    with pytest.raises(RuntimeError, match="stopp"):
        manager.add_request(PROMPTS[0], max_new_tokens=2)
    assert manager.active_requests == 0 and not manager.scheduler.is_busy


def use_in_a_child(fast, manager, expected):
    """What the parent's manager says, and whether a batch of the process's own gives what is expected."""
    try:
        manager.add_request(PROMPTS[0], max_new_tokens=2)
        text = "taken"
    except RuntimeError as error:
        text = str(error)
    manager.destroy()
    outputs = fast.generate_batch(PROMPTS, max_new_tokens=3, warmup=False)
    fast.speculation.refresh()
    return f"{text} {outputs.popitem()[1].generated_tokens == expected}"


def test_a_forked_process_is_refused_by_name(fast, manager):
    expected = generated(fast, PROMPTS[2], max_new_tokens=3)
    manager.add_request(PROMPTS[0], "long", max_new_tokens=900, eos_token_id=-1)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, use_in_a_child(fast, manager, expected).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    text = os.read(reader, 4096).decode()
    assert "was forked" in text and "init_continuous_batching()" in text and text.endswith("True"), text
    assert collect(manager, 1)["long"].error is None


# Calls and other threads beside


def test_threads_that_call_do_not_starve_requests(fast):
    with running(fast) as manager, meanwhile(lambda: generated(fast, PROMPTS[0], max_new_tokens=16), threads=3):
        output = answer(manager, PROMPTS[1], max_new_tokens=30)
    assert output.generated_tokens == generated(fast, PROMPTS[1], max_new_tokens=30)


def inside_a_processor(fast, action):
    """What `action` raises if a logits processor of a generate() calls it."""
    raised = []

    class Acts(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if not raised:
                try:
                    raised.append(action())
                except Exception as error:
                    raised.append(error)
            return scores

    generated(fast, PROMPTS[0], max_new_tokens=3, logits_processor=LogitsProcessorList([Acts()]))
    return raised[0]


def within(seconds, function):
    """What `function` returns in a thread of its own; it must not hang."""
    results = queue.Queue()
    thread = threading.Thread(target=lambda: results.put(function()), daemon=True)
    thread.start()
    return results.get(timeout=seconds)


def test_what_would_wait_for_itself_is_refused_by_name(fast, manager):

    def stop_paused():
        with manager.pause():
            with pytest.raises(RuntimeError, match=r"stop\(\): inside pause"):
                manager.stop()
            with pytest.raises(RuntimeError, match=r"get_result\(\): inside pause"):
                manager.get_result()
            with pytest.raises(RuntimeError, match=r"generate_batch\(\): inside pause"):
                fast.generate_batch(PROMPTS, warmup=False)
        return True

    assert within(SECONDS, stop_paused)
    error = within(SECONDS, lambda: inside_a_processor(fast, lambda: fast.generate_batch(PROMPTS, warmup=False)))
    assert "generate_batch(): inside pause(), or in a processor" in str(error)
    made = within(SECONDS, lambda: inside_a_processor(fast, fast.init_continuous_batching))
    assert type(made) is type(manager)
    made.destroy()
    assert answer(manager, PROMPTS[1], max_new_tokens=3).error is None


def test_requests_are_added_inside_a_processor_while_other_threads_add(fast, manager):
    temperatures = itertools.count(1000)  # another one each time, so that transformers prepares it

    def add(**options):
        return manager.add_request([5], max_new_tokens=1, do_sample=True, **options)

    with meanwhile(lambda: add(temperature=next(temperatures) / 1000)):
        for number in range(5):
            top_p = 0.5 + number / 100
            name = within(SECONDS, lambda top_p=top_p: inside_a_processor(fast, lambda: add(top_p=top_p)))
            assert name.startswith("req_")


# Stop strings and options


@given(
    st.lists(st.sampled_from(["re", "turn", "retu", "e", "\n", "\n\n", "é", "import os", " "]), min_size=1, max_size=3),
    st.lists(st.integers(0, 4095), min_size=1, max_size=12),
)
@settings(max_examples=60)
def test_stop_strings_end_where_transformers_ends(stops, tokens):
    tokens = tokenizer()("return\n\nimport os é").input_ids[: len(tokens)] + tokens
    ours, theirs = StopStrings(tokenizer(), stops), StopStringCriteria(tokenizer(), stops)
    for length in range(1, len(tokens) + 1):
        ids = torch.tensor([tokens[:length]])
        assert ours(ids, None).tolist() == theirs(ids, None).tolist()


def test_stop_strings_of_requests_are_those_of_generate(fast, manager, monkeypatch):
    """transformers goes through the vocabulary for every new string; requests do not."""
    clean, calls = StopStringCriteria.clean_tokenizer_vocab, []

    @functools.wraps(clean)
    def counted(*arguments, **options):
        calls.append(1)
        return clean(*arguments, **options)

    monkeypatch.setattr(StopStringCriteria, "clean_tokenizer_vocab", staticmethod(counted))
    for stop in ("\n\n", "return", "(", "import"):
        options = {"stop_strings": [stop, "never" * 9], "tokenizer": tokenizer(), "max_new_tokens": 40}
        assert answer(manager, PROMPTS[0], **options).generated_tokens == generated(fast, PROMPTS[0], **options)
    assert len(calls) == 4


BAD = {
    "no tokens": ({"input_ids": []}, "at least one token"),
    "a token outside": ({"input_ids": [5, 4096]}, "token id 4096 is outside the vocabulary of 4096"),
    "a negative token": ({"input_ids": [-1]}, "token id -1"),
    "no token ids": ({"input_ids": ["a"]}, "got str"),
    "too long": ({"max_new_tokens": 5000}, "a row of the batch holds"),
    "an unknown option": ({"temprature": 1}, "Did you mean 'temperature'"),
    "beams": ({"num_beams": 3}, "beam search: only generate"),
    "stop strings without a tokenizer": ({"stop_strings": ["a"]}, "tokenizer"),
    "a name twice": ({"request_id": "first"}, "'first' is under way"),
    "a seed that torch does not take": ({"seed": 1 << 64, "do_sample": True}, "seed"),
    "a seed of text": ({"seed": "7", "do_sample": True}, "seed"),
    "tokens of text": ({"max_new_tokens": "7"}, "max_new_tokens"),
    "tokens that would take memory": ({"max_new_tokens": 10**8}, "max_new_tokens"),
    "healing": ({"token_healing": True, "tokenizer": tokenizer()}, "token_healing"),
    "another config": ({"generation_config": {"max_new_tokens": 3}}, "generation_config"),
    "an endless temperature": ({"temperature": float("inf"), "do_sample": True}, "temperature"),
    "no temperature": ({"temperature": float("nan"), "do_sample": True}, "temperature"),
    "no number of sequences": ({"num_return_sequences": 0}, "num_return_sequences"),
    "an end of text": ({"eos_token_id": "a"}, "eos_token_id"),
    "many stops": ({"stop_strings": ["a"] * 65, "tokenizer": tokenizer()}, "stop_strings"),
    "a long stop": ({"stop_strings": ["a" * 50_000], "tokenizer": tokenizer()}, "stop_strings"),
    "an empty stop": ({"stop_strings": [""], "tokenizer": tokenizer()}, "stop_strings"),
    "many biases": ({"sequence_bias": [[[n % 4096], 1.0] for n in range(100_000)]}, "sequence_bias"),
    "many bad words": ({"bad_words_ids": [[n % 4096] for n in range(100_000)]}, "bad_words_ids"),
    "bad words of another form": ({"bad_words_ids": [["a"]]}, "bad_words_ids"),
    "a penalty of text": ({"repetition_penalty": "1"}, "repetition_penalty"),
    "top-k of text": ({"top_k": "many", "do_sample": True}, "top_k"),
    "a name that is no text": ({"request_id": 5}, "request_id"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_refused_by_name_at_once(idle, name):
    options, message = BAD[name]
    idle.add_request([5, 6], "first", max_new_tokens=3)
    with pytest.raises((TypeError, ValueError), match=message):
        idle.add_request(**{"input_ids": PROMPTS[0]} | options)
    assert len(idle.scheduler.waiting) == idle.active_requests == 1
    assert MOST_NUMBERS < 100_000


LARGE = {
    name: 2**31 - 1
    for name in ("max_length", "min_length", "top_k", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "seed")
}
LARGE |= {"max_time": 1e308, "repetition_penalty": 1e308, "encoder_repetition_penalty": 1e308}
LARGE |= {"watermarking_config": {"context_width": 2**31 - 1, "hashing_key": 2**62, "greenlist_ratio": 0.5}}
LARGE |= {"exponential_decay_length_penalty": (2**31 - 1, 1.5), "suppress_tokens": [4095] * 4096}


@pytest.mark.parametrize("name", LARGE)
def test_large_numbers_take_no_memory(idle, name):
    tracemalloc.start()
    with suppress(ValueError, TypeError):
        idle._intake.sequences(PROMPTS[0], idle.generation_config, **{name: LARGE[name]})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("name", ["no_repeat_ngram_size", "encoder_no_repeat_ngram_size"])
def test_sizes_of_ngrams_are_bounded_by_the_text(fast, manager, name):
    prompt = [*range(10, 110)]
    for size in (3, LONGEST_NGRAM, 2**31 - 1):
        options = {name: size, "max_new_tokens": 8}
        expected = options if size < 2**31 - 1 else {"max_new_tokens": 8}  # transformers would list them all
        assert answer(manager, prompt, **options).generated_tokens == generated(fast, prompt, **expected)
    with pytest.raises(ValueError, match=f"{name}: expected at most {LONGEST_NGRAM}"):
        manager.add_request(prompt, **{name: LONGEST_NGRAM + 1})


def test_a_watermark_waits_without_its_table(fast, manager):
    options = {"watermarking_config": WatermarkingConfig(bias=4.0), "max_new_tokens": 8, "do_sample": False}
    (sequence,) = manager._intake.sequences(PROMPTS[0], manager.generation_config, **options)
    assert [each.fixed_table for each in sequence.request.processors if hasattr(each, "fixed_table")] == [None]
    assert answer(manager, PROMPTS[0], **options).generated_tokens == generated(fast, PROMPTS[0], **options)
    options["watermarking_config"] = WatermarkingConfig(seeding_scheme="selfhash")
    with pytest.raises(ValueError, match=r"watermarking_config.seeding_scheme: .* expected lefthash"):
        manager.add_request(PROMPTS[0], **options)


def test_an_answer_takes_memory_as_it_grows():
    answer = Answer(torch.tensor([[1, 2], [3, 4]]), 1 << 31, eos=[9], pad=7)
    answer.take([[9], [5] * 3000])
    assert answer.ids.shape[1] < 10_000
    answer.take([[], [6] * 9000])  # it grows once more, after the first row has ended
    assert answer.sequences()[0, 2:].tolist() == [9] + [7] * 11_999
    assert answer.sequences()[1, -1] == 6 and answer.columns == 12_000


def test_max_time_begins_when_a_row_is_free(fast):
    with running(fast, max_requests_per_batch=1) as manager:
        manager.add_request(PROMPTS[0], "first", max_new_tokens=1500, eos_token_id=-1, do_sample=True, temperature=3.0)
        manager.add_request(PROMPTS[1], "timed", max_new_tokens=3, max_time=0.5)
        time.sleep(0.8)
        manager.cancel_request("first")
        assert len(collect(manager, 2)["timed"].generated_tokens) == 3
