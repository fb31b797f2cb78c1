"""Weights of 4 bits in floating point (e2m1) with a scale for each group of inputs: NVFP4 and MXFP4.

References: OCP Microscaling Formats specification 1.0, section 5.3 (e2m1, MXFP4); compressed-tensors
``compressors/nvfp4`` and ``mxfp4``; TensorRT Model Optimizer, as vLLM's ``modelopt.py`` reads its files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import pack_gpu
from .codes import Place, WeightLayout, exact_linear
from .rows import FP8

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

    def outputs(self, parts: Sequence[Tensor], inputs: int) -> int:
        return parts[0].shape[0]

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        numbers = _table(parts[0])[_unpacked(parts[0]).int()].unflatten(1, (-1, self.group))
        return numbers.mul_(self._scales(parts)[:, :, None]).flatten(1)

    def for_few_rows(self, parts: Sequence[Tensor], inputs: int) -> tuple[WeightLayout, list[Tensor]] | None:
        return pack_gpu.pack_with_table(_unpacked(parts[0]), _table(parts[0]), self._scales(parts).T)

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
    """`Fp4` whose activations are rounded to e2m1, too, as `rounded_groups` does. Its parts are those of `Fp4` and the
    divisor of the activations' scales [1] float32. No kernel reads it."""

    def product(self, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        x = rounded_groups(x, self.group, parts[3])
        return self.multiplied(x, parts, bias, exact_linear)

    def for_few_rows(self, parts: Sequence[Tensor], inputs: int) -> None:
        return None

    def _scales(self, parts: Sequence[Tensor]) -> Tensor:
        return super()._scales(parts[:3])


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


def _unpacked(codes: Tensor) -> Tensor:
    """Bytes [O, I / 2] of two codes -> codes [O, I] uint8."""
    return torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)


def _table(like: Tensor) -> Tensor:
    return torch.tensor(VALUES, device=like.device)


LAYOUTS = (Fp4, Fp4Both)
