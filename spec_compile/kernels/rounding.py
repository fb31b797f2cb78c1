"""Where kernels round as the ops round that they stand for. Import this module only where Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def as_stored(x, cache_ptr):
    """`ops.stored`."""
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0)
    return x.to(dtype)


@triton.jit
def scaled(x, weight, offset, dtype: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """The end of `rms_norm`: x, divided by its root mean square, times the weight."""
    if ROUND_FIRST:
        x = x.to(dtype).to(tl.float32) * weight.to(tl.float32)
    else:
        x *= weight.to(tl.float32) + offset
    return x.to(dtype).to(tl.float32)
