"""The drop-in, feature by feature: the same call on a model and on its speculative shadow gives the same answer."""

import functools
import logging
import math
import string
import threading
import warnings
from pathlib import Path
from random import Random

import pytest
import torch
from models import ADMITTED, SPECIAL, VOCAB, prompts
from sweeps import thinned
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    DynamicCache,
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StaticCache,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
    pipeline,
)
from transformers.cache_utils import DynamicLayer
from transformers.generation import LogitsProcessorList

from spec_compile import speculate

NAMES = ("llama", "qwen3", "gpt2", "gemma3", "mixtral")
SINGLES, IDS, MASK = prompts()
PROMPTS = {"single": dict(input_ids=SINGLES[0]), "padded batch": dict(input_ids=IDS, attention_mask=MASK)}
EOS = list(range(10, 40))
ALL_OUTPUTS = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*only transformers' own generate", "ignore:.*max_length"),
    pytest.mark.seldom("gpt2", "qwen3"),
]
models, kinds = pytest.mark.parametrize("name", NAMES), pytest.mark.parametrize("kind", PROMPTS)


def rows(table: dict):
    """Parametrize `row` by id."""
    return pytest.mark.parametrize("row", [pytest.param(table[name], id=name) for name in table])


@functools.cache
def pair(name: str):
    """A tiny model and its shadow."""
    model = ADMITTED[name]()
    return model, speculate(model, compile=False, adaptive=False)  # what it drafts does not depend on the time taken


@functools.cache
def beyond(model) -> list[torch.Tensor]:
    """What the model says to each prompt beyond any stop."""
    return list(model.generate(**PROMPTS["padded batch"], max_new_tokens=24, eos_token_id=None))


def primed(name: str):
    """The pair with nothing in its trie but what the model says beyond any stop."""
    model, fast = pair(name)
    fast.speculation.ngram.reset()
    fast.speculation.ngram.add(beyond(model))
    return model, fast


@functools.cache
def tokenizer():
    """One of letters and pairs of letters, as many as the tiny models have tokens."""
    pairs = "th he in er an re nd on en at ou ed ha to or it is hi es ng ve al te ea ar se as le ti".split()
    texts = ["<pad>", "<s>", "</s>", *string.ascii_letters, *string.digits, " ", ".", *pairs]
    core = Tokenizer(BPE({text: number for number, text in enumerate(texts)}, [tuple(pair) for pair in pairs]))
    core.decoder = decoders.Fuse()
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **special)


@pytest.fixture(scope="module")
def tiny_coder():
    path = Path(__file__).parent.parent / "examples" / "tiny_coder"
    return AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


class Recorder:
    """A streamer that remembers its calls."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(("put", value.dtype, value.tolist()))

    def end(self):
        self.calls.append("end")


def generate(system, positional=(), **arguments):
    return system.generate(*positional, **{"max_new_tokens": 12, **arguments})


def observe(system, **arguments):
    """What a call of generate() gives, and the texts of its UserWarnings."""
    if hasattr(system, "speculation"):
        system.speculation._announced.clear()  # each says it again
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = generate(system, **arguments)
    return output, [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]


def sequences(output) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.sequences


def assert_same(expected, got):
    """Equal outputs of generate()."""
    assert type(got) is type(expected)
    tokens = sequences(expected)
    assert sequences(got).dtype == tokens.dtype and torch.equal(sequences(got), tokens)
    if isinstance(expected, torch.Tensor):
        return
    assert list(got) == list(expected)
    for kept in ("scores", "logits"):
        if expected.get(kept) is None:
            continue
        assert type(got[kept]) is tuple and len(got[kept]) == len(expected[kept])
        a, b = torch.stack(expected[kept], 1), torch.stack(got[kept], 1)
        ended = (b == 0).all(-1)  # ours gives zeros then, transformers what the padding leads to
        assert not tokens[:, -a.shape[1] :][ended].any()
        # logits of up to 17, by products of other shapes: an error of 1e-5 of the largest
        scale = a[a.isfinite()].abs().max().item()
        torch.testing.assert_close(b[~ended], a[~ended], rtol=1e-5, atol=1e-5 * max(1.0, scale))
    if expected.get("past_key_values") is not None:
        assert type(got.past_key_values) is type(expected.past_key_values)
        assert got.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


def assert_drop_in(model, fast, row, aside=None):
    """The same call, made of row(), gives the same output, streams the same and warns the same: with right drafts for
    all rows, and for some of a batch, which go on beyond where the rows end. aside: what transformers' own loop has
    to do, for which there is one warning more."""
    streamer = None if aside == "num_beams" else Recorder()
    expected, before = observe(model, streamer=streamer, **row())
    for drafted in (slice(None), slice(0, None, 2))[: 1 if aside or len(sequences(expected)) == 1 else 2]:
        fast.speculation.ngram.reset()
        fast.speculation.ngram.add([*beyond(model)[drafted], *sequences(expected)[drafted]])
        rounds, again = fast.speculation.stats.rounds, streamer and Recorder()
        got, after = observe(fast, streamer=again, **row())
        more = [text for text in after if text not in before]
        if aside is None:
            assert more == [] and fast.speculation.stats.rounds > rounds
        else:
            assert len(more) == 1 and aside in more[0] and fast.speculation.stats.rounds == rounds
        assert_same(expected, got)
        assert streamer is None or again.calls == streamer.calls


# ---- what users pass, with one prompt and with three of different lengths ------------------------------------------


def ends_in_fives(ids, scores):
    return ids[:, -1] % 5 == 0


def said_eos(ids, scores):
    return torch.isin(ids[:, -1], torch.tensor(EOS))


def is_long(ids, scores):
    return ids.shape[1] >= 30


class EndsAtCall:
    """A criterion that remembers: all rows end at its n-th call."""

    def __init__(self, n):
        self.left = n

    def __call__(self, ids, scores):
        self.left -= 1
        return torch.full((len(ids),), self.left <= 0)


class EndsRowsInTurn:
    """A criterion that remembers: every row ends one call after the one before it; it also claims an end token."""

    eos_token_id = None

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        return torch.arange(len(ids)) < self.calls - 2


def is_sure(ids, scores):
    return scores[-1].softmax(-1).max(-1).values > 0.6


def moved(ids, scores):
    return scores.roll(7, dims=-1)


def by_row(ids, scores):
    banned = (ids[:, -1:] + torch.arange(len(ids))[:, None] * 3 + torch.arange(0, VOCAB, 4)) % VOCAB
    return scores.scatter(1, banned, -math.inf)


class CountsItsCalls:
    """A processor that remembers: what it bans depends on how often it was called."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        return scores.index_fill(-1, torch.arange(self.calls % 5, VOCAB, 5), -math.inf)


def two_of_three(row, ids):
    """For `prefix_allowed_tokens_fn`: depends on the row and on all of the prefix."""
    return [token for token in range(VOCAB) if (token + row + int(ids.sum())) % 3]


FEATURES = {
    # lengths and ends
    "max_new_tokens": lambda: dict(max_new_tokens=5),
    "one token": lambda: dict(max_new_tokens=1),
    "max_new_tokens of a float": lambda: dict(max_new_tokens=6.5),
    "max_length": lambda: dict(max_new_tokens=None, max_length=33),
    "max_length and max_new_tokens": lambda: dict(max_new_tokens=7, max_length=33),
    "eos": lambda: dict(eos_token_id=31),
    "eos list": lambda: dict(eos_token_id=EOS),
    "eos tensor": lambda: dict(eos_token_id=torch.tensor(EOS)),
    "no eos": lambda: dict(eos_token_id=None),
    "no eos, no pad": lambda: dict(eos_token_id=None, pad_token_id=None),
    "pad": lambda: dict(eos_token_id=EOS, pad_token_id=3),
    "pad is an eos": lambda: dict(eos_token_id=EOS, pad_token_id=10),
    "no pad": lambda: dict(eos_token_id=EOS, pad_token_id=None),
    "min_length": lambda: dict(eos_token_id=EOS, min_length=30),
    "min_new_tokens": lambda: dict(eos_token_id=EOS, min_new_tokens=9),
    "both minima": lambda: dict(eos_token_id=EOS, min_new_tokens=3, min_length=31),
    "max_time": lambda: dict(max_time=3600.0, eos_token_id=EOS),
    "no time": lambda: dict(max_time=0.0),
    "stop_strings": lambda: dict(stop_strings=["a", "ng", "X", "7", "es", "th"], tokenizer=tokenizer()),
    "stop string": lambda: dict(stop_strings="e", tokenizer=tokenizer(), eos_token_id=EOS),
    "stop_strings, no eos": lambda: dict(stop_strings=list("ADGJM147"), tokenizer=tokenizer(), eos_token_id=None),
    # criteria
    "criterion by row": lambda: dict(stopping_criteria=[ends_in_fives]),
    "criterion by row, no eos": lambda: dict(stopping_criteria=[ends_in_fives], eos_token_id=None),
    "criterion of a bool": lambda: dict(stopping_criteria=[is_long], eos_token_id=EOS),
    "criterion that counts": lambda: dict(stopping_criteria=StoppingCriteriaList([EndsAtCall(7)])),
    "criterion that counts rows": lambda: dict(stopping_criteria=[EndsRowsInTurn()]),
    "criterion that counts rows, no eos": lambda: dict(stopping_criteria=[EndsRowsInTurn()], eos_token_id=None),
    "criterion on scores": lambda: dict(stopping_criteria=[is_sure], **ALL_OUTPUTS, eos_token_id=None),
    "shorter MaxLengthCriteria": lambda: dict(stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(29)])),
    "longer MaxLengthCriteria": lambda: dict(stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(44)])),
    "several criteria": lambda: dict(
        stopping_criteria=[EndsAtCall(9), ends_in_fives], stop_strings=["in", "Q"], tokenizer=tokenizer(), max_time=60.0
    ),
    # processors
    "repetition_penalty": lambda: dict(repetition_penalty=1.5),
    "repetition reward": lambda: dict(repetition_penalty=0.8, eos_token_id=EOS),
    "no_repeat_ngram_size": lambda: dict(no_repeat_ngram_size=2),
    "no repeats": lambda: dict(no_repeat_ngram_size=1),
    "encoder_repetition_penalty": lambda: dict(encoder_repetition_penalty=1.7),
    "encoder_no_repeat_ngram_size": lambda: dict(encoder_no_repeat_ngram_size=1),
    "bad_words_ids": lambda: dict(bad_words_ids=[[t] for t in range(40, 96, 2)]),
    "long bad words": lambda: dict(bad_words_ids=[[a, b] for a in range(3, 96) for b in range(a % 3, 96, 3)]),
    "sequence_bias": lambda: dict(sequence_bias={(t,): -4.0 for t in range(0, 96, 2)} | {(7, 8): 3.0, (31, 31): -9.0}),
    "suppress_tokens": lambda: dict(suppress_tokens=list(range(0, 96, 2))),
    "begin_suppress_tokens": lambda: dict(begin_suppress_tokens=list(range(0, 96, 2))),
    "forced_eos_token_id": lambda: dict(forced_eos_token_id=2),
    "forced_eos list": lambda: dict(forced_eos_token_id=[2, 3], eos_token_id=[2, 3]),
    "exponential_decay_length_penalty": lambda: dict(exponential_decay_length_penalty=(3, 1.4), eos_token_id=[2, 3]),
    "renormalize_logits": lambda: dict(renormalize_logits=True, **ALL_OUTPUTS),
    "remove_invalid_values": lambda: dict(remove_invalid_values=True, logits_processor=[lambda ids, s: s / (s > 0)]),
    "prefix_allowed_tokens_fn": lambda: dict(prefix_allowed_tokens_fn=two_of_three),
    "watermarking_config": lambda: dict(watermarking_config=WatermarkingConfig(bias=4.0)),
    "watermarking_config, selfhash": lambda: dict(watermarking_config=dict(bias=4.0, seeding_scheme="selfhash")),
    "watermarking_config, SynthID": lambda: dict(
        watermarking_config=SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)
    ),
    "guidance_scale": lambda: dict(guidance_scale=1.7),
    "user's processor": lambda: dict(logits_processor=[moved], eos_token_id=EOS),
    "processor that knows its row": lambda: dict(logits_processor=LogitsProcessorList([by_row]), eos_token_id=EOS),
    "processor of doubles": lambda: dict(logits_processor=[lambda ids, scores: scores.double()], **ALL_OUTPUTS),
    "processor of NaN": lambda: dict(logits_processor=[lambda ids, scores: scores.index_fill(1, ids[0, -1], math.nan)]),
    "processor that bans all": lambda: dict(logits_processor=[lambda ids, scores: scores - math.inf]),
    "processor of fewer tokens": lambda: dict(logits_processor=[lambda ids, scores: scores[:, :50]]),
    "processor of one row": lambda: dict(
        **PROMPTS["padded batch"], logits_processor=[lambda ids, scores: scores[-1:]]
    ),
    "processor of a vector": lambda: dict(logits_processor=[lambda ids, scores: scores[-1]]),
    "processor that counts": lambda: dict(logits_processor=[CountsItsCalls()], eos_token_id=EOS),
    "processor that counts, no eos": lambda: dict(
        logits_processor=[CountsItsCalls()], stopping_criteria=[ends_in_fives], eos_token_id=None
    ),
    "transformers' processors together": lambda: dict(
        repetition_penalty=1.2, no_repeat_ngram_size=3, bad_words_ids=[[5], [6, 7]], suppress_tokens=[8],
        min_new_tokens=5, eos_token_id=EOS, renormalize_logits=True, **ALL_OUTPUTS,
    ),
    "all together": lambda: dict(
        repetition_penalty=1.2, logits_processor=[CountsItsCalls(), by_row], stopping_criteria=[EndsRowsInTurn()],
        prefix_allowed_tokens_fn=two_of_three, stop_strings=["a"], tokenizer=tokenizer(), min_new_tokens=2,
        eos_token_id=EOS, **ALL_OUTPUTS,
    ),
    # outputs
    "return_dict_in_generate": lambda: dict(return_dict_in_generate=True),
    "output_scores": lambda: dict(return_dict_in_generate=True, output_scores=True),
    "output_logits": lambda: dict(return_dict_in_generate=True, output_logits=True, eos_token_id=None),
    "outputs of rows that end": lambda: dict(**ALL_OUTPUTS, eos_token_id=EOS),
    "outputs and a criterion": lambda: dict(**ALL_OUTPUTS, stopping_criteria=[ends_in_fives]),
    "outputs and a minimum": lambda: dict(**ALL_OUTPUTS, eos_token_id=EOS, min_new_tokens=6),
    "outputs without a dictionary": lambda: dict(output_scores=True, output_logits=True),
    "outputs without a cache": lambda: dict(**ALL_OUTPUTS, use_cache=False),
    # caches and the like
    "use_cache": lambda: dict(use_cache=False),
    "dynamic cache": lambda: dict(cache_implementation="dynamic", return_dict_in_generate=True),
    "static cache": lambda: dict(cache_implementation="static", return_dict_in_generate=True, eos_token_id=None),
    "max_cache_len": lambda: dict(cache_implementation="static", max_cache_len=64, return_dict_in_generate=True),
    "prefill_chunk_size": lambda: dict(prefill_chunk_size=5),
    "disable_compile": lambda: dict(disable_compile=True, synced_gpus=False),
    "generation_config": lambda: dict(
        generation_config=GenerationConfig(max_length=31, eos_token_id=EOS, pad_token_id=4, repetition_penalty=1.1),
        max_new_tokens=None,
    ),
    "generation_config and arguments": lambda: dict(
        generation_config=GenerationConfig(max_new_tokens=3, **ALL_OUTPUTS), max_new_tokens=6
    ),
    # sampling that leaves one choice
    "temperature": lambda: dict(do_sample=True, temperature=1e-4, top_k=0),
    "top_k": lambda: dict(do_sample=True, top_k=1, eos_token_id=EOS),
    "top_p": lambda: dict(do_sample=True, top_p=1e-6),
    "min_p": lambda: dict(do_sample=True, min_p=1.0),
    "every warper": lambda: dict(
        do_sample=True, temperature=0.7, top_k=1, top_p=0.9, min_p=0.05, typical_p=0.9, epsilon_cutoff=0.01,
        eta_cutoff=0.01, top_h=0.8,
    ),
    "num_return_sequences": lambda: dict(do_sample=True, top_k=1, num_return_sequences=3, eos_token_id=EOS),
    "sampling with processors and outputs": lambda: dict(
        do_sample=True, top_k=1, repetition_penalty=1.3, logits_processor=[CountsItsCalls()], min_new_tokens=4,
        eos_token_id=EOS, **ALL_OUTPUTS,
    ),
}  # fmt: skip
FEATURES |= {
    f"top_k=1, {warper}": lambda warper=warper: dict(do_sample=True, top_k=1, **warper)
    for warper in (
        dict(temperature=1.5), dict(top_p=0.5), dict(min_p=0.1), dict(top_h=0.5), dict(typical_p=0.5),
        dict(epsilon_cutoff=0.1), dict(eta_cutoff=0.1), dict(renormalize_logits=True),
    )
}  # fmt: skip


@pytest.mark.sweep(8)
@pytest.mark.parametrize(
    "feature, kind, name",
    [
        *((feature, "padded batch", "llama") for feature in FEATURES),
        *(pytest.param(feature, "single", "llama", marks=pytest.mark.slow) for feature in FEATURES),
        *thinned(4, [*FEATURES], [*PROMPTS], [*NAMES[1:]]),
    ],
)  # fmt: skip
def test_features(feature, kind, name):
    assert_drop_in(*pair(name), lambda: PROMPTS[kind] | FEATURES[feature]())


@models
@kinds
def test_prompt_lookup_is_plain_decoding_here(name, kind):
    """In a batch, too, where transformers' own refuses."""
    model, fast = primed(name)
    expected = generate(model, **PROMPTS[kind], eos_token_id=EOS)
    config = GenerationConfig(prompt_lookup_num_tokens=4, max_new_tokens=12, eos_token_id=EOS, pad_token_id=0)
    for asked in (dict(prompt_lookup_num_tokens=3, eos_token_id=EOS), dict(generation_config=config)):
        streamer, rounds = Recorder(), fast.speculation.stats.rounds
        assert_same(expected, generate(fast, **PROMPTS[kind], **asked, streamer=streamer))
        assert fast.speculation.stats.rounds > rounds
        assert len(streamer.calls) == 2 + expected.shape[1] - PROMPTS[kind]["input_ids"].shape[1]


@models
def test_everything_is_called_as_in_plain_decoding(name):
    """In one order, with the same ids and scores; the scores of rows that have ended mean nothing."""
    logs = []
    for system in primed(name):
        log = []

        def processor(ids, scores, log=log):
            going = ~torch.isin(ids[:, IDS.shape[1] :], torch.tensor(EOS)).any(1)
            log.append(("processor", ids.dtype, ids.tolist(), scores[going].argsort(-1)[:, -5:].tolist()))
            return scores

        def criterion(ids, scores, log=log):
            log.append(("criterion", ids.dtype, ids.tolist(), len(scores)))
            return torch.zeros(len(ids), dtype=torch.bool)

        def allowed(row, ids, log=log):
            log.append(("prefix_allowed_tokens_fn", row, ids.tolist()))
            return two_of_three(row, ids)

        streamer = Recorder()
        streamer.calls = log
        callables = dict(
            logits_processor=[processor], stopping_criteria=[criterion], prefix_allowed_tokens_fn=allowed,
            streamer=streamer,
        )  # fmt: skip
        generate(system, **PROMPTS["padded batch"], **callables, **ALL_OUTPUTS, eos_token_id=EOS)
        logs.append(log)
    assert logs[0] == logs[1] and len(logs[0]) > 10


@models
@kinds
def test_sampling(name, kind):
    """Drawn answers have the plain ones' shapes, follow torch's seed, and differ from each other."""
    asked = dict(**PROMPTS[kind], do_sample=True, num_return_sequences=4, eos_token_id=None, **ALL_OUTPUTS)
    outputs = []
    for system, seed in zip((*primed(name), pair(name)[1], pair(name)[1]), (0, 0, 0, 1)):
        torch.manual_seed(seed)
        outputs.append(generate(system, **asked))
    shapes = [(o.sequences.shape, [s.shape for s in o.scores], [s.dtype for s in o.logits]) for o in outputs]
    assert shapes == shapes[:1] * 4
    drawn = [output.sequences[:, IDS.shape[1] :] for output in outputs]
    assert torch.equal(drawn[1], drawn[2]) and not torch.equal(drawn[1], drawn[3])
    assert len(drawn[1].unique(dim=0)) == len(drawn[1])
    for scores, tokens in zip(outputs[1].scores, drawn[1].T):
        assert scores.gather(1, tokens[:, None]).isfinite().all()


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
        output = system.generate(new, past_key_values=past, return_dict_in_generate=cache == "returned", **asked)
        past = past if cache != "returned" else output.past_key_values
        assert torch.equal(sequences(output)[:, -4:], expected[:, -4:])
        assert past.get_seq_length() == expected.shape[1] - 1
        said = torch.cat([expected[:, -1:], SINGLES[1][:, turn : turn + 3].expand(len(ids), -1)], 1)
        ids = torch.cat([expected, said[:, 1:]], 1)
        mask = torch.cat([mask, mask.new_ones(len(ids), 7)], 1)


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
        asked = dict(input_ids=ids, attention_mask=mask, past_key_values=output.past_key_values, eos_token_id=None)
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
            model(IDS[:, :20], attention_mask=MASK[:, :20], past_key_values=past)
        processors = dict(repetition_penalty=1.2, logits_processor=[CountsItsCalls()], min_new_tokens=2)
        return dict(**PROMPTS["padded batch"], past_key_values=past, eos_token_id=EOS, **processors, **ALL_OUTPUTS)

    assert_drop_in(model, fast, row)


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
    "assistant_model": lambda: dict(assistant_model=assistant(), input_ids=SINGLES[0], attention_mask=None),
    "custom_generate": lambda: dict(custom_generate=echo),
    "attention_mask": lambda: dict(attention_mask=HOLE),
    "attention_mask / position_ids (anything but padding on the left)": lambda: dict(
        input_ids=IDS.flip(1), attention_mask=MASK.flip(1)
    ),
    "position_ids": lambda: dict(position_ids=(MASK.cumsum(1) * 2).clamp(max=300)),
    "past_key_values": lambda: dict(past_key_values=Cache(layer_class_to_replicate=OwnLayer)),
    "torch.autocast": lambda: dict(),
}


@functools.cache
def assistant():
    return ADMITTED["llama"]()


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
    "past_key_values of tuples": lambda: dict(past_key_values=((MASK, MASK),)),
    "past_key_values and cache_implementation": lambda: dict(
        past_key_values=DynamicCache(), cache_implementation="static"
    ),
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
    """The same type of error, and nothing is left behind."""
    types = []
    for system in primed(name):
        with pytest.raises(Exception) as error:
            generate(system, **PROMPTS["padded batch"] | row())
        types.append(error.type)
    assert types[0] is types[1]
    assert pair(name)[1].speculation.ngram.stats()["streams"] == 0
    assert torch.equal(generate(pair(name)[1], **PROMPTS["padded batch"]), answer(name))


# ---- around generate() ----------------------------------------------------------------------------------------------


@models
def test_text_streamers(name, capsys):
    asked = dict(**PROMPTS["single"], eos_token_id=None, max_new_tokens=20)
    printed, pieces = [], []
    for system in primed(name):
        generate(system, **asked, streamer=TextStreamer(tokenizer(), skip_prompt=True))
        printed.append(capsys.readouterr().out)
        streamer = TextIteratorStreamer(tokenizer(), timeout=60)
        thread = threading.Thread(target=generate, args=(system,), kwargs=dict(**asked, streamer=streamer))
        thread.start()
        pieces.append(list(streamer))
        thread.join()
    assert printed[0] == printed[1] and pieces[0] == pieces[1]
    assert "".join(pieces[1]) == tokenizer().decode(SINGLES[0][0]) + printed[1].rstrip("\n")


@models
def test_the_generation_config_is_a_copy(name, monkeypatch):
    model, fast = pair(name)
    config = dict(max_new_tokens=7, eos_token_id=EOS, pad_token_id=3, repetition_penalty=1.3, **ALL_OUTPUTS)
    before = model.generation_config.to_dict()
    assert fast.generation_config.to_dict() == before
    for key, value in config.items():
        monkeypatch.setattr(fast.generation_config, key, value)
    assert model.generation_config.to_dict() == before
    got = fast.generate(**PROMPTS["padded batch"])
    assert torch.equal(got.sequences, model.generate(**PROMPTS["padded batch"], **config).sequences)


@models
def test_saved_and_loaded(name, tmp_path):
    model, fast = pair(name)
    fast.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(model) and again.generation_config.to_dict() == {
        **model.generation_config.to_dict(), "transformers_version": again.generation_config.transformers_version
    }  # fmt: skip
    assert_drop_in(again, fast, lambda: dict(**PROMPTS["padded batch"], eos_token_id=EOS))


@models
def test_in_inference_mode(name):
    model, fast = pair(name)
    with torch.inference_mode():
        assert_drop_in(model, fast, lambda: dict(**PROMPTS["padded batch"], **ALL_OUTPUTS))
    assert_drop_in(model, fast, lambda: dict(**PROMPTS["padded batch"], **ALL_OUTPUTS))


def test_pipeline(tiny_coder, caplog):
    """Text, a batch of texts and a chat; nothing is logged that is not logged for the model itself."""
    speaker, model = tiny_coder
    speaker.chat_template = "{% for m in messages %}# {{ m.content }}\n{% endfor %}"
    fast = speculate(model, compile=False)
    texts = ["def add(a, b):\n", "import os\n\nfor path in os.listdir():\n"]
    answers, logged = [], []
    logging.getLogger("transformers").addHandler(caplog.handler)
    try:
        for system in (model, fast):
            caplog.clear()
            with caplog.at_level("WARNING", "transformers"), warnings.catch_warnings():
                warnings.simplefilter("error", UserWarning)
                write = pipeline("text-generation", model=system, tokenizer=speaker)
                asked = dict(max_new_tokens=16, do_sample=False)
                chat = [dict(role="user", content="Print the sum of two numbers.")]
                answers.append([write(texts[0], **asked), write(texts, batch_size=2, **asked), write(chat, **asked)])
            logged.append({record.getMessage() for record in caplog.records})
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    assert answers[0] == answers[1] and fast.speculation.stats.rounds > 3
    assert logged[1] <= logged[0]


# ---- many cases -----------------------------------------------------------------------------------------------------


class EndsAfter:
    """Each row ends at the first prefix whose tokens, weighted by their places, have a sum that `modulus` divides."""

    def __init__(self, modulus):
        self.modulus = modulus

    def __call__(self, ids, scores):
        return (ids * torch.arange(1, ids.shape[1] + 1)).sum(1) % self.modulus == 0


class EndsAtTheSecond:
    """A row ends when it has said one of `tokens` twice; remembers how often it did."""

    def __init__(self, tokens):
        self.tokens, self.said = torch.tensor(tokens), 0

    def __call__(self, ids, scores):
        self.said = self.said + torch.isin(ids[:, -1], self.tokens)
        return self.said >= 2


def stops(random: Random, said: list[list[int]]):
    """A function that makes arguments that end rows somewhere in `said`, in one to three ways."""
    token = lambda: random.choice(random.choice(said))  # noqa: E731
    makers = {}
    for way in random.sample(["eos", "string", "sum", "second", "call", "width"], random.randint(1, 3)):
        if way == "eos":
            makers["eos_token_id"] = [token() for _ in range(random.randint(1, 3))]
        elif way == "string":
            text = tokenizer().decode(random.choice(said))
            begin = random.randrange(len(text))
            makers["stop_strings"] = [text[begin : begin + random.randint(1, 5)]]
            makers["tokenizer"] = tokenizer()
        else:
            makers.setdefault("criteria", []).append({
                "sum": functools.partial(EndsAfter, random.randint(2, 12)),
                "second": functools.partial(EndsAtTheSecond, [token(), token()]),
                "call": functools.partial(EndsAtCall, random.randint(1, 20)),
                "width": functools.partial(MaxLengthCriteria, random.randint(20, 50)),
            }[way])  # fmt: skip
    criteria = makers.pop("criteria", [])
    makers.setdefault("eos_token_id", random.choice([None, SPECIAL["eos_token_id"]]))
    return lambda: dict(makers, stopping_criteria=StoppingCriteriaList([make() for make in criteria]))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("chunk", [*range(5), *(pytest.param(n, marks=pytest.mark.slow) for n in range(5, 10))])
def test_stops_at_the_same_token(chunk):
    """Criteria, stop strings and end tokens in the middle of accepted runs."""
    random = Random(chunk)
    model, fast = pair(NAMES[chunk % len(NAMES)])
    patterns = [[random.randrange(3, VOCAB) for _ in range(random.randint(2, 6))] for _ in range(8)]
    texts = [(pattern * 10)[: random.randint(4, 25)] for pattern in patterns]
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    answers = model.generate(ids, attention_mask=mask, eos_token_id=None, max_new_tokens=24)
    fast.speculation.ngram.reset()
    fast.speculation.ngram.add(list(answers[::2]))
    fast.speculation.stats.reset()
    for _ in range(40):
        chosen = random.sample(range(8), random.randint(1, 3))
        asked = dict(input_ids=ids[chosen], attention_mask=mask[chosen], max_new_tokens=random.randint(1, 24))
        end = stops(random, answers[chosen, width:].tolist())
        assert_same(generate(model, **asked, **end()), generate(fast, **asked, **end()))
    assert fast.speculation.stats.accept_length > 1.5


@models
def test_each_row_of_a_batch_is_its_own_run(name):
    model, fast = pair(name)
    singles, ids, mask = prompts((5, 500, 64, 9, 333, 17, 130, 250), seed=3)
    together = generate(fast, input_ids=ids, attention_mask=mask, eos_token_id=None)
    for prompt, row in zip(singles, together):
        expected = generate(model, input_ids=prompt, eos_token_id=None)[0, prompt.shape[1] :]
        assert torch.equal(row[ids.shape[1] :], expected)
        assert torch.equal(generate(fast, input_ids=prompt, eos_token_id=None)[0, prompt.shape[1] :], expected)
