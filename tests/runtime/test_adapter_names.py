"""generate(adapter_names=...): each row of a batch has a LoRA adapter of its own, as in peft."""

import copy

import pytest
import torch

pytest.importorskip("peft")
from lora_models import NAMES, call, fill, ids, lora, two_adapters

from spec_compile import speculate
from spec_compile.tools.audit import audit

SCORES = dict(return_dict_in_generate=True, output_logits=True)


@pytest.fixture(scope="module")
def models():
    model = two_adapters()
    return model, speculate(model, compile=False, max_loras=2)


def alike(got, expected):
    assert torch.equal(got.sequences, expected.sequences)
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("names", [NAMES, ["blue", "blue", "red", "__base__"], ["__base__"] * 4])
def test_rows_as_in_peft(models, names):
    model, fast = models
    alike(*(each.generate(**call(ids()), **SCORES, adapter_names=names) for each in (fast, model)))


def test_padded_prompts_and_sequences(models):
    model, fast = models
    prompts = ids(2)
    mask = torch.ones_like(prompts)
    prompts[1, :5], mask[1, :5] = 0, 0
    options = call(prompts, attention_mask=mask)
    expected = model.generate(**options, adapter_names=["blue", "red"])
    assert torch.equal(fast.generate(**options, adapter_names=["blue", "red"]), expected)
    torch.manual_seed(0)
    several = dict(options, do_sample=True, num_return_sequences=3, top_k=1)  # likeliest tokens, by the sampling loop
    rows = fast.generate(**several, adapter_names=["blue", "red"])
    assert torch.equal(rows, expected.repeat_interleave(3, dim=0))


def test_transformers_own_loops_have_the_adapters(models):
    model, fast = models
    options = call(ids(2), num_beams=2)
    with pytest.warns(UserWarning, match="num_beams"):
        found = fast.generate(**options, adapter_names=["red", "blue"])
    assert torch.equal(found, model.generate(**options, adapter_names=["red", "blue"]))


def test_without_names_the_active_adapter_counts():
    model = two_adapters()
    fast = speculate(model, compile=False, max_loras=1)
    for name in ("red", "blue", "red"):  # each takes the only slot in turn
        model.set_adapter(name)
        assert torch.equal(fast.generate(**call(ids())), model.generate(**call(ids())))
    with model.disable_adapter():
        assert torch.equal(fast.generate(**call(ids(2))), model.generate(**call(ids(2))))
    model.base_model.set_adapter(["red", "blue"])
    with pytest.raises(ValueError, match="active at once"):
        fast.generate(**call(ids()))
    assert fast.generate(**call(ids()), adapter_names=["red"] * 4).shape == (4, 36)


def test_more_adapters_than_slots():
    fast = speculate(two_adapters(), compile=False, max_loras=1)
    with pytest.raises(RuntimeError, match="no slot is free for 'blue', because red are in use and max_loras=1"):
        fast.generate(**call(ids()), adapter_names=NAMES)
    assert fast.generate(**call(ids()), adapter_names=["blue"] * 4).shape == (4, 36)  # nothing is left in use


def test_adapters_change_between_calls():
    model = two_adapters()
    fast = speculate(model, compile=False, max_loras=2, max_lora_rank=8)
    check = lambda names: torch.equal(  # noqa: E731
        fast.generate(**call(ids(2)), adapter_names=names), model.generate(**call(ids(2)), adapter_names=names)
    )
    assert check(["red", "blue"])
    fill(model, "red", 5)  # in place
    assert check(["red", "blue"])
    model.delete_adapter("red")
    with pytest.raises(ValueError, match="no adapter 'red'; known are blue"):
        fast.generate(**call(ids(2)), adapter_names=["red", "blue"])
    model.add_adapter("green", lora(8, ["v_proj"], lora_alpha=3))
    fill(model, "green", 6)
    model.add_adapter("red", lora(2, ["up_proj", "k_proj"]))
    fill(model, "red", 7)
    for names in (["green", "blue"], ["red", "green"], ["blue", "red"]):
        assert check(names)


def test_copies_have_adapters(models):
    copied = copy.deepcopy(models[1])
    expected = models[0].generate(**call(ids()), adapter_names=NAMES)
    assert torch.equal(copied.generate(**call(ids()), adapter_names=NAMES), expected)


def test_an_audit_is_refused(models):
    with pytest.raises(ValueError, match="max_loras: an audit"):
        audit(models[1], [[5, 6, 7]])
