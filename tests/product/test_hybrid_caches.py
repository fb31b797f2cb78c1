"""Caches of models with recurrences, in and out of generate(): transformers' tokens and states."""

import warnings
from inspect import signature

import hybrids
import models
import pytest
import torch
from hybrids import answer, states_of, system, turns
from transformers import DynamicCache, StaticCache

import spec_compile
from spec_compile.compat import CACHE, STATES

NAMES = ["lfm2", "qwen3_5", "falcon_h1"]
SLOW = [name for name in models.HYBRIDS if name not in NAMES and name not in hybrids.PURE]
HANDED_OUT = ["lfm2", "qwen3_next", "falcon_h1"]
NEW = hybrids.TURN


def are_close(ours, theirs, bound=2e-5):
    """States of two caches, or tensors; those of single steps differ from those of a chunk in the last bits."""
    pairs = zip(*(each if isinstance(each, list) else states_of(each) for each in (ours, theirs)), strict=True)
    assert all((one - other).abs().max() <= bound * other.abs().max() for one, other in pairs)


@pytest.mark.sweep("qwen3_5")
@pytest.mark.parametrize("name", [*NAMES, *SLOW])
def test_a_cache_goes_from_one_call_to_the_next(name):
    """Rows of unequal length, with drafts that are mostly right. What is not served is equal, too."""
    model, fast = system(name)
    bound = 2 * hybrids.NOISY[name] if name in hybrids.NOISY else 1e-5  # both caches are as far from a plain forward
    with warnings.catch_warnings():
        warnings.simplefilter("error" if name in NAMES else "ignore")
        for lengths in ((5, 33, 20), (40,)):
            wanted = turns(model, lengths, DynamicCache(config=model.config))
            fast.speculation.stats.reset()
            got = turns(fast, lengths, DynamicCache(config=model.config), reference=[*wanted[-1][0]])
            for (text, states), (expected, theirs) in zip(got, wanted):
                assert torch.equal(text, expected)
                for one, other in zip(states, theirs, strict=True):
                    assert (one - other).abs().max() <= bound * other.abs().max()
            assert name not in NAMES or 0 < fast.speculation.stats.rounds < 3 * NEW / 2


def test_a_static_cache_and_rows_that_end_early():
    """Then our states are further on than the cache goes, or not so far, and the model itself fills it."""
    model, fast = system("qwen3_5")
    ids, mask = hybrids.batch((5, 33, 20), seed=2)
    long = answer(model, ids, mask)
    eos = [int(long[0, ids.shape[1] + 4]), int(long[1, ids.shape[1] + 20])]
    caches = [StaticCache(config=model.config, max_cache_len=160) for _ in range(2)]
    plain, got = [
        turns(system, (5, 33, 20), cache, eos_token_id=eos, **extra)
        for system, cache, extra in zip((model, fast), caches, ({}, {"reference": [*long]}))
    ]
    assert [text.tolist() for text, _ in got] == [text.tolist() for text, _ in plain]
    are_close(caches[1], caches[0])


def attended(cache, mask):
    """Keys and values [..., Hkv, D] of the positions that count, in the order of layers."""
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    whole = torch.nn.functional.pad(mask, (0, cache.get_seq_length() - mask.shape[1]), value=1).bool()
    pairs = [(each, whole[:, -each.shape[2] :]) for layer in layers for each in (layer.keys, layer.values)]
    return [each.transpose(1, 2)[seen] for each, seen in pairs]


@pytest.mark.sweep("lfm2 qwen3_next falcon_h1")
@pytest.mark.parametrize("name", [*HANDED_OUT, *sorted({*NAMES, *SLOW} - {*HANDED_OUT})])
def test_a_returned_cache_is_transformers_own(name):
    """States, past inputs of convolutions, keys and values; after prompts that are shorter than a convolution, too.
    Each model continues the other's."""
    model, fast = system(name)
    options, bound = dict(new=5, return_dict_in_generate=True), 2 * hybrids.NOISY.get(name, 1e-5)
    for lengths in ((2,), (9, 5, 1)):
        ids, mask = hybrids.batch(lengths)
        embeds = "inputs_embeds" in signature(model.prepare_inputs_for_generation).parameters
        for given in (None, model.get_input_embeddings()(ids)) if embeds else (None,):
            begun = dict(ids=ids) if given is None else dict(ids=None, inputs_embeds=given)
            plain, got = (answer(each, mask=mask, **begun, **options) for each in (model, fast))
            assert torch.equal(got.sequences, plain.sequences)
            assert got[CACHE].get_seq_length() == plain[CACHE].get_seq_length()
            are_close(got[CACHE], plain[CACHE], bound)
            are_close(attended(got[CACHE], mask), attended(plain[CACHE], mask), bound)
            text, seen = (
                torch.cat([ids, plain.sequences[:, -5:]], dim=1),
                torch.nn.functional.pad(mask, (0, 5), value=1),
            )
            expected = answer(model, text, seen, 6)
            for each, cache in ((model, got[CACHE]), (fast, plain[CACHE])):
                assert torch.equal(answer(each, text, seen, 6, **{CACHE: cache}), expected)


@pytest.mark.slow
def test_a_head_whose_cache_is_of_another_call_sees_the_prompt_again():
    model = models.HYBRIDS["qwen3_5"]()
    fast = spec_compile.speculate(
        model,
        "eagle3",
        draft=hybrids.heads_of(model),
        num_steps=3,
        topk=3,
        num_draft_tokens=8,
        compile=False,
        check=False,
    )
    cache = DynamicCache(config=model.config)
    ids, mask = hybrids.batch((20,))
    answer(model, ids[:, :12], mask[:, :12], 3, **{CACHE: cache})
    ids = torch.cat([answer(model, ids[:, :12], mask[:, :12], 3), ids[:, 12:]], dim=1)
    mask = torch.ones_like(ids)
    expected = answer(model, ids, mask, NEW)
    assert torch.equal(answer(fast, ids, mask, NEW, **{CACHE: cache}), expected)


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("jamba", marks=pytest.mark.slow)])
def test_embeddings_in_place_of_a_prompt(name):
    """The model's own forward reads them, so that states are behind the root already when the first round begins."""
    model, fast = system(name)
    ids, mask = hybrids.batch((5, 33, 20))
    options = dict(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask, max_new_tokens=NEW)
    options |= dict(do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=name != "jamba")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, plain = fast.generate(**options), model.generate(**options)
    if name == "jamba":
        assert torch.equal(got, plain)
        return
    assert torch.equal(got.sequences, plain.sequences)
    are_close(got[CACHE], plain[CACHE])


def test_a_model_that_does_not_read_states_keeps_its_own_loop():
    """Transformers' Mamba forgets the states of a cache in a forward over several tokens, and we answer as it does."""
    model, fast = system.__wrapped__("jamba")  # not the shared one, which may have warned before
    ids, mask = hybrids.batch((40,))
    caches = [answer(model, ids[:, :30], mask[:, :30], 1, return_dict_in_generate=True) for _ in range(2)]
    expected = answer(model, ids, mask, 8, **{CACHE: caches[0][CACHE]})
    with pytest.warns(UserWarning, match=rf"{CACHE} \(the model's forward over several tokens does not read"):
        got = answer(fast, ids, mask, 8, **{CACHE: caches[1][CACHE]})
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", [hybrids.PURE[1], pytest.param(hybrids.PURE[0], marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_given", [True, False], ids=["given", "returned"])
def test_a_cache_of_only_states_is_left_to_transformers(name, is_given):
    """Such a cache counts no tokens. Rounds do not fill it, and serve the model if nobody asks for it."""
    model, fast = system(name)
    fast.speculation.engine._announced.clear()
    ids, mask = hybrids.batch((9, 20))
    caches, texts = [], []
    for each in (model, fast):
        asked = {STATES: DynamicCache(config=model.config)} if is_given else {"return_dict_in_generate": True}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            output = answer(each, ids, mask, NEW, **asked)
        texts.append(output if is_given else output.sequences)
        caches.append(asked.get(STATES))
    assert torch.equal(*texts)
    assert [str(warning.message).startswith(f"{STATES} (of a model without attention)") for warning in caught] == [True]
    if is_given:
        are_close(*caches)
    fast.speculation.stats.reset()
    assert torch.equal(answer(fast, ids, mask, NEW), texts[0]) and fast.speculation.stats.rounds > 0
