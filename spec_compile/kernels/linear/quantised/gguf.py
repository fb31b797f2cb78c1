"""Matrices of GGUF files whose blocks have a layout that the kernel for few rows reads."""

from collections.abc import Callable

import torch
from torch import Tensor

from . import nibbles
from .layout import Packed, require

GROUP = 32
"""Inputs of a block."""


def q4_0(rows: Tensor) -> Packed:
    """Q4_0: a weight is its code minus 8, times the scale of its block.

    rows: [O, B * 18] uint8, B blocks of a scale in float16 and 16 bytes; byte i has the code of input i in its lower
    half, and that of input 16 + i in its upper half.
    """
    blocks = rows.unflatten(1, (-1, 2 + GROUP // 2))
    codes = torch.cat([blocks[:, :, 2:] & 15, blocks[:, :, 2:] >> 4], dim=2).flatten(1)
    scales = blocks[:, :, :2].contiguous().view(torch.float16)[:, :, 0].float()
    require(bool(scales.isfinite().all()), "has scales that are not finite")
    form = nibbles.pack(codes, nibbles.ZERO, scales.T)
    require(form is not None, f"has {len(rows)} outputs, expected 16 or more")
    layout, parts = form
    return Packed(layout, dict(zip(("words", "units"), parts)), None, codes.shape[1])


def in_order(packed: Packed, order: Tensor) -> Packed:
    """A matrix with its rows in another order. order: [O] int64, the present place of each row."""
    words, units = packed.parts.values()
    first = units[:1]  # the table
    return packed._replace(parts={"words": words[order], "units": torch.cat([first, units[1:, order]])})


FORMATS: dict[str, Callable[[Tensor], Packed]] = {"Q4_0": q4_0}
"""Name of a type in GGUF files -> a function of a matrix's rows. UnreadError says what a matrix has."""
