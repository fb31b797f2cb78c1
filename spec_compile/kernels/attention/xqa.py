"""FlashInfer's XQA kernels: attention of a token tree to a paged cache.

They plan nothing on the host and read lengths on the device, so a CUDA graph can hold them. Our cache [B, Hkv, S, D] is
read as pages [P, Hkv, size, D] that overlap: S = 256, Hkv = 2 and pages of 128 slots give row 0 the pages 0 and 1, and
row 1 the pages 4 and 5, because a row has 2 * 256 slots.
"""

import functools
import math

import torch
from torch import Tensor

PAGES = (128, 64, 32, 16)
"""Slots of a page that the kernels support, the largest first."""
SEMAPHORES, SCRATCH = 8 << 20, 128 << 20
"""Bytes of the two buffers that a launch works with."""


def attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    sinks: Tensor | None,
    scale: float,
) -> Tensor:
    """Attention of a block that is already in the caches, from slot lengths[b] on. -> [B, N, H, D]

    q [B, H, N, D], caches [B, Hkv, S, D], lengths [B], ancestors [B, N] (None: a chain), N <= 64. The first call for a
    shape and an N compiles a kernel. Raises ValueError if no page size divides S.
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
    """The largest page size that divides `slots`."""
    for size in PAGES:
        if slots % size == 0:
            return size
    raise ValueError(f"attention_backend: 'flashinfer' needs a cache of whole pages of {PAGES[-1]} slots, got {slots}")


def paged(cache: Tensor, size: int) -> Tensor:
    """A contiguous cache [B, Hkv, S, D] as pages [P, Hkv, size, D]; row b has S / size of them from b * Hkv * S / size.

    The pages between would mix heads and rows; `_table` names none of them.
    """
    batch, heads, slots, dim = cache.shape
    pages = ((batch - 1) * heads + 1) * (slots // size)
    return cache.as_strided((pages, heads, size, dim), (size * dim, slots * dim, dim, 1))


@functools.cache
def _table(batch: int, heads: int, slots: int, size: int, device: torch.device) -> Tensor:
    """The numbers of the pages of each row, [B, S / size] int32."""
    first = torch.arange(batch, device=device)[:, None] * (heads * slots // size)
    return (first + torch.arange(slots // size, device=device)).int()


def packed(ancestors: Tensor | None, batch: int, nodes: int, device: torch.device) -> Tensor:
    """The ancestors' bits as XQA takes them: uint16 [B, N, 2 * ceil(N / 32)], the lowest bits first.

    N = 5: each node has two numbers; node 3 with ancestors 0b01011 has [11, 0]. ancestors: None: a chain.
    """
    if ancestors is None:
        own = torch.ones(nodes, dtype=torch.int64, device=device) << torch.arange(nodes, device=device)
        ancestors = own.cumsum(0).expand(batch, -1)
    halves = ancestors.contiguous().view(torch.int16).view(batch, nodes, 4)
    return halves[..., : 2 * -(-nodes // 32)].contiguous().view(torch.uint16)


@functools.cache
def _workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """Semaphores, zero between launches, and scratch memory."""
    return tuple(torch.zeros(size, dtype=torch.uint8, device=device) for size in (SEMAPHORES, SCRATCH))
