"""Rounding in kernels, as the ops round. Import this module only where Triton is installed."""

import triton
import triton.language as tl

LARGEST_FP8: tl.constexpr = tl.constexpr(448.0)
"""The largest number of float8_e4m3fn."""


@triton.jit
def nearest_fp8(x):
    """The nearest number of float8_e4m3fn to each x, as float32: ties to even, at most the largest.

    0.3 gives 0.3125, and 1000.0 gives 448.0. Triton's own conversion rounds otherwise in the interpreter.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (tl.abs(x) + 24576.0) - 24576.0  # steps of 2 ** -9 from here on
    value = tl.minimum(tl.where(tl.abs(x) < 0.015625, small, normal), LARGEST_FP8)
    return (value.to(tl.int32, bitcast=True) | (bits ^ size)).to(tl.float32, bitcast=True)


@triton.jit
def over_scale(x):
    """`ops.over_scale` of x [R, D] -> float32 [R, D], scales [R, 1]."""
    wide = x.to(tl.float32)
    unit = tl.div_rn(tl.max(tl.abs(wide), 1), tl.full([x.shape[0]], LARGEST_FP8, tl.float32))
    unit = tl.where(unit > 0, unit, 1.0)[:, None]
    return tl.div_rn(wide, unit + tl.zeros_like(wide)), unit


@triton.jit
def as_stored(x, cache_ptr):
    """`ops.stored`: x in the dtype of the cache."""
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    if dtype == tl.float8e4nv:
        x = nearest_fp8(x.to(tl.float32))
    return x.to(dtype)


@triton.jit
def as_read(x, scales_ptr, slot, mask, NUMBER: tl.constexpr, dtype: tl.constexpr):
    """`ops.as_read` of x [C, D] from the slots `slot` [C] of a KV head.

    scales_ptr: [S, 2] of that head, or None. mask [C, 1]: True for slots that exist; None: all. NUMBER: 0 for keys, 1
    for values.
    """
    if scales_ptr is not None:
        scale_at = scales_ptr + slot[:, None] * 2 + NUMBER
        if mask is None:
            unit = tl.load(scale_at)
        else:
            unit = tl.load(scale_at, mask=mask, other=0.0)
        return (x.to(tl.float32) * unit).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def scaled(x, weight, offset, dtype: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """The end of `rms_norm`: x, already divided by its root mean square, times the weight."""
    if ROUND_FIRST:
        x = x.to(dtype).to(tl.float32) * weight.to(tl.float32)
    else:
        x *= weight.to(tl.float32) + offset
    return x.to(dtype).to(tl.float32)
