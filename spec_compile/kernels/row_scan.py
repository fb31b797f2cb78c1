"""Sums, running sums and softmax of rows, with the same bits for a row whatever other rows there are.

torch's own kernels choose the order of a sum by the number of rows, and some by the address of a row. Here a row is cut
into parts of `BLOCK` entries, one a program, and the parts are added in one order. Every sum is formed in float64.

Import this module only where Triton is installed. The kernels never depend on alignment, because Triton would otherwise
choose another layout, and so another order, for a row that begins at an odd address.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import on_gpu, op_with_kernel

BLOCK = 4096
"""Entries of a part. Another value gives other bits."""
WARPS = 8


@op_with_kernel("row_sum", lambda x, dtype=None: x.new_empty(x.shape[:-1], dtype=dtype))
def row_sum(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sums [...] of floating x [..., V], V > 0, over the last dimension. On a CPU the op runs this.

    dtype: the sums have this dtype; None: x's.
    """
    return x.sum(-1, dtype=dtype)


@op_with_kernel("row_cumsum", lambda x, dtype=None: x.new_empty(x.shape, dtype=dtype))
def row_cumsum(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The running sums [..., V] over the last dimension; x, dtype: see `row_sum`."""
    return x.cumsum(-1, dtype=dtype)


@op_with_kernel("row_softmax", lambda x, dtype=None, log=False: x.new_empty(x.shape, dtype=dtype))
def row_softmax(x: Tensor, dtype: torch.dtype | None = None, log: bool = False) -> Tensor:
    """softmax [..., V] over the last dimension, or log_softmax if `log`; x, dtype: see `row_sum`."""
    return x.log_softmax(-1, dtype=dtype) if log else x.softmax(-1, dtype=dtype)


@on_gpu(row_sum)
def launch_sum(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`row_sum` by the kernels."""
    x = x.contiguous()
    out, block, warps = x.new_empty(x.shape[:-1], dtype=dtype), BLOCK, WARPS
    if x.shape[-1] > BLOCK:
        x = _part_sums(x)
        block, warps = triton.next_power_of_2(x.shape[1]), 1
    _sum_parts[(out.numel(),)](x, out, x.shape[-1], BLOCK=block, num_warps=warps)
    return out


@on_gpu(row_cumsum)
def launch_cumsum(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`row_cumsum` by the kernels."""
    x = x.contiguous()
    out, sums = x.new_empty(x.shape, dtype=dtype), _part_sums(x)
    block_parts = triton.next_power_of_2(sums.shape[1])
    _scan[(sums.numel(),)](x, sums, out, x.shape[-1], BLOCK=BLOCK, BLOCK_PARTS=block_parts, num_warps=WARPS)
    return out


@on_gpu(row_softmax)
def launch_softmax(x: Tensor, dtype: torch.dtype | None = None, log: bool = False) -> Tensor:
    """`row_softmax` by the kernels."""
    x = x.contiguous()
    out, size = x.new_empty(x.shape, dtype=dtype), x.shape[-1]
    rows, parts = x.numel() // size, triton.cdiv(size, BLOCK)
    peaks, sums = x.new_empty((2, rows, parts), dtype=torch.float64)
    _sum_powers[(rows * parts,)](x, peaks, sums, size, BLOCK=BLOCK, num_warps=WARPS)
    _softmax[(rows * parts,)](
        x, peaks, sums, out, size,
        LOG=log, BLOCK=BLOCK, BLOCK_PARTS=triton.next_power_of_2(parts), num_warps=WARPS,
    )  # fmt: skip
    return out


def _part_sums(x: Tensor) -> Tensor:
    """The sums of the parts of contiguous x [..., V]: float64 [R, parts]."""
    size = x.shape[-1]
    rows, parts = x.numel() // size, triton.cdiv(size, BLOCK)
    sums = x.new_empty((rows, parts), dtype=torch.float64)
    _sum_parts[(rows * parts,)](x, sums, size, BLOCK=BLOCK, num_warps=WARPS)
    return sums


@triton.jit
def _part(x, size, other, BLOCK: tl.constexpr):
    """The entries [BLOCK] float64 of a program's part, its row, its number, and the columns [BLOCK] of the entries.

    V = 10,000: row 0 has the parts 0 .. 4095, 4096 .. 8191 and 8192 .. 9999, and program 4 has part 1 of row 1. Entries
    beyond the end of the row are `other`.
    """
    parts = tl.cdiv(size, BLOCK)
    row, part = (tl.program_id(0) // parts).to(tl.int64), tl.program_id(0) % parts
    column = part * BLOCK + tl.arange(0, BLOCK)
    return tl.load(x + row * size + column, mask=column < size, other=other).to(tl.float64), row, part, column


@triton.jit(do_not_specialize_on_alignment=["x", "sums"])
def _sum_parts(x, sums, size, BLOCK: tl.constexpr):
    """sums [R, parts]: the sum of each part. x [R, size]."""
    value = _part(x, size, 0.0, BLOCK)[0]
    tl.store(sums + tl.program_id(0), tl.sum(value, 0).to(sums.dtype.element_ty))


@triton.jit(do_not_specialize_on_alignment=["x", "sums", "out"])
def _scan(x, sums, out, size, BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    """out [R, V] = the sum of the parts before + the running sum in the part. x [R, V], sums [R, parts]."""
    value, row, part, column = _part(x, size, 0.0, BLOCK)

    # The sum of the parts before this one, then the running sum inside it.
    number = tl.arange(0, BLOCK_PARTS)
    before = tl.load(sums + row * tl.cdiv(size, BLOCK) + number, mask=number < part, other=0.0)  # guard: running-sums
    running = tl.sum(before, 0) + tl.cumsum(value, 0)
    tl.store(out + row * size + column, running.to(out.dtype.element_ty), mask=column < size)


@triton.jit(do_not_specialize_on_alignment=["x", "peaks", "sums"])
def _sum_powers(x, peaks, sums, size, BLOCK: tl.constexpr):
    """peaks, sums [R, parts]: the largest entry of each part, and its sum of exp(entry - largest). x [R, V]."""
    value = _part(x, size, float("-inf"), BLOCK)[0]
    peak = tl.max(value, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)  # a part of only -inf adds 0
    tl.store(peaks + tl.program_id(0), peak)
    tl.store(sums + tl.program_id(0), tl.sum(tl.exp(value - shift), 0))


@triton.jit(do_not_specialize_on_alignment=["x", "peaks", "sums", "out"])
def _softmax(x, peaks, sums, out, size, LOG: tl.constexpr, BLOCK: tl.constexpr, BLOCK_PARTS: tl.constexpr):
    """out [R, V]: softmax or log_softmax of each row, from the peaks and sums of its parts."""
    value, row, _, column = _part(x, size, float("-inf"), BLOCK)

    # Every program of a row merges all of its parts, in the same order.
    parts = tl.cdiv(size, BLOCK)
    number = tl.arange(0, BLOCK_PARTS)
    peaks_of = tl.load(peaks + row * parts + number, mask=number < parts, other=float("-inf"))
    sums_of = tl.load(sums + row * parts + number, mask=number < parts, other=0.0)
    peak = tl.max(peaks_of, 0)
    total = tl.sum(sums_of * tl.exp(peaks_of - peak), 0)  # NaN for a row of only -inf, as in torch

    if LOG:
        value = value - peak - tl.log(total)
    else:
        value = tl.exp(value - peak) / total
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), mask=column < size)
