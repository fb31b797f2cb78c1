"""What objects and functions tell of themselves: repr, help, and errors about a draft that was not named."""

import dataclasses
import pydoc
from pathlib import Path

import models
import pytest
import torch
import transformers

from spec_compile import api, speculate, train_draft
from spec_compile.config import Options, meanings
from spec_compile.drafters import ALGORITHMS, ALIASES
from spec_compile.train.options import TrainingOptions


@pytest.fixture(scope="module")
def model():
    return models.ADMITTED["llama"]()


def told(model, algo="ngram", **options) -> str:
    fast = models.speculate_captured(model, algo, compile=False, check=False, **options)
    lines = repr(fast).splitlines()
    assert lines[0] == f"{type(model).__name__}(" and lines[1] == f"  speculation={fast.speculation!r}"
    assert len(lines) == len(repr(model).splitlines()) + 1
    return repr(fast.speculation)


def test_a_repr_tells_algorithm_options_and_device(model):
    common, places = "compile=False, check=False", f"device='cpu', dtype={model.dtype}"
    assert told(model) == f"Speculation(algo='ngram', {common}, {places})"
    changed = told(model, "lookahead", capacity=1000, share_text=False, num_draft_tokens=16)
    assert changed == f"Speculation(algo='ngram', {common}, capacity=1000, share_text=False, {places})"
    draft = models.ADMITTED["llama"]()
    told_of = told(model, "standalone", draft=draft, num_steps=2, ngram={"branch_length": 20})
    options = "ngram={'branch_length': 20}, draft=<LlamaForCausalLM>, num_steps=2"
    assert told_of == f"Speculation(algo='draft_model', {common}, {options}, {places})"


def test_a_repr_tells_the_draft():
    folder = Path("examples/tiny_coder")
    coder = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    fast = speculate(coder, "eagle3", draft=folder / "heads" / "eagle3", compile=False, check=False)
    assert "algo='eagle3', " in repr(fast.speculation) and f"draft='{folder}/heads/eagle3', " in repr(fast.speculation)


def test_a_shadow_has_a_repr_before_it_speculates(model):
    assert "speculation=None" in repr(api.speculative(model))


def test_help_lists_every_option():
    """With its default and its meaning, of every algorithm."""
    page = pydoc.plain(pydoc.render_doc(speculate))
    for name, entry in ALGORITHMS.items():
        if not entry.options.__module__.startswith("spec_compile."):
            continue
        assert f"algo={name!r}" in page
        said = meanings(entry.options)
        for field in dataclasses.fields(entry.options):
            default = "" if field.default is None else f"default {field.default!r}"
            assert said[field.name] and f"    {field.name}: " in page and default in page, (name, field.name)
            assert said[field.name].split()[0] in page
    for field in dataclasses.fields(Options):
        assert page.count(f"\n        {field.name}: ") <= len(ALGORITHMS)
    training = pydoc.plain(pydoc.render_doc(train_draft))
    assert [field.name for field in dataclasses.fields(TrainingOptions) if f"    {field.name}: " not in training] == []


NEEDY = sorted(name for name in (*ALGORITHMS, *ALIASES) if ALGORITHMS[ALIASES.get(name, name)].needs)


@pytest.mark.parametrize("algo", NEEDY)
@pytest.mark.parametrize("options", [{}, {"ngram": True}, {"draft": None}], ids=str)
def test_an_algorithm_without_its_draft_says_so(model, algo, options):
    with pytest.raises(ValueError) as error:
        speculate(model, algo, **options)
    message = str(error.value)
    assert message.startswith(f"draft: algo={algo!r} needs a") and "multi-token" not in message
    assert f"speculate(model, algo={algo!r}, draft='FOLDER')" in message


def test_all_others_draft_without_one(model):
    ours = {name for name, entry in ALGORITHMS.items() if entry.options.__module__.startswith("spec_compile.")}
    assert {"ngram", "mtp", "nextn", "naive_eagle", "lookahead", "self"} == {*ours, *ALIASES} - {*NEEDY}
    for algo in ("mtp", "naive_eagle"):
        with pytest.raises(ValueError, match=rf"multi-token prediction, so pass draft=.*algo='{algo}'"):
            speculate(model, algo, compile=False)


def test_a_model_is_looked_at_after_the_options():
    with pytest.raises(ValueError, match="needs an EAGLE-3 head"):
        speculate(torch.nn.Linear(2, 2), "eagle3")
