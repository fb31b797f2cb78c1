"""Codes of 4 or 8 bits: `CodeGroups` in rows, `CodeBlocks` in the order in which the kernel of a CPU reads them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .codes import Codes, Packed, Place, WeightLayout, grouped
from .fp8 import Int8Weight
from .pack_gpu import ZERO, Words, group_of, numbers_of

OUTPUTS = 64
"""Outputs of a block."""
PADDING = 32
"""Inputs are filled up to a multiple of this."""
SEGMENT = 256
"""Inputs of a sum that is scaled; larger groups have several."""
DTYPES = torch.float32, torch.bfloat16, torch.float16
"""By `Number` of cpu_gemm.h."""
NONE, POINT, MINIMUM = range(3)
"""`Second` of cpu_gemm.h."""
CENTRED = torch.arange(-ZERO, 16 - ZERO).float()


@dataclass(frozen=True)
class CodeGroups(WeightLayout):
    """codes [O, I] int8; units [O, G, S], for each `group` inputs a scale, or with S = 2 that and a second number.

    width: bits of a code. In 4 bits codes are 0 to 15, and stand for the numbers of `numbers`, see `table_of`; in 8
    they are numbers. second: NONE, a weight is its number times the scale; POINT, (number - second) * scale; MINIMUM,
    number * scale + second. rounds: to which of `DTYPES` weights are rounded; codes of POINT are whole numbers.
    """

    width: int
    group: int
    second: int
    rounds: int
    numbers: int
    dims: ClassVar[tuple[int, ...]] = 0, 0

    def __post_init__(self):
        if self.width not in (4, 8) or not 0 < self.group < 1 << 31:
            raise ValueError(f"expected codes of 4 or 8 bits and groups of inputs, got {self.width} and {self.group}")
        if self.second not in (NONE, POINT, MINIMUM) or not 0 <= self.rounds < len(DTYPES) or self.numbers < 0:
            raise ValueError(f"expected a second number and a dtype, got {self.second} and {self.rounds}")

    @property
    def bits(self) -> int:
        return self.width

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        return [Place((0, 1), (1, 1)), Place((0, 1), grouped(parts[1], 1, self.group))]

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        codes, units = parts
        dtype = DTYPES[self.rounds]
        units = units.to(dtype)
        codes = F.pad(codes, (0, -codes.shape[1] % self.group)).unflatten(1, (-1, self.group))
        numbers = codes.to(dtype) if self.width == 8 else table_of(self.numbers).to(codes.device, dtype)[codes.int()]
        if self.second == POINT:
            numbers = numbers - units[:, :, 1:]
        numbers = numbers * units[:, :, :1]  # guard: scales-of-blocks
        return (numbers + units[:, :, 1:] if self.second == MINIMUM else numbers).flatten(1)[:, :inputs]

    def unpack(self, parts: Sequence[Tensor], inputs: int) -> Codes | None:
        """For a GPU."""
        if self.width == 8 or self.second == MINIMUM:
            return None
        codes, units = self.rows(parts, inputs)[1]
        scales = units[:, :, 0].T.contiguous()
        if self.rounds == 0:
            return Codes(codes.view(torch.uint8), scales.float(), table=self.table_numbers.to(codes.device))
        zeros = units[:, :, 1].T.int() + ZERO if self.second == POINT else ZERO
        return Codes(codes.view(torch.uint8), scales, zeros)

    @property
    def table_numbers(self) -> Tensor:
        """The numbers of codes of 4 bits [16] float32."""
        return table_of(self.numbers)

    def rows(self, parts: Sequence[Tensor], inputs: int) -> tuple["CodeGroups", list[Tensor]]:
        """The same in rows."""
        return self, list(parts)

    def restored(self, index: int, packed: WeightLayout, parts: Sequence[Tensor], inputs: int) -> Tensor | None:
        return packed.rows(parts, inputs)[1][index] if isinstance(packed, CodeBlocks) else None


@dataclass(frozen=True)
class CodeBlocks(CodeGroups):
    """`CodeGroups` in another order. words [O, W] int32, each of 8 or 4 inputs, W words of I filled up to `PADDING`;
    units [O, G * S], as `CodeGroups` has them. Both are in blocks of 64 outputs, the last with those that are left: a
    block has the first word of all its outputs, then the second, and so on. With two outputs and three words,
    [[a, b, c], [d, e, f]] is a, d, b, e, c, f.

    In 4 bits the lower half of a word has inputs 0, 2, 4, 6 from its lowest bits, and the upper half 1, 3, 5, 7.
    """

    of_cpu = True

    @property
    def step(self) -> int:
        return OUTPUTS

    def rows(self, parts: Sequence[Tensor], inputs: int) -> tuple[CodeGroups, list[Tensor]]:
        """The parts of `CodeGroups`."""
        words, units = map(_without_blocks, parts)
        units = units.unflatten(1, (-1, 1 if self.second == NONE else 2))
        pairs = words.view(torch.uint8)
        if self.width == 4:
            halves = pairs.unflatten(1, (-1, 2, 2)).transpose(2, 3)
            pairs = torch.stack([halves & 15, halves >> 4], dim=3).flatten(1)
        layout = CodeGroups(self.width, self.group, self.second, self.rounds, self.numbers)
        return layout, [pairs.view(torch.int8)[:, :inputs].contiguous(), units]

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        layout, parts = self.rows(parts, inputs)
        return layout.weight(parts, inputs)

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        """Only where the outputs are."""
        return [Place((0, 1)), Place((0, 1))]

    def codes(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        """The codes [O, I] that were packed."""
        codes = self.rows(parts, inputs)[1][0]
        return codes if self.width == 8 else codes.view(torch.uint8)

    def scales(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        """The scales [G, O] that were packed."""
        return self.rows(parts, inputs)[1][1][:, :, 0].T.contiguous()


def table_of(numbers: int) -> Tensor:
    """The 16 float32 that have the bits of an integer, the first the lowest; 0 stands for `CENTRED`."""
    if not numbers:
        return CENTRED
    bits = [numbers >> 32 * place & 0xFFFFFFFF for place in range(16)]
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


def is_read(group: int, groups: int) -> bool:
    """True if the kernel reads groups of `group` inputs."""
    return groups == 1 or (group % 8 == 0 and (group <= SEGMENT or group % SEGMENT == 0))


def blocks(layout: CodeGroups, codes: Tensor, units: Tensor) -> tuple[CodeBlocks, list[Tensor]]:
    """The parts of `CodeGroups` as `CodeBlocks`."""
    codes = F.pad(codes, (0, -codes.shape[1] % PADDING)).view(torch.uint8)
    if layout.width == 4:
        codes = codes.unflatten(1, (-1, 2, 2, 2))
        codes = (codes[:, :, :, 0] | codes[:, :, :, 1] << 4).transpose(2, 3).flatten(1)
    words = codes.contiguous().view(torch.int32)
    made = CodeBlocks(layout.width, layout.group, layout.second, layout.rounds, layout.numbers)
    return made, [_in_blocks(words), _in_blocks(units.flatten(1))]


def is_of_cpu(layout: WeightLayout) -> bool:
    """True if the kernel of a CPU takes parts of a layout as they are, if it takes them."""
    return layout.of_cpu or (layout.packing is not None and not isinstance(layout, (Words, Int8Weight)))


def some_rows(packed: Packed, rows: Tensor) -> Packed:
    """The layer with the outputs `rows` of one in 8 bits whose parts have a row for each, maybe in blocks."""
    if isinstance(packed.layout, CodeBlocks):
        layout, parts = packed.layout.rows([*packed.parts.values()], packed.inputs)
        packed = packed._replace(layout=layout, parts=dict(zip(("codes", "units"), parts)))
    return packed._replace(parts={name: part[rows] for name, part in packed.parts.items()})


def for_cpu(layout: WeightLayout, parts: Sequence[Tensor], inputs: int) -> tuple[WeightLayout, list[Tensor]] | None:
    """`WeightLayout.for_few_rows` for a CPU: `CodeBlocks` of layouts that have these; None: there is no layout."""
    if is_of_cpu(layout):
        return layout, list(parts)
    if isinstance(layout, CodeGroups):
        return blocks(layout, *parts) if is_read(layout.group, parts[1].shape[1]) else None
    if isinstance(layout, Int8Weight):
        codes, scales = parts
        return blocks(CodeGroups(8, -(-inputs // SEGMENT) * SEGMENT, NONE, 0, 0), codes, scales[:, :, None])
    codes = layout.unpack(parts, inputs)
    if codes is None:
        return layout.for_few_rows(parts, inputs)
    group = group_of(codes.codes.shape[1], len(codes.scales))
    if group is None or codes.scales.dtype not in DTYPES:
        return None
    groups, rows = in_rows(codes, group)
    return None if groups.second == POINT and groups.rounds == 0 else blocks(groups, *rows)


def in_rows(weights: Codes, group: int) -> tuple[CodeGroups, list[Tensor]]:
    """`CodeGroups` and its parts. group: inputs of a scale, or more if there is one for all."""
    codes, scales, zeros, table = weights
    codes, scales, rounds, numbers = codes.view(torch.int8), scales.T, DTYPES.index(scales.dtype), 0
    if table is not None and not torch.equal(table.to(CENTRED), CENTRED):
        numbers = numbers_of(table)
    if bool((torch.as_tensor(zeros) == ZERO).all()):  # layers of one layout can be merged
        return CodeGroups(4, group, NONE, rounds, numbers), [codes, scales[:, :, None]]
    points = (zeros - ZERO).to(scales.dtype).T
    return CodeGroups(4, group, POINT, rounds, numbers), [codes, torch.stack([scales, points], dim=2)]


def _in_blocks(rows: Tensor) -> Tensor:
    """rows [O, C] in the order of blocks."""
    return torch.cat([block.T.reshape(block.shape) for block in rows.split(OUTPUTS)])


def _without_blocks(rows: Tensor) -> Tensor:
    """The inverse of `_in_blocks`."""
    return torch.cat([block.reshape(block.shape[::-1]).T for block in rows.split(OUTPUTS)])
