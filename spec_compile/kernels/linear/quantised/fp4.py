"""Weights of 4 bits in floating point (e2m1) with a scale for each group of inputs: NVFP4 and MXFP4.

References: OCP Microscaling Formats specification 1.0, section 5.3 (e2m1, MXFP4); compressed-tensors
``compressors/nvfp4`` and ``mxfp4``; TensorRT Model Optimizer, as vLLM's ``modelopt.py`` reads its files.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import nibbles
from .layout import WeightLayout

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
        return nibbles.pack_with_table(_unpacked(parts[0]), _table(parts[0]), self._scales(parts).T)

    def restored(self, index: int, packed: WeightLayout, parts: Sequence[Tensor], inputs: int) -> Tensor | None:
        if index:
            return None  # the kernel's scales are times the factor
        codes = packed.codes(parts, inputs)
        return codes[:, ::2] | codes[:, 1::2] << 4

    def cut(self, parts: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
        codes, scales, factor = parts
        return [codes[begin:end], scales[begin:end], factor]

    def _scales(self, parts: Sequence[Tensor]) -> Tensor:
        """[O, I / group] float32."""
        _, scales, factor = parts
        wide = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales.float()
        return wide / factor if self.divides else wide * factor


def _unpacked(codes: Tensor) -> Tensor:
    """Bytes [O, I / 2] of two codes -> codes [O, I] uint8."""
    return torch.stack([codes & 15, codes >> 4], dim=2).flatten(1)


def _table(like: Tensor) -> Tensor:
    return torch.tensor(VALUES, device=like.device)


LAYOUTS = (Fp4,)
