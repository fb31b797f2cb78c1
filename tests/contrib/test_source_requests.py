"""Requests of encoder-decoders: rows over different sources against transformers' own generate() of each."""

import copy
import functools

import encoder_decoders as tiny
import models
import pytest
import torch
from batch_requests import collect, running, stopped
from encoder_decoders import EOS, PAD, VOCAB
from transformers.modeling_outputs import BaseModelOutput

import spec_compile
from spec_compile.batching.pages import row_pages
from spec_compile.cache import PAGE
from spec_compile.contrib.encoder_decoder import intake

PROMPT = [EOS, *(3 + 7 * n % 90 for n in range(69))]
"""A prompt of the decoder of more than a page."""


@functools.cache
def pair(family):
    model = tiny.transcriber(std=0.2) if family == "transcriber" else tiny.BUILDERS[family]()
    return model, spec_compile.speculate(model, compile=False, cache=False, adaptive=False)


def one(family, number):
    """A source; those of text have different lengths, and two of three have padding."""
    arguments = tiny.sources(family, 3, 12 + 9 * (number % 4), seed=number)
    return {name: value[number % 3][None] for name, value in arguments.items()}


def expected(model, arguments, **options):
    """The tokens of the answer."""
    wanted = model.generate(**arguments, **options)[0]
    return wanted[wanted.shape[0] - options["max_new_tokens"] :].tolist()


@pytest.mark.sweep("bart whisper")
@pytest.mark.parametrize("family", tiny.CLASSES)
def test_more_requests_than_rows(family):
    model, fast = pair(family)
    requests = [(one(family, number), 6 + 7 * (number % 5)) for number in range(7)]
    with running(fast, max_requests_per_batch=3) as manager:
        for number, (arguments, new) in enumerate(requests):
            manager.add_request(**arguments, request_id=f"{number}", max_new_tokens=new)
        outputs = collect(manager, len(requests))
    for number, (arguments, new) in enumerate(requests):
        output = outputs[f"{number}"]
        assert output.error is None and len(output.prompt_ids) == 1
        assert output.generated_tokens == expected(model, arguments, max_new_tokens=new)
    assert sum(output.speculation.accepted for output in outputs.values()) > 0


OPTIONS = {
    "forced tokens": dict(forced_bos_token_id=7, forced_eos_token_id=EOS),
    "no repetition": dict(no_repeat_ngram_size=3, repetition_penalty=1.3),
    "suppressed tokens": dict(suppress_tokens=[9, 10, 11], begin_suppress_tokens=[30, EOS]),
    "tokens of the source": dict(encoder_no_repeat_ngram_size=2, encoder_repetition_penalty=1.5),
    "prompt": dict(decoder_input_ids=torch.tensor([PROMPT])),
}


@pytest.mark.parametrize("family", ["bart", "m2m_100"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(family, name):
    model, fast = pair(family)
    options = dict(max_new_tokens=20) | OPTIONS[name]
    with running(fast, max_requests_per_batch=2) as manager:
        names = [manager.add_request(**one(family, number), **options) for number in range(3)]
        outputs = collect(manager, 3)
    for number, name in enumerate(names):
        assert outputs[name].generated_tokens == expected(model, one(family, number), **options)


def test_rows_end_and_are_drawn_as_by_themselves():
    model, fast = pair("bart")
    whole = expected(model, one("bart", 2), max_new_tokens=60)
    ends = dict(eos_token_id=whole[40], pad_token_id=PAD)
    drawn = dict(do_sample=True, temperature=1.5, top_k=20, max_new_tokens=20)
    with running(fast, max_requests_per_batch=2) as manager:
        ended = manager.add_request(**one("bart", 2), **ends, max_new_tokens=60)
        sampled = manager.add_request(**one("bart", 1), **drawn, seed=3, num_return_sequences=2)
        outputs = collect(manager, 3)
    wanted = whole[: whole.index(whole[40]) + 1]
    assert outputs[ended].generated_tokens == wanted and outputs[ended].finish_reason == "stop"
    torch.manual_seed(3)
    rows = fast.generate(**one("bart", 1), **drawn, num_return_sequences=2)[:, 1:].tolist()
    assert [outputs[f"{sampled}__child#0"].generated_tokens, outputs[sampled].generated_tokens] == rows


def test_equal_prompts_over_different_sources():
    """Their keys and values differ from the first token on, so no request may begin with another one's."""
    model, fast = pair("bart")
    options = dict(decoder_input_ids=PROMPT, max_new_tokens=8)
    with running(fast, max_requests_per_batch=2) as manager:
        for number in range(4):
            name = manager.add_request(**one("bart", number), **options)
            output = collect(manager, 1)[name]
            tensor = dict(decoder_input_ids=torch.tensor([PROMPT]), max_new_tokens=8)
            assert output.generated_tokens == expected(model, one("bart", number), **tensor)
            assert output.speculation.reused_prompt_tokens == 0


@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_rows_are_taken_and_come_back(family):
    model, fast = pair(family)
    blocks = row_pages(fast.speculation.engine.runtime, 128) + 1
    manager, run = stopped(fast, max_requests_per_batch=4, num_blocks=blocks, page_size=PAGE)
    for number in range(6):
        manager.add_request(**one(family, number), request_id=f"{number}", max_new_tokens=100)
    outputs = run()
    assert manager.scheduler.preemptions > 0
    for number in range(6):
        assert outputs[f"{number}"].generated_tokens == expected(model, one(family, number), max_new_tokens=100)
    manager.scheduler.prefixes.forget()
    assert manager.scheduler.pages.free == manager.scheduler.pages.usable
    manager.destroy()


def test_rows_are_taken_at_any_time():
    model, fast = pair("marian")
    manager, run = stopped(fast, max_requests_per_batch=3)
    for number in range(5):
        manager.add_request(**one("marian", number), request_id=f"{number}", max_new_tokens=30)
    rounds = 0

    def preempt():
        nonlocal rounds
        rounds += 1
        begun = manager.scheduler.begun
        if rounds % 3 == 0 and begun and not len(manager.scheduler.decoder.pipeline):
            manager.scheduler._preempt(max(begun, key=lambda each: each.turn))

    outputs = run(preempt)
    assert manager.scheduler.preemptions > 2
    for number in range(5):
        assert outputs[f"{number}"].generated_tokens == expected(model, one("marian", number), max_new_tokens=30)
    manager.destroy()


def test_cancelled_requests_leave_the_others_alone():
    model, fast = pair("bart")
    with running(fast, max_requests_per_batch=2) as manager:
        for number in range(6):
            manager.add_request(**one("bart", number), request_id=f"{number}", max_new_tokens=90)
        for number in (0, 3):
            manager.cancel_request(f"{number}")
        outputs = collect(manager, 6)
    for number in range(6):
        wanted = expected(model, one("bart", number), max_new_tokens=90)
        if number in (0, 3):
            output = outputs[f"{number}"]
            assert output.finish_reason == "cancelled"
            assert output.generated_tokens == wanted[: len(output.generated_tokens)] != wanted
        else:
            assert outputs[f"{number}"].generated_tokens == wanted


def test_the_encoder_runs_once_when_a_request_has_a_row(monkeypatch):
    model, fast = pair("pegasus")
    calls, encoder = [], type(model.get_encoder())
    own = encoder.forward

    def counted(*args, **kwargs):
        calls.append(1)
        return own(*args, **kwargs)

    manager, run = stopped(fast, max_requests_per_batch=1)
    monkeypatch.setattr(encoder, "forward", counted)
    monkeypatch.setattr(manager.scheduler, "check", lambda: None)  # it would find that
    for number in range(3):
        manager.add_request(**one("pegasus", number), request_id=f"{number}", max_new_tokens=5)
    assert not calls
    outputs = run()
    assert len(calls) == 3 and [output.error for output in outputs.values()] == [None] * 3
    manager.destroy()


def test_a_source_as_states():
    model, fast = pair("bart")
    arguments = one("bart", 1)
    states = model.get_encoder()(**arguments).last_hidden_state.detach()
    mask = arguments["attention_mask"]
    with running(fast, max_requests_per_batch=2) as manager:
        for name, told in (("output", BaseModelOutput(states)), ("tuple", (states,)), ("tensor", states)):
            manager.add_request(encoder_outputs=told, attention_mask=mask, request_id=name, max_new_tokens=12)
        outputs = collect(manager, 3)
    for output in outputs.values():
        assert output.generated_tokens == expected(model, arguments, max_new_tokens=12)


def test_drafts_come_from_the_source():
    _, fast = pair("blenderbot")
    manager, _ = stopped(fast, max_requests_per_batch=2)
    arguments = one("blenderbot", 1)
    ids = arguments["input_ids"][arguments["attention_mask"] != 0].tolist()
    manager.add_request(**arguments, max_new_tokens=2)
    manager.add_request(**arguments, max_new_tokens=2, reference=[7, 8, 9])
    waiting = [*manager.scheduler.waiting]
    assert [[text.tolist() for text in each.request.references] for each in waiting] == [[ids], [[7, 8, 9]]]
    manager.destroy()


def test_generate_batch_and_other_drafts():
    model, _ = pair("bart")
    draft = models.ADMITTED["llama"]()
    fast = spec_compile.speculate(model, "draft_model", draft=draft, compile=False, cache=False)
    texts = [one("bart", number)["input_ids"][0].tolist() for number in range(3)]
    outputs = [*fast.generate_batch(texts, max_new_tokens=20, warmup=False).values()]
    for ids, output in zip(texts, outputs, strict=True):
        assert output.generated_tokens == expected(model, dict(input_ids=torch.tensor([ids])), max_new_tokens=20)


# --- Whisper


SOUNDS = {
    "plain": dict(language="en"), "timestamps": dict(language="de", return_timestamps=True), "detected": {},
    "prompt": dict(language="en", prompt_ids=torch.tensor([112, 20, 21, 22, 23])),
    "translated": dict(language="en", task="translate"),
}  # fmt: skip


def sound(seed, frames=tiny.FRAMES):
    g = torch.Generator().manual_seed(seed)
    return dict(input_features=torch.randn(1, tiny.AUDIO["num_mel_bins"], frames, generator=g))


def test_sounds_with_their_own_options():
    model, fast = pair("transcriber")
    requests = [(sound(seed, tiny.FRAMES - 30 * (seed % 2)), options) for seed, options in enumerate(SOUNDS.values())]
    wanted = []
    for arguments, options in requests:
        tokens = model.generate(**arguments, **options, force_unique_generate_call=True, max_new_tokens=25)[0].tolist()
        wanted.append(tokens)
    with running(fast, max_requests_per_batch=2) as manager:
        for number, (arguments, options) in enumerate(requests):
            manager.add_request(**arguments, **options, request_id=f"{number}", max_new_tokens=25)
        outputs = collect(manager, len(requests))
    for number in range(len(requests)):
        output = outputs[f"{number}"]
        assert output.error is None
        both = [output.prompt_ids + output.generated_tokens, output.generated_tokens]
        assert wanted[number] in both


def test_a_drawn_sound():
    _, fast = pair("transcriber")
    options = dict(language="en", do_sample=True, temperature=0.9, max_new_tokens=12)
    torch.manual_seed(4)
    wanted = fast.generate(**sound(1), **options)[0].tolist()
    with running(fast, max_requests_per_batch=2) as manager:
        name = manager.add_request(**sound(1), **options, seed=4)
        tokens = collect(manager, 1)[name].generated_tokens
    assert wanted in (tokens, tokens[:-1])


# --- what is refused


def test_wrong_requests():
    _, fast = pair("bart")
    ids = one("bart", 0)["input_ids"]
    wrong = {
        "expected a source, its input_features or its encoder_outputs, got none": {},
        "the encoder has positions for 128 tokens, got 129": dict(input_ids=[5] * 129),
        f"token id {VOCAB} is outside the vocabulary": dict(input_ids=[5, VOCAB]),
        "decoder_input_ids: token id 99 is outside": dict(input_ids=ids, decoder_input_ids=[EOS, 99]),
        "attention_mask: expected the source's size, and a token": dict(input_ids=ids, attention_mask=[1, 1]),
        "got [1, 12]": dict(input_ids=ids, attention_mask=torch.zeros_like(ids)),
        "encoder_outputs: expected states [1, places, 64], got [1, 5, 3]": dict(encoder_outputs=torch.zeros(1, 5, 3)),
        "a prompt of 1 tokens and 200 new ones": dict(input_ids=ids, max_new_tokens=200),
        "prompt_logprobs: they are not told of prompts with pictures or a source": dict(
            input_ids=ids, prompt_logprobs=1
        ),
    }
    with running(fast, max_requests_per_batch=2) as manager:
        for message, arguments in wrong.items():
            with pytest.raises(ValueError) as raised:
                manager.add_request(**arguments)
            assert message in str(raised.value)
        with pytest.raises(TypeError, match="unknown option 'language' of a request"):
            manager.add_request(ids, language="en")
        with pytest.raises(ValueError, match="beam search: only generate"):
            manager.add_request(ids, num_beams=2)
    with running(pair("m2m_100")[1]) as manager, pytest.raises(ValueError, match="with padding tokens"):
        manager.add_request(ids, decoder_input_ids=[EOS, PAD, 20])


def test_wrong_sounds():
    with running(pair("transcriber")[1]) as manager:
        for shape in ((1, 16, tiny.FRAMES + 1), (1, 80, 10), (2, 16, 10)):
            with pytest.raises(ValueError, match=r"expected .1, 16, at most 100., one piece of a sound"):
                manager.add_request(input_features=torch.zeros(*shape))
        with pytest.raises(TypeError, match="unknown option 'no_speech_threshold'"):
            manager.add_request(**sound(0), no_speech_threshold=0.5)
        config = pair("transcriber")[0].generation_config
        for name in intake.OF_SEGMENTS:
            own = copy.deepcopy(config)
            setattr(own, name, 0.5)
            with pytest.raises(ValueError, match=f"{name}: only generate"):
                manager.add_request(**sound(0), generation_config=own)


def test_an_encoder_that_fails_ends_its_request_alone(monkeypatch):
    model, fast = pair("plbart")
    wanted, calls, own = expected(model, one("plbart", 1), max_new_tokens=10), [], intake.SourcePrefill.pieces

    def fails_once(*args):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("no such place")
        yield from own(*args)

    monkeypatch.setattr(intake.SourcePrefill, "pieces", fails_once)
    with running(fast, max_requests_per_batch=2) as manager:
        for number in range(2):
            manager.add_request(**one("plbart", number), request_id=f"{number}", max_new_tokens=10)
        outputs = collect(manager, 2)
    assert outputs["0"].error == "no such place" and outputs["1"].generated_tokens == wanted
