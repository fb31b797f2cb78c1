"""Attention of few queries under any mask, which reads each key-value head once: the op of the backend "spec".

    out = softmax(scale * q k^T + mask) v

A static cache is mostly empty, and only its mask says so. The kernel reads the mask first, and keys and values only of
blocks of slots that some query sees.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..card import precision
from ..launching import new_op
from ..ops import empty_heads

try:
    import triton

    from .block_kernels import attend_kernel, merge_kernel
    from .partial_softmax import key_columns
except ImportError:
    triton = None

MOST_ROWS = 64
"""Queries of one KV head (tokens times heads of its group) that the kernel takes."""
SHARE, BLOCK = 128, 64
"""Slots of a program at least, and slots that it reads at a time."""
MOST_PARTS = 64
LARGEST_HEAD = 256


@new_op("grouped_attention", lambda q, k, v, mask, scale: empty_heads(q, v).transpose(1, 2))
def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """``F.scaled_dot_product_attention`` over key-value heads that nobody has repeated.

    q [B, H, N, Dk], k [B, Hkv, S, Dk], v [B, Hkv, S, Dv]; heads h * H / Hkv .. of q belong to head h of k.
    mask: [1 or B, 1 or H, 1 or N, S]; True where a query sees a slot, or a number that is added to the scores.
    scale: None for Dk ** -0.5. -> [B, H, N, Dv]; zeros for a query that sees nothing.
    """
    if _has_kernel(q, k, v, mask):
        return launch(q, k, v, mask, q.shape[-1] ** -0.5 if scale is None else scale)
    return empty_heads(q, v).copy_(plain(q, k, v, mask, scale).transpose(1, 2)).transpose(1, 2)


GROUPED = torch.ops.spec_compile.grouped_attention.default


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """The op in plain PyTorch, which Inductor can see through: the query heads of one KV head are rows of one
    attention."""
    nodes, kv_heads = q.shape[2], k.shape[1]
    stacked = q.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    if mask is not None and mask.shape[1:3] != (1, 1):
        mask = mask.expand(-1, q.shape[1], nodes, -1).unflatten(1, (kv_heads, -1)).flatten(2, 3)
    out = F.scaled_dot_product_attention(stacked, k, v, attn_mask=mask, scale=scale)
    return out.unflatten(2, (-1, nodes)).flatten(1, 2)


def _has_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """True if the kernel takes these tensors."""
    if triton is None or not q.is_cuda or max(q.shape[3], v.shape[3]) > LARGEST_HEAD or not k.shape[2]:
        return False
    if mask is not None and (mask.dtype != torch.bool or mask.shape[1] != 1):
        return False
    return q.shape[1] // k.shape[1] * q.shape[2] <= MOST_ROWS and k.stride(3) == v.stride(3) == 1


def launch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The op by the kernels, for a mask [1 or B, 1, 1 or N, S] of bools."""
    batch, heads, nodes, size = q.shape
    kv_heads, slots, value_size = k.shape[1], k.shape[2], v.shape[3]
    rows = heads // kv_heads * nodes
    q = q if q.stride(3) == 1 else q.contiguous()
    if mask is not None:
        mask = mask.expand(batch, 1, nodes, slots)

    # The parts into which the slots are cut, each of `share` slots.
    parts = min(triton.cdiv(slots, SHARE), MOST_PARTS)
    share = triton.cdiv(triton.cdiv(slots, parts), BLOCK) * BLOCK
    parts = triton.cdiv(slots, share)

    # Attend to all parts, then merge them.
    sums = q.new_empty(batch * kv_heads, parts, rows, value_size, dtype=torch.float32)
    peaks = q.new_empty(batch * kv_heads, parts, 2, rows, dtype=torch.float32)
    out = empty_heads(q, v)
    columns = triton.next_power_of_2(value_size)
    attend_kernel[(parts, batch * kv_heads)](
        q, k, v, mask, sums, peaks, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
        *((0, 0, 0) if mask is None else (mask.stride(0), mask.stride(2), mask.stride(3))),
        nodes, slots, share, rows, scale, KV_HEADS=kv_heads, DK=size, BLOCK_DK=key_columns(size),
        DV=value_size, BLOCK_DV=columns, BLOCK_M=max(triton.next_power_of_2(rows), 16), BLOCK_N=BLOCK,
        PRECISION=precision(q.dtype, q.device), num_warps=4,
        num_stages=2 if q.element_size() < 4 else 1,
    )  # fmt: skip
    merge_kernel[(rows, batch * kv_heads)](
        sums, peaks, out, nodes, parts, KV_HEADS=kv_heads, GROUP=heads // kv_heads, DV=value_size, BLOCK_DV=columns,
        num_warps=1,
    )  # fmt: skip
    return out.transpose(1, 2)
