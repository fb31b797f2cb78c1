"""Tiny quantised models that run on a CPU: still packed, with the arithmetic of their libraries."""

import functools
from types import SimpleNamespace
from unittest import mock

import models
import pytest
import quantised_checkpoints as checkpoints
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FineGrainedFP8Config,
    GPTQConfig,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
)
from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from spec_compile.capture.yardstick import NEAR_TIE
from spec_compile.quantised import unrounded_activations
from spec_compile.tools.audit_logits import gap_noise

IDS = torch.randint(1, checkpoints.VOCAB, (1, 20), generator=torch.Generator().manual_seed(3))


def fp8_forward(layer, x):
    """What transformers' kernels compute for an `FP8Linear`, one block of weights after the other."""
    out = torch.zeros(*x.shape[:-1], layer.out_features, dtype=torch.float64)
    for column in range(0, layer.in_features, 128):
        part = x[..., column : column + 128].float()
        scale = part.abs().amax(-1, keepdim=True) / 448
        scale = scale.where(scale > 0, 1.0)
        part = ((part / scale).to(torch.float8_e4m3fn).float() * scale).double()
        for row in range(0, layer.out_features, 128):
            weight = layer.weight[row : row + 128, column : column + 128].float()
            weight = weight * layer.weight_scale_inv[row // 128, column // 128]
            out[..., row : row + 128] += part @ weight.T.double()
    return out.to(x.dtype)


def linear_4bit_forward(layer, x):
    """What `bitsandbytes` computes where it has no kernel."""
    from bitsandbytes.functional import dequantize_4bit

    return F.linear(x, dequantize_4bit(layer.weight.data, layer.weight.quant_state))


def load(name, folder, dtype=torch.float32, **changes):
    """A checkpoint of a format, still packed as on a GPU, whose layers also run on a CPU."""
    if name in PACKED_BY_HAND:
        return packed_by_hand(name, checkpoints.write(name, folder), dtype)
    if name in LIBRARY:
        pytest.importorskip(LIBRARY[name])
    on_loading = {"quantization_config": ON_LOADING[name](dtype)} if name in ON_LOADING else {}
    name = "plain" if on_loading else name
    with mock.patch.object(FineGrainedFP8HfQuantizer, "validate_environment", lambda *args, **kwargs: None):
        folder = checkpoints.write(name, folder, **changes)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **on_loading)
    for part in model.modules():
        if isinstance(part, FP8Linear):
            part.forward = functools.partial(fp8_forward, part)
        if type(part).__name__ == "Linear4bit":  # some CPUs have a kernel that rounds scales to bfloat16
            part.forward = functools.partial(linear_4bit_forward, part)
    return model.eval()


@torch.no_grad()
def parts_at_near_tie(fast, answer, wanted):
    """True if two texts [T] of a speculative model with rounded activations are equal, or part where the two logits are
    as near as the rounding of activations moves them. The yardstick is the logits without that rounding."""
    pairs = zip(answer.tolist(), wanted.tolist())
    place = next((number for number, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
    if place is None:
        return len(answer) == len(wanted)
    run, ids = fast.speculation.engine.captured.gm, wanted[None, :place]
    rounded = run(ids, positions := torch.arange(place)[None])[0][0]
    with unrounded_activations():
        exact = run(ids, positions)[0][0]
    pair = [answer[place], wanted[place]]
    errors = (rounded - exact)[:, pair].diff(dim=-1).T
    return abs(float(exact[-1, pair].diff())) <= NEAR_TIE * gap_noise(errors)


def experts_forward(experts, x, weight, scale, activation_scale=None):
    """What transformers' kernels compute for one of `FP8Experts`."""
    layer = SimpleNamespace(weight=weight, weight_scale_inv=scale, out_features=len(weight), in_features=x.shape[-1])
    return fp8_forward(layer, x)


def build_fp8_mixture(**sizes):
    """A tiny Qwen3-MoE in FP8, still packed as on a GPU, whose layers also run on a CPU."""
    sizes = models.GQA16 | models.MOE | sizes
    model = models.build("Qwen3MoeConfig", "Qwen3MoeForCausalLM", sizes)
    model.config.quantization_config = FineGrainedFP8Config()
    replace_with_fp8_linear(model, ["lm_head"], model.config.quantization_config)
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                value = torch.rand(parameter.shape) / 2 + 0.5 if "scale" in name else torch.randn(parameter.shape) / 8
                part._parameters[name] = nn.Parameter(value.to(parameter.dtype), requires_grad=False)
        if isinstance(part, FP8Linear):
            part.forward = functools.partial(fp8_forward, part)
        if type(part).__name__ == "FP8Experts":
            part.linear = functools.partial(experts_forward, part)
    model.config._experts_implementation = "eager"
    return model.eval()


class LibraryLinear(nn.Module):
    """A layer as gptqmodel holds it. Its forward unpacks the weights, once."""

    def __init__(self, tensors, inputs, outputs, is_awq):
        super().__init__()
        self.in_features, self.out_features, self.bits, self.bias, self.is_awq = inputs, outputs, 4, None, is_awq
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def qzero_format(self):
        return 1

    def unpacked(self):
        words, zeros, scales = self.qweight, self.qzeros, self.scales  # once: each access may make them again
        i, weight = torch.arange(self.in_features), torch.empty(self.out_features, self.in_features)
        group = i * len(scales) // self.in_features if self.is_awq else self.g_idx.long()
        for o in range(8):
            nibble = (0, 4, 1, 5, 2, 6, 3, 7)[o] if self.is_awq else o
            zero = (zeros[group] >> 4 * nibble & 15) + (not self.is_awq)
            code = words >> 4 * nibble if self.is_awq else words[i // 8, o::8] >> (i % 8 * 4)[:, None]
            weight[o::8] = (((code & 15) - zero) * scales[group, o::8]).T
        return weight

    def forward(self, x):
        if "_weight" not in vars(self):
            self.__dict__["_weight"] = self.unpacked()
        return F.linear(x, self._weight.to(x.dtype))


def packed_by_hand(name, folder, dtype):
    """A checkpoint of GPTQ or AWQ as transformers would hold it with gptqmodel, which need not be installed."""
    config = LlamaConfig.from_pretrained(folder)
    method = config.quantization_config["quant_method"]
    del config.quantization_config
    cls, module = ("TorchLinear", "torch") if method == "gptq" else ("AwqTorchLinear", "torch_awq")
    cls = type(cls, (LibraryLinear,), {"__module__": f"gptqmodel.nn_modules.qlinear.{module}"})
    model, tensors = LlamaForCausalLM(config).eval(), load_file(folder / "model.safetensors")
    for prefix, layer in list(model.model.named_modules()):
        if isinstance(layer, nn.Linear):
            start = f"model.{prefix}."
            parts = {key.removeprefix(start): tensors.pop(key) for key in list(tensors) if key.startswith(start)}
            parent, _, child = prefix.rpartition(".")
            packed = cls(parts, layer.in_features, layer.out_features, method == "awq")
            setattr(model.model.get_submodule(parent), child, packed)
    assert not model.load_state_dict(tensors, strict=False).unexpected_keys
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.config.quantization_config = GPTQConfig(bits=4)
    model.config.quantization_config.quant_method = method
    return model


def bitsandbytes(dtype, kind="nf4", nested=False):
    options = dict(bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=nested)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=dtype, **options)


def torchao(dtype, name, *arguments):
    quantization = pytest.importorskip("torchao.quantization")
    arguments = [getattr(quantization, each)(64) if each == "PerGroup" else each for each in arguments]
    return TorchAoConfig(getattr(quantization, name)(*arguments, version=2))


ON_LOADING = {
    "nf4": bitsandbytes,
    "nf4_nested": functools.partial(bitsandbytes, nested=True),
    "fp4": functools.partial(bitsandbytes, kind="fp4"),
    "ao_int8": lambda dtype: torchao(dtype, "Int8WeightOnlyConfig"),
    "ao_float8": lambda dtype: torchao(dtype, "Float8WeightOnlyConfig"),
    "ao_int4": lambda dtype: torchao(dtype, "IntxWeightOnlyConfig", torch.int4, "PerGroup"),
}
"""Formats that transformers makes of a plain checkpoint."""
LIBRARY = {name: "compressed_tensors" for name in checkpoints.FORMATS if name.startswith("ct_") and name != "ct_nvfp4"}
LIBRARY |= {name: "torchao" if name.startswith("ao") else "bitsandbytes" for name in ON_LOADING}
"""What transformers needs to load a format."""
PACKED_BY_HAND = ["gptq", "gptq_by_activation", "awq"]
