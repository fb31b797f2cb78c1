"""Backend "flashinfer": FlashInfer's kernels over our static cache.

Inside a CUDA graph, trees go to kernels that read lengths on the device (XQA). Prompts, and trees with
``cuda_graphs=False``, go to a kernel that takes lengths from the host and knows no trees: it attends to the committed
slots, PyTorch attends to the tree itself, and `merge` adds both.
"""

import functools
import importlib.metadata
import math
from collections.abc import Callable

import torch
from packaging.version import Version
from torch import Tensor

from ...tree import MAX_NODES
from .. import HALF
from ..ops import append_block, first_slots, is_paged
from .base import AttentionCall, Backend, Use, attention_op

MIN_VERSION = "0.6.1"
"""The first version whose XQA takes trees."""


def _with_lengths_on_host(call: AttentionCall) -> Tensor:
    """The call, which reads the lengths on the host. -> [B, N, H, Dv]."""
    q, k, v, key_cache, value_cache, lengths, ancestors, _, sinks, scale, softcap, window, *_ = call
    append_block(key_cache, value_cache, None, k, v, lengths, call.table)

    # One row of the batch after the other. A tree attends to the committed slots and to itself.
    rows, counts = [], lengths.tolist()
    key_cache, value_cache = (first_slots(x, max(counts) + q.shape[2], call.table) for x in (key_cache, value_cache))
    for row, length in enumerate(counts):
        queries, end = q[row].transpose(0, 1).contiguous(), length + q.shape[2]
        if ancestors is None:
            out, lse = part(queries, key_cache[row, :, :end], value_cache[row, :, :end], scale, softcap, window, True)
        else:
            out, lse = block(q[row], k[row], v[row], ancestors[row], scale, softcap)
            if length:
                prefix = key_cache[row, :, :length], value_cache[row, :, :length]
                out, lse = merge(*part(queries, *prefix, scale, softcap, None, False), out, lse)
        rows.append(out if sinks is None else add_sinks(out, lse, sinks))
    return torch.stack(rows).to(q.dtype)


attention_op("spec_compile::flashinfer_attention")(_with_lengths_on_host)


@attention_op("spec_compile::flashinfer_tree_attention")
def tree_attention(call: AttentionCall) -> Tensor:
    """The call, which reads the lengths on the host only for chunks of more than 64 tokens. -> [B, N, H, D]."""
    if call.q.shape[2] > MAX_NODES:
        return _with_lengths_on_host(call)
    append_block(call.key_cache, call.value_cache, None, call.k, call.v, call.lengths, call.table)
    caches = call.key_cache, call.value_cache, call.table if is_paged(call.table) else None
    return xqa_attention(call.q, *caches, call.lengths, call.ancestors, call.sinks, call.scale)


def part(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, window: int | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of q [N, H, D] to k, v [Hkv, S, D]; causal: the queries belong to the last N slots.

    -> out [N, H, D], natural log-sum-exp [N, H].
    """
    from flashinfer import single_prefill_with_kv_cache

    out, lse = single_prefill_with_kv_cache(
        q, k.transpose(0, 1), v.transpose(0, 1), causal=causal, sm_scale=scale, logits_soft_cap=softcap,
        window_left=-1 if window is None else window - 1, return_lse=True,
    )  # fmt: skip
    return out, lse * math.log(2)  # it gives logarithms of base 2


def block(
    q: Tensor, k: Tensor, v: Tensor, ancestors: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of a tree to itself: q [H, N, D], k, v [Hkv, N, D], ancestors [N] -> as `part`, in float32."""
    q, k, v = q.float(), *(x.float().repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    seen = (ancestors[:, None] >> torch.arange(q.shape[1], device=q.device)) & 1
    scores = scores.masked_fill(seen == 0, -math.inf)
    return (scores.softmax(2) @ v).transpose(0, 1), scores.logsumexp(2).transpose(0, 1)


def load(use: Use) -> Callable:
    try:
        installed = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"attention_backend: 'flashinfer' needs FlashInfer: pip install \"flashinfer-python>={MIN_VERSION}\""
        ) from None
    if Version(installed) < Version(MIN_VERSION):
        raise ImportError(
            f"attention_backend: 'flashinfer' needs FlashInfer {MIN_VERSION} or later, {installed} is installed: "
            f'pip install -U "flashinfer-python>={MIN_VERSION}"'
        )
    ops = torch.ops.spec_compile
    return (ops.flashinfer_tree_attention if use.captured else ops.flashinfer_attention).default


BACKEND = Backend(
    "flashinfer", load, frozenset({"cuda"}), frozenset(HALF), causal=frozenset({"window", "softcap", "sinks"}),
    trees=frozenset({"softcap", "sinks"}), captured=frozenset({"sinks"}), sizes=frozenset({64, 128, 256}),
)  # fmt: skip


# Attention to a union of keys, from the results and log-sum-exps of attention to its parts.


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two disjoint sets of keys (online softmax; Milakov & Gimelshein 2018, eq. 4):

        total = log(e^lse + e^other_lse)        result = e^(lse - total) * out + e^(other_lse - total) * other

    out, other: [..., D]; weighted means of values.
    lse, other_lse: [...]; natural log-sum-exps of scores; minus infinity where a set has no visible key, but not both.
    -> result [..., D] of out's dtype, total [...].
    """
    total = torch.logaddexp(lse, other_lse)
    shares = (lse - total).exp(), (other_lse - total).exp()
    return (out * shares[0][..., None] + other * shares[1][..., None]).to(out.dtype), total


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention with sinks (gpt-oss) from attention without: `merge` with a key of score sinks[h] and a value of zeros.

    out [..., H, D], lse [..., H], sinks [H] -> [..., H, D].
    """
    return (out * torch.sigmoid(lse - sinks.to(lse.dtype))[..., None]).to(out.dtype)


# FlashInfer's XQA kernels: attention of a token tree to a paged cache.
#
# They plan nothing on the host and read lengths on the device, so a CUDA graph can hold them. Our cache [B, Hkv, S, D]
# is read as pages [P, Hkv, size, D] that overlap: S = 256, Hkv = 2 and pages of 128 slots give row 0 the pages 0 and 1,
# and row 1 the pages 4 and 5, because a row has 2 * 256 slots.


PAGES = (128, 64, 32, 16)
"""Slots of a page that the kernels support, the largest first."""
SEMAPHORES, SCRATCH = 8 << 20, 128 << 20
"""Bytes of the two buffers that a launch works with."""


def xqa_attention(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, table: Tensor | None, lengths: Tensor, ancestors: Tensor | None,
    sinks: Tensor | None, scale: float,
) -> Tensor:  # fmt: skip
    """Attention of a block that is already in the caches, from slot lengths[b] on. -> [B, N, H, D]

    q [B, H, N, D], caches [P, Hkv, S, D] of which rows have the pages table [B, n] (None: row b is page b), lengths
    [B], ancestors [B, N] (None: a chain), N <= 64. The first call for a shape and an N compiles a kernel. Raises
    ValueError if no page size divides S.
    """
    from flashinfer.xqa import xqa

    (batch, heads, nodes, dim), (kv_heads, slots) = q.shape, key_cache.shape[1:3]
    size = page_size(slots)
    if table is None:
        table = _table(batch, kv_heads, slots, size, q.device)
        key_cache, value_cache = paged(key_cache, size), paged(value_cache, size)
    elif size != slots:
        raise ValueError(f"attention_backend: 'flashinfer' needs pages of one of {PAGES} slots, got {slots}")
    semaphores, scratch = _workspace(q.device)
    q = q.transpose(1, 2)[:, None].contiguous()
    out = torch.empty_like(q)
    tree = {} if nodes == 1 else {"q_seq_len": nodes, "mask": packed(ancestors, batch, nodes, q.device)}
    xqa(
        q if nodes > 1 else q[:, :, 0], key_cache, value_cache, table,
        (lengths + nodes).int().view(torch.uint32)[:, None],
        out if nodes > 1 else out[:, :, 0], scratch, semaphores, kv_heads, size,
        sinks=None if sinks is None else sinks.float().view(kv_heads, heads // kv_heads),
        q_scale=scale * math.sqrt(dim),  # the kernels divide by the square root
        kv_layout="HND", **tree,
    )  # fmt: skip
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
