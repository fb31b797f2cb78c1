"""The drop-in: what transformers' own loops do, and errors, which are those of transformers."""

import functools
import math

import pytest
import torch
from drop_in import (
    IDS,
    MASK,
    PROMPTS,
    SINGLES,
    Recorder,
    assert_drop_in,
    generate,
    is_long,
    is_sure,
    models,
    moved,
    pair,
    primed,
    rows,
    tokenizer,
    two_of_three,
)
from models import VOCAB
from transformers import Cache, DynamicCache, GenerationConfig, TextStreamer
from transformers.cache_utils import DynamicLayer

from spec_compile.compat import CACHE
from spec_compile.errors import RequestError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*only transformers' own generate", "ignore:.*max_length"),
    pytest.mark.seldom("gpt2", "qwen3"),
]


# ---- what transformers' own loops do -------------------------------------------------------------------------------


def echo(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    return torch.cat([input_ids, input_ids[:, :3] // 2], 1)


class OwnLayer(DynamicLayer):
    """Keys and values that are kept in some other way, as far as we know."""


HOLE = MASK.clone()
HOLE[:, -4] = 0
ASIDE = {
    "num_beams": lambda: dict(num_beams=3, num_return_sequences=2),
    "output_hidden_states": lambda: dict(output_hidden_states=True, return_dict_in_generate=True),
    "output_attentions": lambda: dict(output_attentions=True, return_dict_in_generate=True),
    "assistant_early_exit": lambda: dict(assistant_early_exit=1, input_ids=SINGLES[0], attention_mask=None),
    "custom_generate": lambda: dict(custom_generate=echo),
    "attention_mask": lambda: dict(attention_mask=HOLE),
    "attention_mask / position_ids (anything but padding on the left)": lambda: dict(
        input_ids=IDS.flip(1), attention_mask=MASK.flip(1)
    ),
    "position_ids": lambda: dict(position_ids=(MASK.cumsum(1) * 2).clamp(max=300)),
    CACHE: lambda: {CACHE: Cache(layer_class_to_replicate=OwnLayer)},
    "torch.autocast": lambda: dict(),
}


@models
@pytest.mark.parametrize("argument", ASIDE)
def test_what_transformers_does_itself(name, argument):
    """Beams, hidden states and so on: the answer is that of transformers' loop, with one warning."""
    with torch.autocast("cpu", torch.bfloat16, enabled=argument == "torch.autocast"):
        assert_drop_in(*pair(name), lambda: PROMPTS["padded batch"] | ASIDE[argument](), aside=argument)


# ---- errors ---------------------------------------------------------------------------------------------------------


class RaisesAtCall:
    """A processor, criterion or `prefix_allowed_tokens_fn`."""

    def __init__(self, n, result):
        self.left, self.result = n, result

    def __call__(self, ids, scores):
        self.left -= 1
        if self.left == 0:
            raise KeyError("the user's")
        return self.result(ids, scores)


class BrokenStreamer(Recorder):
    def put(self, value):
        super().put(value)
        if len(self.calls) == 4:
            raise OSError("disk full")


class NeverEnds(Recorder):
    def end(self):
        raise OSError("disk full")


def nothing(ids, scores):
    return torch.zeros(len(ids), dtype=torch.bool)


ERRORS = {
    "max_length below the prompt's": lambda: dict(max_new_tokens=None, max_length=10),
    "max_length of the prompt": lambda: dict(max_new_tokens=None, max_length=24),
    "max_new_tokens=0": lambda: dict(max_new_tokens=0),
    "num_return_sequences": lambda: dict(num_return_sequences=2),
    "num_return_sequences, prompt lookup": lambda: dict(
        generation_config=GenerationConfig(prompt_lookup_num_tokens=3, num_return_sequences=2, do_sample=True)
    ),
    "unknown argument": lambda: dict(temprature=0.5),
    "unknown model argument": lambda: dict(pixel_values=torch.zeros(3, 3)),
    "stop_strings without a tokenizer": lambda: dict(stop_strings=["a"]),
    "stop_strings=[]": lambda: dict(stop_strings=[], tokenizer=tokenizer()),
    "token_healing without a tokenizer": lambda: dict(token_healing=True),
    "temperature=-1": lambda: dict(do_sample=True, temperature=-1.0),
    "temperature=0": lambda: dict(do_sample=True, temperature=0.0),
    "top_k=-1": lambda: dict(do_sample=True, top_k=-1),
    "top_p=-1": lambda: dict(do_sample=True, top_p=-1.0),
    "min_p=2": lambda: dict(do_sample=True, min_p=2.0),
    "top_h=2": lambda: dict(do_sample=True, top_h=2.0),
    "repetition_penalty=-1": lambda: dict(repetition_penalty=-1.0),
    "no_repeat_ngram_size=1.5": lambda: dict(no_repeat_ngram_size=1.5),
    "bad_words_ids=[]": lambda: dict(bad_words_ids=[]),
    "bad_words_ids beyond the vocabulary": lambda: dict(bad_words_ids=[[VOCAB]]),
    "sequence_bias={}": lambda: dict(sequence_bias={}),
    "forced_eos_token_id beyond the vocabulary": lambda: dict(forced_eos_token_id=VOCAB),
    "exponential_decay_length_penalty without eos": lambda: dict(
        exponential_decay_length_penalty=(3, 1.2), eos_token_id=None
    ),
    "eos of text": lambda: dict(eos_token_id="a"),
    "watermarking_config": lambda: dict(watermarking_config=dict(greenlist_ratio=2.0)),
    "num_beams=0": lambda: dict(num_beams=0),
    "streamer and num_beams": lambda: dict(num_beams=2, streamer=Recorder()),
    "contrastive search": lambda: dict(penalty_alpha=0.5, top_k=4),
    "use_mtp": lambda: dict(use_mtp=True),
    "assistant_model is no model": lambda: dict(assistant_model="x"),
    "mask of fewer rows": lambda: dict(attention_mask=MASK[:2]),
    "mask of four dimensions": lambda: dict(attention_mask=MASK[:, None, None]),
    "cache of tuples": lambda: {CACHE: ((MASK, MASK),)},
    "cache and cache_implementation": lambda: {CACHE: DynamicCache(), "cache_implementation": "static"},
    "cache_implementation": lambda: dict(cache_implementation="nonsense"),
    "cache_implementation=offloaded": lambda: dict(cache_implementation="offloaded"),  # needs a GPU
    "prefill_chunk_size=0": lambda: dict(prefill_chunk_size=0),
    "prefill_chunk_size and inputs_embeds": lambda: dict(
        input_ids=None, inputs_embeds=torch.ones(3, 24, 64), prefill_chunk_size=5
    ),
    "guidance_scale and inputs_embeds": lambda: dict(
        input_ids=None, inputs_embeds=torch.ones(3, 24, 64), guidance_scale=1.5
    ),
    "inputs and input_ids": lambda: dict(inputs=IDS),
    "input_ids of one dimension": lambda: dict(input_ids=IDS[0], attention_mask=None),
    "input_ids of floats": lambda: dict(input_ids=IDS.float()),
    "input_ids of a list": lambda: dict(input_ids=IDS.tolist()),
    "no rows": lambda: dict(input_ids=IDS[:0], attention_mask=None),
    "processor without a list": lambda: dict(logits_processor=moved),
    "criterion without a list": lambda: dict(stopping_criteria=is_long),
    "processor of None": lambda: dict(logits_processor=[lambda ids, scores: None]),
    "processor of fewer rows": lambda: dict(logits_processor=[lambda ids, scores: scores[:2]]),
    "processor of more rows": lambda: dict(logits_processor=[lambda ids, scores: scores.repeat(2, 1)]),
    "processor of NaN, sampling": lambda: dict(
        do_sample=True, top_k=0, logits_processor=[lambda ids, scores: scores.index_fill(1, ids[0, -1], math.nan)]
    ),
    "processor of inf, sampling": lambda: dict(
        do_sample=True, top_k=0, logits_processor=[lambda ids, scores: scores.index_fill(1, ids[0, -1], math.inf)]
    ),
    "processor that bans all, sampling": lambda: dict(
        do_sample=True, logits_processor=[lambda ids, scores: scores - math.inf]
    ),
    "processor that raises": lambda: dict(logits_processor=[RaisesAtCall(3, moved)]),
    "criterion that raises": lambda: dict(stopping_criteria=[RaisesAtCall(3, nothing)]),
    "criterion that raises first": lambda: dict(stopping_criteria=[RaisesAtCall(1, nothing)]),
    "criterion of None": lambda: dict(stopping_criteria=[lambda ids, scores: None]),
    "criterion of fewer rows": lambda: dict(stopping_criteria=[lambda ids, scores: nothing(ids[:2], scores)]),
    "criterion on scores that are not kept": lambda: dict(stopping_criteria=[is_sure]),
    "prefix_allowed_tokens_fn that raises": lambda: dict(prefix_allowed_tokens_fn=RaisesAtCall(4, two_of_three)),
    "prefix_allowed_tokens_fn that bans all": lambda: dict(prefix_allowed_tokens_fn=lambda row, ids: []),
    "streamer that raises": lambda: dict(streamer=BrokenStreamer()),
    "streamer that raises at the end": lambda: dict(streamer=NeverEnds()),
    "streamer is none": lambda: dict(streamer=3),
    "TextStreamer of a batch": lambda: dict(streamer=TextStreamer(tokenizer())),
}


@functools.cache
def answer(name: str) -> torch.Tensor:
    return generate(pair(name)[0], **PROMPTS["padded batch"])


@models
@rows(ERRORS)
def test_errors(name, row):
    """The same type of error, or ours of that type, and nothing is left behind."""
    types = []
    for system in primed(name):
        with pytest.raises(Exception) as error:
            generate(system, **PROMPTS["padded batch"] | row())
        types.append(error.type)
    theirs, ours = types
    assert theirs is ours or (ours is RequestError and issubclass(ours, theirs))
    assert pair(name)[1].speculation.ngram.stats()["streams"] == 0
    assert torch.equal(generate(pair(name)[1], **PROMPTS["padded batch"]), answer(name))
