"""Prompts with pictures: the same tokens as transformers' generate()."""

import copy
import itertools
import warnings
from types import SimpleNamespace
from unittest import mock

import models
import pytest
import torch
import transformers
from models import speculate_captured
from picture_models import NAMES, PICTURE, START, VIDEO, fast, heads, inputs, model

import spec_compile
from spec_compile.compat import CACHE

OFTEN = {"Gemma3", "LlavaNext", "Qwen2_5_VL", "Qwen3VLMoe"}
CASES = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
COUNTS = {"no picture": (0,), "one": (1,), "two": (2,), "padding on the left": (2, 1), "some rows": (1, 0, 2)}
NEW = 32


def both(name, *, silent=True, **arguments):
    """The tokens of transformers and ours; the latter must come without a warning."""
    arguments = dict(max_new_tokens=NEW, do_sample=False) | arguments
    want = model(name).generate(**arguments)
    with warnings.catch_warnings():
        if silent:
            warnings.simplefilter("error")
        return want, fast(name).generate(**arguments)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("name", CASES)
def test_the_same_tokens(name, counts):
    want, got = both(name, **inputs(name, counts))
    assert torch.equal(want, got)


@pytest.mark.parametrize("name", CASES)
def test_another_picture_another_answer(name):
    """So the tests above would see it if a picture was lost."""
    arguments = inputs(name)
    first = fast(name).generate(**arguments, max_new_tokens=NEW, do_sample=False)
    arguments["pixel_values"] = arguments["pixel_values"].flip(-1) + 1
    assert not torch.equal(first, fast(name).generate(**arguments, max_new_tokens=NEW, do_sample=False))


@pytest.mark.parametrize("name", CASES)
def test_trees_are_drafted_from_what_follows_a_picture(name):
    arguments, system = inputs(name), speculate_captured(model(name), compile=False, adaptive=False)
    answer = system.generate(**arguments, max_new_tokens=NEW, do_sample=False)
    system.speculation.stats.reset()
    again = system.generate(**arguments, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(answer, again) and system.speculation.stats.rounds < NEW / 2


@pytest.mark.parametrize("name", CASES)
def test_heads_see_what_the_model_itself_has_processed(name):
    """A prompt without pictures can be processed either way, and a head's cache is then the same."""
    arguments, caches = inputs(name, (0, 0)) | dict(max_new_tokens=1, do_sample=False), []
    for is_own in (False, True):
        with mock.patch("spec_compile.runtime.prompt._has_pictures", lambda kwargs, is_own=is_own: is_own):
            heads(name).generate(**arguments)
        session = heads(name).speculation.engine.session(2)
        session.pay()  # earlier drafts may not have paid, so that the prompt was put off
        lengths = arguments["attention_mask"].sum(dim=1) - 1
        caches.append([t[row, :, :n].clone() for t in session.drafter.cache.tensors for row, n in enumerate(lengths)])
        for tensor in session.drafter.cache.tensors:
            tensor.zero_()
    for ours, own in zip(*caches):
        assert ours.abs().max() > 0.1
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-4)


def with_llama(name):
    """A model with a draft model, which sees no pictures."""
    draft = models.ADMITTED["llama"]()
    return speculate_captured(model(name), "draft_model", draft=draft, num_steps=2, compile=False, check=False)


@pytest.mark.parametrize(
    "name, system",
    [*((name, heads) for name in NAMES), ("Llava", with_llama), ("Qwen3VL", with_llama)],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.sweep("Gemma3-heads LlavaNext-heads Qwen2_5_VL-heads Qwen3VLMoe-heads Llava-with_llama")
def test_drafts_for_prompts_with_pictures(name, system):
    arguments = inputs(name, (2, 1)) | dict(max_new_tokens=NEW, do_sample=False)
    assert torch.equal(model(name).generate(**arguments), system(name).generate(**arguments))


CALLS = {
    "processors": dict(repetition_penalty=1.3, no_repeat_ngram_size=3),
    "sampling of one": dict(do_sample=True, top_k=1),
    "several sequences": dict(do_sample=True, top_k=1, num_return_sequences=2),
    "a chunk at a time": dict(prefill_chunk_size=64),
    "a static cache": dict(cache_implementation="static"),
    "no cache": dict(use_cache=False, suppress_tokens=[PICTURE]),
    "few tokens": dict(max_new_tokens=1),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("name", CASES)
def test_options_of_generate(name, call):
    want, got = both(name, **inputs(name, (1, 2)) | dict(max_new_tokens=12) | call)
    assert torch.equal(want, got)


@pytest.mark.parametrize("name", CASES)
def test_streamers_criteria_outputs_and_a_second_turn(name):
    """Scores and the cache that is returned, behind which a second call goes on without pictures."""
    arguments, results = inputs(name, (1, 2)), []
    mask, width = arguments["attention_mask"], arguments["attention_mask"].shape[1]
    asked = dict(max_new_tokens=12, do_sample=False)
    for each in (model(name), fast(name)):
        streamed = []
        first = each.generate(
            **arguments, **asked, return_dict_in_generate=True, output_logits=True,
            stopping_criteria=[lambda ids, scores, **_: torch.full((len(ids),), ids.shape[1] >= width + 6)],
        )  # fmt: skip
        added = torch.cat([first.sequences, torch.arange(3, 13).view(2, 5)], dim=1)
        seen = torch.nn.functional.pad(mask, (0, added.shape[1] - width), value=1)
        second = each.generate(input_ids=added, attention_mask=seen, **{CACHE: first[CACHE]}, **asked)
        streamer = SimpleNamespace(put=lambda value: streamed.append(value.tolist()), end=lambda: None)  # noqa: B023
        each.generate(**inputs(name), **asked, streamer=streamer)
        results.append((torch.stack(first.logits), first.sequences, second, streamed))
    ours, own = results
    torch.testing.assert_close(ours[0], own[0], rtol=1e-3, atol=1e-3)
    assert torch.equal(ours[1], own[1]) and ours[1].shape[1] == width + 6
    assert torch.equal(ours[2], own[2]) and ours[3] == own[3]


@pytest.mark.parametrize("name", ["Gemma3", "Llava"])
def test_a_prompt_may_end_in_a_picture(name):
    want, got = both(name, **inputs(name, (1, 2), ending=0))
    assert torch.equal(want, got)


def test_behind_a_picture_axes_differ():
    """transformers counts on in each axis from the picture's last token, which one offset cannot say."""
    with pytest.warns(UserWarning, match="position_ids"):
        want, got = both("Qwen2_5_VL", silent=False, **inputs("Qwen2_5_VL", ending=0))
    assert torch.equal(want, got)


@pytest.mark.parametrize("name", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL"])
def test_videos(name):
    frames = [[VIDEO] * 4, [5] if name == "Qwen3VL" else [], [VIDEO] * 4]  # Qwen3-VL marks the time of each frame
    ids = torch.tensor([[5, 6, 7, START, *itertools.chain(*frames), 8, 9, 10]])
    pixels = torch.randn(32, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(0))
    want, got = both(
        name, input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=2 * (ids == VIDEO).long(),
        pixel_values_videos=pixels, video_grid_thw=torch.tensor([[2, 4, 4]]),
    )  # fmt: skip
    assert torch.equal(want, got)


@pytest.mark.parametrize("name", CASES)
def test_a_picture_too_many(name):
    """The model's own error, and the next call is as if there had been none."""
    arguments = inputs(name)
    wrong = arguments | {"input_ids": arguments["input_ids"].masked_fill(arguments["input_ids"] == PICTURE, 5)}
    with pytest.raises(ValueError, match=r"(?i)image"):
        fast(name).generate(**wrong, max_new_tokens=4)
    want, got = both(name, **arguments)
    assert torch.equal(want, got)


def test_models_that_are_not_known_to_read_pictures_have_their_own_loop(monkeypatch):
    monkeypatch.setattr("spec_compile.capture.admit.READERS", set())
    with pytest.warns(UserWarning, match="pixel_values"):
        want, got = both("Llava", silent=False, **inputs("Llava"))
    assert torch.equal(want, got)


def test_marks_of_pictures_that_are_not_there():
    """Gemma 3 lets such tokens see each other in both directions."""
    arguments = inputs("Gemma3", (0,))
    arguments["token_type_ids"][:, 2:6] = 1
    with pytest.warns(UserWarning, match="token_type_ids"):
        want, got = both("Gemma3", silent=False, **arguments)
    assert torch.equal(want, got)


def test_attention_to_pictures_in_each_token_is_left_to_transformers():
    """Texts of such a model are served."""
    text = dict(models.GQA16, rope_parameters=dict(rope_type="default", rope_theta=10000.0), cross_attention_layers=[1])
    vision = dict(hidden_size=32, attention_heads=2, intermediate_size=48, image_size=16, patch_size=4)
    vision |= dict(num_hidden_layers=2, num_global_layers=1, intermediate_layers_indices=[0], vision_output_dim=64)
    vision |= dict(max_num_tiles=1, supported_aspect_ratios=[[1, 1]])
    config = transformers.MllamaConfig(text_config=text | models.SPECIAL, vision_config=vision, image_token_index=95)
    target = transformers.MllamaForConditionalGeneration(config).eval()
    models._randomise(target, torch.Generator().manual_seed(0))
    fast = spec_compile.speculate(target, compile=False)
    ids = models.prompts((12,))[0][0]
    request = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=None)
    assert torch.equal(fast.generate(ids, **request), plain := target.generate(ids, **request))
    assert fast.speculation.stats.tokens > 0
    one = torch.ones(1, 1, 1, dtype=torch.int64)
    request |= dict(pixel_values=torch.randn(1, 1, 1, 3, 16, 16), aspect_ratio_ids=one[0], aspect_ratio_mask=one)
    request |= dict(cross_attention_mask=torch.ones(1, 12, 1, 1, dtype=torch.int64))
    with pytest.warns(UserWarning, match="pixel_values"):
        got = fast.generate(ids, **request)
    assert torch.equal(got, target.generate(ids, **request)) and not torch.equal(got, plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("name", ["Gemma3", "LlavaNext", "Qwen2_5_VL", "Qwen3VL"])
def test_on_a_gpu(name, compile):
    """Captured rounds, uncompiled ones too, in float32. Every round drafts, whatever that costs."""
    target = copy.deepcopy(model(name)).cuda()
    fast = spec_compile.speculate(target, compile=compile, max_cache_len=512, adaptive=False)
    for counts in COUNTS.values():
        arguments = {key: value.cuda() for key, value in inputs(name, counts).items()}
        arguments |= dict(max_new_tokens=NEW, do_sample=False)
        want = target.generate(**arguments)
        assert torch.equal(want, fast.generate(**arguments)) and torch.equal(want, fast.generate(**arguments))
    assert fast.speculation.stats.accept_length > 1.5
