"""Attention of queries that have no slots of their own: to the committed slots of a cache, which is only read."""

import torch
from torch import Tensor

from .. import ops


def attend_to_committed(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    scales: Tensor | None,
    lengths: Tensor,
    max_kv_len: int,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """softmax(scale * q k^T) v over the committed slots. -> [B, R, H, Dv].

    q: [B, H, R, Dk]; R queries a row, rotated, which see the same slots and not each other.
    key_cache, value_cache, scales: as in `call.AttentionCall`; none is written.
    lengths: [B] int64; committed slots. A row without any sees slot 0, whatever that holds.
    max_kv_len: slots that may be committed; on a GPU all are looked at.
    window: how many of the last committed slots are seen; None for all.

    All queries are asked in the place of the last committed token, as heads of a block of that one token, which is in
    the cache already: with H = 4, Hkv = 2 and R = 3 it has 12 heads, of which the first 6 read KV head 0.
    """
    batch, heads, rows, size = q.shape
    last = (lengths - 1).clamp(min=0)
    positions, q = last[:, None], q.reshape(batch, heads * rows, 1, size)
    if q.is_cuda:
        out = torch.ops.spec_compile.tree_attention(
            q=q, k=None, v=None, key_cache=key_cache, value_cache=value_cache, lengths=last, ancestors=None,
            positions=positions, sinks=None, scale=scale, softcap=softcap, window=window, scales=scales,
        )  # fmt: skip
    else:
        mask = ops.tree_mask(positions, last, None, max_kv_len, window, 1, q.dtype)
        keys, values = ops.as_read(key_cache, value_cache, scales, max_kv_len, q.dtype)
        out = ops.masked_attention(q, keys, values, mask, None, scale, softcap)
    return out.reshape(batch, heads, rows, -1).transpose(1, 2)
