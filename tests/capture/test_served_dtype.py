"""A GPU without bfloat16 serves float16 in its place; an older one is refused by name."""

import logging

import models
import pytest
import torch

import spec_compile
from spec_compile import UnsupportedModelError
from spec_compile.capture import admit
from spec_compile.capture.admit import admit_training, in_served_dtype
from spec_compile.kernels.card import Card

T4, A100, V100 = (Card(name, capability, 40, 65_536) for name, capability in
                  (("T4", (7, 5)), ("A100", (8, 0)), ("V100", (7, 0))))  # fmt: skip


@pytest.fixture
def on_card(monkeypatch):
    """A function: the card on which all models are from now on."""

    def be(card):
        monkeypatch.setattr(admit, "card_of", lambda device: card)

    return be


def in_bfloat16():
    return models.ADMITTED["llama"]().to(torch.bfloat16)


def test_weights_are_converted_with_one_warning(on_card, caplog):
    on_card(T4)
    model = in_bfloat16()
    model.register_buffer("more", torch.ones(2, dtype=torch.bfloat16))
    model.config.dtype = torch.bfloat16
    numbers = {name: weight.clone() for name, weight in model.named_parameters()}
    with caplog.at_level(logging.WARNING, "spec_compile"):
        in_served_dtype(model, converts=True)
        in_served_dtype(model, converts=True)
    (record,) = caplog.records
    assert "LlamaForCausalLM is in bfloat16, which T4 (compute capability 7.5) does not compute" in record.message
    assert {each.dtype for each in (*model.parameters(), model.more)} == {torch.float16}
    assert model.dtype == model.config.dtype == torch.float16
    assert all(torch.equal(weight, numbers[name].half()) for name, weight in model.named_parameters())


@pytest.mark.parametrize("card", [A100, Card()])
def test_other_devices_keep_bfloat16(on_card, card):
    on_card(card)
    model = in_bfloat16()
    in_served_dtype(model, converts=False)
    assert model.dtype == torch.bfloat16


def test_what_cannot_be_converted_is_refused_before_any_change(on_card):
    on_card(T4)
    model = in_bfloat16()
    with pytest.raises(UnsupportedModelError, match=r"load it with dtype=torch.float16, or pass convert_bfloat16=True"):
        spec_compile.speculate(model, convert_bfloat16=False)
    with torch.no_grad():
        model.model.norm.weight[3] = 1e5
    with pytest.raises(UnsupportedModelError, match=r"model.norm.weight has values beyond float16; .*torch.float32"):
        in_served_dtype(model, converts=True)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    in_served_dtype(model.float(), converts=False)


def test_a_converted_model_answers_as_one_in_float16(on_card):
    """With a draft model in bfloat16, which is converted, too."""
    ids = models.prompts((9,))[1]
    same = in_bfloat16().to(torch.float16)
    expected = spec_compile.speculate(same, "draft_model", draft=in_bfloat16().half(), compile=False, check=False)
    on_card(T4)
    model, draft = in_bfloat16(), in_bfloat16()
    fast = spec_compile.speculate(model, "draft_model", draft=draft, compile=False, check=False)
    assert model.dtype == draft.dtype == torch.float16
    options = dict(max_new_tokens=6, do_sample=False)
    assert torch.equal(fast.generate(ids, **options), expected.generate(ids, **options))


def test_older_gpus_are_refused_by_name(on_card):
    model = in_bfloat16()
    on_card(V100)
    with pytest.raises(UnsupportedModelError, match=r"is on V100 \(compute capability 7.0\); the kernels need 7.5"):
        admit._admit_device(model, torch.device("cuda"))
    on_card(T4)
    admit._admit_device(model, torch.device("cuda"))


def test_drafts_are_not_trained_there(on_card):
    model = in_bfloat16()
    on_card(A100)
    admit_training(model)
    on_card(T4)
    with pytest.raises(UnsupportedModelError, match=r"is on T4 .*drafts are trained by kernels that need 8.0 or later"):
        admit_training(model)
