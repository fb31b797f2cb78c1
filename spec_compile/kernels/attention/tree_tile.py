"""What all programs of tree attention do: fetch slots, load queries of a tile of rows, store their partial softmax.

Import this module only where Triton is installed.
"""

import triton
import triton.language as tl

from ..ptx import prefetch_l2


@triton.jit
def prefetch_slots(cache_ptr, begin, end, D: tl.constexpr, BLOCK_D: tl.constexpr, COUNT: tl.constexpr):
    """Fetch the first COUNT of the slots begin .. end to the L2 cache, by lines of 128 bytes."""
    LINE: tl.constexpr = 1024 // cache_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = BLOCK_D // LINE if BLOCK_D > LINE else 1
    slot = tl.maximum(tl.minimum(begin + tl.arange(0, COUNT), end - 1), 0)
    column = tl.minimum(tl.arange(0, LINES) * LINE, D - 1)
    prefetch_l2((cache_ptr + slot[:, None] * D + column[None, :]).to(tl.int64))


@triton.jit
def store_part(parts_ptr, sums_ptr, part, rows, row, real, column, acc, peak, total, DV: tl.constexpr):
    """A partial softmax into parts [P, rows, Dv] and sums [P, 2, rows] at `part`."""
    dv = column + tl.arange(0, acc.shape[1])
    at = part * rows + row[:, None]
    tl.store(parts_ptr + at * DV + dv[None, :], acc, mask=real[:, None] & (dv < DV)[None, :])
    sums_ptr += part * (2 * rows) + row
    tl.store(sums_ptr, peak, mask=real)
    tl.store(sums_ptr + rows, total, mask=real)


@triton.jit
def store_nothing(sums_ptr, part, rows, row, real):
    """The sums of a partial softmax that saw nothing, whose values nobody reads."""
    sums_ptr += part * (2 * rows) + row
    tl.store(sums_ptr, tl.full(row.shape, float("-inf"), tl.float32), mask=real)
    tl.store(sums_ptr + rows, tl.zeros(row.shape, tl.float32), mask=real)


@triton.jit
def load_queries(row_ptr, real, DK: tl.constexpr, BLOCK_DK: tl.constexpr):
    """[M, BLOCK_DK] of the rows at row_ptr [M]."""
    dk = tl.arange(0, BLOCK_DK)[None, :]
    return tl.load(row_ptr[:, None] + dk, mask=real[:, None] & (dk < DK), other=0.0)
