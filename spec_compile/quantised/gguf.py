"""Matrices of GGUF files whose blocks have a layout that a kernel for few rows reads."""

from collections.abc import Callable

import torch
from torch import Tensor

from .codes import Packed, require
from .pack_cpu import MINIMUM, NONE, CodeGroups, numbers_of

GROUP = 32
"""Inputs of a block."""


def q4_0(rows: Tensor) -> Packed:
    """Q4_0: a weight is its code minus 8, times the scale of its block.

    rows: [O, B * 18] uint8, B blocks of a scale in float16 and 16 bytes; byte i has the code of input i in its lower
    half, and the code of input 16 + i in its upper half.
    """
    units, codes = _units_and_bytes(rows, 1, GROUP // 2)
    return _packed(CodeGroups(4, GROUP, NONE, 0, 0), _nibbles(codes), units)


def q4_1(rows: Tensor) -> Packed:
    """Q4_1: a weight is its code times the scale of its block, plus the minimum of the block.

    rows: [O, B * 20] uint8, B blocks of a scale and a minimum in float16, and 16 bytes as of Q4_0.
    """
    units, codes = _units_and_bytes(rows, 2, GROUP // 2)
    return _packed(CodeGroups(4, GROUP, MINIMUM, 0, numbers_of(torch.arange(16))), _nibbles(codes), units)


def q8_0(rows: Tensor) -> Packed:
    """Q8_0: a weight is its code times the scale of its block.

    rows: [O, B * 34] uint8, B blocks of a scale in float16 and 32 int8.
    """
    units, codes = _units_and_bytes(rows, 1, GROUP)
    return _packed(CodeGroups(8, GROUP, NONE, 0, 0), codes, units)


FORMATS: dict[str, Callable[[Tensor], Packed]] = {"Q4_0": q4_0, "Q4_1": q4_1, "Q8_0": q8_0}
"""Name of a type in GGUF files -> a function of a matrix's rows. UnreadError says what a matrix has."""
ON_GPU = ("Q4_0",)
"""The types that kernels of a GPU read, too."""


def _units_and_bytes(rows: Tensor, numbers: int, size: int) -> tuple[Tensor, Tensor]:
    """Blocks of `numbers` float16 and `size` bytes -> units [O, B, numbers], bytes [O, B, size] uint8."""
    blocks = rows.unflatten(1, (-1, 2 * numbers + size))
    units = blocks[:, :, : 2 * numbers].contiguous().view(torch.float16)
    require(bool(units.isfinite().all()), "has scales that are not finite")
    return units, blocks[:, :, 2 * numbers :]


def _nibbles(codes: Tensor) -> Tensor:
    return torch.cat([codes & 15, codes >> 4], dim=2)


def _packed(layout: CodeGroups, codes: Tensor, units: Tensor) -> Packed:
    codes = codes.flatten(1).contiguous().view(torch.int8)
    return Packed(layout, {"codes": codes, "units": units}, None, codes.shape[1])
