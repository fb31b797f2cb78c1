"""The option `weights`: a model is rounded at load, in place, and answers as the rounded model does."""

import copy
import pickle

import draft_checkpoints as drafts
import models
import pytest
import torch
from torch import nn
from transformers import GenerationConfig

import spec_compile
from spec_compile import UnsupportedModelError
from spec_compile.capture import rounded
from spec_compile.capture.quantised import QuantisedLinear, packed_layer, packed_layers
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.drafters.draft_weights import DraftWeights
from spec_compile.graph import attribute

IDS = torch.randint(3, models.VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
OPTIONS = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)


def tokens(model):
    return model.generate(IDS, attention_mask=torch.ones_like(IDS), generation_config=OPTIONS)


@pytest.mark.sweep("int8 int4")
@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_layers_are_held_rounded(name):
    model = models.ADMITTED["llama"]()
    before = copy.deepcopy(model)
    fast = spec_compile.speculate(model, weights=name, compile=False)
    packed = packed_layers(model)
    assert len(packed) == 14 + (name != "fp8") and (name == "fp8") == (type(model.lm_head) is nn.Linear)
    for path, layer in packed.items():
        weight = before.get_submodule(path).weight
        x = torch.eye(weight.shape[1])
        rounded = model.get_submodule(path)(x).t()
        format = "int8" if path == "lm_head" else name
        step = weight.abs().amax() / {"fp8": 16, "int8": 127, "int4": 3}[format]
        assert 0 < (rounded - weight).abs().max() <= step
        assert not any(part.shape == weight.shape and part.itemsize > 1 for part in layer.parts.values())
    assert torch.equal(tokens(fast), tokens(model))


def first_part(packed):
    """The codes, in the order in which the kernel of this CPU reads them."""
    return next(iter(packed.parts.values()))


@pytest.mark.parametrize("name, is_tied", [("int8", True), ("int4", False)])
def test_the_output_head_is_read_in_8_bits(name, is_tied):
    model = models.build("LlamaConfig", "LlamaForCausalLM", dict(models.GQA, tie_word_embeddings=is_tied))
    model = model.bfloat16()
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    fast = spec_compile.speculate(model, weights=name, compile=False)
    rounded, numbers = model.lm_head, packed_layer(model.lm_head).weight()
    assert (rounded.weight is embedding) == is_tied and rounded.weight.dtype == torch.bfloat16
    step = head.float().abs().amax(dim=1, keepdim=True) / 127
    assert ((numbers - head).abs() <= 0.51 * step).all()
    if not is_tied:
        assert torch.equal(rounded.weight, numbers.bfloat16())
        assert not any(each.shape == head.shape and each is not embedding for each in model.parameters())
    graph, held = fast.speculation.engine.runtime.verify, first_part(packed_layer(rounded))
    assert attribute(graph.gm, graph.head_weight).data_ptr() == held.data_ptr()
    drafted, plain = tokens(fast), tokens(spec_compile.speculate(model, num_draft_tokens=1, compile=False))
    assert torch.equal(drafted, plain)


def test_heads_read_the_codes_of_the_output_head(tmp_path):
    model = drafts.write("eagle", tmp_path).target
    options = dict(algo="eagle", draft=tmp_path, compile=False, num_steps=2)
    fast = spec_compile.speculate(model, weights="int8", **options)
    read, held = fast.speculation.engine.runtime.algorithm.logits.copy.part_0, first_part(packed_layer(model.lm_head))
    assert read.data_ptr() == held.data_ptr()
    assert torch.equal(tokens(fast), tokens(model))
    head = load_head(tmp_path, model, token_map=[5, 3, 90])
    few = DraftWeights(None, head, head.head_weight).copy_of(head.head_weight, "output")
    assert torch.equal(few.weight(), packed_layer(model.lm_head).weight()[[5, 3, 90]])


def test_a_copy_is_rounded_once():
    fast = spec_compile.speculate(models.ADMITTED["llama"](), weights="int8", compile=False)
    again = pickle.loads(pickle.dumps(fast))
    assert torch.equal(tokens(again), tokens(fast))
    assert all(isinstance(again.get_submodule(path), QuantisedLinear) for path in packed_layers(again))


def test_an_error_gives_the_weights_back(monkeypatch):
    model = models.ADMITTED["llama"]()
    layers = [*model.modules()]

    def fail(*_):
        assert packed_layers(model)
        raise UnsupportedModelError("model: fails")

    monkeypatch.setattr("spec_compile.api.capture", fail)
    with pytest.raises(UnsupportedModelError, match="model: fails"):
        spec_compile.speculate(model, weights="int8", compile=False)
    assert [*model.modules()] == layers


def test_layers_whose_weight_others_read_stay():
    model = models.ADMITTED["llama"]()
    mlp = model.model.layers[0].mlp
    mlp.up_proj.weight = mlp.gate_proj.weight
    with rounded.rounded_weights(model, "int8"):
        pass
    assert len(packed_layers(model)) == 13 and type(mlp.up_proj) is type(mlp.gate_proj) is nn.Linear


def test_what_cannot_be_rounded_is_named(monkeypatch):
    model = models.ADMITTED["llama"]()
    with pytest.raises(ValueError, match=r"weights: expected one of None, fp8, int8, int4, got 'int3'\. Did you mean"):
        spec_compile.speculate(model, weights="int3")
    with pytest.raises(UnsupportedModelError, match="weights: GPT2LMHeadModel has no linear layer that 'int8' can"):
        spec_compile.speculate(models.ADMITTED["gpt2"](), weights="int8", compile=False)
    monkeypatch.setattr(rounded, "packed_layers", lambda model: {"model.layers.0.mlp.up_proj": None})
    with pytest.raises(UnsupportedModelError, match="weights: LlamaForCausalLM is quantised already; leave"):
        spec_compile.speculate(model, weights="int8", compile=False)
