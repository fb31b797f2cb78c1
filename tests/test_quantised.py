"""Quantised targets: what is not read is refused by name; what is read gives transformers' own answers."""

import models
import pytest
import quantised_checkpoints as checkpoints
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPTQConfig, QuantoConfig

from spec_compile import UnsupportedModelError, speculate


def refuses(model, *texts):
    """Assert that `model` is refused with a message that has all of the texts."""
    with pytest.raises(UnsupportedModelError) as raised:
        speculate(model, compile=False)
    assert all(text in str(raised.value) for text in texts), str(raised.value)


def test_a_method_that_transformers_did_not_apply(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(checkpoints.write("modelopt", tmp_path)).eval()
    refuses(model, "'modelopt'", "did not apply", "load a checkpoint")


def test_a_method_that_is_not_read():
    model = models.ADMITTED["llama"]()
    model.config.quantization_config = QuantoConfig(weights="int4")
    refuses(model, "'quanto'", "not read yet")


@pytest.mark.parametrize("library", ["gptqmodel.nn_modules", "transformers.integrations.mxfp4"])
def test_a_class_of_quantised_layers_that_is_not_read(library):
    model = models.ADMITTED["llama"]()
    packed = type("PackedLinear", (nn.Linear,), {"__module__": library})
    model.model.layers[1].mlp.up_proj.__class__ = packed
    refuses(model, "PackedLinear", "model.layers.1.mlp.up_proj", "not read yet")


def test_a_class_of_quantised_tensors_that_is_not_read():
    model = models.ADMITTED["llama"]()
    packed = type("PackedTensor", (torch.Tensor,), {"__module__": "torchao.somewhere"})
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(packed))
    refuses(model, "PackedTensor", "model.layers.0.mlp.down_proj.weight", "not read yet")


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_experts_that_were_not_loaded(method, monkeypatch):
    monkeypatch.setattr("spec_compile.capture.quantised.READ", {"gptq": "GPTQ", "awq": "AWQ"})
    model = models.ADMITTED["qwen3_moe"]()
    model.config.quantization_config = GPTQConfig(bits=4)
    model.config.quantization_config.quant_method = method
    refuses(model, "mixture of experts", method, "random")
