"""The drop-in, by features of generate(): the same call on a model and on its shadow gives the same answer."""

import functools
import logging
import math
import threading
import warnings
from pathlib import Path
from random import Random

import pytest
import torch
from drop_in import (
    ALL_OUTPUTS,
    EOS,
    IDS,
    NAMES,
    PROMPTS,
    SINGLES,
    CountsItsCalls,
    Recorder,
    assert_drop_in,
    assert_same,
    generate,
    is_long,
    is_sure,
    kinds,
    models,
    moved,
    pair,
    primed,
    tokenizer,
    two_of_three,
)
from models import ADMITTED, SPECIAL, VOCAB, prompts
from sweeps import thinned
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    MaxLengthCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
    pipeline,
)
from transformers.generation import LogitsProcessorList
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from spec_compile import speculate

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*only transformers' own generate", "ignore:.*max_length"),
    pytest.mark.seldom("gpt2", "qwen3"),
]


@pytest.fixture(scope="module")
def tiny_coder():
    path = Path(__file__).parents[2] / "examples" / "tiny_coder"
    return AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


# ---- what users pass, with one prompt and with three of different lengths ------------------------------------------


def ends_in_fives(ids, scores):
    return ids[:, -1] % 5 == 0


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


def by_row(ids, scores):
    banned = (ids[:, -1:] + torch.arange(len(ids))[:, None] * 3 + torch.arange(0, VOCAB, 4)) % VOCAB
    return scores.scatter(1, banned, -math.inf)


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


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.5}, {"prompt_lookup_num_tokens": 3}])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_paged_caches_are_those_of_transformers(name, options):
    """transformers hands these calls to its own batches, which drop some processors and masks."""
    model = ADMITTED[name]()
    model.generation_config.continuous_batching_config = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    fast = speculate(model, compile=False, check=False)
    asked = dict(inputs=prompts()[1][:2], max_new_tokens=6, eos_token_id=-1, cache_implementation="paged", **options)
    expected = model.generate(**asked)
    assert expected.dim() == 3 and torch.equal(fast.generate(**asked), expected)
    asked = dict(input_ids=prompts()[0][0], max_new_tokens=6, eos_token_id=None)
    assert torch.equal(fast.generate(**asked), model.generate(**asked)) and fast.speculation.stats.rounds
    with pytest.raises(NotImplementedError, match="streaming is not supported"):
        fast.generate(**asked, cache_implementation="paged", streamer=TextStreamer(tokenizer()))


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
