"""torchao's int8 and float8 weights without quantised activations, in a tensor subclass as weight of an `nn.Linear`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .layout import Layout, Packed, require, require_scale

DTYPES = {"Int8Tensor": torch.int8, "Float8Tensor": torch.float8_e4m3fn}


class _PerOutput(Layout):
    """codes [O, I], scales [O, 1] float32."""

    packing = "channels", 1

    def outputs(self, parts: Sequence[Tensor], inputs: int) -> int:
        return parts[0].shape[0]


@dataclass(frozen=True)
class Int8Weight(_PerOutput):
    """codes int8. Products with the codes are rounded before the scale is applied."""

    def unrounded(self, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        codes, scales = parts
        out = F.linear(x, codes.to(x.dtype)) * scales[:, 0].to(x.dtype)
        return out if bias is None else out + bias


@dataclass(frozen=True)
class Float8Weight(_PerOutput):
    """codes float8_e4m3fn. Weights are rounded to the dtype of activations."""

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        codes, scales = parts
        return codes.float() * scales


LAYOUTS = (Int8Weight, Float8Weight)


def read(module: nn.Module) -> Packed | None:
    """An `nn.Linear` with a weight of these classes."""
    weight = module._parameters.get("weight")
    name = type(weight).__name__
    if name not in DTYPES or not type(weight).__module__.startswith("torchao.") or type(module) is not nn.Linear:
        return None
    require(weight.act_quant_kwargs is None, f"quantises activations, too ({name})")
    require(getattr(weight, "act_pre_scale", None) is None, "scales activations")
    zero = getattr(weight, "zero_point", None)
    require(zero is None or not bool(zero.any()), "has zero points")
    require(weight.qdata.dtype == DTYPES[name], f"has weights of {weight.qdata.dtype}, expected {DTYPES[name]}")
    require_scale("scale", weight.scale, (weight.shape[0], 1))
    layout = Int8Weight() if name == "Int8Tensor" else Float8Weight()
    return Packed(layout, {"qdata": weight.qdata, "scale": weight.scale}, module.bias)
