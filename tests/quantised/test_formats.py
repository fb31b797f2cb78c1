"""Quantised matrices in files: the method that a config names, and a format that is added from outside."""

import pytest
import torch

from spec_compile import quantised
from spec_compile.quantised.formats import quantisation_of, sized_as
from spec_compile.quantised.fp8 import Int8Weight


def test_old_names_of_the_config():
    assert quantisation_of({"compression_config": {"format": "float-quantized"}}, {}).method == "compressed-tensors"
    assert quantisation_of({"quantization_config": {"quant_method": "modelopt_fp4", "quant_algo": "nvfp4"}}, {})
    assert quantisation_of({}, {}) is None


def test_a_format_from_outside_is_read():
    def read(tensors, config):
        codes, scales = tensors["codes"], tensors["scales"] / config["divisor"]
        quantised.codes.require(codes.dtype == torch.int8, f"is {codes.dtype}, expected torch.int8")
        return quantised.Packed(Int8Weight(), {"codes": codes, "scales": scales}, None, codes.shape[1])

    stored = quantised.Stored(".codes", (".scales",), (), sized_as("codes"), read)
    quantised.FORMATS.append(quantised.Format(files={"mine": (stored,)}))
    try:
        said = quantisation_of({"quantization_config": {"quant_method": "mine", "divisor": 4}}, {})
        tensors = {"fc.codes": torch.tensor([[1, -2]], dtype=torch.int8), "fc.scales": torch.tensor([[2.0]])}
        (name, matrix), *others = said.matrices(tensors).items()
        assert (name, others) == ("fc.weight", [])
        assert matrix.shape({each: tuple(tensor.shape) for each, tensor in tensors.items()}, tensors.get) == (1, 2)
        assert matrix.read(tensors.get, said.config).weight().tolist() == [[0.5, -1.0]]
        tensors["fc.codes"] = tensors["fc.codes"].float()
        with pytest.raises(ValueError, match=r"^draft: fc\.codes is torch.float32"):
            matrix.read(tensors.get, said.config)
    finally:
        quantised.FORMATS.pop()
