"""The steps after a product, with its sums in registers: those of `small_m_kernel` and `wide_kernel`.

Import this module only where Triton is installed. Shapes: HEIGHT columns of out, BLOCK_N rows of x.
"""

import triton
import triton.language as tl

from ..pairs import sum_in_pairs, sum_rows_in_pairs


@triton.jit
def inverse_rms(squares, inputs, eps):
    """1 / the root mean square of each row of x [BLOCK_N], from `load_squares`. The product and the sum are an explicit
    fma, because a compiler could fuse them in one kernel and not in another."""
    total = sum_in_pairs(squares, squares.shape[0], squares.shape[1])
    return tl.rsqrt(tl.fma(total, tl.zeros_like(total) + 1.0 / inputs, tl.zeros_like(total) + eps))


@triton.jit
def scale_rows(acc, scale, bias):
    """acc [HEIGHT, BLOCK_N] times scale [BLOCK_N], plus bias [HEIGHT]."""
    return tl.fma(acc, scale[None, :] + tl.zeros_like(acc), bias[:, None] + tl.zeros_like(acc))


@triton.jit
def load_bias(bias_ptr, o):
    """Zeros where there is no bias."""
    bias = tl.zeros(o.shape, tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + o).to(tl.float32)
    return bias


@triton.jit
def load_squares(squares_ptr, n, rows, TERMS: tl.constexpr):
    """Sums of the squares of the stream [rows, TERMS] -> those of a tile's rows [BLOCK_N, TERMS], rounded up."""
    term = tl.arange(0, triton.next_power_of_2(TERMS))
    mask = (n < rows)[:, None] & (term < TERMS)[None, :]
    return tl.load(squares_ptr + n[:, None] * TERMS + term[None, :], mask=mask, other=0.0)


@triton.jit
def load_stream(stream, column, n, rows, height, stride_r):
    """The residual stream before the product [HEIGHT, BLOCK_N], and the weight of the norm after it [HEIGHT]."""
    mask = (column < height)[:, None] & (n < rows)[None, :]
    before = tl.load(stream.residual + n[None, :].to(tl.int64) * stride_r + column[:, None], mask=mask, other=0.0)
    return before, tl.load(stream.weight + column, mask=column < height, other=0.0)


@triton.jit
def store_stream(
    acc, residual, norm, out_ptr, stream, column, n, tile, rows, height,
    BLOCK_N: tl.constexpr, HEIGHT: tl.constexpr, SQUARED: tl.constexpr,
):  # fmt: skip
    """The residual stream with the sums [HEIGHT, BLOCK_N] added, to out [rows, height], and the first half of the next
    RMSNorm: times its weight to scaled [rows, height], and each SQUARED columns' sum of squares to squares."""
    mask = (column < height)[:, None] & (n < rows)[None, :]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = (acc.to(dtype).to(tl.float32) + residual.to(tl.float32)).to(dtype)
    at = n[None, :].to(tl.int64) * height + column[:, None]
    tl.store(out_ptr + at, total, mask=mask)
    wide = tl.where(mask, total.to(tl.float32), 0.0)
    factor = norm.to(tl.float32) + stream.offset
    tl.store(stream.scaled + at, (wide * factor[:, None]).to(dtype), mask=mask)
    groups: tl.constexpr = HEIGHT // SQUARED
    sums = sum_rows_in_pairs(wide * wide, groups, SQUARED, BLOCK_N)
    group = tile * groups + tl.arange(0, groups)
    mask = (group * SQUARED < height)[:, None] & (n < rows)[None, :]
    tl.store(stream.squares + n[None, :] * tl.cdiv(height, SQUARED) + group[:, None], sums, mask=mask)


@triton.jit
def store(value, out_ptr, column, n, rows, height):
    """value [HEIGHT, BLOCK_N] to out [rows, height]."""
    mask = (column < height)[:, None] & (n < rows)[None, :]
    at = n[None, :].to(tl.int64) * height + column[:, None]
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=mask)
