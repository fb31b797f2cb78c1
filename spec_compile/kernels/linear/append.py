"""The merged product of q, k and v, which rotates queries and keys and appends the block to the cache."""

import torch
from torch import Tensor

from .. import ops
from ..ops import as_rows
from .plans import MAX_HEAD, appending
from .small_m import Heads, Normed, launch, memory_of, plan_of, small_m_matmul
from .stream import normed_matmul


def lack(size: int, value_size: int, normed: bool) -> str | None:
    """Why the kernel cannot append heads of `size`, keys and values, the keys normed or not; None if it can."""
    if size != value_size or size % 2:
        return f"keys of {size} and values of {value_size}"
    if normed and (size > MAX_HEAD or size & (size - 1)):
        return f"norms of heads of {size}"
    return None


@torch.library.custom_op("spec_compile::small_m_append", mutates_args=("key_cache", "value_cache"))
def small_m_append(
    x: Tensor, weight: Tensor, bias: Tensor | None, squares: Tensor | None, rms_eps: float, cos: Tensor, sin: Tensor,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float, offset: float | None, key_cache: Tensor,
    value_cache: Tensor, lengths: Tensor, scales: Tensor | None = None, kind: str = "",
) -> Tensor:  # fmt: skip
    """A linear layer to queries, keys and values, and what `tree_attention` does to them before it attends.

    x [B, N, I], weight [(H + 2 Hkv) D, I], bias [(H + 2 Hkv) D] or None, scales, kind: as of `small_m_matmul`. With
    squares, x is `scaled` of `normed_matmul`, and rms_eps of its norm. key_cache, value_cache [B, Hkv, S, D], and the
    others: as of `attention.call.Call`. Nothing is written beyond the last slot S. -> queries [B, N, H, D], normed and
    rotated.
    """
    how = plan_of(x, weight, kind)
    heads = Heads(cos, sin, q_norm, k_norm, eps, offset, key_cache, value_cache, lengths)
    if how is None:
        if squares is None:
            return _append(small_m_matmul(x, weight, bias, scales, kind), heads)
        return _append(normed_matmul(x, squares, weight, bias, rms_eps, scales, kind), heads)
    flat, size = as_rows(x), key_cache.shape[3]
    out = x.new_empty(len(flat), len(weight) - 2 * key_cache.shape[1] * size)
    heads = heads._replace(**{name: getattr(heads, name).contiguous() for name in ("cos", "sin", "lengths")})
    bias = bias if bias is None else bias.contiguous()
    normed = None if squares is None else Normed(squares, rms_eps)
    tile = appending(how.tile(len(flat)), size if q_norm is not None else 0, memory_of(x.device))
    launch(flat, weight, bias, out, how.parts, tile, normed=normed, heads=heads, scales=scales, kind=kind)
    return out.view(*x.shape[:-1], -1, size)


@small_m_append.register_fake
def _(
    x, weight, bias, squares, rms_eps, cos, sin, q_norm, k_norm, eps, offset, key_cache, value_cache, lengths,
    scales=None, kind="",
):  # fmt: skip
    kv_heads, size = key_cache.shape[1], key_cache.shape[3]
    return x.new_empty(*x.shape[:-1], weight.shape[0] // size - 2 * kv_heads, size)


def _append(product: Tensor, heads: Heads) -> Tensor:
    """The product [B, N, (H + 2 Hkv) D] in plain PyTorch: the queries [B, N, H, D] of `small_m_append`."""
    kv_heads, size = heads.key_cache.shape[1], heads.key_cache.shape[3]
    product = product.unflatten(-1, (-1, size)).transpose(1, 2)
    q, k, v = product.split([product.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if heads.q_norm is not None:
        from ..norm import rms_norm  # needs Triton

        q, k = (rms_norm(x, w, heads.eps, heads.offset) for x, w in ((q, heads.q_norm), (k, heads.k_norm)))
    q, k = (ops.rotated(x, heads.cos, heads.sin) for x in (q, k))
    ops.append(heads.key_cache, k, heads.lengths)
    ops.append(heads.value_cache, v, heads.lengths)
    return q.transpose(1, 2).contiguous()
