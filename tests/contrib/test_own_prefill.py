"""Prompts with pictures in pieces between rounds, and with what earlier requests have left of them."""

import functools
import itertools

import models
import pytest
import torch
from batch_requests import collect, running, stopped
from models import speculate_captured
from picture_models import PICTURE, fast, heads, inputs, model
from transformers import LlamaConfig

from spec_compile.cache import PAGE
from spec_compile.contrib.own_prefill import pictures, prefill, rows
from spec_compile.drafters.modules.eagle import Eagle3Head

NEW = 12
PLACES = {"Llava": 16, "Qwen2_5_VL": 4, "Qwen3VL": 4, "Gemma3": 4}


@functools.cache
def layered(name):
    """EAGLE-3 with a random head that has taps of layers only."""
    torch.manual_seed(0)
    target = model(name)
    shared = target.get_input_embeddings().weight, (1, 0, 2), models.BASE["hidden_size"]
    head = Eagle3Head(LlamaConfig(**models.GQA16), *shared, head_weight=target.get_output_embeddings().weight)
    options = dict(draft=head.requires_grad_(False).eval(), num_steps=2)
    return speculate_captured(target, "eagle3", **options, compile=False, check=False)


def expected(name, arguments):
    wanted = model(name).generate(**arguments, max_new_tokens=NEW, do_sample=False)
    return wanted[0, arguments["input_ids"].shape[1] :].tolist()


def long(name, before=90, count=2, seed=0, after=40):
    """A prompt of `before` tokens of text, pictures, and `after` tokens, and the tokens before each picture's end."""
    arguments = inputs(name, (count,), seed)
    g = torch.Generator().manual_seed(100)
    first, last = (torch.randint(3, 80, (1, length), generator=g) for length in (before, after))
    ids = torch.cat([first, arguments["input_ids"], last], dim=1)
    arguments["input_ids"], arguments["attention_mask"] = ids, torch.ones_like(ids)
    for types in {"token_type_ids", "mm_token_type_ids"} & arguments.keys():
        arguments[types] = (ids == PICTURE).long()
    return arguments


def other(name, arguments, picture):
    """The same ids and sizes, with another picture in one place."""
    pixels = arguments["pixel_values"].clone()
    grid = arguments.get("image_grid_thw")
    parts = pixels.split(1 if grid is None else grid.prod(dim=1).tolist())
    parts[picture].add_(1)
    return arguments | {"pixel_values": pixels}


def asked(system, requests):
    """The last outputs of requests that come one after the other."""
    with running(system, max_requests_per_batch=2) as manager:
        outputs = []
        for arguments in requests:
            name = manager.add_request(**arguments, max_new_tokens=NEW)
            outputs.append(collect(manager, 1)[name])
    system.destroy_cached_continuous_batching_manager()
    assert [output.error for output in outputs] == [None] * len(outputs)
    return outputs


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("make", [fast, heads, layered])
def test_beginnings_are_shared_by_the_contents_of_pictures(name, make, monkeypatch):
    """A text before pictures serves, and pictures with the same contents; other pictures with the same ids do not."""
    monkeypatch.setitem(pictures.PIECE, "cpu", 24)
    first = long(name)
    places = (first["input_ids"][0] == PICTURE).nonzero().flatten()
    requests = [first, first, other(name, first, 1), other(name, first, 0)]
    shorter = {key: first[key][:, : places[-1] + 5] for key in first.keys() & {"input_ids", "attention_mask"}}
    requests.append(shorter)  # ids without their pictures
    outputs = asked(make(name), requests)
    for arguments, output in zip(requests, outputs):
        if arguments is not shorter:
            assert output.generated_tokens == expected(name, arguments)
    wanted = make(name).generate(**shorter, max_new_tokens=NEW, do_sample=False)[0, shorter["input_ids"].shape[1] :]
    assert outputs[-1].generated_tokens == wanted.tolist()

    # How much each of them began with.
    reused = [output.speculation.reused_prompt_tokens for output in outputs]
    width, begin = first["input_ids"].shape[1], int(places[0])
    assert reused[0] == 0 and width - 4 <= reused[1] < width
    is_divided = name in ("Llava", "Qwen2_5_VL") and make is not heads
    second = int(places[places.diff(prepend=places[:1] - 1) > 1][0])  # where the second picture begins
    assert second - 2 <= reused[2] <= second if is_divided else reused[2] == 0
    assert begin - 2 <= reused[3] <= begin if is_divided else reused[3] == 0
    assert begin - 2 <= reused[4] <= begin


@pytest.mark.parametrize("name", ["Llava", "Qwen2_5_VL", "Qwen3VL"])
def test_the_next_turn_of_a_chat_reads_no_picture_again(name, monkeypatch):
    first, calls, own = long(name, count=1), [], prefill.OwnPrefill.begins
    answer = expected(name, first)
    monkeypatch.setattr(rows.OwnRows, "process", lambda *_, own=rows.OwnRows.process: (calls.append(1), own(*_)))
    added = torch.tensor([[*answer, 5, 8, 9, 4]])
    second = dict(first)
    for key in {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"} & first.keys():
        values = {"input_ids": added, "attention_mask": torch.ones_like(added)}.get(key, torch.zeros_like(added))
        second[key] = torch.cat([first[key], values], dim=1)
    outputs = asked(fast(name), [first, second])
    assert [output.generated_tokens for output in outputs] == [answer, expected(name, second)]
    assert outputs[1].speculation.reused_prompt_tokens >= first["input_ids"].shape[1] - 1 and len(calls) == 1
    assert own is prefill.OwnPrefill.begins


@pytest.mark.parametrize("name", ["Llava", "Qwen2_5_VL"])
def test_rounds_go_on_between_pieces(name, monkeypatch):
    monkeypatch.setitem(pictures.PIECE, "cpu", 16)
    text, prompt = inputs(name, (0,)), long(name, before=3 * PAGE, after=60)
    manager, _ = stopped(fast(name), max_requests_per_batch=3)
    manager.add_request(**text, request_id="text", max_new_tokens=60, speculation=False)
    with torch.no_grad():
        manager.scheduler.step()
        (row,) = manager.scheduler.begun
        manager.add_request(**prompt, request_id="pictures", max_new_tokens=NEW)
        told = []
        while manager.scheduler.is_busy:
            manager._deliver(manager.scheduler.step())
            if manager.scheduler.prefill.owned:
                told.append((manager.scheduler.prefill.owned[0].done, len(row.tokens)))
    done, gained = zip(*told)
    assert len(told) > 8 and {*torch.tensor(done).diff().tolist()} == {16}
    assert {*torch.tensor(gained).diff().tolist()} == {1}
    outputs = {output.request_id: output for output in manager.output_router.output_queue.queue}
    assert outputs["pictures"].generated_tokens == expected(name, prompt)
    wanted = model(name).generate(**text, max_new_tokens=60, do_sample=False)[0, text["input_ids"].shape[1] :]
    assert outputs["text"].generated_tokens == wanted.tolist()
    manager.destroy()


@pytest.mark.parametrize("ending", ["cancelled", "taken", "failed"])
def test_a_prompt_that_leaves_between_pieces(ending, monkeypatch):
    monkeypatch.setitem(pictures.PIECE, "cpu", 16)
    prompt = long("Llava", before=2 * PAGE)
    manager, run = stopped(fast("Llava"), max_requests_per_batch=2)
    scheduler = manager.scheduler
    for name in ("first", "second"):
        manager.add_request(**prompt, request_id=name, max_new_tokens=NEW)
    count = 0

    def leave():
        nonlocal count
        count += 1
        if count == 3 and ending == "cancelled":
            manager.cancel_request("first")
        elif count == 3 and ending == "taken":
            scheduler._preempt(scheduler.prefill.owned[0])
        elif count == 3:
            scheduler.prefill.own._pieces = (1 / 0 for _ in range(2))

    outputs = run(leave)
    assert outputs["second"].generated_tokens == expected("Llava", prompt)
    reasons = {"cancelled": "cancelled", "taken": "length", "failed": "error"}
    assert outputs["first"].finish_reason == reasons[ending] and outputs["second"].finish_reason == "length"
    if ending == "taken":
        assert outputs["first"].generated_tokens == expected("Llava", prompt) and scheduler.preemptions == 1
    scheduler.prefixes.forget()
    assert scheduler.pages.free == scheduler.pages.usable and not scheduler.prefill.own.state.kv.table.any()
    manager.destroy()


def test_nothing_is_shared_where_equal_bits_are_promised():
    system = speculate_captured(model("Llava"), compile=False, exact="request")
    outputs = asked(system, [long("Llava")] * 2)
    assert [output.speculation.reused_prompt_tokens for output in outputs] == [0, 0]
    assert [output.generated_tokens for output in outputs] == [expected("Llava", long("Llava"))] * 2


def test_token_types_that_mark_other_tokens_share_nothing():
    first = long("Gemma3")
    odd = first | {"token_type_ids": first["token_type_ids"].clone()}
    odd["token_type_ids"][0, 0] = 1
    manager, _ = stopped(fast("Gemma3"), max_requests_per_batch=2)
    for arguments in (first, odd):
        manager.add_request(**arguments, max_new_tokens=2)
    assert [each.keys is None for each in manager.scheduler.waiting] == [False, True]
    manager.destroy()


def test_contents_of_each_picture():
    grid, patches = torch.tensor([[1, 4, 4], [1, 4, 8]]), torch.randn(48, 6)
    one, two = pictures.contents_of({"image_grid_thw": grid, "pixel_values": patches}, 2)
    assert torch.equal(one["pixel_values"], patches[:16]) and torch.equal(two["pixel_values"], patches[16:])
    assert one["image_grid_thw"].tolist() == [1, 4, 4]
    whole = {"pixel_values": torch.randn(1, 2, 3), "image_sizes": torch.ones(2, 2)}
    assert all(part is whole for part in pictures.contents_of(whole, 2))
    tensors = [patches, patches.double(), patches.view(6, 48), patches.bfloat16(), patches + 1]
    assert len({pictures.digest_of({"pixel_values": each}) for each in tensors}) == 5
    assert pictures.digest_of({"pixel_values": patches.T}) != pictures.digest_of({"pixel_values": patches})


def test_numbers_are_never_given_twice(monkeypatch):
    monkeypatch.setattr(pictures, "_numbers", itertools.count(-1, -1))
    number_of = functools.lru_cache(2)(pictures.number_of.__wrapped__)
    given = [number_of(digest) for digest in (b"a", b"b", b"a", b"c", b"a", b"b")]
    assert given == [-1, -2, -1, -3, -1, -4]


def test_parts_of_a_language_models_arguments():
    embeds, mask = torch.randn(1, 9, 4), torch.ones(1, 9)
    good = dict(inputs_embeds=embeds, attention_mask=mask, position_ids=torch.ones(3, 1, 9), use_cache=True, x=None)
    assert pictures.is_divisible(good, 9) and not pictures.is_divisible(good, 8)
    for name, value in (("attention_mask", {}), ("deepstack", [embeds]), ("argument 0", embeds), ("inputs_embeds", 0)):
        assert not pictures.is_divisible(good | {name: value}, 9)
    part = pictures.cut(good, 2, 5)
    assert torch.equal(part["inputs_embeds"], embeds[:, 2:5]) and part["position_ids"].shape == (3, 1, 3)
    assert part["attention_mask"].shape == (1, 5) and part["use_cache"] is True and part["x"] is None


@pytest.mark.parametrize("name", ["Llava", "Qwen2_5_VL"])
def test_keys_of_pieces_are_those_of_the_whole(name, monkeypatch):
    """The target's and the draft's: by one piece, by several, and after a beginning that was known."""
    prompt, kept = long(name), []
    length = prompt["input_ids"].shape[1] - 1
    for size, known in ((1000, False), (24, False), (24, True)):
        monkeypatch.setitem(pictures.PIECE, "cpu", size)
        manager, run = stopped(layered(name), max_requests_per_batch=2)
        if known:
            manager.add_request(**other(name, prompt, 1), max_new_tokens=1)
            run()
        manager.add_request(**prompt, max_new_tokens=NEW)
        with torch.no_grad():
            while not manager.scheduler.decoder.active:
                manager.scheduler.step()
        (sequence,) = manager.scheduler.decoder.active
        assert bool(sequence.speculation.reused_prompt_tokens) == known
        slots = [
            each[sequence.pages].transpose(1, 2).flatten(0, 1) for each in manager.scheduler.decoder.cache_tensors()
        ]
        kept.append([each[: length - 1].clone() for each in slots])
        run()
        manager.destroy()
    for parts in kept[1:]:
        for one, whole in zip(parts, kept[0], strict=True):
            torch.testing.assert_close(one, whole, atol=1e-4, rtol=1e-4)
