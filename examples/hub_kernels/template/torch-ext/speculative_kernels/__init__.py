"""Two kernels of speculative decoding: attention over token trees, and linear layers of few rows.

On a GPU both are Triton kernels; elsewhere they run their plain-PyTorch meaning. Neither has a gradient.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ._ops import add_op_namespace_prefix, ops
from .kernels.attention.base import AttentionCall, plain_attention
from .kernels.linear.product import Product
from .kernels.linear.skinny_gemm import plan_of, run
from .tree import MAX_NODES

__all__ = ["few_rows_linear", "tree_attention"]


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, ancestors: Tensor | None, lengths: Tensor, key_cache: Tensor, value_cache: Tensor,
    *, table: Tensor | None = None, scale: float | None = None, softcap: float | None = None,
    window: int | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Append a tree's keys and values to the cache, and attend from its nodes to the cache and to their ancestors.

    A tree with parents [-1, 0, 0, 1] has ancestors [0b0001, 0b0011, 0b0101, 0b1011]: bit j of node i is set if j is i
    or above i. With lengths [300] its keys go to the slots 300 .. 303, and node 3 sees the slots 0 .. 299 and, for
    nodes 0, 1 and 3, the slots 300, 301 and 303.

    Shapes: B rows, N nodes, H query heads, Hkv heads of keys and values, S slots of a page of the cache.

    q: [B, H, N, Dk]; rotated queries. float32, bfloat16 or float16; k and v have the same dtype.
    k: [B, Hkv, N, Dk]; rotated keys.
    v: [B, Hkv, N, Dv]; values.
    ancestors: [B, N] int64, N <= 64, parents before children. None: a causal chain of any N, such as a prompt.
    lengths: [B] int64; the filled slots of each row, which all nodes see. With N they must fit into a row.
    key_cache, value_cache: [P, Hkv, S, Dk] and [P, Hkv, S, Dv], contiguous, of q's dtype or float8_e4m3fn; written.
        Their numbers must be finite.
    table: [B, n] int32, n > 1; slot s of row b is slot s % S of page table[b, s // S]. S is then a multiple of 64, and
        page 0 is scratch: it belongs to no row. None: row b is page b, and P = B.
    scale: positive factor of the scores; None: Dk ** -0.5.
    softcap: c in c * tanh(score / c), as in Gemma 2.
    window: how many positions a node sees, its own included. A node's position is its row's length plus its depth.
    sinks: [H]; a logit of each head that takes probability and gives no value, as in gpt-oss.

    -> [B, N, H, Dv] of q's dtype. Raises ValueError for shapes that do not fit.
    """
    (batch, heads, nodes, _), (_, kv_heads, slots, _) = _shape(q, "q", 4), _shape(key_cache, "key_cache", 4)
    for name, x, size, cache in (("k", k, q.shape[3], key_cache), ("v", v, v.shape[-1], value_cache)):
        if _shape(x, name, 4) != (batch, kv_heads, nodes, size) or x.dtype != q.dtype:
            raise ValueError(f"{name}: expected {q.dtype} {[batch, kv_heads, nodes, size]}, got {x.dtype} {[*x.shape]}")
        if cache.shape != (len(key_cache), kv_heads, slots, size) or not cache.is_contiguous():
            pages = f"[P, {kv_heads}, {slots}, {size}]"
            raise ValueError(f"the cache of {name}: expected contiguous {pages}, got {[*cache.shape]}")
    if heads % kv_heads:
        raise ValueError(f"q: expected a multiple of the cache's {kv_heads} heads, got {heads}")
    if lengths.shape != (batch,) or lengths.dtype != torch.int64:
        raise ValueError(f"lengths: expected int64 [{batch}], got {lengths.dtype} {[*lengths.shape]}")
    if scale is not None and scale <= 0:
        raise ValueError(f"scale: expected a positive number, got {scale}")
    if table is None and len(key_cache) != batch:
        raise ValueError(f"key_cache: expected a page for each of {batch} rows, got {len(key_cache)} and no table")
    if table is not None and (table.dtype != torch.int32 or _shape(table, "table", 2)[1] < 2 or slots % 64):
        found = f"{table.dtype} {[*table.shape]} with {slots}"
        raise ValueError(f"table: expected int32 [{batch}, n], n > 1, and pages of a multiple of 64 slots, got {found}")
    if ancestors is None:
        depth = torch.arange(nodes, device=q.device).expand(batch, -1)
    elif ancestors.shape != (batch, nodes) or ancestors.dtype != torch.int64 or nodes > MAX_NODES:
        shape = f"int64 [{batch}, {nodes}] of at most {MAX_NODES} nodes"
        raise ValueError(f"ancestors: expected {shape}, got {ancestors.dtype} {[*ancestors.shape]}")
    else:
        depth = ((ancestors[:, :, None] >> torch.arange(nodes, device=q.device)) & 1).sum(2) - 1
    scale = q.shape[3] ** -0.5 if scale is None else float(scale)
    options = lengths[:, None] + depth, sinks, scale, softcap, window, table
    return ops.tree_attention(q, k, v, key_cache, value_cache, lengths, ancestors, *options)


def few_rows_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``F.linear(x, weight)`` of few rows, such as a tree's 1 to 64 nodes, by a kernel that reads the weight once.

    x: [..., I]. weight: [O, I], contiguous, of x's dtype. -> [..., O], summed in float32, rounded once to x's dtype.

    The kernel takes bfloat16 and float16 on a GPU of compute capability 8.0 or later, with I a multiple of 16; all else
    is ``F.linear``. A row has the same bits whatever the number of rows. Raises ValueError for shapes that do not fit.
    """
    if _shape(weight, "weight", 2)[1] != x.shape[-1]:
        raise ValueError(f"weight: expected [O, {x.shape[-1]}], got {[*weight.shape]}")
    return ops.few_rows_linear(x, weight)


def _shape(x: Tensor, name: str, dimensions: int) -> torch.Size:
    if x.dim() != dimensions:
        raise ValueError(f"{name}: expected {dimensions} dimensions, got {[*x.shape]}")
    return x.shape


@torch.library.custom_op(add_op_namespace_prefix("tree_attention"), mutates_args=("key_cache", "value_cache"))
def _attend(
    q: Tensor, k: Tensor, v: Tensor, key_cache: Tensor, value_cache: Tensor, lengths: Tensor,
    ancestors: Tensor | None, positions: Tensor, sinks: Tensor | None, scale: float, softcap: float | None,
    window: int | None, table: Tensor | None,
) -> Tensor:  # fmt: skip
    arguments = q, k, v, key_cache, value_cache, lengths, ancestors, positions, sinks, scale, softcap, window
    call = AttentionCall(*arguments, table=table)
    if q.is_cuda:
        from .kernels.attention.tree_attention import launch  # needs Triton

        return launch(call)
    return plain_attention(call, int(lengths.max()) + q.shape[2]).contiguous()


@_attend.register_fake
def _(q, k, v, key_cache, *_):
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


@torch.library.custom_op(add_op_namespace_prefix("few_rows_linear"), mutates_args=())
def _multiply(x: Tensor, weight: Tensor) -> Tensor:
    plan = plan_of(x, weight)
    return F.linear(x, weight) if plan is None else run(Product(x, weight), plan)


@_multiply.register_fake
def _(x, weight):
    return x.new_empty(*x.shape[:-1], weight.shape[0])
