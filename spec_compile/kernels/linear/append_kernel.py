"""The end of the product "small_m" whose outputs are queries, keys and values: norms, rotation, append to the cache.

The rotation of x, y, outputs d and d + D / 2 of a head, is x * cos - y * sin, y * cos + x * sin. A tile has PAIRS such
pairs of N rows; x and y are [PAIRS, N]. Pair p is d = p % (D / 2) of head p // (D / 2): with D = 64, pair 70 is outputs
6 and 38 of head 2. Query heads come first, then key heads, then value heads. Numbers are rounded where `tree_attention`
rounds them if it appends for itself.

Import this module only where Triton is installed.
"""

import triton
import triton.language as tl

from ..pairs import sum_rows_in_pairs
from ..rounding import as_stored, scaled


@triton.jit
def load_for_heads(
    heads, pair, n, rows, nodes, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """The inputs of `store_heads` besides the product: cos of x and of y, sin of x and of y [PAIRS, N], weights of
    their norms [PAIRS, 1], which mean nothing without norms, and the rows' slots in the caches [N]."""
    half: tl.constexpr = D // 2
    head, d = pair // half, pair % half
    mask = (head < HEADS + KV_HEADS)[:, None] & (n < rows)[None, :]
    at = n[None, :].to(tl.int64) * D + d[:, None]
    cos, next_cos = tl.load(heads.cos + at, mask=mask, other=0.0), tl.load(heads.cos + at + half, mask=mask, other=0.0)
    sin, next_sin = tl.load(heads.sin + at, mask=mask, other=0.0), tl.load(heads.sin + at + half, mask=mask, other=0.0)
    weight, next_weight = d[:, None], d[:, None]
    if heads.q_norm is not None:
        is_query = (head < HEADS)[:, None]
        weight = tl.where(is_query, tl.load(heads.q_norm + d)[:, None], tl.load(heads.k_norm + d)[:, None])
        d += half
        next_weight = tl.where(is_query, tl.load(heads.q_norm + d)[:, None], tl.load(heads.k_norm + d)[:, None])
    slot = tl.load(heads.lengths + n // nodes, mask=n < rows, other=0) + n % nodes
    return cos, next_cos, sin, next_sin, weight, next_weight, slot


@triton.jit
def _inverse_rms(first, second, eps, D: tl.constexpr, PAIRS: tl.constexpr, N: tl.constexpr):
    """1 / the root mean square of each head -> [PAIRS, N]. The tile has whole heads."""
    half: tl.constexpr = D // 2
    heads: tl.constexpr = PAIRS // half
    squares = sum_rows_in_pairs(first * first, heads, half, N) + sum_rows_in_pairs(second * second, heads, half, N)
    scale = tl.rsqrt(squares / D + eps)
    return tl.reshape(tl.broadcast_to(scale[:, None, :], [heads, half, N]), [PAIRS, N])


@triton.jit
def store_heads(
    first, second, loaded, out_ptr, heads, pair, n, rows, nodes, capacity, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, PAIRS: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Queries into out [rows, HEADS * D]; keys and values into the caches [B, KV_HEADS, capacity, D], node i of row b
    of the batch at slot lengths[b] + i. loaded: by `load_for_heads`."""
    half: tl.constexpr = D // 2
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    head, d = pair // half, pair % half
    is_query, is_turned = head < HEADS, head < HEADS + KV_HEADS

    # Norm and rotate.
    cos, next_cos, sin, next_sin, weight, next_weight, slot = loaded
    x, y = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
    a, b = x, y
    if heads.q_norm is not None:
        scale = _inverse_rms(x, y, heads.eps, D, PAIRS, N)
        a = scaled(x * scale, weight, heads.offset, dtype, heads.offset is None)
        b = scaled(y * scale, next_weight, heads.offset, dtype, heads.offset is None)
    turned = tl.fma(a, cos.to(tl.float32), -b * sin.to(tl.float32))
    next_turned = tl.fma(b, next_cos.to(tl.float32), a * next_sin.to(tl.float32))
    x = tl.where(is_turned[:, None], turned, x).to(dtype)
    y = tl.where(is_turned[:, None], next_turned, y).to(dtype)

    # Queries.
    inside = n < rows
    at = n[None, :].to(tl.int64) * (HEADS * D) + (head * D + d)[:, None]
    mask = is_query[:, None] & inside[None, :]
    tl.store(out_ptr + at, x, mask=mask)
    tl.store(out_ptr + at + half, y, mask=mask)

    # Keys, and values, whose heads follow those of keys.
    batch = (n // nodes).to(tl.int64)
    is_key, kv_head = is_turned & (head >= HEADS), (head - HEADS) % KV_HEADS
    at = (batch * KV_HEADS * capacity + slot)[None, :] * D + (kv_head.to(tl.int64) * capacity * D + d)[:, None]
    stored = (inside & (slot < capacity))[None, :]
    mask = is_key[:, None] & stored
    tl.store(heads.key_cache + at, as_stored(x, heads.key_cache), mask=mask)
    tl.store(heads.key_cache + at + half, as_stored(y, heads.key_cache), mask=mask)
    mask = ((head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS))[:, None] & stored
    tl.store(heads.value_cache + at, as_stored(x, heads.value_cache), mask=mask)
    tl.store(heads.value_cache + at + half, as_stored(y, heads.value_cache), mask=mask)
