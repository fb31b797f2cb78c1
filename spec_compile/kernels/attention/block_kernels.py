"""Kernels of tree attention for the block itself: its keys and values, normed, rotated, rounded, and appended.

Import this module only where Triton is installed. Shapes: R rows of a tile, D (Dk, Dv) a head size, BLOCK_D* the power
of two that holds it. `stride_kb, stride_kh, stride_kn` are the strides of k over rows of the batch, heads and tokens.
"""

import triton
import triton.language as tl

from ..pairs import sum_in_pairs


@triton.jit
def as_stored(x, cache_ptr):
    """`ops.stored`."""
    dtype: tl.constexpr = cache_ptr.dtype.element_ty
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0)
    return x.to(dtype)


@triton.jit
def _scaled(x, weight, offset, dtype: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """The end of `rms_norm`, rounded as it rounds."""
    if ROUND_FIRST:
        x = x.to(dtype).to(tl.float32) * weight.to(tl.float32)
    else:
        x *= weight.to(tl.float32) + offset
    return x.to(dtype).to(tl.float32)


@triton.jit
def load_rotated(
    row_ptr, dim, cos_ptr, sin_ptr, norm_ptr, eps, offset, mask,
    D: tl.constexpr, ALIGNED: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """The rows [R, BLOCK_D] at `row_ptr` [R, 1] as `ops.rotated` turns them, normed before if `norm_ptr` has a weight
    [D], and rounded once after the rotation. cos_ptr, sin_ptr: [R, 1]. dim [BLOCK_D]."""
    half: tl.constexpr = D // 2
    across = tl.where(dim < half, dim + half, dim - half)
    across = tl.multiple_of(tl.max_contiguous(across, ALIGNED), ALIGNED)[None, :]
    first, dim = (dim < half)[None, :], dim[None, :]
    # Each number and the one it is turned with, of the other half, both [R, BLOCK_D].
    loaded = tl.load(row_ptr + dim, mask=mask, other=0.0)
    dtype: tl.constexpr = loaded.dtype
    x = loaded.to(tl.float32)
    other = tl.load(row_ptr + across, mask=mask, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        scale = tl.rsqrt(sum_in_pairs(x * x, x.shape[0], x.shape[1]) / D + eps)[:, None]
        x = _scaled(x * scale, tl.load(norm_ptr + dim, mask=dim < D, other=0.0), offset, dtype, ROUND_FIRST)
        weight = tl.load(norm_ptr + across, mask=dim < D, other=0.0)
        other = _scaled(other * scale, weight, offset, dtype, ROUND_FIRST)
    cos = tl.load(cos_ptr + dim, mask=mask, other=0.0).to(tl.float32)
    turned = tl.where(first, -other, other) * tl.load(sin_ptr + dim, mask=mask, other=0.0).to(tl.float32)
    return tl.fma(x, cos, turned).to(dtype)  # named, because a compiler could as well fuse the other product


@triton.jit
def load_query(
    row_ptr, angle, real, cos_ptr, sin_ptr, q_norm_ptr, eps, offset,
    DK: tl.constexpr, BLOCK_DK: tl.constexpr, ALIGNED: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """Queries [BLOCK_M, BLOCK_DK] at `row_ptr` [BLOCK_M, 1], turned by the rows of cos at `angle` [BLOCK_M, 1]."""
    dk = tl.arange(0, BLOCK_DK)
    mask = real[:, None] & (dk < DK)[None, :]
    if cos_ptr is None:
        query = tl.load(row_ptr + dk[None, :], mask=mask, other=0.0)
    else:
        query = load_rotated(
            row_ptr, dk, cos_ptr + angle, sin_ptr + angle, q_norm_ptr, eps, offset, mask, DK, ALIGNED, ROUND_FIRST
        )
    return query


@triton.jit
def take_block(
    k_ptr, v_ptr, key_cache_ptr, value_cache_ptr, stride_kn, stride_vn, token, nodes, length, capacity, written,
    column, cos_ptr, sin_ptr, first_angle, norm_ptr, eps, offset,
    DK: tl.constexpr, BLOCK_DK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    ALIGNED: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """Keys [R, BLOCK_DK] and values [R, BLOCK_DV], from `column` on, of the block's tokens `token` [R], as the cache
    holds them; those `written` [R] go into it. The pointers are those of one KV head; first_angle: the row of cos of
    token 0."""
    dk, dv = tl.arange(0, BLOCK_DK)[None, :], column + tl.arange(0, BLOCK_DV)[None, :]
    inside = (token < nodes)[:, None]
    row_ptr, mask = k_ptr + token[:, None] * stride_kn, inside & (dk < DK)
    if cos_ptr is None:
        keys = tl.load(row_ptr + dk, mask=mask, other=0.0)
    else:
        angle = (first_angle + token)[:, None] * DK
        keys = load_rotated(
            row_ptr, tl.arange(0, BLOCK_DK), cos_ptr + angle, sin_ptr + angle, norm_ptr, eps, offset, mask,
            DK, ALIGNED, ROUND_FIRST,
        )  # fmt: skip
    values = tl.load(v_ptr + token[:, None] * stride_vn + dv, mask=inside & (dv < DV), other=0.0)
    keys, values = as_stored(keys, key_cache_ptr), as_stored(values, value_cache_ptr)
    slot = (length + token)[:, None]
    written = written[:, None] & inside & (slot < capacity)
    tl.store(key_cache_ptr + slot * DK + dk, keys, mask=written & (dk < DK))
    tl.store(value_cache_ptr + slot * DV + dv, values, mask=written & (dv < DV))
    return keys, values


@triton.jit(do_not_specialize=["nodes"])
def append_kernel(
    k_ptr, v_ptr, key_cache_ptr, value_cache_ptr, lengths_ptr, cos_ptr, sin_ptr, k_norm_ptr,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, nodes, capacity, eps, offset,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, ALIGNED: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """A causal chunk into the cache, BLOCK tokens of a KV head a program. Grid (N / BLOCK, B * Hkv)."""
    group = tl.program_id(1).to(tl.int64)
    batch, kv_head = group // KV_HEADS, group % KV_HEADS
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    take_block(
        k_ptr + batch * stride_kb + kv_head * stride_kh, v_ptr + batch * stride_vb + kv_head * stride_vh,
        key_cache_ptr + group * capacity * DK, value_cache_ptr + group * capacity * DV, stride_kn, stride_vn,
        token, nodes, tl.load(lengths_ptr + batch).to(tl.int32), capacity,
        token < nodes, 0, cos_ptr, sin_ptr, batch * nodes, k_norm_ptr, eps, offset,
        DK, BLOCK_DK, DV, BLOCK_DV, ALIGNED, ROUND_FIRST,
    )  # fmt: skip
