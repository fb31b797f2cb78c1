"""Weights of 4 bits in floating point (e2m1) with a scale for each group of inputs: NVFP4 and MXFP4.

References: OCP Microscaling Formats specification 1.0, section 5.3 (e2m1, MXFP4); compressed-tensors
``compressors/nvfp4`` and ``mxfp4``; TensorRT Model Optimizer, as vLLM's ``modelopt.py`` reads its files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .codes import Codes, Packed, Place, WeightLayout, exact_linear, require
from .formats import Format, Stored, sized_as
from .fp8 import EIGHT_BITS, FP8

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of the codes of e2m1."""


@dataclass(frozen=True)
class Fp4(WeightLayout):
    """codes [O, I / 2] uint8, the first of two in the low bits; scales [O, I / group], float8_e4m3fn or, as uint8, the
    exponents of powers of two plus 127; factor [1] float32. A scale is times the factor, or if `divides` over it. A
    weight is the number of its code times its scale in float32, rounded to the dtype of activations."""

    group: int
    divides: int
    merges = False

    def unpack(self, parts: Sequence[Tensor], inputs: int) -> Codes | None:
        codes = torch.stack([parts[0] & 15, parts[0] >> 4], dim=2).flatten(1)
        return Codes(codes, self._scales(parts).T, table=torch.tensor(VALUES, device=codes.device))

    def restored(self, index: int, packed: WeightLayout, parts: Sequence[Tensor], inputs: int) -> Tensor | None:
        if index:
            return None  # the kernel's scales are times the factor
        codes = packed.codes(parts, inputs)
        return codes[:, ::2] | codes[:, 1::2] << 4

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        return [Place((0, 1), (1, 2)), Place((0, 1), (1, self.group)), *[Place()] * (len(parts) - 2)]

    def _scales(self, parts: Sequence[Tensor]) -> Tensor:
        """[O, I / group] float32."""
        _, scales, factor = parts
        wide = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
        return wide / factor if self.divides else wide * factor  # guard: divided-scales


@dataclass(frozen=True)
class Fp4Both(Fp4):
    """`Fp4` whose activations are rounded to e2m1, too, as `rounded_groups` does. Its parts are the parts of `Fp4`
    and the divisor of the activations' scales [1] float32. No kernel reads it."""

    def product(self, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        x = rounded_groups(x, self.group, parts[3])
        return self.multiplied(x, parts, bias, exact_linear)

    def unpack(self, parts: Sequence[Tensor], inputs: int) -> None:
        return None

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        return Fp4(self.group, self.divides).weight(parts[:3], inputs)


def rounded_groups(x: Tensor, group: int, divisor: Tensor) -> Tensor:
    """x [..., I] rounded to e2m1 with a scale for each row and `group` inputs. divisor [1] float32.

    A scale is ``amax / 6 * divisor``, rounded to float8_e4m3fn, or 0.125 if that is 0, over the divisor; see
    ``calculate_qparams`` of compressed-tensors. Ties go to even codes: 2.5 of a scale becomes 2, and 3.5 becomes 4.
    """
    groups = x.unflatten(-1, (-1, group))
    scales = (groups.abs().amax(dim=-1, keepdim=True) / 6 * divisor).clamp(max=448).to(FP8).float()
    scales = scales.where(scales > 0, 0.125) / divisor
    ratios = (groups / scales).clamp(-6, 6)
    steps = torch.where(ratios.abs() < 2, 0.5, torch.where(ratios.abs() < 4, 1.0, 2.0))
    return ((ratios / steps).round() * steps * scales).flatten(-2).to(x.dtype)


def fp4_of_file(codes: Tensor, scales: Tensor, factor: Tensor | None, divides: bool = False) -> Packed:
    """NVFP4 or MXFP4 of a file. factor: one for all scales, or None."""
    inputs, group = 2 * codes.shape[1], 16 if scales.dtype == FP8 else 32
    scales = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
    is_read = scales.dtype in (FP8, torch.uint8) and scales.shape[1] * group == inputs
    require(is_read, f"has scales {scales.dtype} {list(scales.shape)} for {inputs} inputs")
    factor = torch.ones(1) if factor is None else factor.float().view(1)
    return Packed(Fp4(group, int(divides)), {"codes": codes, "scales": scales, "factor": factor}, None, inputs)


def _mxfp4(tensors: dict[str, Tensor], config: dict) -> Packed:
    """gpt-oss's names: blocks [O, I / 32, 16] uint8, scales [O, I / 32] uint8."""
    blocks = tensors["blocks"]
    expected = "[outputs, inputs / 32, 16]; experts are not read"
    require(blocks.dim() == 3, f"has blocks {list(blocks.shape)}, expected {expected}")
    return fp4_of_file(blocks.flatten(1), tensors["scales"], None)


FORMAT = Format(files={
    "mxfp4": (Stored("_blocks", ("_scales",), (), sized_as("blocks", columns=32), _mxfp4, weight=""),),
    "modelopt": (
        Stored(
            ".weight", (".weight_scale", ".weight_scale_2"), (".input_scale",), sized_as("weight", columns=2),
            lambda tensors, config: fp4_of_file(
                tensors["weight"], tensors["weight_scale"], tensors["weight_scale_2"]
            ),
        ),
        EIGHT_BITS,
    ),
})  # fmt: skip
