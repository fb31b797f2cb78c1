"""Norms of rows, each in one small kernel: RMSNorm, also with a sum before it or a gate, and the delta rule's L2 norms.

Import this module only where Triton is installed. A program takes a row and is done in a few microseconds, in which
the memory would idle: so the kernel is launched early and lets the next begin at once (see `launching`), which is
mostly a matrix product that then fetches its first weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .card import launches_early
from .launching import on_gpu, op_with_kernel
from .ops import as_groups, as_rows


@op_with_kernel("rms_norm", lambda x, weight, eps, offset: x.new_empty(x.shape))
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float | None) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019, eq. 4) of x [..., C] with weight [C] of x's dtype -> [..., C].

    Computed in float32. The normed row is rounded to x's dtype before it is multiplied by the weight (Llama, Qwen), or
    with an offset multiplied by ``weight + offset`` before it is rounded (Gemma: 1, OLMo2: 0). ValueError for a weight
    of another size or dtype.
    """
    _check_norm(x, weight)
    wide = x.float().contiguous()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset is None:
        return weight * wide.to(x.dtype)
    return (wide * (weight.float() + offset)).to(x.dtype)


@op_with_kernel("add_rms_norm", lambda x, residual, weight, eps, offset: (x.new_empty(x.shape), x.new_empty(x.shape)))
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float | None
) -> tuple[Tensor, Tensor]:
    """-> ``x + residual``, rounded to their dtype, and its `rms_norm`; x, residual [..., C] of one shape and dtype."""
    _check_norm(x, weight, residual)
    total = (x + residual).contiguous()
    return total, rms_norm(total, weight, eps, offset)


def _check_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(
            f"weight: expected {x.dtype} [{x.shape[-1]}], as x has, got {weight.dtype} {list(weight.shape)}"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual: expected {x.dtype} {list(x.shape)}, as x is, got {residual.dtype} {list(residual.shape)}"
        )


@on_gpu(add_rms_norm)
def launch_norm(x, residual, weight, eps, offset) -> tuple[Tensor | None, Tensor]:
    """`add_rms_norm` by the kernel, or without a residual `rms_norm`, whose first result is None."""
    _check_norm(x, weight, residual)
    size = x.shape[-1]
    out = x.new_empty(x.shape)
    total = None if residual is None else torch.empty_like(out)
    by_head = x.dim() > 3
    x = as_groups(x, size) if by_head else as_rows(x)[:, None]
    residual = residual if residual is None else as_rows(residual)
    if not out.numel():
        return total, out
    block = triton.next_power_of_2(size)
    early = launches_early(x.device)
    kernel = _rms_norm_of_heads if by_head else _add_rms_norm
    kernel[(out.numel() // size,)](
        x, residual, weight.contiguous(), total, out, *x.stride()[:2], x.shape[1],
        0 if residual is None else residual.stride(0), size, eps, 0.0 if offset is None else offset,
        ROUND_FIRST=offset is None, BLOCK=block, EARLY=early, launch_pdl=early,
        num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return total, out


on_gpu(rms_norm)(lambda x, weight, eps, offset: launch_norm(x, None, weight, eps, offset)[1])


@triton.jit
def _add_rms_norm(
    x, residual,  # [rows / heads, heads, size] and [rows, size] by their strides, or None
    weight, total, out,  # [size]; [rows, size] each, written
    stride_x, stride_h, heads, stride_r, size, eps, offset,
    ROUND_FIRST: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """total = x + residual, or x without a residual; out = norm(total) * weight. One row a program, grid (rows)."""
    # The weight is read before the kernel that computes x is done.
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()

    # The row, with the residual added and rounded.
    x += (row // heads) * stride_x + (row % heads) * stride_h
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * stride_r + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(out.dtype.element_ty)
        tl.store(total + row * size + column, rounded, mask=inside)
        value = rounded.to(tl.float32)

    # Its norm.
    value *= tl.rsqrt(tl.sum(value * value) / size + eps)
    if ROUND_FIRST:
        value = value.to(out.dtype.element_ty).to(tl.float32) * scale
    else:
        value *= scale + offset
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), mask=inside)


_rms_norm_of_heads = triton.jit(
    _add_rms_norm.fn, do_not_specialize=["stride_x", "stride_h", "heads"], do_not_specialize_on_alignment=["x"]
)
"""Heads of a single token may lie at another address than heads of many: in a copy, or where a product has put them.
So this kernel knows nothing of strides and alignment, for which Triton would choose another order of a sum."""


# RMSNorm of groups of entries, with the gate before or after it, in one small kernel.
#
# A program takes a group of a row, so that other rows do not change a row's bits. The kernel knows nothing of strides
# and alignment: Triton would otherwise choose another layout, and so another order of a sum, for rows that lie
# elsewhere.


ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}


@op_with_kernel("gated_rms_norm", lambda x, gate, weight, *_: x.new_empty(x.shape, dtype=weight.dtype))
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, size: int, activation: str, gate_first: bool, round_first: bool
) -> Tensor:
    """RMSNorm of each `size` entries of x [..., C], times the activation of the gate -> [..., C] of the weight's dtype.

    gate: as many entries as x, in the same order, of any shape whose last dimension is a multiple of `size`. weight
    [C]. activation: a key of `ACTIVATIONS`. gate_first: the gate comes before the norm (Mamba-2), otherwise after it
    (Gated DeltaNet). round_first: the norm is rounded before it is multiplied by the weight, and the product, too.
    Computed in float32. ValueError for a weight of another size.
    """
    _check_gated_norm(x, weight, size)
    opened = ACTIVATIONS[activation](gate.float()).reshape(x.shape)
    wide = x.float() * opened if gate_first else x.float()
    groups = wide.unflatten(-1, (-1, size))
    normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    normed = weight * normed.to(weight.dtype) if round_first else weight.float() * normed
    return (normed if gate_first else normed * opened).to(weight.dtype).contiguous()


def _check_gated_norm(x: Tensor, weight: Tensor, size: int) -> None:
    if weight.shape != x.shape[-1:] or x.shape[-1] % size:
        raise ValueError(f"weight: expected [{x.shape[-1]}], as x has, in groups of {size}, got {list(weight.shape)}")


@on_gpu(gated_rms_norm)
def launch_gated_norm(x, gate, weight, eps, size, activation, gate_first, round_first) -> Tensor:
    """`gated_rms_norm` by the kernel."""
    _check_gated_norm(x, weight, size)
    out = x.new_empty(x.shape, dtype=weight.dtype)
    x, gate = (as_groups(tensor, size) for tensor in (x, gate))
    block, early = triton.next_power_of_2(size), launches_early(x.device)
    if out.numel():
        gated_rms_norm_kernel[(out.numel() // size,)](
            x, gate, weight.contiguous(), out, *x.stride()[:2], x.shape[1], *gate.stride()[:2], gate.shape[1],
            size, len(weight) // size, eps, SIGMOID=activation == "sigmoid", GATE_FIRST=gate_first,
            ROUND_FIRST=round_first, BLOCK=block, EARLY=early, launch_pdl=early,
            num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return out


STRIDES = ["stride_x", "stride_xg", "groups_x", "stride_g", "stride_gg", "groups_g"]


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=["x", "gate", "weight", "out"])
def gated_rms_norm_kernel(
    x, gate,  # [rows, groups, size] each, by their strides
    weight, out,  # [groups_w, size]; [programs, size], written
    stride_x, stride_xg, groups_x, stride_g, stride_gg, groups_g, size, groups_w, eps,
    SIGMOID: tl.constexpr, GATE_FIRST: tl.constexpr, ROUND_FIRST: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out = norm(x) * weight * open(gate), or norm(x * open(gate)) * weight. One group of a row a program."""
    if EARLY:
        gdc_launch_dependents()
    # The weight is read before the kernel that computes x is done.
    group = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    scale = tl.load(weight + (group % groups_w) * size + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()

    # The group and its gate.
    x += (group // groups_x) * stride_x + (group % groups_x) * stride_xg
    gate += (group // groups_g) * stride_g + (group % groups_g) * stride_gg
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + column, mask=inside, other=0.0).to(tl.float32)
    if SIGMOID:
        opened = 1.0 / (1.0 + tl.exp(-opened))
    else:
        opened = opened / (1.0 + tl.exp(-opened))

    # The norm, with the gate before or after it.
    if GATE_FIRST:
        value *= opened
    value *= tl.rsqrt(tl.sum(value * value) / size + eps)
    if ROUND_FIRST:
        value = (value.to(out.dtype.element_ty).to(tl.float32) * scale).to(out.dtype.element_ty).to(tl.float32)
    else:
        value *= scale
    if not GATE_FIRST:
        value *= opened
    tl.store(out + group * size + column, value.to(out.dtype.element_ty), mask=inside)


# L2 norms of the queries and keys of the delta rule, in one small kernel.
#
#     q_out = scale * q / sqrt(sum(q^2) + eps)        k_out = k / sqrt(sum(k^2) + eps)
#
# A program has one head of one token, so a row has the same bits whatever other rows there are. Like the gated norm's,
# the kernel is compiled for no strides and alignments.


@op_with_kernel("l2_norms", lambda q, k, eps, scale: tuple(x.new_empty(x.shape, dtype=torch.float32) for x in (q, k)))
def l2_norms(q: Tensor, k: Tensor, eps: float, scale: float) -> tuple[Tensor, Tensor]:
    """The L2 norms of q and k [..., H, D], q times `scale` -> both float32.

    Source: flash-linear-attention's ``use_qk_l2norm_in_kernel`` (Gated DeltaNet, Kimi Delta Attention). ValueError for
    q and k of different shapes.
    """
    _check_l2_norm(q, k)
    q, k = ((x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)).contiguous() for x in (q.float(), k.float()))
    return q * scale, k


def _check_l2_norm(q: Tensor, k: Tensor) -> None:
    if q.shape != k.shape:
        raise ValueError(f"k: expected {list(q.shape)}, as q has, got {list(k.shape)}")


@on_gpu(l2_norms)
def launch_l2_norm(q, k, eps, scale) -> tuple[Tensor, Tensor]:
    """`l2_norms` by the kernel."""
    _check_l2_norm(q, k)
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
    # Queries are scaled after their norm, keys are not.
    row, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * size + column
    value = _normed(q, row, head, stride_q, stride_qh, size, eps, BLOCK) * scale
    tl.store(q_out + at, value, mask=column < size)
    tl.store(k_out + at, _normed(k, row, head, stride_k, stride_kh, size, eps, BLOCK), mask=column < size)
