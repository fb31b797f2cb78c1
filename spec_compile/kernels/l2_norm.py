"""L2 norms of the queries and keys of the delta rule, in one small kernel.

    q_out = scale * q / sqrt(sum(q^2) + eps)        k_out = k / sqrt(sum(k^2) + eps)

Import this module only where Triton is installed. A program has one head of one token, so a row has the same bits
whatever other rows there are. Like that of `gated_norm`, the kernel is compiled for no strides and alignments.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .ops import as_groups
from .plain import on_gpu


@torch.library.custom_op("spec_compile::l2_norms", mutates_args=(), device_types="cpu")
def l2_norms(q: Tensor, k: Tensor, eps: float, scale: float) -> tuple[Tensor, Tensor]:
    """The L2 norms of q and k [..., H, D], q times `scale` -> both float32.

    Source: flash-linear-attention's ``use_qk_l2norm_in_kernel`` (Gated DeltaNet, Kimi Delta Attention). ValueError for
    q and k of different shapes.
    """
    _check(q, k)
    q, k = ((x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)).contiguous() for x in (q.float(), k.float()))
    return q * scale, k


@l2_norms.register_fake
def _(q, k, eps, scale):
    return q.new_empty(q.shape, dtype=torch.float32), k.new_empty(k.shape, dtype=torch.float32)


def _check(q: Tensor, k: Tensor) -> None:
    if q.shape != k.shape:
        raise ValueError(f"k: expected {list(q.shape)}, as q has, got {list(k.shape)}")


@on_gpu(l2_norms)
def launch(q, k, eps, scale) -> tuple[Tensor, Tensor]:
    """`l2_norms` by the kernel."""
    _check(q, k)
    size = q.shape[-1]
    outs = [x.new_empty(x.shape, dtype=torch.float32) for x in (q, k)]
    q, k = as_groups(q, size), as_groups(k, size)
    block = triton.next_power_of_2(size)
    if q.numel():
        l2_norms_kernel[(q.shape[0] * q.shape[1],)](
            q, k, *outs, *q.stride()[:2], *k.stride()[:2], q.shape[1], size, eps, scale,
            BLOCK=block, num_warps=max(block // 512, 1),
        )  # fmt: skip
    return tuple(outs)


@triton.jit
def _normed(x, row, head, stride, stride_h, size, eps, BLOCK: tl.constexpr):
    """The normed head x[row, head], [BLOCK]."""
    column = tl.arange(0, BLOCK)
    value = tl.load(x + row * stride + head * stride_h + column, mask=column < size, other=0.0).to(tl.float32)
    return value * tl.rsqrt(tl.sum(value * value) + eps)


@triton.jit(
    do_not_specialize=["stride_q", "stride_qh", "stride_k", "stride_kh", "heads"],
    do_not_specialize_on_alignment=["q", "k", "q_out", "k_out"],
)
def l2_norms_kernel(
    q, k,  # [rows, heads, size] by their strides
    q_out, k_out,  # [rows * heads, size] float32, written
    stride_q, stride_qh, stride_k, stride_kh, heads, size, eps, scale, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one row a program. Grid (rows * heads)."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * size + column
    value = _normed(q, row, head, stride_q, stride_qh, size, eps, BLOCK) * scale
    tl.store(q_out + at, value, mask=column < size)
    tl.store(k_out + at, _normed(k, row, head, stride_k, stride_kh, size, eps, BLOCK), mask=column < size)
