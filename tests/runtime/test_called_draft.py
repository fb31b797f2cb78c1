"""Drafts that a call names: answers are the model's own, and the drafts are those that the call asks for."""

import warnings
from pathlib import Path
from unittest import mock

import draft_rounds as rounds
import models
import pytest
import torch
import two_tokenizers as two
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

import spec_compile
from spec_compile.runtime.preparation import CalledDraft

DEMO = Path(__file__).parents[2] / "examples" / "tiny_coder"
PROMPTS = ["def mean(values):\n", "class Stack:\n    def __init__(self):\n"]
GREEDY = dict(max_new_tokens=24, do_sample=False)


@pytest.fixture(scope="module")
def demo():
    """The demo model, a copy of it, and two prompts."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO, padding_side="left")
    model, twin = (AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32) for _ in range(2))
    return model, twin, tokenizer(PROMPTS, return_tensors="pt", padding=True)


@pytest.fixture(scope="module")
def fast(demo):
    return spec_compile.speculate(demo[0], "mtp", draft=DEMO / "heads" / "mtp", compile=False, adaptive=False)


def length_of(fast, inputs, **options):
    """The accept length of one call, and its answer, without a warning."""
    fast.speculation.stats.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer = fast.generate(**inputs, **options)
    return fast.speculation.stats.accept_length, answer


def test_each_argument_names_its_draft(demo, fast):
    model, twin, inputs = demo
    want = model.generate(**inputs, **GREEDY)
    asked = {
        "own": {}, "copy": dict(assistant_model=twin), "n-grams": dict(prompt_lookup_num_tokens=5),
        "block": dict(use_mtp=True), "config": dict(generation_config=GenerationConfig(use_mtp=True)),
    }  # fmt: skip
    lengths = {}
    for name, options in asked.items():
        lengths[name], answer = length_of(fast, inputs, **GREEDY, **options)
        assert answer.equal(want), name
    assert lengths["copy"] == 4  # all three drafts of a copy of the target are right
    assert lengths["own"] == lengths["block"] == lengths["config"] and lengths["n-grams"] != lengths["own"] > 1.5


def test_drawn_tokens_are_those_of_the_seed(demo, fast):
    _, twin, inputs = demo
    answers = []
    for options in ({}, dict(assistant_model=twin), dict(prompt_lookup_num_tokens=5)):
        torch.manual_seed(3)
        answers.append(fast.generate(**inputs, max_new_tokens=24, do_sample=True, temperature=0.9, **options))
    assert answers[0].equal(answers[1]) and answers[0].equal(answers[2])


@pytest.mark.slow
def test_a_model_is_built_once_for_a_draft_and_number_of_steps(demo, fast):
    (_, twin, inputs), engine = demo, fast.speculation.engine
    engine.called_drafts.clear()
    with mock.patch.object(engine, "speculate", wraps=engine.speculate) as made:
        for steps in (None, None, 2):
            with mock.patch.object(twin.generation_config, "num_assistant_tokens", steps):
                length, _ = length_of(fast, inputs, **GREEDY, assistant_model=twin)
            assert length == (3 if steps else 4)
        options = [call.kwargs for call in made.call_args_list]
        assert [each.get("num_steps") for each in options] == [None, 2] and options[0]["adaptive"] is False
        fast.speculation.refresh()
        fast.generate(**inputs, **GREEDY, assistant_model=twin)
        assert made.call_count == 3


def test_an_assistant_may_have_a_tokenizer_of_its_own():
    """Its target with other ids drafts what is right. Tokenizers without a common token leave the call to transformers,
    which reads the answer's text again."""
    target, ids = rounds.target("llama"), rounds.prompts(1)
    fast = models.speculate_captured(target, "ngram", compile=False, check=False, adaptive=False, max_cache_len=200)
    options = dict(**GREEDY, eos_token_id=None, assistant_model=two.draft(), tokenizer=two.tokenizer())
    length, answer = length_of(fast, dict(inputs=ids), **options, assistant_tokenizer=two.draft_tokenizer())
    assert length == 4 and answer.equal(rounds.plain("llama", 1))
    torch.manual_seed(3)
    drawn = options | dict(do_sample=True, assistant_tokenizer=two.draft_tokenizer())
    length, answer = length_of(fast, dict(inputs=ids), **drawn)
    torch.manual_seed(3)
    want = fast.generate(ids, max_new_tokens=24, do_sample=True, eos_token_id=None)
    assert 1.2 < length and answer.equal(want)
    other = two.made({"other": 0, "<end>": 1}, eos_token="<end>", unk_token="<end>")
    with pytest.warns(UserWarning, match="assistant_model: only transformers"):
        fast.generate(ids, **options | dict(max_new_tokens=2), assistant_tokenizer=other)


def test_options_of_a_call_reach_the_other_model(demo, fast):
    _, twin, inputs = demo
    length, _ = length_of(fast, inputs, **GREEDY, assistant_model=twin, speculation=False)
    assert length == 1
    with pytest.raises(ValueError, match="reference"):
        fast.generate(**inputs, **GREEDY, assistant_model=twin, reference=[1, 2, 3])


def test_drafts_that_are_not_served_run_in_transformers_loop(demo, fast):
    model, _, inputs = demo
    one = {name: value[:1] for name, value in inputs.items()}
    want = model.generate(**one, **GREEDY)
    with pytest.warns(UserWarning, match="assistant_early_exit: only transformers"):
        assert fast.generate(**one, **GREEDY, assistant_early_exit=2).equal(want)
    small = LlamaForCausalLM(
        LlamaConfig(vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    for options in (dict(assistant_model=small), dict(assistant_model="x")):
        errors = []
        for each in (model, fast):
            with pytest.raises(Exception) as caught:
                each.generate(**one, **GREEDY, **options)
            errors.append(caught.type)
        assert errors[0] is errors[1]


@pytest.mark.parametrize(
    "config, assistant, tokenizer, expected",
    [
        (dict(assistant_early_exit=1, use_mtp=True), None, None, ("assistant_early_exit", None)),
        (dict(prompt_lookup_num_tokens=3, use_mtp=True), None, None, ("prompt_lookup_num_tokens", "ngram")),
        (dict(use_mtp=True), "a model", None, ("use_mtp", "mtp")),
        (dict(), "a model", None, ("assistant_model", "draft_model")),
        (dict(), "a model", object(), ("assistant_model", "draft_model")),
        (dict(), "text", None, ("assistant_model", None)),
        (dict(speculation_type="dflash"), "a model", None, ("speculation_type", "dflash")),
    ],
)
def test_the_order_is_that_of_transformers(config, assistant, tokenizer, expected, demo):
    assistant = demo[1] if assistant == "a model" else assistant
    arguments = dict(tokenizer="ours", assistant_tokenizer=tokenizer)
    called = CalledDraft.of(GenerationConfig(**config), assistant, arguments)
    assert (called.argument, called.algo) == expected
    assert called.options.get("assistant_tokenizer") is tokenizer and ("tokenizer" in called.options) == bool(tokenizer)
