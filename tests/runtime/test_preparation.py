"""Calls alike are prepared once, and nobody can tell: answers, errors and warnings are those of transformers."""

import logging
import types
import warnings

import pytest
import torch
import transformers
from models import ADMITTED, VOCAB, prompts
from transformers import GenerationConfig, GenerationMixin, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation import LogitsProcessor, LogitsProcessorList

from spec_compile import speculate
from spec_compile.runtime.generate import SpeculativeMixin

SINGLES, PADDED, PADDING = prompts()
ONE, LONGER = SINGLES[0], torch.cat([SINGLES[0], SINGLES[1]], dim=1)
PAD = 3
TWO = torch.cat([ONE, ONE.flip(1)])
BASE = dict(max_new_tokens=6, eos_token_id=[5, 6], pad_token_id=PAD)
SAMPLING = dict(do_sample=True, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01)


@pytest.fixture(scope="module")
def pair():
    """A tiny model and its shadow."""
    model = ADMITTED["llama"]()
    return model, speculate(model, compile=False, adaptive=False)


@pytest.fixture
def planned(monkeypatch):
    """A list that gets an entry at every call that transformers does not prepare."""
    calls, run = [], SpeculativeMixin._generate_as_before
    monkeypatch.setattr(
        SpeculativeMixin, "_generate_as_before", lambda self, *args: calls.append(args) or run(self, *args)
    )
    return calls


class Messages(logging.Handler):
    """What transformers logs."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


class Recorder:
    """A streamer that remembers its calls."""

    def __init__(self):
        self.calls = []

    def put(self, value):
        self.calls.append(value.tolist())

    def end(self):
        self.calls.append("end")


def outcome(system, call: dict) -> tuple:
    """What a call gives or raises, its warnings, and what transformers logs."""
    positional = call.get("positional", ())
    call = {name: value() if isinstance(value, types.LambdaType) else value for name, value in call.items()}
    call.pop("positional", None)
    torch.manual_seed(0)
    if hasattr(system, "speculation"):
        system.speculation.engine._announced.clear()
    messages, logger = Messages(), logging.getLogger("transformers")
    level = logger.level
    logger.addHandler(messages)
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = system.generate(*positional, **call)
                result = getattr(result, "sequences", result).tolist()
            except Exception as error:
                result = type(error), str(error)
    finally:
        logger.removeHandler(messages)
        logger.setLevel(level)
    said = [str(warning.message) for warning in caught if "only transformers' own" not in str(warning.message)]
    streamed = call["streamer"].calls if isinstance(call.get("streamer"), Recorder) else None
    return result, streamed, said, messages.texts


def forget_messages():
    """transformers says again what it says once."""
    for name in ("warning_once", "info_once"):
        getattr(transformers.utils.logging.get_logger("transformers"), name).__func__.cache_clear()


COMMON = {
    "greedy": dict(input_ids=ONE),
    "positional": dict(positional=(ONE,)),
    "inputs": dict(inputs=ONE),
    "a mask of ones": dict(input_ids=ONE, attention_mask=torch.ones_like(ONE)),
    "a mask of bools": dict(input_ids=ONE, attention_mask=torch.ones_like(ONE, dtype=torch.bool)),
    "one end": dict(input_ids=ONE, eos_token_id=7),
    "no end": dict(input_ids=ONE, eos_token_id=None),
    "no end and no pad": dict(input_ids=ONE, eos_token_id=None, pad_token_id=None),
    "no pad": dict(input_ids=ONE, pad_token_id=None),
    "pad is an end": dict(input_ids=ONE, pad_token_id=5),
    "a minimum": dict(input_ids=ONE, min_new_tokens=4),
    "a penalty": dict(input_ids=ONE, repetition_penalty=1.2),
    "a config": dict(input_ids=ONE, generation_config=lambda: GenerationConfig(**BASE)),
    "a streamer": dict(input_ids=ONE, streamer=lambda: Recorder()),
    "two rows": dict(input_ids=TWO, attention_mask=torch.ones_like(TWO)),
    "one token": dict(input_ids=ONE[:, :1]),
    "flags of sampling": dict(input_ids=ONE, temperature=0.5),
}


@pytest.mark.parametrize("name", COMMON)
def test_common_calls_are_prepared_once(name, pair, planned):
    results = []
    for system in pair:
        forget_messages()
        base = {} if "generation_config" in COMMON[name] else BASE
        results.append([outcome(system, {**base, **COMMON[name]}) for _ in range(3)])
    assert results[0] == results[1]
    assert len(planned) >= 2


@pytest.mark.parametrize("options", [SAMPLING, dict(do_sample=True), SAMPLING | dict(repetition_penalty=1.1)])
def test_sampling_draws_the_same_tokens(options, pair, planned):
    fast = pair[1]
    fast.speculation.engine.remembered._kept.clear()
    call = dict(input_ids=ONE, **BASE, **options)
    assert outcome(fast, call) == outcome(fast, call) and len(planned) == 1
    assert outcome(fast, call | dict(temperature=9.0))[0] != outcome(fast, call)[0]


def test_prompts_of_any_width_share_a_preparation(pair, planned):
    model, fast = pair
    for ids in (ONE, LONGER, ONE[:, 1:]):
        assert outcome(fast, dict(input_ids=ids, **BASE)) == outcome(model, dict(input_ids=ids, **BASE))
    assert len(planned) >= 2


def test_tokens_outside_the_vocabulary_are_refused(pair, planned):
    fast = pair[1]
    refusals = [outcome(fast, dict(input_ids=ids, **BASE)) for ids in (ONE, ONE + VOCAB, ONE - VOCAB)][1:]
    for (error, message), *_ in refusals:
        assert error is ValueError and "vocabulary" in message
    assert len(planned) >= 2


class Nothing(LogitsProcessor):
    def __call__(self, ids, scores):
        return scores


UNCOMMON = {
    "int32": dict(input_ids=ONE.int()),
    "one row without batch": dict(input_ids=ONE[0]),
    "no tokens": dict(input_ids=ONE[:, :0]),
    "a list": dict(input_ids=ONE.tolist()),
    "padding": dict(input_ids=PADDED, attention_mask=PADDING),
    "a mask with a zero": dict(input_ids=ONE, attention_mask=torch.cat([0 * ONE[:, :1], 0 * ONE[:, 1:] + 1], 1)),
    "a mask of floats": dict(input_ids=ONE, attention_mask=torch.ones(ONE.shape)),
    "a mask of another width": dict(input_ids=ONE, attention_mask=torch.ones(1, ONE.shape[1] - 1)),
    "rows without a mask": dict(input_ids=TWO),
    "padding in a row": dict(input_ids=torch.cat([torch.tensor([[PAD, PAD]]), ONE], 1)),
    "ends as a tensor": dict(input_ids=ONE, eos_token_id=torch.tensor([5, 6])),
    "ends below zero": dict(input_ids=ONE, eos_token_id=[5, -1]),
    "no maximum": dict(input_ids=ONE, max_new_tokens=None),
    "a fraction of a token": dict(input_ids=ONE, max_new_tokens=5.5),
    "no new tokens": dict(input_ids=ONE, max_new_tokens=0),
    "beams": dict(input_ids=ONE, num_beams=2),
    "several answers": dict(input_ids=ONE, do_sample=True, top_k=1, num_return_sequences=2),
    "outputs": dict(input_ids=ONE, return_dict_in_generate=True, output_scores=True),
    "a processor": dict(input_ids=ONE, logits_processor=lambda: LogitsProcessorList([Nothing()])),
    "a criterion": dict(input_ids=ONE, stopping_criteria=lambda: StoppingCriteriaList([MaxLengthCriteria(20)])),
    "a typo": dict(input_ids=ONE, max_new_token=3),
    "a temperature of zero": dict(input_ids=ONE, do_sample=True, temperature=0.0),
}
OTHERWISE = {
    "one row without batch", "no tokens", "a mask of another width", "a fraction of a token", "several answers"
}  # fmt: skip
"""Here our message or random numbers are not transformers'; `test_drop_in` says which."""


@pytest.mark.parametrize("name", UNCOMMON)
def test_uncommon_calls_are_as_ever(name, pair, planned):
    """Each comes behind a common call, and twice."""
    results, call = [], {**BASE, **UNCOMMON[name]}
    for system in pair:
        forget_messages()
        results.append([outcome(system, each) for each in (dict(input_ids=ONE, **BASE), call, call)])
    if name not in OTHERWISE:
        assert results[0] == results[1]
    else:
        assert results[1][1] == results[1][2]
    assert len(planned) <= 1


CHANGES = [
    ("generation_config", "temperature", 0.3),
    ("generation_config", "eos_token_id", [*range(VOCAB)]),
    ("generation_config", "num_beams", True),
    ("generation_config", "num_beams", 2),
    ("generation_config", "early_stopping", "perhaps"),
    ("generation_config", "max_length", 50),
    ("generation_config", "min_length", 20),
    ("generation_config", "return_dict_in_generate", True),
    ("generation_config", "streamer", 1),
    ("config", "temperature", 0.3),
    (None, "generation_config", GenerationConfig(suppress_tokens=[7], eos_token_id=8, pad_token_id=PAD)),
    (None, "generation_config", type("Mine", (GenerationConfig,), {})(no_repeat_ngram_size=1)),
]
"""An object of the system, or the system, its attribute, and a value that this gets between two calls."""


@pytest.mark.parametrize("part, name, value", CHANGES)
def test_a_change_between_two_calls_is_seen(part, name, value, pair, planned, monkeypatch):
    results, call = [], dict(input_ids=ONE, max_new_tokens=6)
    for system in pair:
        forget_messages()
        monkeypatch.setattr(system.generation_config, "eos_token_id", [5, 6])
        monkeypatch.setattr(system.generation_config, "pad_token_id", PAD)
        results.append([outcome(system, call) for _ in range(2)])
        with monkeypatch.context() as patch:
            patch.setattr(getattr(system, part) if part else system, name, value, raising=False)
            results[-1] += [outcome(system, call) for _ in range(2)]
        results[-1] += [outcome(system, call) for _ in range(2)]
    assert results[0] == results[1]


METHODS = ("_prepare_generation_config", "_get_logits_processor", "_validate_model_kwargs", "generate")
OWNERS = [(owner, method) for owner in ("object", "class", "mixin") for method in METHODS]
OWNERS.remove(("object", "generate"))  # set on the original, it is run in place of ours


@pytest.mark.sweep(3)
@pytest.mark.parametrize("owner, method", OWNERS)
def test_a_replaced_method_is_called(owner, method, monkeypatch):
    model = ADMITTED["llama"]()
    fast = speculate(model, compile=False)
    call, calls = dict(input_ids=ONE, **BASE), []
    fast.generate(**call)
    original = getattr(GenerationMixin, method)

    def replaced(self, *args, **kwargs):
        calls.append(method)
        return original(self, *args, **kwargs)

    if owner == "object":
        monkeypatch.setitem(vars(fast), method, types.MethodType(replaced, fast))
    else:
        monkeypatch.setattr(type(model) if owner == "class" else GenerationMixin, method, replaced)
    for count in (1, 2):
        fast.generate(**call)
        assert len(calls) == count
    monkeypatch.undo()
    fast.generate(**call)
    assert len(calls) == 2


def test_autocast_is_seen_and_training_mode_does_not_matter(pair, planned):
    fast = pair[1]
    call = dict(input_ids=ONE, **BASE)
    before = outcome(fast, call)
    planned.clear()
    fast.train()
    assert outcome(fast, call) == before and len(planned) == 1
    fast.eval()
    planned.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outcome(fast, call)
    assert not planned
    assert isinstance(outcome(fast, call)[0], list) and planned


def test_a_call_inside_the_preparation_takes_no_part_in_it(pair, planned):
    """A streamer gets the prompt while transformers prepares, and may generate."""
    model, fast = pair

    class Nested(Recorder):
        def put(self, value):
            super().put(value)
            if len(self.calls) == 1:
                self.inner = fast.generate(LONGER, max_new_tokens=9, eos_token_id=None, do_sample=False)

    fast.speculation.engine.remembered._kept.clear()
    want = outcome(model, dict(input_ids=ONE, **BASE, streamer=Recorder()))
    for _ in range(2):
        streamer = Nested()
        assert outcome(fast, dict(input_ids=ONE, **BASE, streamer=streamer)) == want
        assert torch.equal(streamer.inner, model.generate(LONGER, max_new_tokens=9, eos_token_id=None))


def test_preparations_are_forgotten(pair):
    fast = pair[1]
    for tokens in range(1, 40):
        fast.generate(ONE, max_new_tokens=tokens % 2 + 1, eos_token_id=tokens, pad_token_id=PAD)
    assert len(fast.speculation.engine.remembered._kept) == 32
