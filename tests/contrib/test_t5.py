"""T5 and its relatives: biases by distance in rounds against transformers' own generate(), for tiny random models."""

import functools

import distributions
import encoder_decoders as tiny
import models
import pytest
import torch
import transformers
from encoder_decoders import PAD, VOCAB

import spec_compile
from spec_compile.contrib.encoder_decoder import decoder, t5

FAR = 60
"""Tokens of an answer, three times the largest distance that the tiny models tell from others."""


@functools.cache
def pair(family):
    """A model and its speculative version."""
    model = tiny.build(family)
    return model, spec_compile.speculate(model, compile=False, cache=False, adaptive=False)


@pytest.mark.parametrize("family", ["t5", "umt5", "longt5"])
def test_the_table_has_the_bias_of_each_distance(family):
    part = tiny.build(family).get_decoder().block[0].layer[0].SelfAttention
    table = part.relative_attention_bias(t5.buckets_of(part)).T
    told = part.compute_bias(FAR, FAR)[0, :, -1].flip(1)  # the last query's, from itself to the first key
    assert torch.equal(table[:, torch.arange(FAR).clamp(max=table.shape[1] - 1)], told)
    assert len(table.unique()) == 4 * len(part.relative_attention_bias.weight)


@pytest.mark.parametrize("family", ["t5", "flan_t5", "umt5"])
def test_far_answers_are_equal(family):
    model, fast = pair(family)
    fast.speculation.stats.reset()
    options = tiny.sources(family, 3, seed=5) | dict(max_new_tokens=FAR)
    assert torch.equal(model.generate(**options), fast.generate(**options))
    assert fast.speculation.stats.accept_length > 1


def test_a_biased_model_answers_in_another_way_without_its_biases():
    model = tiny.build("t5")
    options = tiny.sources("t5", 3, seed=5) | dict(max_new_tokens=FAR)
    before = model.generate(**options)
    model.get_decoder().block[0].layer[0].SelfAttention.relative_attention_bias.weight.data.zero_()
    assert not torch.equal(before, model.generate(**options))


def test_biases_that_change_are_followed():
    model = tiny.build("umt5")
    fast = spec_compile.speculate(model, compile=False, cache=False, adaptive=False)
    options = tiny.sources("umt5", 2) | dict(max_new_tokens=FAR)
    before = fast.generate(**options)
    with torch.no_grad():
        for block in model.get_decoder().block:
            block.layer[0].SelfAttention.relative_attention_bias.weight.mul_(-3.0)
    answer = fast.generate(**options)
    assert torch.equal(model.generate(**options), answer) and not torch.equal(before, answer)


@pytest.mark.parametrize("padded", [0, 3])
def test_prompts_of_the_decoder(padded):
    model, fast = pair("t5")
    prompts = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(prompts)
    prompts[1, :padded], mask[1, :padded] = PAD, 0
    options = tiny.sources("t5", 2) | dict(decoder_input_ids=prompts, decoder_attention_mask=mask, max_new_tokens=FAR)
    assert torch.equal(model.generate(**options), fast.generate(**options))


def test_draws_have_the_distribution_of_the_model():
    model = tiny.build("t5", vocab_size=6, std=0.15)
    fast = spec_compile.speculate(model, compile=False, cache=False, adaptive=False)
    assert tiny.fit_of_draws(fast, tiny.chances(model, PAD)) > distributions.FITS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    """In half precision transformers keeps a part of each layer in float32, and clamps what lies beyond."""
    model = tiny.build("flan_t5").to(dtype)
    if dtype == torch.float16:
        for name, part in model.named_modules():
            if name.endswith(".wo"):
                part.float()
    fast = spec_compile.speculate(model, compile=False, cache=False, adaptive=False)
    options = tiny.sources("flan_t5", 2) | dict(max_new_tokens=20)
    answers = [fast.generate(**options, speculation=speculation) for speculation in (None, False)]
    assert answers[0].shape == answers[1].shape and (answers[0] == answers[1]).float().mean() > 0.5


def test_a_source_of_embeddings():
    """As Pop2Piano's, which come from sounds."""
    model, fast = pair("t5")
    fast.speculation.stats.reset()
    embeds = model.get_input_embeddings()(tiny.sources("t5", 2)["input_ids"])
    options = dict(inputs_embeds=embeds, max_new_tokens=FAR)
    assert torch.equal(model.generate(**options), fast.generate(**options))
    assert fast.speculation.stats.accept_length > 1


def test_music():
    config = transformers.Pop2PianoConfig(**tiny.SIZES | tiny.BY_DISTANCE | dict(composer_vocab_size=1))
    model = transformers.Pop2PianoForConditionalGeneration(config).eval()
    models._randomise(model, torch.Generator().manual_seed(0), std=0.3, embed=0.25)
    own = dict(max_length=None, eos_token_id=None, composer_to_feature_token={"composer1": 90})
    vars(model.generation_config).update(own)
    fast = spec_compile.speculate(model, compile=False, cache=False, adaptive=False)
    features = torch.randn(2, 20, config.d_model, generator=torch.Generator().manual_seed(0))
    options = dict(input_features=features, max_new_tokens=FAR)
    assert torch.equal(model.generate(**options), fast.generate(**options))
    assert fast.speculation.stats.accept_length > 1


# --- sources of any length


@pytest.mark.parametrize(
    ("named", "room"),
    [(dict(n_positions=64), 64), (dict(), decoder.ANY_LENGTH), (dict(n_positions=64, max_source_positions=90), 90)],
)
def test_room_for_sources(named, room):
    config = tiny.build("t5", **dict(n_positions=None) | named).config
    assert decoder.room_of(config) == room


def test_a_longer_source_is_refused_and_gets_room_by_name():
    model, fast = pair("t5")
    source = tiny.sources("t5", length=70)
    with pytest.raises(ValueError, match=r"input_ids: .* room for 64 tokens, got 70; .*config\.max_source_positions"):
        fast.generate(**source, max_new_tokens=8)
    wide = tiny.build("t5")
    wide.config.max_source_positions = 70
    fast = spec_compile.speculate(wide, compile=False, cache=False)
    options = source | dict(max_new_tokens=FAR)
    assert torch.equal(model.generate(**options), fast.generate(**options))
