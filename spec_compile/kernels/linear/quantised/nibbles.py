"""4 bits as the kernel for few rows reads them: what layers of all formats with 4 bits are repacked into."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from .layout import Layout

WIDTH = 256
"""Columns whose words lie side by side."""
DTYPES = torch.bfloat16, torch.float16
TOO_LARGE = {torch.bfloat16: 128, torch.float16: 1024}
"""A number of this dtype whose lowest bits are a code is too large by this."""


class _Words(Layout):
    """words [O, W * 32] int32, W = I / 256 rounded up: nibble j of word w of each 32 is the code of column 32 * j + w
    of their 256. units: a row for each of so many columns, [G, O]."""

    bits = 4
    dims = 0, 1

    def outputs(self, parts: Sequence[Tensor], inputs: int) -> int:
        return parts[0].shape[0]

    def for_few_rows(self, parts: Sequence[Tensor], inputs: int) -> tuple[Layout, list[Tensor]]:
        return self, [part.contiguous() for part in parts]

    def cut(self, parts: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
        words, units = parts
        return [words[begin:end], units[:, begin:end]]

    def codes(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        """The codes [O, I] uint8 that were packed."""
        return _unpacked(parts[0])[:, :inputs]

    def scales(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        """The scales [G, O] that were packed."""
        raise NotImplementedError


@dataclass(frozen=True)
class Nibbles(_Words):
    """units [W * 256 / group, O] int32: a scale in the lower half; in the upper half what is added to a code
    that is `TOO_LARGE`, so that it is the code minus its zero point. dtype: of both halves, an index of `DTYPES`."""

    group: int
    dtype: int

    def serves(self, dtype: torch.dtype) -> bool:
        return dtype == DTYPES[self.dtype]

    @property
    def packing(self) -> tuple[str, int]:
        return "nibbles_fp16" if self.dtype else "nibbles_bf16", self.group

    def scales(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        scales = parts[1].contiguous()[:, :, None].view(DTYPES[self.dtype])[:, :, 0]
        return scales[: max(inputs // self.group, 1)].contiguous()

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        words, units = parts
        dtype, codes = DTYPES[self.dtype], _unpacked(words)
        scales, added = units.T.contiguous()[:, :, None].view(dtype).unbind(2)
        groups = codes.to(dtype).add_(TOO_LARGE[dtype]).unflatten(1, (-1, self.group))
        return groups.add_(added[:, :, None]).mul_(scales[:, :, None]).flatten(1)[:, :inputs]


@dataclass(frozen=True)
class TableNibbles(_Words):
    """units [1 + W * 256 / group, O] float32: a table of 16 numbers, then a scale in each row. A
    weight is the number of its code times its scale in float32, rounded to the dtype of activations."""

    group: int

    @property
    def packing(self) -> tuple[str, int]:
        return "nibbles_table", self.group

    def fits(self, layers: list[list[Tensor]]) -> bool:
        first, *others = (units[0, :16] for _, units in layers)
        return all(torch.equal(first, other) for other in others)

    def cut(self, parts: Sequence[Tensor], begin: int, end: int) -> list[Tensor]:
        words, units = parts
        scales = units.new_zeros(len(units), max(end - begin, 16))  # as wide as the table
        scales[0, :16], scales[1:, : end - begin] = units[0, :16], units[1:, begin:end]
        return [words[begin:end], scales]

    def scales(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        return parts[1][1 : 1 + max(inputs // self.group, 1)].contiguous()

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        words, units = parts
        numbers = units[0, :16][_unpacked(words).int()].unflatten(1, (-1, self.group))
        return numbers.mul_(units[1:, : len(words)].T[:, :, None]).flatten(1)[:, :inputs]


LAYOUTS = (Nibbles, TableNibbles)


def _unpacked(words: Tensor) -> Tensor:
    """words [O, W * 32] of both layouts -> codes [O, W * 256] uint8."""
    codes = words.view(torch.uint8).unflatten(1, (-1, 32, 4)).transpose(2, 3)
    return torch.stack([codes & 15, codes >> 4], dim=3).flatten(1)


def pack(codes: Tensor, zeros: Tensor | int, scales: Tensor) -> tuple[Nibbles, list[Tensor]] | None:
    """The layout of codes and its parts; None if the kernel does not read such groups.

    codes [O, I] uint8 of 0 to 15, zeros [G, O] or one for all, scales [G, O].
    """
    group = _group(codes.shape[1], len(scales))
    if scales.dtype not in DTYPES or group is None:
        return None
    words = _words(codes)
    added = (-TOO_LARGE[scales.dtype] - zeros + torch.zeros_like(scales, dtype=torch.int32)).to(scales.dtype)
    units = torch.stack([scales, added], dim=2).view(torch.int32)[:, :, 0]
    return Nibbles(group, DTYPES.index(scales.dtype)), [words, _padded(units, words, group)]


def pack_with_table(codes: Tensor, table: Tensor, scales: Tensor) -> tuple[TableNibbles, list[Tensor]] | None:
    """`pack` of codes whose numbers are in a table [16] float32. scales [G, O] float32."""
    group = _group(codes.shape[1], len(scales))
    if group is None or len(codes) < len(table):
        return None
    words = _words(codes)
    first = F.pad(table, (0, len(codes) - len(table)))[None]
    return TableNibbles(group), [words, torch.cat([first, _padded(scales, words, group)])]


def _group(inputs: int, groups: int) -> int | None:
    """The columns of a scale where one spans all inputs, or as many as the kernel reads; else None."""
    group = inputs // groups if groups > 1 else -(-inputs // WIDTH) * WIDTH
    return group if group % WIDTH == 0 or group in (32, 64, 128) else None


def _words(codes: Tensor) -> Tensor:
    """codes [O, I] uint8 -> words [O, W * 32] int32."""
    codes = F.pad(codes, (0, -codes.shape[1] % WIDTH)).view(len(codes), -1, 4, 2, 32)
    words = (codes[:, :, :, 0] | codes[:, :, :, 1] << 4).transpose(2, 3).contiguous().view(torch.int32)
    return words.view(len(codes), -1)


def _padded(units: Tensor, words: Tensor, group: int) -> Tensor:
    """Units [G, O] of all columns that words have."""
    return F.pad(units, (0, 0, 0, words.shape[1] * 8 // group - len(units))).contiguous()
