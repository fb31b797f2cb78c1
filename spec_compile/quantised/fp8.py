"""Fine-grained FP8 (DeepSeek's and Qwen's ``*-FP8``): a scale for each block of weights, and for each row of a block.

Reference: DeepSeek-V3 Technical Report (arXiv 2412.19437), section 3.3.2; `FP8Linear` of transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .codes import Packed, Place, WeightLayout, class_path, exact_linear, require, require_scale

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

    def outputs(self, parts: Sequence[Tensor], inputs: int) -> int:
        return parts[0].shape[0]

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


LAYOUTS = (Fp8Block,)


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
