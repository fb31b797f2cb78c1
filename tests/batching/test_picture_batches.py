"""Prompts with pictures in continuous batching and in the server: what their own generate() gives."""

import copy

import pytest
import torch
from batch_requests import collect, running
from picture_models import NAMES, PICTURE, fast, heads, inputs, model

import spec_compile

NEW = 16
OFTEN, WITH_HEADS = ["Gemma3", "Qwen3VL"], ["Gemma3", "Qwen2_5_VL"]


def expected(name, arguments, **options):
    options = dict(max_new_tokens=NEW, do_sample=False) | options
    return model(name).generate(**arguments, **options)[0, arguments["input_ids"].shape[1] :].tolist()


def answers(fast, requests):
    with running(fast, max_requests_per_batch=2) as manager:
        for number, arguments in enumerate(requests):
            manager.add_request(**arguments, request_id=f"r{number}", max_new_tokens=NEW)
        outputs = collect(manager, len(requests))
    assert [outputs[f"r{number}"].error for number in range(len(requests))] == [None] * len(requests)
    return [outputs[f"r{number}"].generated_tokens for number in range(len(requests))]


@pytest.mark.sweep("Gemma3 Qwen3VL")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in OFTEN else pytest.mark.slow) for n in NAMES])
def test_rows_with_pictures_beside_rows_without(name):
    """The last has the ids of the one before and other pictures, so that nothing of that may serve it."""
    requests = [inputs(name, (count,), seed) for seed, count in enumerate((1, 0, 2))]
    requests.append(requests[2] | {"pixel_values": requests[2]["pixel_values"].flip(-1) + 1})
    systems = [fast(name), heads(name)] if name in WITH_HEADS else [fast(name)]
    for system in systems:  # a head is given what the model made of pictures
        assert answers(system, requests) == [expected(name, arguments) for arguments in requests]


def test_what_is_refused_and_what_fails_alone():
    arguments = inputs("Gemma3")
    with running(fast("Gemma3"), max_requests_per_batch=2) as manager:
        with pytest.raises(ValueError, match="ends in a picture"):
            manager.add_request(**inputs("Gemma3", ending=0))
        with pytest.raises(ValueError, match="attention_mask: a request has one prompt without padding"):
            manager.add_request(**arguments | {"attention_mask": 0 * arguments["attention_mask"]})
        with pytest.raises(TypeError, match="unknown option 'audio_values'"):
            manager.add_request(**arguments, audio_values=torch.zeros(1, 1))
        wrong = arguments["input_ids"].masked_fill(arguments["input_ids"] == PICTURE, 5)
        manager.add_request(**arguments | {"input_ids": wrong}, request_id="wrong", max_new_tokens=NEW)
        manager.add_request(**arguments, request_id="right", max_new_tokens=NEW)
        outputs = collect(manager, 2)
    assert outputs["wrong"].finish_reason == "error" and "mage" in outputs["wrong"].error
    assert outputs["right"].generated_tokens == expected("Gemma3", arguments)


def test_ids_without_their_pictures_are_another_prompt():
    """Nothing of the request before may serve it, though the ids are alike."""
    arguments = inputs("Gemma3", (2,))
    ids = {name: arguments[name] for name in ("input_ids", "attention_mask")}
    wanted = fast("Gemma3").generate(**ids, max_new_tokens=NEW, do_sample=False)[0, ids["input_ids"].shape[1] :]
    with running(fast("Gemma3"), max_requests_per_batch=2) as manager:
        for name, request in (("pictures", arguments), ("ids", ids)):
            manager.add_request(**request, request_id=name, max_new_tokens=NEW)
            output = collect(manager, 1)[name]
    assert output.generated_tokens == wanted.tolist() != expected("Gemma3", arguments)


def test_several_sequences_of_one_picture():
    arguments = inputs("Gemma3")
    torch.manual_seed(5)
    options = dict(do_sample=True, max_new_tokens=6, num_return_sequences=2)
    rows = fast("Gemma3").generate(**arguments, **options)[:, arguments["input_ids"].shape[1] :].tolist()
    with running(fast("Gemma3"), max_requests_per_batch=2) as manager:
        name = manager.add_request(**arguments, seed=5, **options)
        outputs = collect(manager, 2)
    assert [outputs[f"{name}__child#0"].generated_tokens, outputs[name].generated_tokens] == rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("name", ["Gemma3", "Qwen3VL"])
def test_on_a_gpu(name, compile):
    target = copy.deepcopy(model(name)).cuda()
    fast = spec_compile.speculate(target, compile=compile, max_cache_len=512)
    requests = [inputs(name, (count,), seed) for seed, count in enumerate((1, 0, 2, 1))]
    requests = [{key: value.cuda() for key, value in request.items()} for request in requests]
    wanted = [
        target.generate(**request, max_new_tokens=NEW, do_sample=False)[0, request["input_ids"].shape[1] :].tolist()
        for request in requests
    ]
    assert answers(fast, requests) == wanted
