"""Drafts over the source of their target, and models of sounds, against transformers' own generate(), for tiny ones."""

import copy
import functools
import warnings

import distributions
import encoder_decoders as tiny
import models
import pytest
import torch
import transformers
from encoder_decoders import EOS

import spec_compile
from spec_compile.contrib.encoder_decoder import inputs, moonshine
from spec_compile.contrib.encoder_decoder.draft import encoder_of

NEW = 30
OPTIONS = dict(compile=False, cache=False, adaptive=False)
"""Every round drafts, whatever it costs."""
OF_A_DECODER = {"bart": transformers.BartForCausalLM, "transcriber": transformers.WhisperForCausalLM}


@functools.cache
def target(family):
    return tiny.transcriber(std=0.2) if family == "transcriber" else tiny.build(family)


@functools.cache
def plain(family):
    return spec_compile.speculate(target(family), **OPTIONS)


@functools.cache
def draft_of(family, kind):
    """A draft with the target's weights but for a little noise in its last layer.

    kind: "whole" has the target's encoder, "other" a slightly different one, "lone" none.
    """
    model = target(family)
    config = copy.deepcopy(model.config)
    made = OF_A_DECODER[family](config) if kind == "lone" else copy.deepcopy(model)
    made.load_state_dict({name: x for name, x in model.state_dict().items() if name in made.state_dict()})
    with torch.no_grad():
        made.get_decoder().layers[-1].fc2.weight.mul_(0.98)
        if kind == "other":
            made.get_encoder().layers[0].fc1.weight.mul_(0.999)
    return made.eval()


@functools.cache
def drafted(family, kind):
    return spec_compile.speculate(target(family), "draft_model", draft=draft_of(family, kind), **OPTIONS)


ROTARY = dict(
    vocab_size=96, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=4,
    max_position_embeddings=128, pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
)  # fmt: skip
MOONSHINES = ("plain", "padded heads", "streaming", "another width")


@functools.cache
def moonshine_of(name, seed=0):
    """A tiny Moonshine, whose heads may be padded, or a Moonshine Streaming, whose encoder may have another width."""
    if name in ("plain", "padded heads"):
        config = transformers.MoonshineConfig(
            **ROTARY, encoder_num_hidden_layers=2, decoder_num_hidden_layers=2, encoder_num_attention_heads=4,
            pad_head_dim_to_multiple_of=24 if name == "padded heads" else None,
        )  # fmt: skip
        model = transformers.MoonshineForConditionalGeneration(config)
    else:
        encoder = dict(
            hidden_size=48 if name == "another width" else 64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, sliding_windows=[[4, 2], [4, 0]],
        )  # fmt: skip
        config = transformers.MoonshineStreamingConfig(encoder_config=encoder, num_hidden_layers=2, **ROTARY)
        model = transformers.MoonshineStreamingForConditionalGeneration(config)
    models._randomise(model, torch.Generator().manual_seed(seed), std=0.3, embed=0.25)
    model.generation_config.update(eos_token_id=None, max_length=None)
    return model.eval()


def waves(batch, samples=8000, seed=0):
    """Random sounds; row b is shorter by a fifth of a second times b."""
    values = torch.randn(batch, samples, generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(samples) < samples - 1600 * torch.arange(batch)[:, None]).long()
    return dict(input_values=values * mask, attention_mask=mask)


def sounds(batch, frames, seed=0):
    g = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, tiny.AUDIO["num_mel_bins"], frames, generator=g)
    return dict(input_features=features, attention_mask=torch.ones(batch, frames, dtype=torch.int64))


def run(model, **options):
    """The answer, and the mean number of tokens of a round; fails if transformers' own loop runs."""
    stats = model.speculation.stats
    stats.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*without speculation")
        return model.generate(**options), stats.accept_length


# --- drafts over the same source


@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", ["whole", "other", "lone"])
def test_a_draft_attends_to_the_source(kind):
    fast = drafted("bart", kind)
    for batch in (1, 3):
        options = tiny.sources("bart", batch, seed=batch) | dict(max_new_tokens=NEW)
        expected = target("bart").generate(**options)
        answer, length = run(fast, **options)
        assert torch.equal(expected, answer) and length > 2
        answer, length = run(plain("bart"), **options, assistant_model=draft_of("bart", kind))
        assert torch.equal(expected, answer) and length > 2
    own = encoder_of(draft_of("bart", kind), target("bart"))
    assert own is (draft_of("bart", kind).get_encoder() if kind == "other" else None)
    assert ("its own encoder" in fast.speculation.explain()) == (kind == "other")


def test_several_answers_to_a_source():
    options = tiny.sources("bart", 3) | dict(max_new_tokens=NEW, do_sample=True, top_k=1, num_return_sequences=2)
    expected = target("bart").generate(**options)
    answer, length = run(drafted("bart", "other"), **options)
    assert torch.equal(expected, answer) and length > 2


def test_an_output_of_the_encoder_as_the_source():
    model, source = target("bart"), tiny.sources("bart", 2)
    options = dict(max_new_tokens=NEW, attention_mask=source["attention_mask"])
    encoded = lambda: model.get_encoder()(**source)  # noqa: E731
    expected = model.generate(**source, max_new_tokens=NEW)
    assert torch.equal(run(drafted("bart", "whole"), encoder_outputs=encoded(), **options)[0], expected)
    fast = drafted("bart", "other")
    with pytest.raises(ValueError, match=r"^encoder_outputs: the draft has another encoder than the model"):
        fast.generate(encoder_outputs=encoded(), **options)
    assert torch.equal(run(fast, **source, max_new_tokens=NEW)[0], expected)


def test_drafts_with_ngrams():
    options = tiny.sources("bart", 3) | dict(max_new_tokens=NEW)
    draft = draft_of("bart", "other")
    fast = spec_compile.speculate(target("bart"), "draft_model", draft=draft, ngram=True, **OPTIONS)
    answer, length = run(fast, **options)
    assert torch.equal(target("bart").generate(**options), answer) and length > 2


def test_draws_with_a_draft_have_the_distribution_of_the_model():
    model = tiny.build("bart", vocab_size=6, max_position_embeddings=32, std=0.15)
    draft = tiny.build("bart", vocab_size=6, max_position_embeddings=32, std=0.15, seed=1)
    chances = tiny.chances(model, EOS)
    for method in ("greedy", "probabilistic"):
        fast = spec_compile.speculate(model, "draft_model", draft=draft, draft_sample_method=method, **OPTIONS)
        assert tiny.fit_of_draws(fast, chances) > distributions.FITS


SOUNDS = {
    "short": (1, dict(language="en"), 2.0),
    "detected": (1, {}, 2.0),
    "timestamps": (1, dict(language="de", return_timestamps=True), 1.0),
    "long": (3, dict(language="en", return_timestamps=True), 1.0),
    "conditioned": (3, dict(language="en", return_timestamps=True, condition_on_prev_tokens=True), 1.0),
}
"""For each its pieces, its options, and a number that the mean tokens of a round exceed. Drafts do not know the rules
of timestamps, which decide most tokens of random models."""


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("short", "whole"), ("detected", "lone"), ("timestamps", "other"), ("long", "other"), ("conditioned", "lone")],
)
def test_sounds(name, kind):
    pieces, options, least = SOUNDS[name]
    for batch in (1, 2):
        given = sounds(batch, pieces * tiny.FRAMES) | options
        answer, length = run(drafted("transcriber", kind), **given)
        assert torch.equal(target("transcriber").generate(**given), answer) and length > least


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("name", "kind"),
    [("short", "other"), ("detected", "lone"), ("timestamps", "whole"), ("long", "lone"), ("conditioned", "other")],
)
def test_an_assistant_of_a_call(name, kind):
    """With an assistant Whisper suppresses no first tokens. transformers' own assisted decoding takes one row, and with
    timestamps its tokens differ from greedy decoding (seen with 5.24)."""
    (pieces, options, least), model, draft = SOUNDS[name], target("transcriber"), draft_of("transcriber", kind)
    unsuppressed = copy.deepcopy(model.generation_config)
    unsuppressed.begin_suppress_tokens = None
    for batch in (1, 2):
        given = sounds(batch, pieces * tiny.FRAMES) | options | dict(max_new_tokens=NEW)
        expected = model.generate(**given, generation_config=unsuppressed)
        answer, length = run(plain("transcriber"), **given, assistant_model=draft)
        assert torch.equal(expected, answer) and length > least
        if batch == 1 and least > 1:
            assert torch.equal(model.generate(**given, assistant_model=draft), answer)


# --- Moonshine


@pytest.mark.parametrize("name", MOONSHINES)
def test_sounds_of_any_length(name):
    model = moonshine_of(name)
    fast = spec_compile.speculate(model, compile=False, cache=False, adaptive=False)
    for batch, samples in ((1, 8000), (3, 8000), (2, 12000)):
        options = waves(batch, samples, seed=batch) | dict(max_new_tokens=NEW)
        answer, length = run(fast, **options)
        assert torch.equal(model.generate(**options), answer) and length > 1
    expected, answer = (
        each.generate(**waves(2), max_new_tokens=8, return_dict_in_generate=True, output_logits=True)
        for each in (model, fast)
    )
    assert torch.equal(expected.sequences, answer.sequences)
    assert all(torch.allclose(x, y, atol=1e-4) for x, y in zip(expected.logits, answer.logits, strict=True))


@pytest.mark.parametrize("name", ["plain", "another width"])
def test_a_draft_for_sounds_of_any_length(name):
    model, options = moonshine_of(name), waves(2) | dict(max_new_tokens=NEW)
    for factor in (1.0, 0.999):
        draft = copy.deepcopy(model)
        with torch.no_grad():
            draft.get_decoder().layers[-1].mlp.fc2.weight.mul_(0.98)
            draft.get_encoder().layers[0].mlp.fc1.weight.mul_(factor)
        fast = spec_compile.speculate(model, "draft_model", draft=draft, **OPTIONS)
        answer, length = run(fast, **options)
        assert torch.equal(model.generate(**options), answer) and length > 2
        assert ("its own encoder" in fast.speculation.explain()) == (factor < 1)


def test_a_sound_that_is_too_long_steps_aside():
    model = moonshine_of("plain")
    fast = spec_compile.speculate(model, compile=False, cache=False)
    options = waves(1, (moonshine.SECONDS + 1) * 16_000) | dict(max_new_tokens=4)
    with pytest.warns(UserWarning, match=r"encoder_outputs \(of 27\d\d places\).* without speculation"):
        answer = fast.generate(**options)
    assert torch.equal(model.generate(**options), answer)


# --- wrong calls are refused before any work, and the next call is served


def floats(*shape):
    return torch.zeros(shape)


def ids(*shape):
    return torch.full(shape, 5)


def states(*shape):
    return transformers.modeling_outputs.BaseModelOutput(floats(*shape))


WHISPER, SAMPLES = (
    r"expected \[batch, 16 mel bins, frames\], got ",
    r"expected \[batch, samples\] with 895 samples or more",
)
PROMPT = dict(input_ids=ids(2, 9))
WRONG = {
    "another processor": ("transcriber", dict(input_features=floats(1, 80, 100)), f"^input_features: {WHISPER}float32"),
    "frames first": ("transcriber", dict(input_features=floats(1, 100, 16)), f"^input_features: {WHISPER}float32"),
    "samples": ("transcriber", dict(input_features=floats(1, 16000)), f"^input_features: {WHISPER}float32"),
    "integers": ("transcriber", dict(input_features=ids(1, 16, 100)), f"^input_features: {WHISPER}int64"),
    "an array": ("transcriber", dict(input_features=floats(1, 16, 100).numpy()), "^input_features: expected a tensor"),
    "no source": ("transcriber", {}, "Make sure to provide either `input_features` or `encoder_outputs`"),
    "too many tokens": ("transcriber", sounds(1, 100) | dict(max_new_tokens=500), "max_new_tokens"),
    "features": ("moonshine", dict(input_values=floats(1, 80, 3000)), f"^input_values: {SAMPLES}"),
    "one row": ("moonshine", dict(input_values=floats(8000)), f"^input_values: {SAMPLES}"),
    "a short sound": ("moonshine", dict(input_values=floats(1, 894)), f"^input_values: {SAMPLES}"),
    "half a frame": ("streaming", dict(input_values=floats(1, 8001)), "^input_values: .* a multiple of 80, got"),
    "one text": ("bart", dict(input_ids=ids(9)), r"^input_ids: expected token ids \[batch, at least one token\]"),
    "empty texts": ("bart", dict(input_ids=ids(1, 0)), "^input_ids: expected token ids"),
    "narrow embeddings": ("bart", dict(inputs_embeds=floats(2, 9, 32)), r"^inputs_embeds: expected .*places, 64\]"),
    "another encoder": ("bart", dict(encoder_outputs=states(2, 9, 32)), r"^encoder_outputs: expected .*places, 64\]"),
    "one prompt": ("bart", PROMPT | dict(decoder_input_ids=ids(1, 2)), "^decoder_input_ids: .* of 2 sources, got 1"),
    "three prompts": ("bart", PROMPT | dict(decoder_input_ids=ids(3, 2)), "^decoder_input_ids: .* of 2 sources, got 3"),
    "a flat prompt": ("bart", PROMPT | dict(decoder_input_ids=ids(2)), "^decoder_input_ids: expected token"),
    "floats as a prompt": ("bart", PROMPT | dict(decoder_input_ids=floats(2, 2)), "^decoder_input_ids: expected token"),
    "a long prompt": ("bart", PROMPT | dict(decoder_input_ids=ids(2, 126)), "^max_new_tokens: .* ask for at most 1"),
}  # fmt: skip


@functools.cache
def any_pair(name):
    """A model, its speculative version, and the arguments of a call that is served."""
    if name in OF_A_DECODER:
        source = sounds(1, tiny.FRAMES) | dict(language="en") if name == "transcriber" else tiny.sources(name, 2)
        return target(name), plain(name), source
    model = moonshine_of("plain" if name == "moonshine" else name)
    return model, spec_compile.speculate(model, compile=False, cache=False), waves(1)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls(name):
    family, options, message = WRONG[name]
    model, fast, served = any_pair(family)
    more = dict(language="en") if family == "transcriber" else {}
    with pytest.raises(TypeError if name == "an array" else ValueError, match=message):
        fast.generate(**dict(max_new_tokens=6) | more | options)
    assert torch.equal(model.generate(**served, max_new_tokens=6), fast.generate(**served, max_new_tokens=6))


def test_the_shortest_sound():
    assert any_pair("moonshine")[1].generate(floats(1, inputs.SHORTEST), max_new_tokens=2).shape[1] > 1


def test_wrong_drafts():
    bart = functools.partial(tiny.build, "bart")
    narrow = transformers.BartForCausalLM(transformers.BartConfig(**tiny.SIZES | dict(d_model=32))).eval()
    for draft, message in (
        (bart(vocab_size=200), "^draft: its vocabulary of 200 tokens is not the model's"),
        (narrow, "^draft: BartForCausalLM attends to an encoder of d_model 32, the model's has 64"),
        (bart(max_position_embeddings=64), "^draft: .* takes sources of 64 places, the model 128"),
        (target("transcriber"), "^draft: WhisperForConditionalGeneration reads input_features, the model input_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            spec_compile.speculate(target("bart"), "draft_model", draft=draft, **OPTIONS)
    with pytest.raises(ValueError, match=r"^draft: the encoder of Whisper\S+ reads 8 mel bins, the model's 16"):
        draft = tiny.transcriber(num_mel_bins=8)
        spec_compile.speculate(target("transcriber"), "draft_model", draft=draft, **OPTIONS)
    with pytest.raises(ValueError, match="different tokenizers"):
        plain("bart").generate(**tiny.sources("bart"), assistant_model=bart(vocab_size=200))
