"""Where kernels round as the ops round that they stand for. Import this module only where Triton is installed."""

import triton
import triton.language as tl

LARGEST_FP8: tl.constexpr = tl.constexpr(448.0)
"""Of float8_e4m3fn."""


@triton.jit
def nearest_fp8(x):
    """The value of float8_e4m3fn next to each x, float32: ties to even, nothing beyond the largest. Triton's
    interpreter converts to that type in another way."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    small = (tl.abs(x) + 24576.0) - 24576.0  # steps of 2 ** -9 from here on
    value = tl.minimum(tl.where(tl.abs(x) < 0.015625, small, normal), LARGEST_FP8)
    return (value.to(tl.int32, bitcast=True) | (bits ^ size)).to(tl.float32, bitcast=True)


@triton.jit
def over_scale(x):
    """`ops.over_scale` of x [R, D]: float32, and the scales [R, 1]."""
    wide = x.to(tl.float32)
    unit = tl.div_rn(tl.max(tl.abs(wide), 1), tl.full([x.shape[0]], LARGEST_FP8, tl.float32))
    unit = tl.where(unit > 0, unit, 1.0)[:, None]
    return tl.div_rn(wide, unit + tl.zeros_like(wide)), unit


@triton.jit
def as_stored(x, cache_ptr):
    """`ops.stored`."""
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    if dtype == tl.float8e4nv:
        x = nearest_fp8(x.to(tl.float32))
    return x.to(dtype)


@triton.jit
def as_read(x, scales_ptr, slot, mask, NUMBER: tl.constexpr, dtype: tl.constexpr):
    """`ops.as_read` of x [C, D], slots [C] of a KV head. scales_ptr: of that head; mask [C, 1]: which slots exist,
    None: all."""
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
    """The end of `rms_norm`: x, divided by its root mean square, times the weight."""
    if ROUND_FIRST:
        x = x.to(dtype).to(tl.float32) * weight.to(tl.float32)
    else:
        x *= weight.to(tl.float32) + offset
    return x.to(dtype).to(tl.float32)
