"""The kernel that prepares a block for attention: queries and keys are normed and rotated, keys and values appended.

    query, key:  x -> rms_norm(x), if there are weights -> x * cos + rotate_half(x) * sin, if there are angles
    caches:      slot lengths[b] + n of KV head h gets key and value n, as they are or divided by their scales

Import this module only where Triton is installed. Shapes: R rows of a tile, D (Dk, Dv) a head size, BLOCK_D* the power
of two that holds it. `stride_kb, stride_kh, stride_kn` are the strides of k over rows of the batch, heads and tokens.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..pairs import sum_in_pairs
from ..rounding import as_stored, over_scale, scaled


@triton.jit
def load_rotated(
    row_ptr, dim, cos_ptr, sin_ptr, norm_ptr, eps, offset, mask,
    D: tl.constexpr, ALIGNED: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """`ops.rotated` of the rows at `row_ptr` [R, 1] -> [R, BLOCK_D], rounded once, after the rotation.

    With D = 4, x = [a, b, c, d] becomes [a cos - c sin, b cos - d sin, c cos + a sin, d cos + b sin], each with the
    cos and sin of its column. norm_ptr: weight [D] of a norm before the rotation, or None. cos_ptr, sin_ptr: [R, 1].
    dim [BLOCK_D].
    """
    half: tl.constexpr = D // 2
    across = tl.where(dim < half, dim + half, dim - half)
    across = tl.multiple_of(tl.max_contiguous(across, ALIGNED), ALIGNED)[None, :]
    first, dim = (dim < half)[None, :], dim[None, :]
    # Each number x and its partner from the other half, both [R, BLOCK_D].
    loaded = tl.load(row_ptr + dim, mask=mask, other=0.0)
    dtype: tl.constexpr = loaded.dtype
    x = loaded.to(tl.float32)
    other = tl.load(row_ptr + across, mask=mask, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        scale = tl.rsqrt(sum_in_pairs(x * x, x.shape[0], x.shape[1]) / D + eps)[:, None]
        x = scaled(x * scale, tl.load(norm_ptr + dim, mask=dim < D, other=0.0), offset, dtype, ROUND_FIRST)
        weight = tl.load(norm_ptr + across, mask=dim < D, other=0.0)
        other = scaled(other * scale, weight, offset, dtype, ROUND_FIRST)
    cos = tl.load(cos_ptr + dim, mask=mask, other=0.0).to(tl.float32)
    turned = tl.where(first, -other, other) * tl.load(sin_ptr + dim, mask=mask, other=0.0).to(tl.float32)
    return tl.fma(x, cos, turned).to(dtype)  # explicit, because a compiler could fuse the other product instead


@triton.jit(do_not_specialize=["nodes"])
def append_kernel(
    q_ptr, k_ptr, v_ptr,  # [B, H, N, Dk], [B, Hkv, N, Dk], [B, Hkv, N, Dv], by their strides
    rotated_ptr,  # [B, H, N, Dk], written
    key_cache_ptr, value_cache_ptr, scales_ptr,  # [B, Hkv, S, Dk], [B, Hkv, S, Dv], [B, Hkv, S, 2] or None, written
    lengths_ptr,  # [B]
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr,  # [B, N, Dk] or None, [Dk] or None
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    nodes, capacity, eps, offset,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, ALIGNED: tl.constexpr, ROUND_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of a head a program: keys and values go into the caches, queries to `rotated`.

    Grid (N / BLOCK, B, Hkv + H): the KV heads, then the query heads. Without rotation (N / BLOCK, B, Hkv).
    """
    if EARLY:
        gdc_launch_dependents()
    batch, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)[None, :]
    inside = (token < nodes)[:, None]
    mask = inside & (dk < DK)[None, :]
    angle = (batch * nodes + token)[:, None] * DK
    if EARLY:
        gdc_wait()

    # A KV head: the key, then the value, into the slot of each token.
    if head < KV_HEADS:
        row_ptr = k_ptr + batch * stride_kb + head * stride_kh + token[:, None] * stride_kn
        if cos_ptr is None:
            keys = tl.load(row_ptr + dk[None, :], mask=mask, other=0.0)
        else:
            keys = load_rotated(
                row_ptr, dk, cos_ptr + angle, sin_ptr + angle, k_norm_ptr, eps, offset, mask, DK, ALIGNED, ROUND_FIRST
            )
        row_ptr = v_ptr + batch * stride_vb + head * stride_vh + token[:, None] * stride_vn
        values = tl.load(row_ptr + dv, mask=inside & (dv < DV), other=0.0)
        slot = (tl.load(lengths_ptr + batch).to(tl.int32) + token)[:, None]
        at = (batch * KV_HEADS + head) * capacity + slot
        if scales_ptr is not None:
            keys, key_unit = over_scale(keys)
            values, value_unit = over_scale(values)
            tl.store(scales_ptr + at * 2, key_unit, mask=inside & (slot < capacity))
            tl.store(scales_ptr + at * 2 + 1, value_unit, mask=inside & (slot < capacity))
        tl.store(key_cache_ptr + at * DK + dk[None, :], as_stored(keys, key_cache_ptr), mask=mask & (slot < capacity))
        stored = inside & (slot < capacity) & (dv < DV)
        tl.store(value_cache_ptr + at * DV + dv, as_stored(values, value_cache_ptr), mask=stored)

    # A query head.
    elif cos_ptr is not None:
        head -= KV_HEADS
        row_ptr = q_ptr + batch * stride_qb + head * stride_qh + token[:, None] * stride_qn
        queries = load_rotated(
            row_ptr, dk, cos_ptr + angle, sin_ptr + angle, q_norm_ptr, eps, offset, mask, DK, ALIGNED, ROUND_FIRST
        )
        at = ((batch * HEADS + head) * nodes + token)[:, None] * DK
        tl.store(rotated_ptr + at + dk[None, :], queries, mask=mask)
