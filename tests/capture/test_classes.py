"""Classes of models: those that were hard, methods of a model's own, padding that positions ignore, other caches."""

import functools
import json
import sys
import warnings
from pathlib import Path

import models
import pytest
import tiny_models
import torch
from transformers import DynamicCache, GPT2LMHeadModel, LlamaForCausalLM, Phi3ForCausalLM

import spec_compile
from spec_compile import UnsupportedModelError
from spec_compile.capture import replaced
from spec_compile.runtime import prompt as past

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.common import RESULTS, ROOT
from benchmarks.quality import architectures
from spec_compile.compat import CACHE

ROWS, IDS, MASK = models.prompts()
ASIDE = "only transformers' own generate() does this"


def llama_of(cls, row="llama"):
    """A tiny Llama as an object of another class."""
    model = models.ADMITTED[row]()
    model.__class__ = cls
    return model


def answer(model, ids, mask=None, **more):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=12, eos_token_id=None, **more)


def said(call):
    """What `call` returns, and the warnings that transformers' own loop ran."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(warning.message) for warning in caught if ASIDE in str(warning.message)]


# --- classes, through what the sweep over all of them runs

HARD = {
    "DeepseekV2ForCausalLM": ("served", "equal", ""),  # complex numbers of a strided tensor
    "AfmoeForCausalLM": ("served", "equal", ""),  # a view of a strided tensor
    "BertLMHeadModel": ("served", "equal", ""),  # token types looked up by positions
    "GotOcr2ForConditionalGeneration": ("served", "equal", ""),
    "BartForCausalLM": ("served", "aside", ""),  # a decoder that counts its own positions, padding too
    "MarianForCausalLM": ("served", "aside", ""),  # the same without an offset
    "RobertaForCausalLM": ("served", "equal", ""),  # positions follow the padding token unless they are given
    "MllamaForCausalLM": ("served", "equal", ""),  # skips its cross-attention
    "WhisperForCausalLM": ("served", "aside", ""),  # positions ignore the padding
    # modules that are changed for the capture
    **dict.fromkeys(["OpenAIGPTLMHeadModel", "FalconForCausalLM", "DiffLlamaForCausalLM"], ("served", "equal", "")),
    **dict.fromkeys(["DbrxForCausalLM", "AriaTextForCausalLM"], ("served", "equal", "")),
    "MoshiForCausalLM": ("refused", "", "the model's own generate()"),  # its cache forgets what its mask shows
}


@pytest.mark.sweep("BartForCausalLM")
@pytest.mark.parametrize("name", HARD)
def test_class(name):
    outcome = tiny_models.examine(name)
    verdict, padded, reason = HARD[name]
    assert (outcome.verdict, outcome.padded) == (verdict, padded), outcome
    assert reason in outcome.reason


def compare_continued(model, fast):
    """A text that goes on from the model's own filled cache: transformers' loop answers, with one warning."""
    texts = []
    for system in (model, fast):
        cache = DynamicCache(config=model.config)
        first = answer(model, ROWS[0], **{CACHE: cache})
        texts.append(said(lambda: answer(system, first, **{CACHE: cache})))  # noqa: B023
    (want, _), (got, messages) = texts
    assert torch.equal(got, want)
    assert len(messages) == 1 and messages[0].startswith(f"{CACHE} (the model's own cache holds something else")


def test_a_cache_that_may_hold_keys_of_pictures_is_left_to_transformers():
    model = tiny_models.build("MllamaForCausalLM")
    fast = spec_compile.speculate(model, compile=False, check=False)
    compare_continued(model, fast)


def test_several_output_heads_are_refused_by_name():
    model = models.ADMITTED["llama"]()
    model.get_output_embeddings = lambda: torch.nn.ModuleList([model.lm_head])
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM has several output heads"):
        spec_compile.speculate(model, compile=False)


def test_the_docs_show_the_table_of_the_last_sweep():
    record = json.loads((RESULTS / "architectures.json").read_text())
    table = architectures.table(record["outcomes"], record["machine"]["transformers"])
    assert not set(record["counts"]) & set(architectures.BAD)
    assert table in (ROOT / "docs" / "models.md").read_text()


def test_a_difference_counts_unless_it_is_a_near_tie():
    model = models.ADMITTED["llama"]()
    request = (models.prompts((20,))[0][0], None)
    want = tiny_models._answer(model, *request, 4)
    token = int(want[0, 20])
    other = (token + 1) % models.VOCAB
    wrong = want.clone()
    wrong[0, 20] = other
    assert tiny_models._differences(model, request, want, want) == 0
    assert tiny_models._differences(model, request, want, wrong) is None
    with torch.no_grad():
        model.lm_head.weight[other] = model.lm_head.weight[token]
    assert tiny_models._differences(model, request, want, wrong) == 1


# --- methods of a model's own


class OwnInputs(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        return {**inputs, "input_ids": (inputs["input_ids"] + 5) % models.VOCAB}


class OwnUpdate(LlamaForCausalLM):
    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, **kwargs):
        outputs.logits = outputs.logits.roll(1, -1)
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, **kwargs)


class OwnSample(LlamaForCausalLM):
    def _sample(self, input_ids, *args, **kwargs):
        return torch.cat([input_ids, torch.full_like(input_ids[:, :12], 7)], 1)


class OwnLoop(LlamaForCausalLM):
    def generate(self, ids, **kwargs):
        for _ in range(12):
            ids = torch.cat([ids, self(ids).logits[:, -1:].argmin(-1)], 1)
        return ids


OWN = {
    OwnInputs: "prepare_inputs_for_generation (overridden by OwnInputs)",
    OwnUpdate: "_update_model_kwargs_for_generation (overridden by OwnUpdate)",
    OwnSample: "_sample (overridden by OwnSample)",
    OwnLoop: "generate (overridden by OwnLoop)",
}


@pytest.mark.sweep("OwnInputs OwnLoop")
@pytest.mark.parametrize("cls", OWN, ids=lambda cls: cls.__name__)
def test_a_method_of_the_models_own_is_run_with_one_warning(cls):
    model = llama_of(cls)
    fast = spec_compile.speculate(model, compile=False)
    got, messages = said(lambda: [answer(fast, ids) for ids in ROWS[:2]])
    assert all(torch.equal(a, answer(model, ids)) for a, ids in zip(got, ROWS))
    assert len(messages) == 1 and messages[0].startswith(OWN[cls])
    assert fast.speculation.stats.tokens == 0


def test_methods_that_were_replaced_are_seen(monkeypatch):
    """By a wrapper with the name of transformers', on the object, and in transformers' class."""
    wrapped = functools.wraps(LlamaForCausalLM.prepare_inputs_for_generation)(OwnInputs.prepare_inputs_for_generation)
    decorated = type("Decorated", (LlamaForCausalLM,), {"prepare_inputs_for_generation": wrapped})
    assert replaced.overridden(llama_of(decorated)) == "prepare_inputs_for_generation (overridden by Decorated)"
    model = models.ADMITTED["llama"]()
    model.prepare_inputs_for_generation = functools.partial(OwnInputs.prepare_inputs_for_generation, model)
    assert replaced.overridden(model) == "prepare_inputs_for_generation (set on the LlamaForCausalLM object)"
    monkeypatch.setattr(LlamaForCausalLM, "_update_model_kwargs_for_generation", lambda *args, **kwargs: {})
    name = "_update_model_kwargs_for_generation (overridden by LlamaForCausalLM)"
    assert replaced.overridden(models.ADMITTED["llama"]()) == name


def test_generate_set_on_the_object_is_run():
    """As transformers sets the custom_generate of a repository."""
    model = models.ADMITTED["llama"]()
    model.generate = functools.partial(lambda ids, model, **kwargs: ids + len(list(model.parameters())), model=model)
    fast = spec_compile.speculate(model, compile=False)
    got, messages = said(lambda: answer(fast, ROWS[0]))
    assert torch.equal(got, answer(model, ROWS[0]))
    assert len(messages) == 1 and messages[0].startswith("generate (set on the LlamaForCausalLM object)")


HEIR = type("Heir", (LlamaForCausalLM,), {"prepare_for_fun": lambda self: None})


@pytest.mark.parametrize("row, cls", [("llama", HEIR), ("phi3", Phi3ForCausalLM)])
def test_heirs_and_what_transformers_overrides_are_served(row, cls):
    model = llama_of(cls, row)
    fast = spec_compile.speculate(model, compile=False)
    got, messages = said(lambda: answer(fast, IDS, MASK))
    assert torch.equal(got, answer(model, IDS, MASK)) and not messages
    assert fast.speculation.stats.tokens > 0


# --- real generation is compared before the first answer


class IgnoresPadding(GPT2LMHeadModel):
    """Learned positions count from the left edge of the batch."""

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, **kwargs):
        if attention_mask is not None and position_ids is not None:
            length = attention_mask.shape[1]
            position_ids = torch.arange(length - input_ids.shape[1], length)[None].expand_as(position_ids)
        return super().forward(input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)


class OtherWithCache(LlamaForCausalLM):
    """Says something else once there is a cache."""

    def forward(self, input_ids=None, **kwargs):
        cache = kwargs.get(CACHE)
        cached = cache is not None and cache.get_seq_length() > 0
        output = super().forward(input_ids, **kwargs)
        output.logits = output.logits.flip(-1) if cached else output.logits
        return output


class CannotGenerate(LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        if kwargs.get(CACHE) is not None:
            raise NotImplementedError("no cache here")
        return super().forward(input_ids, **kwargs)


def test_padding_that_positions_ignore_is_left_to_transformers():
    model = llama_of(IgnoresPadding, "gpt2")
    alone, padded = answer(model, ROWS[1]), answer(model, IDS, MASK)
    assert not torch.equal(alone[0, -12:], padded[1, -12:])
    fast = spec_compile.speculate(model, compile=False)
    got, messages = said(lambda: answer(fast, ROWS[1]))
    assert torch.equal(got, alone) and not messages
    got, messages = said(lambda: answer(fast, IDS, MASK))
    assert torch.equal(got, padded)
    assert len(messages) == 1 and messages[0].startswith("attention_mask (padding on the left")


REFUSED = {OtherWithCache: "the model's own generate(), over its cache", CannotGenerate: "NotImplementedError: no"}


@pytest.mark.parametrize("cls, reason", REFUSED.items())
def test_a_model_that_generates_something_else_is_refused(cls, reason):
    with pytest.raises(UnsupportedModelError) as error:
        spec_compile.speculate(llama_of(cls), compile=False)
    assert str(error.value).startswith(f"model: {cls.__name__}") and reason in str(error.value)
    spec_compile.speculate(llama_of(cls), compile=False, check=False)


def test_the_check_leaves_the_models_settings_alone():
    """A checkpoint's own settings neither change the check nor are changed by it."""
    model = models.ADMITTED["llama"]()
    model.generation_config.num_beams, model.generation_config.repetition_penalty = 3, 1.5
    before = model.generation_config.to_dict()
    spec_compile.speculate(model, compile=False)
    assert model.generation_config.to_dict() == before


# --- caches of latents


@pytest.fixture(scope="module")
def latent():
    model = models.ADMITTED["deepseek_v3"]()
    return model, spec_compile.speculate(model, compile=False)


@pytest.mark.parametrize("ids, mask", [(ROWS[0], None), (IDS, MASK)], ids=["one row", "padded batch"])
def test_a_cache_of_latents_is_given_back_as_transformers_fills_it(latent, ids, mask):
    model, fast = latent
    asked = dict(return_dict_in_generate=True, output_scores=True)
    want, (got, messages) = answer(model, ids, mask, **asked), said(lambda: answer(fast, ids, mask, **asked))
    assert torch.equal(got.sequences, want.sequences) and not messages
    assert got[CACHE].get_seq_length() == want[CACHE].get_seq_length()
    seen = torch.nn.functional.pad(torch.ones_like(ids) if mask is None else mask, (0, 11), value=1)
    for mine, own in zip(got[CACHE].layers, want[CACHE].layers):
        for a, b in ((mine.keys, own.keys), (mine.values, own.values)):
            real = seen[:, None, :, None].bool()
            torch.testing.assert_close(a * real, b * real, atol=1e-4, rtol=1e-3)
    mask = torch.ones_like(want.sequences) if mask is None else torch.nn.functional.pad(seen, (0, 1), value=1)
    again = [answer(model, out.sequences, mask, **{CACHE: out[CACHE]}) for out in (got, want)]
    assert torch.equal(*again)


def test_a_cache_of_latents_is_continued_by_transformers(latent):
    model, fast = latent
    compare_continued(model, fast)


def test_embeddings_in_a_model_with_a_cache_of_latents(latent):
    model, fast = latent
    embeds = model.get_input_embeddings()(ROWS[0])
    want, (got, messages) = [
        model.generate(inputs_embeds=embeds, max_new_tokens=8, do_sample=False),
        said(lambda: fast.generate(inputs_embeds=embeds, max_new_tokens=8, do_sample=False)),
    ]
    assert torch.equal(got, want)
    assert len(messages) == 1 and messages[0].startswith("inputs_embeds (the model's own cache")


@pytest.mark.parametrize("name, alike", [("llama", True), ("mistral", True), ("deepseek_v3", False)])
def test_caches_of_keys_and_values_are_known_as_ours(captured, name, alike):
    model, graph = captured(name)
    assert (past.layout_of(model, graph) is not None) is alike
