"""8 bits: fine-grained FP8 (DeepSeek's and Qwen's ``*-FP8``) with a scale for each block of weights and of activations,
and FP8 or int8 with a scale for each output and activations in 16 bits.

Reference: DeepSeek-V3 Technical Report (arXiv 2412.19437), section 3.3.2; `FP8Linear` of transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .codes import Packed, Place, WeightLayout, class_path, exact_linear, require, require_scale
from .formats import Format, Stored, sized_as

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max


@dataclass(frozen=True)
class Fp8Block(WeightLayout):
    """weight [O, I] float8_e4m3fn, scales [O / rows, I / columns] float32, both rounded up. Activations are rounded to
    FP8 with a scale for each row and `columns` inputs, and products are summed in float32."""

    rows: int
    columns: int

    @property
    def step(self) -> int:
        return self.rows

    @property
    def packing(self) -> tuple[str, int] | None:
        return ("fp8_blocks", self.rows) if self.rows == self.columns == 128 else None

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        codes, scales = parts
        weight, whole = codes.float(), len(codes) // self.rows
        scales = scales.repeat_interleave(self.columns, 1)[:, :inputs]
        weight[: whole * self.rows].unflatten(0, (whole, self.rows)).mul_(scales[:whole, None])  # without a copy
        weight[whole * self.rows :].mul_(scales[whole:])
        return weight

    def product(self, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        rounded = rounded_blocks(x, self.columns)

        def multiply(parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
            out = exact_linear(rounded, self.weight(parts, x.shape[-1]), None).to(x.dtype)
            return out if bias is None else out + bias

        return self.by_outputs(x, parts, bias, multiply)

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        return [Place((0, 1), (1, 1)), Place((0, self.rows), (1, self.columns))]


def rounded_blocks(x: Tensor, columns: int) -> Tensor:
    """x [..., I] in float32, rounded to FP8 with the scale ``amax / 448`` of each row and `columns` inputs."""
    blocks = F.pad(x.float(), (0, -x.shape[-1] % columns)).unflatten(-1, (-1, columns))
    scales = blocks.abs().amax(dim=-1, keepdim=True) / LARGEST
    scales = scales.where(scales > 0, 1.0)
    return ((blocks / scales).to(FP8).float() * scales).flatten(-2)[..., : x.shape[-1]]


class _PerOutput(WeightLayout):
    """codes [O, I], scales [O, 1] float32."""

    packing = "channels", 1

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

    def refilled(self, owner: nn.Parameter, parts: dict[str, Tensor]) -> nn.Parameter:
        return refilled_parameter(owner, parts)


@dataclass(frozen=True)
class Float8Weight(_PerOutput):
    """codes float8_e4m3fn. Weights are rounded to the dtype of activations."""


def refilled_parameter(weight: nn.Parameter, parts: dict[str, Tensor]) -> nn.Parameter:
    """`WeightLayout.refilled` of a tensor of torchao."""
    names, context = weight.__tensor_flatten__()
    tensors = {name: parts.get(name, getattr(weight, name)) for name in names}
    other = type(weight).__tensor_unflatten__(tensors, context, weight.shape, weight.stride())
    return nn.Parameter(other, requires_grad=weight.requires_grad)


def read(module: nn.Module) -> Packed | None:
    """An `FP8Linear` with scales of blocks and activations that are rounded on the fly."""
    if class_path(module) != "transformers.integrations.finegrained_fp8.FP8Linear":
        return None
    weight, scales = module.weight, module.weight_scale_inv
    require(module.block_size is not None, "has one scale for the whole matrix, where blocks are expected")
    require(module.activation_scheme == "dynamic", f"has activations of the scheme {module.activation_scheme!r}")
    require(weight.dtype == FP8, f"has weights of {weight.dtype}, expected {FP8}")
    require(scales.dtype == torch.float32, f"has scales of {scales.dtype}, expected torch.float32")
    rows, columns = module.block_size
    outputs, inputs = weight.shape
    require_scale("weight_scale_inv", scales, (-(-outputs // rows), -(-inputs // columns)))
    return Packed(Fp8Block(rows, columns), {"weight": weight, "weight_scale_inv": scales}, module.bias, inputs)


def eight_bits(codes: Tensor, scales: Tensor, config: dict) -> Packed:
    """FP8 or int8 of a file, with a scale for all, for each output, or for each block (FP8)."""
    require(codes.dtype in (FP8, torch.int8), f"is {codes.dtype}, expected {FP8} or torch.int8")
    (outputs, inputs), scales = codes.shape, scales.float()
    if scales.numel() in (1, outputs) and scales.squeeze().dim() < 2:
        layout = Int8Weight() if codes.dtype == torch.int8 else Float8Weight()
        scales = scales.reshape(-1, 1).repeat(outputs // scales.numel(), 1)
        return Packed(layout, {"codes": codes, "scales": scales}, None, inputs)
    rows, columns = config.get("weight_block_size") or config.get("block_structure") or (128, 128)
    shape = -(-outputs // rows), -(-inputs // columns)
    is_read = codes.dtype == FP8 and scales.numel() == shape[0] * shape[1]
    require(is_read, f"has scales {list(scales.shape)} for {codes.dtype} {list(codes.shape)}")
    return Packed(Fp8Block(rows, columns), {"codes": codes, "scales": scales.reshape(shape)}, None, inputs)


EIGHT_BITS = Stored(
    ".weight", (".weight_scale",), (".input_scale",), sized_as("weight"),
    lambda tensors, config: eight_bits(tensors["weight"], tensors["weight_scale"], config),
)  # fmt: skip
"""The names of tensors that compressed-tensors and TensorRT Model Optimizer share."""
FORMAT = Format(
    read,
    {"fp8": (Stored(
        ".weight", (".weight_scale_inv",), (".activation_scale", ".input_scale"), sized_as("weight"),
        lambda tensors, config: eight_bits(tensors["weight"], tensors["weight_scale_inv"], config),
    ),)},
)  # fmt: skip
