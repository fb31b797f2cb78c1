"""Activations that are rounded to FP8 once for all products that read them. Import only where Triton is installed."""

import torch
from torch import Tensor

from ...quantised.fp8 import FP8
from .. import card
from .quantised_kernel import UNIT_ROWS, round_blocks_kernel

BLOCKS, FEW_ROWS = 8, 16
"""A program rounds BLOCKS blocks of a row, or with more than FEW_ROWS rows twice as many."""


def has_fp8(device: torch.device) -> bool:
    """True if a GPU's tensor cores take FP8."""
    return card.card_of(device).capability >= card.FP8


def as_read(weight: Tensor) -> Tensor:
    """Weights as kernels read them: FP8 as bytes if the GPU's tensor cores have no FP8."""
    return weight.view(torch.uint8) if weight.dtype == FP8 and not has_fp8(weight.device) else weight


def rounded_blocks(x: Tensor, size: int, early: bool) -> tuple[Tensor, Tensor]:
    """`quantised.fp8.rounded_blocks` as codes and scales, by a kernel.

    x: [R, I], of any row stride.
    size: columns that share a scale.
    early: as of `small_m.launch`.

    -> codes [R, I] of float8_e4m3fn, or of x's dtype if the tensor cores have no FP8;
    scales [I / size, R] float32, with memory for more rows.
    """
    rows, inputs = x.shape
    blocks, of_program = -(-inputs // size), BLOCKS if rows <= FEW_ROWS else 2 * BLOCKS
    codes = x.new_empty(rows, inputs, dtype=FP8 if has_fp8(x.device) else x.dtype)
    units = x.new_empty(blocks, -(-rows // UNIT_ROWS.value) * UNIT_ROWS.value, dtype=torch.float32)
    round_blocks_kernel[(rows, -(-blocks // of_program))](
        x, codes, units, inputs, x.stride(0), SIZE=size, BLOCKS=of_program, EARLY=early,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return codes, units
