"""The drop-in: prompts in every form, and caches that go from one call to the next."""

import warnings

import pytest
import torch
from drop_in import (
    ALL_OUTPUTS,
    EOS,
    IDS,
    MASK,
    PROMPTS,
    SINGLES,
    CountsItsCalls,
    assert_drop_in,
    assert_same,
    generate,
    kinds,
    models,
    pair,
    primed,
    rows,
    sequences,
    tokenizer,
)
from transformers import DynamicCache, GenerationConfig, StaticCache

from spec_compile.compat import CACHE

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*only transformers' own generate", "ignore:.*max_length"),
    pytest.mark.seldom("gpt2", "qwen3"),
]


def said_eos(ids, scores):
    return torch.isin(ids[:, -1], torch.tensor(EOS))


# ---- prompts in every form ----------------------------------------------------------------------------------------


def embedded(model, ids=IDS):
    return model.get_input_embeddings()(ids).detach()


INPUTS = {
    "positional": lambda model: dict(positional=(SINGLES[1],)),
    "positional configuration": lambda model: dict(positional=(SINGLES[1], GenerationConfig(max_new_tokens=4))),
    "inputs": lambda model: dict(inputs=SINGLES[1]),
    "no length": lambda model: dict(positional=(SINGLES[1],), max_new_tokens=None),
    "no mask": lambda model: dict(input_ids=torch.cat([SINGLES[1], SINGLES[1].flip(1)])),
    "padding without a mask": lambda model: dict(input_ids=IDS),
    "bool mask": lambda model: dict(input_ids=IDS, attention_mask=MASK.bool()),
    "float mask": lambda model: dict(input_ids=IDS, attention_mask=MASK.float()),
    "int32": lambda model: dict(input_ids=IDS.int(), attention_mask=MASK.int(), eos_token_id=EOS),
    "a view": lambda model: dict(input_ids=torch.stack([SINGLES[0], SINGLES[0]], -1)[..., 0]),
    "one token": lambda model: dict(input_ids=torch.tensor([[7]])),
    "one token, forced_bos_token_id": lambda model: dict(input_ids=torch.tensor([[7], [9]]), forced_bos_token_id=5),
    "nothing but bos": lambda model: dict(),
    "bos_token_id": lambda model: dict(bos_token_id=9),
    "equal rows": lambda model: dict(input_ids=SINGLES[2].repeat(2, 1)),
    "position_ids as they are": lambda model: dict(
        input_ids=IDS, attention_mask=MASK, position_ids=(MASK.cumsum(1) - 1).clamp(min=0)
    ),
    "negative_prompt_ids": lambda model: dict(
        input_ids=SINGLES[0], negative_prompt_ids=SINGLES[1], guidance_scale=1.4
    ),
    "negative_prompt_attention_mask": lambda model: dict(
        input_ids=IDS, attention_mask=MASK, guidance_scale=1.4, negative_prompt_ids=IDS.flip(0),
        negative_prompt_attention_mask=MASK.flip(0),
    ),
    "inputs_embeds": lambda model: dict(inputs_embeds=embedded(model, SINGLES[0])),
    "inputs_embeds and a mask": lambda model: dict(
        inputs_embeds=embedded(model), attention_mask=MASK, eos_token_id=EOS
    ),
    "inputs_embeds and input_ids": lambda model: dict(
        inputs_embeds=embedded(model), input_ids=IDS, attention_mask=MASK, eos_token_id=EOS
    ),
    "inputs_embeds, processors and outputs": lambda model: dict(
        inputs_embeds=embedded(model), attention_mask=MASK, repetition_penalty=1.3, min_new_tokens=3, eos_token_id=EOS,
        logits_processor=[CountsItsCalls()], **ALL_OUTPUTS,
    ),
    "inputs_embeds and max_length": lambda model: dict(
        inputs_embeds=embedded(model, SINGLES[0]), max_new_tokens=None, max_length=30
    ),
    "inputs_embeds and min_length": lambda model: dict(
        inputs_embeds=embedded(model, SINGLES[0]), min_length=28, eos_token_id=EOS
    ),
    "inputs_embeds, static cache": lambda model: dict(
        inputs_embeds=embedded(model), attention_mask=MASK, cache_implementation="static"
    ),
    "inputs_embeds, sampling": lambda model: dict(
        inputs_embeds=embedded(model), attention_mask=MASK, do_sample=True, top_k=1, num_return_sequences=2
    ),
    "one embedding": lambda model: dict(inputs_embeds=embedded(model, SINGLES[0][:, :1])),
    "token_healing": lambda model: dict(input_ids=tokenizer()("so the h", return_tensors="pt").input_ids,
        token_healing=True, tokenizer=tokenizer(),
    ),
}  # fmt: skip


@pytest.mark.sweep(4)
@models
@rows(INPUTS)
def test_inputs(name, row):
    model, fast = pair(name)
    assert_drop_in(model, fast, lambda: row(model))


@models
def test_chat_template(name):
    """What apply_chat_template makes goes into generate() as it is."""
    speaker = tokenizer()
    speaker.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}.{% endfor %}assistant "
    chats = [[dict(role="user", content=text)] for text in ("hi there", "write the answer to it")]
    asked = dict(return_dict=True, return_tensors="pt", padding=True)
    assert_drop_in(*pair(name), lambda: dict(speaker.apply_chat_template(chats, **asked)))


# ---- caches -------------------------------------------------------------------------------------------------------

CACHES = {
    "returned": None,
    "DynamicCache": lambda model: DynamicCache(config=model.config),
    "StaticCache": lambda model: StaticCache(config=model.config, max_cache_len=64),
}


@pytest.mark.sweep(6)
@models
@kinds
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("turns", ["plain, ours, plain", "ours, plain, ours", "ours, ours, ours"])
@pytest.mark.parametrize("given", ["all tokens", "only new ones"])
def test_a_cache_goes_from_one_to_the_other(name, kind, cache, turns, given):
    """A talk of three turns over one cache; every answer as from all its tokens without a cache."""
    model, fast = primed(name)
    ids = PROMPTS[kind]["input_ids"]
    mask = PROMPTS[kind].get("attention_mask", torch.ones_like(ids))
    said, past = ids, CACHES[cache] and CACHES[cache](model)
    for turn, who in enumerate(turns.split(", ")):
        asked = dict(attention_mask=mask, eos_token_id=None, max_new_tokens=4)
        expected = model.generate(ids, **asked)
        system, new = {"plain": model, "ours": fast}[who], said if given == "only new ones" else ids
        output = system.generate(new, **{CACHE: past}, return_dict_in_generate=cache == "returned", **asked)
        past = past if cache != "returned" else output[CACHE]
        assert torch.equal(sequences(output)[:, -4:], expected[:, -4:])
        assert past.get_seq_length() == expected.shape[1] - 1
        said = torch.cat([expected[:, -1:], SINGLES[1][:, turn : turn + 3].expand(len(ids), -1)], 1)
        ids = torch.cat([expected, said[:, 1:]], 1)
        mask = torch.cat([mask, mask.new_ones(len(ids), 7)], 1)


def test_a_cache_by_its_older_name_is_served():
    """transformers 5.24 has renamed it, and accepts the older name with a warning."""
    model, fast = primed("llama")
    expected, rounds = generate(model, **PROMPTS["single"]), fast.speculation.stats.rounds
    cache = DynamicCache(config=model.config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = generate(fast, **PROMPTS["single"], past_key_values=cache)
    assert torch.equal(got, expected) and fast.speculation.stats.rounds > rounds
    assert cache.get_seq_length() == got.shape[1] - 1
    assert [warning.category for warning in caught] == [FutureWarning] * (CACHE != "past_key_values")


UNFIT = {
    f"^{CACHE}: expected a cache of batch size 3, got 2": (2, 24),
    f"^attention_mask, {CACHE}: 20 cached and 7 given tokens do not make the mask's 24": (3, 7),
}


@pytest.mark.parametrize("message, sizes", UNFIT.items(), ids=["other rows", "other width"])
def test_a_cache_that_does_not_fit_is_refused_by_the_name_of_its_argument(message, sizes):
    """sizes: rows of the cache, and tokens given beside it."""
    model, fast = pair("llama")
    rows, width = sizes
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(IDS[:rows, :20], **{CACHE: cache})
    with pytest.raises(ValueError, match=message):
        generate(fast, input_ids=IDS[:, -width:], attention_mask=MASK, **{CACHE: cache})


@models
@pytest.mark.parametrize("padding", ["seen", "masked"])
@pytest.mark.parametrize("end", [dict(eos_token_id=EOS), dict(stopping_criteria=[said_eos])], ids=["eos", "criterion"])
def test_a_cache_of_rows_that_ended_is_continued(name, end, padding):
    model, fast = primed(name)
    answers = []
    for system in (model, fast):
        output = generate(system, **PROMPTS["padded batch"], **end, return_dict_in_generate=True)
        ends = torch.isin(output.sequences[:, IDS.shape[1] :], torch.tensor(EOS)).long()
        ended = ends.cumsum(1) > ends
        new = ~ended if padding == "masked" else torch.ones_like(ended)
        ids = torch.cat([output.sequences, SINGLES[1][:, :3].expand(3, -1)], 1)
        mask = torch.cat([MASK, new.long(), MASK.new_ones(3, 3)], 1)
        asked = dict(input_ids=ids, attention_mask=mask, **{CACHE: output[CACHE]}, eos_token_id=None)
        answers.append(generate(model, **asked, **ALL_OUTPUTS))
    assert ended.any()
    assert_same(*answers)


@models
def test_a_cache_with_scores_and_stops(name):
    """Outputs, processors and ends of rows over a cache that the user filled by a forward."""
    model, fast = pair(name)

    def row():
        past = DynamicCache(config=model.config)
        with torch.no_grad():
            model(IDS[:, :20], attention_mask=MASK[:, :20], **{CACHE: past})
        processors = dict(repetition_penalty=1.2, logits_processor=[CountsItsCalls()], min_new_tokens=2)
        return dict(**PROMPTS["padded batch"], **{CACHE: past}, eos_token_id=EOS, **processors, **ALL_OUTPUTS)

    assert_drop_in(model, fast, row)
