"""FlashInfer's XQA kernels: attention of a token tree to a paged cache. They plan nothing on the host and read the
lengths on the device, so that a CUDA graph can hold them."""

import functools
import math

import torch
from torch import Tensor

PAGES = (128, 64, 32, 16)
"""Slots of a page, as the kernels have them."""
SEMAPHORES, SCRATCH = 8 << 20, 128 << 20
"""Bytes that a launch works with."""


def attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    sinks: Tensor | None,
    scale: float,
) -> Tensor:
    """Attention of a block that the caches already hold, at the slots lengths[b] onwards.

    q [B, H, N, D], caches [B, Hkv, S, D], lengths [B], ancestors [B, N] (None: a chain), N <= 64 -> [B, N, H, D].
    The first call for a shape, or for an N, compiles a kernel. ValueError if no page size divides S.
    """
    from flashinfer.xqa import xqa

    (batch, heads, nodes, dim), (kv_heads, slots) = q.shape, key_cache.shape[1:3]
    size = page_size(slots)
    semaphores, scratch = _workspace(q.device)
    q = q.transpose(1, 2)[:, None].contiguous()
    out = torch.empty_like(q)
    tree = {} if nodes == 1 else {"q_seq_len": nodes, "mask": packed(ancestors, batch, nodes, q.device)}
    xqa(
        q if nodes > 1 else q[:, :, 0],
        paged(key_cache, size),
        paged(value_cache, size),
        _table(batch, kv_heads, slots, size, q.device),
        (lengths + nodes).int().view(torch.uint32)[:, None],
        out if nodes > 1 else out[:, :, 0],
        scratch,
        semaphores,
        kv_heads,
        size,
        sinks=None if sinks is None else sinks.float().view(kv_heads, heads // kv_heads),
        q_scale=scale * math.sqrt(dim),  # the kernels divide by the square root
        kv_layout="HND",
        **tree,
    )
    return out[:, 0]


def page_size(slots: int) -> int:
    """The largest page that divides a cache of so many slots."""
    for size in PAGES:
        if slots % size == 0:
            return size
    raise ValueError(f"attention_backend: 'flashinfer' needs a cache of whole pages of {PAGES[-1]} slots, got {slots}")


def paged(cache: Tensor, size: int) -> Tensor:
    """A cache [B, Hkv, S, D], contiguous, as pages [P, Hkv, size, D], those of row b from b * Hkv * S / size on.

    Pages of other numbers are there, too, and straddle rows; `_table` names none of them.
    """
    batch, heads, slots, dim = cache.shape
    pages = ((batch - 1) * heads + 1) * (slots // size)
    return cache.as_strided((pages, heads, size, dim), (size * dim, slots * dim, dim, 1))


@functools.cache
def _table(batch: int, heads: int, slots: int, size: int, device: torch.device) -> Tensor:
    """The pages of each row in their order [B, S / size] int32."""
    first = torch.arange(batch, device=device)[:, None] * (heads * slots // size)
    return (first + torch.arange(slots // size, device=device)).int()


def packed(ancestors: Tensor | None, batch: int, nodes: int, device: torch.device) -> Tensor:
    """What each node sees of the block, as XQA takes it: bits in words of 32, as pairs [B, N, 2 * ceil(N / 32)] of
    uint16."""
    if ancestors is None:
        own = torch.ones(nodes, dtype=torch.int64, device=device) << torch.arange(nodes, device=device)
        ancestors = own.cumsum(0).expand(batch, -1)
    halves = ancestors.contiguous().view(torch.int16).view(batch, nodes, 4)
    return halves[..., : 2 * -(-nodes // 32)].contiguous().view(torch.uint16)


@functools.cache
def _workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Semaphores, zero between launches, and scratch memory."""
    return tuple(torch.zeros(size, dtype=torch.uint8, device=device) for size in (SEMAPHORES, SCRATCH))
