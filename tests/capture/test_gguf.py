"""GGUF files keep their bits: `load_gguf` packs layers again that transformers has unpacked."""

import logging
import sys
from pathlib import Path

import models
import pytest
import torch

import spec_compile
from spec_compile.capture import rounded
from spec_compile.capture.quantised import QuantisedLinear
from spec_compile.kernels.linear import few_rows

sys.path.insert(0, str(Path(__file__).parents[2]))

library = pytest.importorskip("gguf")
IDS = torch.randint(3, models.VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
OPTIONS = dict(max_new_tokens=12, do_sample=False, pad_token_id=0)


def write(folder, kind, monkeypatch):
    """A file of the Llama with matrices of a type."""
    from benchmarks.peers import gguf_file  # it needs the package, too

    models.ADMITTED["llama"]().save_pretrained(folder / "model")
    monkeypatch.setitem(gguf_file.TYPES, kind, library.GGMLQuantizationType[kind])
    gguf_file.write(folder / "model", folder / f"{kind}.gguf", kind)


@pytest.mark.skipif(few_rows.BEST == 0, reason="needs a CPU with AVX2, and the package built")
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
    for path in (
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    ):  # of which rows are in other places
        layer, weight = model.get_submodule(path), plain.get_submodule(path).weight
        assert isinstance(layer, QuantisedLinear) and torch.equal(layer.packed.weight().to(dtype), weight)
    fast = spec_compile.speculate(model, compile=False)
    assert torch.equal(fast.generate(IDS, **OPTIONS), model.generate(IDS, **OPTIONS))
    if dtype == torch.float32:
        assert torch.equal(model.generate(IDS, **OPTIONS), plain.generate(IDS, **OPTIONS))


def test_other_formats_are_unpacked_and_named(tmp_path, monkeypatch, caplog):
    write(tmp_path, "Q5_1", monkeypatch)
    model = spec_compile.load_gguf(tmp_path, "Q5_1.gguf", dtype=torch.float32)
    assert not any(isinstance(part, QuantisedLinear) for part in model.modules())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "spec_compile"]
    assert "14 linear layers of Q5_1.gguf are unpacked to torch.float32" in line and "(the file has 16 of Q5_1)" in line
    assert "kernels of this cpu read only Q4_0, Q4_1, Q8_0 (" in line


def test_a_device_without_kernels_has_them_unpacked(tmp_path, monkeypatch, caplog):
    write(tmp_path, "Q8_0", monkeypatch)
    monkeypatch.setattr(few_rows, "BEST", 0)
    model = spec_compile.load_gguf(tmp_path, "Q8_0.gguf", dtype=torch.float32)
    assert not any(isinstance(part, QuantisedLinear) for part in model.modules())
    assert "14 linear layers of Q8_0.gguf are unpacked" in caplog.text


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
    write(tmp_path, "Q4_0", monkeypatch)
    with pytest.raises(ValueError, match="quantization_config: load_gguf keeps layers as they are"):
        spec_compile.load_gguf(tmp_path, "Q4_0.gguf", quantization_config=None)
    path = tmp_path / "Q4_0.gguf"
    tensor = next(t for t in library.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    data = bytearray(path.read_bytes())
    data[tensor.data_offset : tensor.data_offset + 2] = b"\x00\x7e"  # a scale that is no number
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"gguf_file: Q4_0\.gguf: blk\.1\.ffn_up\.weight \(Q4_0\) has scales that are not f"
    ):
        spec_compile.load_gguf(tmp_path, "Q4_0.gguf")
