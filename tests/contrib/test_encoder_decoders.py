"""Encoder-decoders: rounds over states of their sources against transformers' own generate(), for tiny random ones."""

import functools
import warnings

import distributions
import encoder_decoders as tiny
import models
import pytest
import tokenizers
import torch
import transformers
from encoder_decoders import EOS, PAD, VOCAB
from torch.nn import functional as F
from transformers import EncoderDecoderCache, GenerationConfig

import spec_compile
from spec_compile import UnsupportedModelError
from spec_compile.contrib.encoder_decoder import kind

NEW = 40
FEATURES = tiny.AUDIO["num_mel_bins"]


@functools.cache
def pair(family):
    """A model and its speculative version."""
    model = tiny.transcriber(std=0.2) if family == "transcriber" else tiny.BUILDERS[family]()
    return model, spec_compile.speculate(model, compile=False, cache=False, adaptive=False)


def answers(family, aside="", **options):
    """The answers of both, and the mean number of tokens of a round, 0 if transformers' own loop ran. aside: a part of
    the one warning that says why it did; "" for none."""
    model, fast = pair(family)
    fast.speculation.stats.reset()
    fast.speculation.engine._announced.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        expected, answer = (each.generate(**options) for each in (model, fast))
    told = [str(each.message) for each in seen if "without speculation" in str(each.message)]
    assert len(told) == bool(aside) and all(aside in each for each in told)
    return expected, answer, fast.speculation.stats.accept_length


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def alike(expected, answer):
    """True if all tokens are equal, and all scores and times nearly."""
    both = [*zip(tensors_in(expected), tensors_in(answer), strict=True)]
    return bool(both) and all(
        torch.allclose(x, y, atol=1e-4) if x.is_floating_point() else torch.equal(x, y) for x, y in both
    )


# --- the kind of recurrence


def test_padding_of_a_source_is_hidden():
    g = torch.Generator().manual_seed(0)
    q, keys, values = (torch.randn(2, *shape, generator=g) for shape in ((3, 4, 16), (4, 6, 16), (4, 6, 16)))
    seen = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 1, 1, 0, 1, 0]]).bool()
    state, weights = kind.pack(keys, values, seen, room=9), [torch.zeros(4, 5, 40), torch.zeros(9)]
    assert state.shape == (2, *kind.SOURCE.state([q, *weights])[0])
    for row in range(2):
        k, v = keys[row][:, seen[row]], values[row][:, seen[row]]
        expected = F.softmax(torch.einsum("thd,hsd->hts", q[row], k), dim=-1) @ v
        torch.testing.assert_close(kind.SOURCE.tree([q, *weights], state, None)[row], expected.transpose(0, 1))
    out, after = kind.SOURCE.chunk([q, *weights], state, torch.tensor([3, 0]))
    assert torch.equal(after, state) and torch.equal(out, kind.SOURCE.tree([q, *weights], state, None))


def test_a_row_without_a_source_gets_the_example():
    g = torch.Generator().manual_seed(0)
    q, example = torch.randn(2, 3, 4, 16, generator=g), torch.randn(1, 4, 5, 32, generator=g)
    example = kind.pack(*example.split(16, dim=3), None, 5)[0]
    state = torch.zeros(2, 4, 9, 40)
    state[1] = kind.pack(torch.ones(1, 4, 2, 16), torch.ones(1, 4, 2, 16), None, 9)[0]
    _, after = kind.SOURCE.chunk([q, example, torch.zeros(9)], state, torch.tensor([3, 3]))
    assert torch.equal(after[0, :, :5], example) and (after[0, :, 5:, -1] == kind.HIDDEN).all()
    assert torch.equal(after[1], state[1])


# --- the same answers


# The others have parts of these: MBart, PLBart and a small Blenderbot those of Bart, Pegasus those of Marian, and T5's
# relatives are in test_t5.py.
@pytest.mark.sweep("bart bigbird_pegasus blenderbot longt5 m2m_100 marian umt5 whisper")
@pytest.mark.parametrize("family", tiny.CLASSES)
def test_answers_are_equal(family):
    for batch in (1, 3):
        expected, answer, length = answers(family, **tiny.sources(family, batch, seed=batch), max_new_tokens=NEW)
        assert torch.equal(expected, answer) and length > 1


OPTIONS = {
    "forced tokens": dict(forced_bos_token_id=7, forced_eos_token_id=EOS),
    "ends": dict(eos_token_id=[9, 33, 60], pad_token_id=PAD, min_length=6),
    "no repetition": dict(no_repeat_ngram_size=3, repetition_penalty=1.3),
    "suppressed tokens": dict(suppress_tokens=[9, 10, 11], begin_suppress_tokens=[30, EOS]),
    "tokens of the source": dict(encoder_no_repeat_ngram_size=2, encoder_repetition_penalty=1.5),
    "no cache": dict(use_cache=False),
    "several": dict(num_return_sequences=2),
    "prompt": dict(decoder_input_ids=torch.tensor([[EOS, 20, 21, 22, 20, 21, 22, 20]] * 3)),
}


@pytest.mark.parametrize("family", ["bart", "m2m_100"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(family, name):
    options = dict(max_new_tokens=NEW) | OPTIONS[name]
    if name == "several":
        model, fast = pair(family)
        torch.manual_seed(0)
        answer = fast.generate(**tiny.sources(family, 3), do_sample=True, top_k=1, **options)
        assert torch.equal(answer, model.generate(**tiny.sources(family, 3), do_sample=True, top_k=1, **options))
        return
    expected, answer, _ = answers(family, **tiny.sources(family, 3), **options)
    assert torch.equal(expected, answer)


def test_a_call_is_not_answered_from_another_source():
    model, fast = pair("bart")
    for seed in range(4):
        options = tiny.sources("bart", seed=seed) | dict(max_new_tokens=12)
        assert torch.equal(model.generate(**options), fast.generate(**options))


def test_drafts_come_from_the_source():
    _, fast = pair("blenderbot")
    engine, ids = fast.speculation.engine, tiny.sources("blenderbot", 2)["input_ids"]
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    options = dict(input_ids=ids, attention_mask=mask)
    seen = []

    def keep(input_ids, scores, **_):
        seen.append([each.tolist() for each in engine.wishes["references"]])
        return torch.zeros(len(input_ids), dtype=torch.bool)

    for named in ({}, {"reference": [7, 8, 9]}):
        fast.generate(**options, **named, max_new_tokens=2, stopping_criteria=transformers.StoppingCriteriaList([keep]))
    assert seen[0] == [ids[0].tolist(), ids[1, 5:].tolist()] and seen[-1] == [[7, 8, 9]]


def test_a_decoder_as_a_draft():
    model, fast = pair("bart")
    draft = models.ADMITTED["llama"]()
    options = tiny.sources("bart", 3) | dict(max_new_tokens=NEW)
    expected = model.generate(**options)
    assert torch.equal(expected, fast.generate(**options, assistant_model=draft))
    drafted = spec_compile.speculate(model, "draft_model", draft=draft, compile=False, cache=False)
    for _ in range(2):  # the second time with what the draft keeps of the first
        assert torch.equal(expected, drafted.generate(**options))


def test_new_weights_are_taken_over():
    model = tiny.build("plbart")
    fast = spec_compile.speculate(model, compile=False, cache=False)
    options = tiny.sources("plbart", 2) | dict(max_new_tokens=NEW)
    attention = model.model.decoder.layers[0].encoder_attn
    attention.k_proj.weight = torch.nn.Parameter(1.5 * attention.k_proj.weight.detach())
    with pytest.raises(RuntimeError, match=r"encoder_attn\.k_proj\.weight was moved or replaced"):
        fast.generate(**options)
    fast.speculation.refresh()
    assert torch.equal(model.generate(**options), fast.generate(**options))


def test_the_output_has_scores_and_both_caches():
    options = dict(max_new_tokens=NEW, return_dict_in_generate=True, output_scores=True, output_logits=True)
    for family, batch in (("bart", 1), ("m2m_100", 3)):
        ends = dict(eos_token_id=[9, 33, 60], pad_token_id=PAD) if batch > 1 else {}
        expected, answer, _ = answers(family, **tiny.sources(family, batch), **options | ends)
        assert type(answer) is type(expected) and answer.keys() == expected.keys()
        for name in ("sequences", "scores", "logits"):
            assert alike(expected[name], answer[name])
        assert type(answer.cache) is EncoderDecoderCache and answer.cache.is_updated == expected.cache.is_updated
        for part in ("self_attention_cache", "cross_attention_cache"):
            for one, other in zip(*(getattr(each.cache, part).layers for each in (expected, answer)), strict=True):
                torch.testing.assert_close(one.keys, other.keys, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(one.values, other.values, atol=1e-4, rtol=1e-4)


# --- sampling


def test_draws_have_the_distribution_of_the_model():
    model = tiny.build("bart", vocab_size=6, max_position_embeddings=32, std=0.15)
    fast = spec_compile.speculate(model, compile=False, cache=False)
    assert tiny.fit_of_draws(fast, tiny.chances(model, EOS)) > distributions.FITS
    answers = []
    for speculation in (None, False):
        torch.manual_seed(1)
        options = dict(do_sample=True, top_k=0, max_new_tokens=12, num_return_sequences=4)
        answers.append(fast.generate(tiny.SOURCE, **options, speculation=speculation))
    assert torch.equal(*answers)


# --- Whisper


def sounds(batch, frames, seed=0):
    g = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, FEATURES, frames, generator=g)
    return dict(input_features=features, attention_mask=torch.ones(batch, frames, dtype=torch.int64))


STRICT = dict(temperature=(0.0,), logprob_threshold=-0.01, compression_ratio_threshold=1.35, no_speech_threshold=1e-5)
SHORT = {
    "plain": dict(language="en"), "timestamps": dict(language="de", return_timestamps=True), "detected": {},
    "prompt": dict(language="en", prompt_ids=torch.tensor([112, 20, 21, 22, 23])),
    "scores": dict(language="en", return_dict_in_generate=True, output_scores=True, task="translate"),
}  # fmt: skip
LONG = {
    "plain": {}, "segments": dict(return_segments=True), "thresholds": STRICT,
    "conditioned": dict(condition_on_prev_tokens=True),
    "prompt": dict(
        prompt_ids=torch.tensor([112, 20, 21]), condition_on_prev_tokens=True, prompt_condition_type="all-segments"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHORT)
def test_short_sounds(name):
    expected, answer, length = answers("transcriber", **sounds(2, tiny.FRAMES), **SHORT[name])
    assert alike(expected, answer) and length > 1


@pytest.mark.parametrize("name", LONG)
def test_long_sounds(name):
    options = dict(language="en", return_timestamps=True) | LONG[name]
    expected, answer, length = answers("transcriber", **sounds(2, 3 * tiny.FRAMES), **options)
    assert alike(expected, answer) and length > 1


class Tokenizer(transformers.PreTrainedTokenizerFast):
    """Writes tokens as numbers."""

    def __init__(self):
        numbers = {str(token): token for token in range(200)}
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="0"))
        super().__init__(tokenizer_object=words, pad_token="2", eos_token="2", unk_token="0")

    def _decode_asr(self, outputs, **_):
        return " ".join(str(token) for output in outputs for token in output["tokens"].flatten().tolist()), {}


@pytest.mark.parametrize("seconds", [1, 3])
def test_the_pipeline_transcribes(seconds):
    extractor = transformers.WhisperFeatureExtractor(feature_size=FEATURES, chunk_length=1)
    sound = torch.randn(16000 * seconds, generator=torch.Generator().manual_seed(0)).numpy()
    options = dict(tokenizer=Tokenizer(), feature_extractor=extractor)
    texts = [
        transformers.pipeline("automatic-speech-recognition", model=model, **options)(
            sound, return_timestamps=seconds > 1, generate_kwargs=dict(language="en")
        )["text"]
        for model in pair("transcriber")
    ]
    assert texts[0] == texts[1] != ""


# --- what is not served steps aside, and what is wrong is refused


@pytest.mark.parametrize(
    ("options", "aside"),
    [
        (dict(num_beams=2), "num_beams"),
        (dict(cache_implementation="static"), "cache_implementation"),
        (dict(return_dict_in_generate=True, output_attentions=True), "output_attentions"),
        (dict(decoder_input_ids=torch.tensor([[2, 20, 21]]), decoder_attention_mask=torch.tensor([[0, 1, 1]])),
         "attention_mask (padding on the left"),
    ],
)  # fmt: skip
def test_transformers_own_loop_runs(options, aside):
    expected, answer, length = answers("bart", aside, **tiny.sources("bart"), max_new_tokens=8, **options)
    assert alike([*expected.values()] if isinstance(expected, dict) else expected, answer) and length == 0


def test_a_cache_of_the_user_steps_aside():
    cache = lambda: EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())  # noqa: E731
    model, fast = pair("bart")
    options = tiny.sources("bart") | dict(max_new_tokens=8)
    with pytest.warns(UserWarning, match="cache.* without speculation"):
        fast.speculation.engine._announced.clear()
        answer = fast.generate(**options, cache=cache())
    assert torch.equal(answer, model.generate(**options, cache=cache()))


def test_padding_in_a_prompt_that_positions_skip():
    prompt = dict(decoder_input_ids=torch.tensor([[EOS, PAD, 20, 21]]), max_new_tokens=8)
    expected, answer, _ = answers("m2m_100", "decoder_input_ids (with padding", **tiny.sources("m2m_100"), **prompt)
    assert torch.equal(expected, answer)


def test_generated_padding_that_positions_skip():
    class Alternate(transformers.LogitsProcessor):
        """Every third token is padding."""

        def __call__(self, input_ids, scores):
            if input_ids.shape[1] % 3 == 0:
                scores = torch.full_like(scores, -torch.inf)
                scores[:, PAD] = 0.0
            return scores

    processors = transformers.LogitsProcessorList([Alternate()])
    options = dict(logits_processor=processors, max_new_tokens=NEW, return_dict_in_generate=True, output_logits=True)
    expected, answer, _ = answers("m2m_100", **tiny.sources("m2m_100"), **options)
    assert torch.equal(expected.sequences, answer.sequences) and (answer.sequences == PAD).sum() > NEW // 4
    assert alike(expected.logits, answer.logits)


def test_wrong_inputs():
    _, fast = pair("bart")
    with pytest.raises(ValueError, match=r"^input_ids: the encoder has positions for 128 tokens, got 129; shorten it"):
        fast.generate(input_ids=torch.full((1, 129), 5))
    with pytest.raises(ValueError, match=f"^input_ids: expected token ids below {VOCAB}, got 5 to {VOCAB}"):
        fast.generate(input_ids=torch.tensor([[5, VOCAB]]))
    with pytest.raises(ValueError, match=r"^max_new_tokens: prompt and new tokens make 201 tokens, .* at most 127"):
        fast.generate(**tiny.sources("bart"), generation_config=GenerationConfig(max_new_tokens=200, pad_token_id=PAD))
    with pytest.raises(ValueError, match=r"^model: an audit reads prompts of causal language models"):
        fast.speculation.audit([[3, 4, 5]])


def test_a_class_that_differs_is_refused():
    model = tiny.build("bart")
    attention = model.model.decoder.layers[1].encoder_attn
    own = attention.forward
    attention.forward = lambda hidden_states, *args, **kwargs: own(1.5 * hidden_states, *args, **kwargs)
    with pytest.raises(UnsupportedModelError, match="differs from the model's own forward"):
        spec_compile.speculate(model, compile=False, cache=False)


def test_a_later_start_is_from_an_artefact(tmp_path):
    model = tiny.build("marian")
    options = tiny.sources("marian", 3) | dict(max_new_tokens=NEW)
    for is_later in (False, True):
        fast = spec_compile.speculate(model, compile=False, cache=tmp_path)
        assert fast.speculation.is_from_artefact == is_later
        assert torch.equal(model.generate(**options), fast.generate(**options))
