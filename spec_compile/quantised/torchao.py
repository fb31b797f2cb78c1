"""torchao's weights of 1 to 8 bits without quantised activations, in a tensor subclass as weight of an `nn.Linear`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import pack_gpu
from .codes import Packed, Place, WeightLayout, grouped, require, require_scale

DTYPES = {"Int8Tensor": torch.int8, "Float8Tensor": torch.float8_e4m3fn}


class _PerOutput(WeightLayout):
    """codes [O, I], scales [O, 1] float32."""

    packing = "channels", 1

    def outputs(self, parts: Sequence[Tensor], inputs: int) -> int:
        return parts[0].shape[0]

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        codes, scales = parts
        return codes.float() * scales

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        return [Place((0, 1), (1, 1)), Place((0, 1))]


@dataclass(frozen=True)
class Int8Weight(_PerOutput):
    """codes int8. Products with the codes are rounded before the scale is applied."""

    def unrounded(self, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        def multiply(parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
            codes, scales = parts
            out = F.linear(x, codes.to(x.dtype)) * scales[:, 0].to(x.dtype)
            return out if bias is None else out + bias

        return self.by_outputs(x, parts, bias, multiply)

    def restored(self, index: int, packed: WeightLayout, parts: Sequence[Tensor], inputs: int) -> Tensor | None:
        return packed.codes(parts, inputs) if index == 0 else packed.scales(parts, inputs).T.contiguous()


@dataclass(frozen=True)
class Float8Weight(_PerOutput):
    """codes float8_e4m3fn. Weights are rounded to the dtype of activations."""


@dataclass(frozen=True)
class IntGroups(WeightLayout):
    """codes [O, I] int8, of `width` bits; scales [O, I / group] of the model's dtype; zero points, as many, int8.
    Weights are rounded to the dtype of the scales."""

    group: int
    width: int

    def outputs(self, parts: Sequence[Tensor], inputs: int) -> int:
        return parts[0].shape[0]

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        codes, scales, zeros = parts
        codes = codes.to(scales.dtype).unflatten(1, (-1, self.group)).sub_(zeros[:, :, None])
        return codes.mul_(scales[:, :, None]).flatten(1)

    def for_few_rows(self, parts: Sequence[Tensor], inputs: int) -> tuple[WeightLayout, list[Tensor]] | None:
        codes, scales, zeros = parts
        return None if self.width > 4 else pack_gpu.pack((codes + 8).to(torch.uint8), zeros.T.int() + 8, scales.T)

    def restored(self, index: int, packed: WeightLayout, parts: Sequence[Tensor], inputs: int) -> Tensor | None:
        if index == 0:
            return packed.codes(parts, inputs).to(torch.int8) - 8
        return packed.scales(parts, inputs).T.contiguous() if index == 1 else None

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        groups = Place((0, 1), grouped(parts[1], 1, self.group))
        return [Place((0, 1), (1, 1)), groups, groups]

    def of_inputs(self, size: int) -> "IntGroups":
        return IntGroups(min(self.group, size), self.width)


LAYOUTS = (Int8Weight, Float8Weight, IntGroups)


def refilled(weight: nn.Parameter, parts: dict[str, Tensor]) -> nn.Parameter:
    """A parameter like `weight` with these of its `parts`."""
    names, context = weight.__tensor_flatten__()
    tensors = {name: parts.get(name, getattr(weight, name)) for name in names}
    other = type(weight).__tensor_unflatten__(tensors, context, weight.shape, weight.stride())
    return nn.Parameter(other, requires_grad=weight.requires_grad)


def read(module: nn.Module) -> Packed | None:
    """An `nn.Linear` with a weight of these classes, or of `IntxUnpackedToInt8Tensor`."""
    weight = module._parameters.get("weight")
    name = type(weight).__name__
    if not type(weight).__module__.startswith("torchao.") or type(module) is not nn.Linear:
        return None
    if name == "IntxUnpackedToInt8Tensor":
        return _groups(module, weight)
    if name not in DTYPES:
        return None
    require(weight.act_quant_kwargs is None, f"quantises activations, too ({name})")
    require(getattr(weight, "act_pre_scale", None) is None, "scales activations")
    zero = getattr(weight, "zero_point", None)
    require(zero is None or not bool(zero.any()), "has zero points")
    require(weight.qdata.dtype == DTYPES[name], f"has weights of {weight.qdata.dtype}, expected {DTYPES[name]}")
    require_scale("scale", weight.scale, (weight.shape[0], 1))
    layout = Int8Weight() if name == "Int8Tensor" else Float8Weight()
    return Packed(layout, {"qdata": weight.qdata, "scale": weight.scale}, module.bias, weight.shape[1], "weight")


def _groups(module: nn.Linear, weight: Tensor) -> Packed:
    require(weight.activation_quantization is None, "quantises activations, too (IntxUnpackedToInt8Tensor)")
    (rows, group), outputs = weight.block_size, weight.shape[0]
    require(rows == 1, f"has blocks of {rows} outputs, expected 1")
    require(weight.zero_point.dtype == torch.int8, f"has zero points of {weight.zero_point.dtype}, expected torch.int8")
    require(weight.scale.dtype == weight.dtype, f"has scales of {weight.scale.dtype} and computes in {weight.dtype}")
    require_scale("scale", weight.scale, (outputs, weight.shape[1] // group))
    width = int(str(weight.target_dtype).removeprefix("torch.int"))
    parts = {"qdata": weight.qdata, "scale": weight.scale, "zero_point": weight.zero_point}
    return Packed(IntGroups(group, width), parts, module.bias, weight.shape[1], "weight")
