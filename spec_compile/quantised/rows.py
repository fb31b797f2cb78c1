"""Activations that are rounded to 8 bits with a scale for each row, or a constant one, as compressed-tensors does."""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..compat import gather_parts
from .codes import Codes, Place, WeightLayout, exact_linear, grouped, packed_nibbles, unpacked_nibbles
from .fp8 import FP8
from .pack_gpu import WIDTH, Words, group_of

rounds_activations: ContextVar[bool] = ContextVar("rounds_activations", default=True)
"""False where no layer rounds its activations, whatever its format and kernel."""
LARGEST = {FP8: 448.0, torch.int8: 127.5}
"""By what the largest absolute value of a row is divided to get its scale."""


def rounded_rows(x: Tensor, dtype: torch.dtype, scales: Tensor | None = None) -> Tensor:
    """x [..., I] rounded to FP8 or int8 with a scale for each row, or the given; every step is rounded to x's dtype."""
    if scales is None:
        scales = x.abs().amax(dim=-1, keepdim=True) / LARGEST[dtype]
    codes = x / scales.where(scales > 0, 1.0)
    if dtype == torch.int8:
        codes = codes.round().clamp(-128, 127)
    else:
        codes = codes.clamp(-448, 448).to(dtype).to(x.dtype)
    return codes * scales


@torch.library.custom_op("spec_compile::rounded_over_ranks", mutates_args=())
def rounded_over_ranks(x: Tensor, dtype: torch.dtype, group_name: str) -> Tensor:
    """`rounded_rows` of rows [..., I] of which each rank has other columns, with the scales of the whole rows.

    group_name: names a process group of torch.distributed, see `all_reduce`.
    """
    if not rounds_activations.get():
        return x.clone()
    largest = gather_parts(x.abs().amax(dim=-1, keepdim=True), group_name).amax(dim=0)  # guard: rank-rounding
    return rounded_rows(x, dtype, largest / LARGEST[dtype])


@rounded_over_ranks.register_fake
def _(x, dtype, group_name):
    return torch.empty_like(x)


class RoundsRows(WeightLayout):
    """A layout whose activations are rounded by `rounded_rows` before the product; nothing if `row_dtype` is None."""

    def product(self, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        dtype, scale = self.row_dtype(parts[0]), self.constant_scale(parts)
        if dtype is not None:
            x = rounded_rows(x, dtype, None if scale is None else scale.to(x.dtype))
        return self.multiplied(x, parts, bias, exact_linear)


# Integers of 4 bits in groups, and activations that are rounded to 8 bits by row: W4A8 and W4AFP8.
#
# Reference: ``quant_scheme.py`` of compressed-tensors, `W4A8` and `W4AFP8`. The kernel multiplies codes, as QServe
# (arXiv 2405.04532) does; it scales the sum of each group.


@dataclass(frozen=True)
class W4A8(RoundsRows):
    """weight [O, I] int8 of -8 to 7, or if `packed` as `Int4Group` has it; scales [O, I / group] of the model's dtype.
    fp8: activations are rounded to float8_e4m3fn, else to int8. rounded: they come so, see `rounded_over_ranks`."""

    group: int
    fp8: int
    packed: int
    rounded: int = 0

    def row_dtype(self, weight: Tensor) -> torch.dtype | None:
        return None if self.rounded else FP8 if self.fp8 else torch.int8

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        codes, scales = parts
        return Codes(self._codes(codes), scales.T).weight()

    def unpack(self, parts: Sequence[Tensor], inputs: int) -> Codes | None:
        """None if the product rounds activations, as no kernel of `Codes` does."""
        return Codes(self._codes(parts[0]), parts[1].T) if self.rounded else None

    def for_few_rows(self, parts: Sequence[Tensor], inputs: int) -> tuple[WeightLayout, list[Tensor]] | None:
        codes, scales = parts
        if self.rounded:
            return super().for_few_rows(parts, inputs)
        group = group_of(inputs, scales.shape[1])
        if group is None or group < 32:
            return None
        layout = RoundedNibbles(group, self.fp8)
        words = layout.words(self._codes(codes))
        return layout, [words, F.pad(scales.T, (0, 0, 0, words.shape[1] * 8 // group - scales.shape[1])).contiguous()]

    def restored(self, index: int, packed: WeightLayout, parts: Sequence[Tensor], inputs: int) -> Tensor | None:
        if index:
            return packed.scales(parts, inputs).T.contiguous()
        codes = packed.codes(parts, inputs)
        return packed_nibbles(codes) if self.packed else codes.to(torch.int8).sub_(8)

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        return [Place((0, 1), (1, 8 if self.packed else 1)), Place((0, 1), grouped(parts[1], 1, self.group))]

    def of_inputs(self, size: int) -> "W4A8":
        return replace(self, group=min(self.group, size), rounded=1)

    def _codes(self, codes: Tensor) -> Tensor:
        """[O, I] uint8, plus 8."""
        return unpacked_nibbles(codes) if self.packed else (codes + 8).to(torch.uint8)


@dataclass(frozen=True)
class RoundedNibbles(Words, RoundsRows):
    """The same in the order of the kernel. words: [O, W * 32] int32, W = I / 256 rounded up; their bytes [O, W * 128],
    of which D = `depth` in a row have 2 * D columns: byte j has column j in its lower half, and column
    D + j in its upper half, both in two's complement. With D = 64, column 70 of -2 and column 6 of 3 are byte 6, 0xE3.
    units: [W * 256 / group, O] scales of the model's dtype.

    So a shift or a mask of each byte makes an int8 that is 16 times the weight's code.
    """

    group: int
    fp8: int

    @property
    def packing(self) -> tuple[str, int]:
        return "nibbles_rounded", self.group

    @property
    def depth(self) -> int:
        return min(self.group, WIDTH // 2)

    def row_dtype(self, weight: Tensor) -> torch.dtype:
        return FP8 if self.fp8 else torch.int8

    def words(self, codes: Tensor) -> Tensor:
        codes = (F.pad(codes, (0, -codes.shape[1] % WIDTH), value=8) ^ 8).unflatten(1, (-1, 2, self.depth))
        return (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1).view(torch.int32)

    def unpacked(self, words: Tensor) -> Tensor:
        pairs = words.contiguous().view(torch.uint8).unflatten(1, (-1, self.depth))
        return torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1) ^ 8

    def scales(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        return parts[1][: max(inputs // self.group, 1)]

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        words, units = parts
        numbers = self.unpacked(words).to(units.dtype).sub_(8)
        return numbers.unflatten(1, (-1, self.group)).mul_(units.T[:, :, None]).flatten(1)[:, :inputs]
