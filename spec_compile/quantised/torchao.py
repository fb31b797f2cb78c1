"""torchao's weights of 1 to 8 bits without quantised activations, in a tensor subclass as weight of an `nn.Linear`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .codes import Codes, Packed, Place, WeightLayout, grouped, require, require_scale
from .formats import Format, Stored, sized_as
from .fp8 import Float8Weight, Int8Weight, eight_bits, refilled_parameter

DTYPES = {"Int8Tensor": torch.int8, "Float8Tensor": torch.float8_e4m3fn}


@dataclass(frozen=True)
class IntGroups(WeightLayout):
    """codes [O, I] int8, of `width` bits; scales [O, I / group] of the model's dtype; zero points, as many, int8.
    Weights are rounded to the dtype of the scales."""

    group: int
    width: int

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        codes, scales, zeros = parts
        return Codes(codes, scales.T, zeros.T).weight()

    def unpack(self, parts: Sequence[Tensor], inputs: int) -> Codes | None:
        codes, scales, zeros = parts
        return None if self.width > 4 else Codes((codes + 8).to(torch.uint8), scales.T, zeros.T.int() + 8)

    def restored(self, index: int, packed: WeightLayout, parts: Sequence[Tensor], inputs: int) -> Tensor | None:
        if index == 0:
            return packed.codes(parts, inputs).to(torch.int8) - 8
        return packed.scales(parts, inputs).T.contiguous() if index == 1 else None

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        groups = Place((0, 1), grouped(parts[1], 1, self.group))
        return [Place((0, 1), (1, 1)), groups, groups]

    def of_inputs(self, size: int) -> "IntGroups":
        return IntGroups(min(self.group, size), self.width)

    def refilled(self, owner: nn.Parameter, parts: dict[str, Tensor]) -> nn.Parameter:
        return refilled_parameter(owner, parts)


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


def _of_file(tensors: dict[str, Tensor], config: dict) -> Packed:
    codes, scales, zeros = (tensors.get(f"weight_{name}") for name in ("qdata", "scale", "zero_point"))
    if zeros is None:
        return eight_bits(codes, scales, config)
    is_read = codes.dtype == zeros.dtype == torch.int8 and scales.shape[0] == codes.shape[0]
    require(is_read, "is of another class than Int8Tensor, Float8Tensor and IntxUnpackedToInt8Tensor")
    width = 4 if -8 <= int(codes.min()) and int(codes.max()) < 8 else 8
    inputs = codes.shape[1]
    parts = {"qdata": codes, "scale": scales, "zero_point": zeros}
    return Packed(IntGroups(inputs // scales.shape[1], width), parts, None, inputs)


FORMAT = Format(
    read,
    {"torchao": (Stored(
        "._weight_qdata", ("._weight_scale",), ("._weight_zero_point",), sized_as("weight_qdata"), _of_file,
    ),)},
)  # fmt: skip
