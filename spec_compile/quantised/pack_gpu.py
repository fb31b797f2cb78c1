"""The layouts of 4 bits that the kernel for few rows reads; layers of all formats with 4 bits are repacked to them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .codes import Codes, Place, WeightLayout

WIDTH = 256
"""Columns whose words lie side by side."""
DTYPES = torch.bfloat16, torch.float16
TOO_LARGE = {torch.bfloat16: 128, torch.float16: 1024}
"""A number of this dtype whose lowest bits are a code is too large by this."""
ZERO = 8
"""The zero point of layouts that are centred."""
TOO_SMALL = {torch.bfloat16: 130, torch.float16: 18}
"""A number of this dtype whose mantissa begins with a code, and whose exponent is 0, is too small by two to this."""
TURN = {torch.bfloat16: 3, torch.float16: 6}
"""The place of the last bit of such a code."""


class Words(WeightLayout):
    """words: [O, W * 32] int32, W = I / 256 rounded up; half-words [O, W * 64], the lower half first. D = `depth` of
    them hold the codes of 4 * D columns: nibble j of half-word h is the code of column j * D + h. Then each word is
    turned to the left by `turn` bits. With D = 64, half-word 0 is (from the lowest bits) columns 0, 64, 128, 192,
    half-word 1 columns 1, 65, 129, 193; both are word 0.
    units: [G, O]; a row for each `span` of columns.

    So the codes of neighbouring columns are 16 bits apart in every word, and the kernel turns and masks both at once.
    """

    bits = 4
    dims = 0, 1
    group: int

    @property
    def depth(self) -> int:
        return min(self.group, 64)

    @property
    def turn(self) -> int:
        return 0

    def for_few_rows(self, parts: Sequence[Tensor], inputs: int) -> tuple[WeightLayout, list[Tensor]]:
        return self, [part.contiguous() for part in parts]

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        """Only where the outputs are, because the inputs of a word are not neighbours."""
        return [Place((0, 1)), Place((1, 1))]

    def codes(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        """The codes [O, I] uint8 that were packed."""
        return self.unpacked(parts[0])[:, :inputs]

    def scales(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        """The scales [G, O] that were packed."""
        raise NotImplementedError

    @property
    def span(self) -> int:
        """Columns of a pair."""
        return 2 * self.group if self.group < WIDTH else self.group

    def pairs(self, scales: Tensor) -> Tensor:
        """scales [G, O] -> [P, O, 2], two groups side by side; a group of 256 columns or more stands twice."""
        if self.group >= WIDTH:
            return torch.stack([scales, scales], dim=2)
        return F.pad(scales, (0, 0, 0, len(scales) % 2)).unflatten(0, (-1, 2)).transpose(1, 2).contiguous()

    def unpaired(self, pairs: Tensor) -> Tensor:
        """The inverse of `pairs`, of an even number of groups."""
        return pairs[:, :, 0] if self.group >= WIDTH else pairs.transpose(1, 2).flatten(0, 1)

    def words(self, codes: Tensor) -> Tensor:
        """codes [O, I] uint8 -> words."""
        codes = F.pad(codes, (0, -codes.shape[1] % WIDTH)).view(len(codes), -1, 2, 2, self.depth)
        words = (codes[:, :, :, 0] | codes[:, :, :, 1] << 4).transpose(2, 3).flatten(1).view(torch.int32)
        return _turned(words, self.turn)

    def unpacked(self, words: Tensor) -> Tensor:
        """words -> codes [O, W * 256] uint8."""
        halves = _turned(words, -self.turn).view(torch.uint8).unflatten(1, (-1, self.depth, 2)).transpose(2, 3)
        return torch.stack([halves & 15, halves >> 4], dim=3).flatten(1)


@dataclass(frozen=True)
class Nibbles(Words):
    """units int32. dtype: of both halves of them, an index of `DTYPES`. Weights are rounded to it.

    centred: all zero points are 8. units then have two groups' scales, the first in the lower half, times two to
    `TOO_SMALL`; of one group, where it has 256 columns or more. Else units [W * 256 / group, O]: a scale in the lower
    half; in the upper half what is added to a code that is `TOO_LARGE`, so that it is the code minus its zero point.
    """

    group: int
    dtype: int
    centred: int

    @property
    def turn(self) -> int:
        return TURN[DTYPES[self.dtype]] if self.centred else 0

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype == DTYPES[self.dtype]

    @property
    def packing(self) -> tuple[str, int]:
        return f"nibbles_{'fp16' if self.dtype else 'bf16'}{'_centred' if self.centred else ''}", self.group

    def units(self, scales: Tensor, zeros: Tensor | int) -> Tensor:
        """scales [G, O], zeros alike or one for all -> units of G groups, with another if two share one."""
        if not self.centred:
            added = (-TOO_LARGE[scales.dtype] - zeros + torch.zeros_like(scales, dtype=torch.int32)).to(scales.dtype)
            return torch.stack([scales, added], dim=2).view(torch.int32)[:, :, 0]
        scales = (scales.double() * 2.0 ** TOO_SMALL[scales.dtype]).to(scales.dtype)
        return self.pairs(scales).view(torch.int32)[:, :, 0]

    def scales_and_zeros(self, units: Tensor) -> tuple[Tensor, Tensor | int]:
        """The inverse of `units`."""
        dtype = DTYPES[self.dtype]
        first, second = units[:, :, None].contiguous().view(dtype).unbind(2)
        if not self.centred:
            return first, -TOO_LARGE[dtype] - second.to(torch.int32)
        scales = self.unpaired(torch.stack([first, second], dim=2))
        return (scales.double() * 2.0 ** -TOO_SMALL[dtype]).to(dtype), ZERO

    def scales(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        return self.scales_and_zeros(parts[1])[0][: max(inputs // self.group, 1)].contiguous()

    def unpack(self, parts: Sequence[Tensor], inputs: int) -> Codes:
        scales = self.scales(parts, inputs)
        zeros = self.scales_and_zeros(parts[1])[1]
        return Codes(self.codes(parts, inputs), scales, zeros if isinstance(zeros, int) else zeros[: len(scales)])


@dataclass(frozen=True)
class TableNibbles(Words):
    """units [1 + P, O, 2] float32: the 16 numbers of the table, then the scales as `pairs`. A weight is the number of
    its code times its scale in float32, rounded to the dtype of activations. numbers: `table`."""

    group: int
    numbers: int

    @property
    def table(self) -> int:
        return self.numbers

    @property
    def packing(self) -> tuple[str, int]:
        return "nibbles_table", self.group

    def cut(self, parts: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
        words, units = parts
        scales = units.new_zeros(len(units), max(end - begin, 8), 2)  # as wide as the table
        scales[0, :8], scales[1:, : end - begin] = units[0, :8], units[1:, begin:end]
        return [words[begin:end], scales]

    def scales(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        return self.unpaired(parts[1][1:])[: max(inputs // self.group, 1)].contiguous()

    def unpack(self, parts: Sequence[Tensor], inputs: int) -> Codes:
        scales = self.scales(parts, inputs)[:, : len(parts[0])]  # units may be wider, see `cut`
        return Codes(self.codes(parts, inputs), scales, table=parts[1][0, :8].flatten())


def pack(weights: Codes) -> tuple[Words, list[Tensor]] | None:
    """A layout of the kernel for few rows and its parts; None if that does not read such groups."""
    codes, scales, zeros, table = weights
    all_centred = bool((torch.as_tensor(zeros) == ZERO).all())
    if table is None and scales.dtype == torch.float32 and all_centred:
        table = torch.arange(-ZERO, 16 - ZERO, device=codes.device).float()
    group = group_of(codes.shape[1], len(scales))
    is_read = scales.dtype in DTYPES if table is None else len(codes) >= len(table)
    if group is None or not is_read:
        return None
    if table is None:
        centred = all_centred and bool((scales.abs() < 0.25).all())  # times two to `TOO_SMALL`, a number of its dtype
        layout = Nibbles(group, DTYPES.index(scales.dtype), int(centred))
        words = layout.words(codes)
        return layout, [words, _padded(layout.units(scales, zeros), words, layout.span if centred else group)]
    layout = TableNibbles(group, numbers_of(table))
    words = layout.words(codes)
    first = F.pad(table, (0, 2 * len(codes) - len(table))).view(1, -1, 2)
    return layout, [words, torch.cat([first, _padded(layout.pairs(scales), words, layout.span)])]


def numbers_of(table: Tensor) -> int:
    """The bits of a table of 16 float32 as an integer, the first number the lowest."""
    bits = table.float().contiguous().view(torch.int32).tolist()
    return sum((each & 0xFFFFFFFF) << 32 * place for place, each in enumerate(bits))


def _turned(words: Tensor, bits: int) -> Tensor:
    """int32 words, turned to the left by `bits`; to the right if that is negative."""
    bits %= 32
    return words << bits | words >> 32 - bits & (1 << bits) - 1 if bits else words


def group_of(inputs: int, groups: int) -> int | None:
    """The columns of a scale where one spans all inputs, or as many as the kernel reads; else None."""
    group = inputs // groups if groups > 1 else -(-inputs // WIDTH) * WIDTH
    return group if group % WIDTH == 0 or group in (16, 32, 64, 128) else None


def _padded(units: Tensor, words: Tensor, span: int) -> Tensor:
    """Units of all columns that words have. span: columns of each."""
    missing = words.shape[1] * 8 // span - len(units)
    return torch.cat([units, units.new_zeros(missing, *units.shape[1:])])
