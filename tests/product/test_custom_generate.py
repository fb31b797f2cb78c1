"""transformers' `custom_generate`: a plain model generates by the speculative one that it keeps."""

import copy
import gc
import importlib.metadata
import pickle
import re
import shutil
import sys
import warnings
import weakref
from functools import partial
from pathlib import Path

import models
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, dynamic_module_utils

from spec_compile import custom_generate, speculate
from spec_compile.capture.changes import KEPT
from spec_compile.compat import CACHE

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples/custom_generate"
CARD = (FOLDER / "README.md").read_text()
PROMPT = {"input_ids": models.prompts()[0][0], "max_new_tokens": 12}
DOOR = {"custom_generate": str(FOLDER), "trust_remote_code": True, "compile": False, "check": False}


@pytest.fixture(autouse=True)
def modules_cache(tmp_path, monkeypatch):
    """transformers copies the code of repositories to a folder of this test, and finds it there."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def model():
    return models.ADMITTED["llama"]()


def kept(model):
    return vars(model)[KEPT].fast


def test_the_tokens_are_those_of_the_model_and_later_calls_only_generate(model, monkeypatch):
    ids, mask = models.prompts()[1:]
    batch = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, "eos_token_id": None}
    expected = model.generate(**PROMPT), model.generate(**batch)
    found = {"revision": "main", "local_files_only": True}  # transformers passes on what it loads the function with
    assert torch.equal(model.generate(**PROMPT, **DOOR, **found, algo="ngram", num_draft_tokens=4), expected[0])
    fast = kept(model)
    monkeypatch.setattr(custom_generate, "speculate", None)
    assert torch.equal(model.generate(**batch, **DOOR, algo="ngram", num_draft_tokens=4), expected[1])
    assert kept(model) is fast and fast.speculation.stats.tokens == 4 * 12


def test_calls_that_are_alike_are_prepared_once(model):
    model.generate(**PROMPT, **DOOR)
    assert kept(model).speculation.engine.remembered._kept


@pytest.mark.slow
def test_another_option_makes_another_and_lets_the_first_go():
    model = models.ADMITTED["llama"]()
    model.generate(**PROMPT, **DOOR)
    first = weakref.ref(kept(model))
    with pytest.raises(ValueError, match="num_draft_tokens: expected 1 to 64"):
        model.generate(**PROMPT, **DOOR, num_draft_tokens=100)
    assert kept(model) is first()
    model.generate(**PROMPT, **DOOR, num_draft_tokens=2)
    gc.collect()
    assert first() is None and kept(model).speculation.options.num_draft_tokens == 2
    last, model = weakref.ref(kept(model)), None
    gc.collect()
    assert last() is None


def change_in_place(model):
    model.lm_head.weight.data.neg_()


def replace_weight(model):
    model.lm_head.weight = nn.Parameter(-model.lm_head.weight.data)


def replace_layer(model):
    layer = copy.deepcopy(model.model.layers[1])
    layer.self_attn.layer_idx = 0
    model.model.layers[0] = layer


@pytest.mark.parametrize(
    ("change", "is_kept"), [(change_in_place, True), (replace_weight, True), (replace_layer, False)]
)
def test_a_changed_model_gives_its_own_tokens(model, change, is_kept):
    before, fast = model.generate(**PROMPT, **DOOR), kept(model)
    change(model)
    expected = model.generate(**PROMPT)
    assert not torch.equal(before, expected)
    assert torch.equal(model.generate(**PROMPT, **DOOR), expected)
    assert (kept(model) is fast) == is_kept


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"num_step": 3}, r"not used by the model: \['num_step'\]"),
        ({"algo": "ngrm"}, "Did you mean 'ngram'"),
        ({"topk": 2}, "unknown option 'topk'"),
        ({"algo": "eagle3"}, "draft: algo='eagle3' needs an EAGLE-3 head"),
    ],
)
def test_wrong_arguments_are_named_before_any_work(model, monkeypatch, argument, message):
    monkeypatch.setattr("spec_compile.api.capture", None)
    with pytest.raises((TypeError, ValueError), match=message):
        model.generate(**PROMPT, **DOOR, **argument)
    assert KEPT not in vars(model)


def test_a_cache_of_keys_and_values_is_no_option(model):
    asked = PROMPT | {"return_dict_in_generate": True}
    filled = model.generate(**asked)[CACHE]
    longer = {"input_ids": model.generate(**PROMPT), "max_new_tokens": 8}
    expected = model.generate(**longer)
    assert torch.equal(model.generate(**longer, **DOOR, **{CACHE: filled}), expected)
    assert torch.equal(model.generate(**PROMPT, **DOOR, cache=False), model.generate(**PROMPT))
    assert kept(model).speculation.options.cache is False


def test_copies_do_not_contain_what_the_model_keeps(model):
    model.generate(**PROMPT, **DOOR)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert vars(other)[KEPT] == {}
        assert torch.equal(other.generate(**PROMPT, **DOOR), model.generate(**PROMPT))
        assert kept(other).speculation.original is other


def test_a_speculative_model_stands_for_its_original(model):
    fast = speculate(model, compile=False, check=False)
    with pytest.warns(UserWarning, match="custom_generate: only transformers'"):
        fast.generate(**PROMPT, **DOOR)
    assert kept(model) is not fast and KEPT not in vars(fast) and KEPT not in vars(kept(model))


def in_a_batch(model, input_ids, **arguments):
    found = model.generate_batch(input_ids.tolist(), max_new_tokens=12, warmup=False)
    return torch.tensor([output.prompt_ids + output.generated_tokens for output in found.values()])


def with_the_models_loop(model, input_ids, **arguments):
    return model._sample(input_ids, **arguments)


def with_generate(model, input_ids, **arguments):
    return model.generate(input_ids, max_new_tokens=12)


@pytest.mark.filterwarnings("ignore:.*only transformers' own generate")
@pytest.mark.parametrize("function", [in_a_batch, with_the_models_loop, with_generate])
def test_functions_of_the_user_call_all_methods_of_a_speculative_model(model, function):
    expected = model.generate(**PROMPT)
    fast = speculate(model, compile=False, check=False)
    assert torch.equal(fast.generate(**PROMPT, custom_generate=function), expected)
    assert fast.speculation.stats.tokens == 12


def test_a_model_from_such_a_repository_has_it_bound(model, tmp_path, capsys):
    expected = model.generate(**PROMPT)
    model.save_pretrained(tmp_path / "model")
    shutil.copytree(FOLDER / "custom_generate", tmp_path / "model/custom_generate")
    bound = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="float32", trust_remote_code=True)
    assert bound.generate.func is custom_generate.generate
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eager = {"max_new_tokens": 12, "compile": False, "check": False}
        assert torch.equal(bound.generate(PROMPT["input_ids"], **eager), expected)
        own = speculate(bound, compile=False, check=False)
        assert torch.equal(own.generate(**PROMPT), expected) and own.speculation.stats.rounds
        bound.generate = own.generate
        assert torch.equal(bound.generate(**PROMPT), expected)


def test_the_card_has_transformers_tag_and_runs(two_layers, tmp_path, monkeypatch, capsys):
    assert re.search(r"^tags:\n(  - .+\n)*  - custom_generate\n", CARD, re.MULTILINE)
    for line in (FOLDER / "custom_generate/requirements.txt").read_text().split():
        assert importlib.metadata.version(line)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(custom_generate, "speculate", partial(speculate, compile=False, check=False))
    namespace = {}
    for code in re.findall(r"```python\n(.*?)```", CARD, re.DOTALL):
        exec(code, namespace)
    expected = namespace["model"].generate(**namespace["inputs"], max_new_tokens=32)
    assert torch.equal(namespace["output"], expected)
    assert kept(namespace["model"]).speculation.stats.tokens == 64
