"""Weights in fewer bits from the load on: `weights=` and files of GGUF."""

import copy
import logging
import pickle
import sys
from pathlib import Path

import draft_checkpoints as drafts
import models
import pytest
import torch
from torch import nn
from transformers import GenerationConfig

import spec_compile
from spec_compile import UnsupportedModelError
from spec_compile.capture import rounded
from spec_compile.capture.admit import Inventory, admit
from spec_compile.capture.quantised import QuantisedLinear, packed_layer, packed_layers
from spec_compile.drafters.checkpoints.load import load_head
from spec_compile.drafters.shared_draft import DraftWeights
from spec_compile.graph import attribute
from spec_compile.kernels.linear import cpu_gemm

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
    with rounded.rounded_weights(admit(model), "int8"):
        pass
    assert len(packed_layers(model)) == 13 and type(mlp.up_proj) is type(mlp.gate_proj) is nn.Linear


def test_what_cannot_be_rounded_is_named(monkeypatch):
    model = models.ADMITTED["llama"]()
    with pytest.raises(ValueError, match=r"weights: expected one of None, fp8, int8, int4, got 'int3'\. Did you mean"):
        spec_compile.speculate(model, weights="int3")
    with pytest.raises(UnsupportedModelError, match="weights: GPT2LMHeadModel has no linear layer that 'int8' can"):
        spec_compile.speculate(models.ADMITTED["gpt2"](), weights="int8", compile=False)
    inventory = Inventory(model, packed={"model.layers.0.mlp.up_proj"}, experts=set())
    monkeypatch.setattr("spec_compile.api.admit", lambda *_: inventory)
    with pytest.raises(UnsupportedModelError, match="weights: LlamaForCausalLM is quantised already; leave"):
        spec_compile.speculate(model, weights="int8", compile=False)


# GGUF files keep their bits: `load_gguf` packs layers again that transformers has unpacked.


sys.path.insert(0, str(Path(__file__).parents[2]))

GREEDY = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)


def write(folder, kind, monkeypatch):
    """Write a file of the Llama with matrices of a type; the package `gguf`."""
    library = pytest.importorskip("gguf")
    from benchmarks.peers import gguf_file  # it needs the package, too

    models.ADMITTED["llama"]().save_pretrained(folder / "model")
    monkeypatch.setitem(gguf_file.TYPES, kind, library.GGMLQuantizationType[kind])
    gguf_file.write(folder / "model", folder / f"{kind}.gguf", kind)
    return library


@pytest.mark.skipif(cpu_gemm.BEST == 0, reason="needs a CPU with AVX2, and the package built")
@pytest.mark.parametrize(
    "kind, dtype",
    [("Q4_0", torch.float32), ("Q4_0", torch.bfloat16), ("Q8_0", torch.bfloat16), ("Q4_1", torch.float32)],
)
def test_layers_keep_the_bits_of_the_file(kind, dtype, tmp_path, monkeypatch, caplog):
    write(tmp_path, kind, monkeypatch)
    plain = rounded.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=f"{kind}.gguf", dtype=dtype).eval()
    with caplog.at_level(logging.INFO, "spec_compile"):
        model = spec_compile.load_gguf(tmp_path, f"{kind}.gguf", dtype=dtype)
    assert f"14 linear layers keep the bits of {kind}.gguf" in caplog.text and "unpacked" not in caplog.text
    for path in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):  # the first has rows elsewhere
        layer, weight = model.get_submodule(path), plain.get_submodule(path).weight
        assert isinstance(layer, QuantisedLinear) and torch.equal(layer.packed.weight().to(dtype), weight)
    fast = spec_compile.speculate(model, compile=False)
    assert torch.equal(fast.generate(IDS[:1], **GREEDY), model.generate(IDS[:1], **GREEDY))
    if dtype == torch.float32:
        assert torch.equal(model.generate(IDS[:1], **GREEDY), plain.generate(IDS[:1], **GREEDY))


@pytest.mark.parametrize("kind, level", [("Q5_1", cpu_gemm.BEST), ("Q8_0", 0)])
def test_formats_without_a_kernel_are_unpacked_and_named(kind, level, tmp_path, monkeypatch, caplog):
    write(tmp_path, kind, monkeypatch)
    monkeypatch.setattr(cpu_gemm, "BEST", level)
    model = spec_compile.load_gguf(tmp_path, f"{kind}.gguf", dtype=torch.float32)
    assert not any(isinstance(part, QuantisedLinear) for part in model.modules())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "spec_compile"]
    assert f"14 linear layers of {kind}.gguf are unpacked to torch.float32" in line
    assert level == 0 or ("(the file has 16 of Q5_1)" in line and "this cpu read only Q4_0, Q4_1, Q8_0 (" in line)


def test_a_layer_whose_weights_differ_stays(tmp_path, monkeypatch):
    write(tmp_path, "Q4_0", monkeypatch)
    path = str(tmp_path / "Q4_0.gguf")
    matrices, _ = rounded._read(path, torch.float32, ["Q4_0"])
    matrix = next(iter(matrices.values()))[0]
    weight = rounded.gguf.q4_0(torch.tensor(matrix.data)).weight()
    assert rounded._found(matrices, weight) is not None
    swapped = weight.clone()  # with the same keys, but other numbers
    swapped[0, :2] = swapped[0, :2].flip(0) + 1
    keys = rounded.row_keys(weight, torch.float32)
    monkeypatch.setattr(rounded, "row_keys", lambda some, dtype: keys)
    assert rounded._found(matrices, swapped) is None


def test_files_that_are_refused(tmp_path, monkeypatch):
    library = write(tmp_path, "Q4_0", monkeypatch)
    with pytest.raises(ValueError, match="quantization_config: load_gguf keeps layers as they are"):
        spec_compile.load_gguf(tmp_path, "Q4_0.gguf", quantization_config=None)
    path = tmp_path / "Q4_0.gguf"
    tensor = next(t for t in library.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    data = bytearray(path.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = b"\x00\x7e"  # a scale that is no number
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"Q4_0\.gguf: blk\.1\.ffn_up\.weight \(Q4_0\) has scales that are not finite"):
        spec_compile.load_gguf(tmp_path, "Q4_0.gguf")
