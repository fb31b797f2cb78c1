"""RMSNorm of rows, with the addition of the residual stream before it, in one small kernel.

Import this module only where Triton is installed. A program takes a row and is done in a few microseconds, in which
the memory would idle: so the kernel is launched early and lets the next begin at once (see `dependent_launch`), which
is mostly a matrix product that then fetches its first weights.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import dependent_launch
from .ops import as_groups, as_rows
from .plain import on_gpu


@torch.library.custom_op("spec_compile::rms_norm", mutates_args=(), device_types="cpu")
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float | None) -> Tensor:
    """RMSNorm (Zhang and Sennrich 2019, eq. 4) of x [..., C] with weight [C] of x's dtype -> [..., C].

    Computed in float32. The normed row is rounded to x's dtype before it is multiplied by the weight (Llama, Qwen), or
    with an offset multiplied by ``weight + offset`` before it is rounded (Gemma: 1, OLMo2: 0). ValueError for a weight
    of another size or dtype.
    """
    _check(x, weight)
    wide = x.float().contiguous()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset is None:
        return weight * wide.to(x.dtype)
    return (wide * (weight.float() + offset)).to(x.dtype)


@torch.library.custom_op("spec_compile::add_rms_norm", mutates_args=(), device_types="cpu")
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float | None
) -> tuple[Tensor, Tensor]:
    """-> ``x + residual``, rounded to their dtype, and its `rms_norm`; x, residual [..., C] of one shape and dtype."""
    _check(x, weight, residual)
    total = (x + residual).contiguous()
    return total, rms_norm(total, weight, eps, offset)


@rms_norm.register_fake
def _(x, weight, eps, offset):
    return x.new_empty(x.shape)


@add_rms_norm.register_fake
def _(x, residual, weight, eps, offset):
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _check(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(
            f"weight: expected {x.dtype} [{x.shape[-1]}], as x has, got {weight.dtype} {list(weight.shape)}"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual: expected {x.dtype} {list(x.shape)}, as x is, got {residual.dtype} {list(residual.shape)}"
        )


@on_gpu(rms_norm)
def _rms_norm(x, weight, eps, offset) -> Tensor:
    return launch(x, None, weight, eps, offset)[1]


@on_gpu(add_rms_norm)
def launch(x, residual, weight, eps, offset) -> tuple[Tensor | None, Tensor]:
    """`add_rms_norm` by the kernel, or without a residual `rms_norm`, whose first result is None."""
    _check(x, weight, residual)
    size = x.shape[-1]
    out = x.new_empty(x.shape)
    total = None if residual is None else torch.empty_like(out)
    by_head = x.dim() > 3
    x = as_groups(x, size) if by_head else as_rows(x)[:, None]
    residual = residual if residual is None else as_rows(residual)
    if not out.numel():
        return total, out
    block = triton.next_power_of_2(size)
    early = dependent_launch.available(x)
    kernel = _rms_norm_of_heads if by_head else _add_rms_norm
    kernel[(out.numel() // size,)](
        x, residual, weight.contiguous(), total, out, *x.stride()[:2], x.shape[1],
        0 if residual is None else residual.stride(0), size, eps, 0.0 if offset is None else offset,
        ROUND_FIRST=offset is None, BLOCK=block, EARLY=early, num_warps=min(max(block // 512, 1), 16),
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return total, out


@triton.jit
def _add_rms_norm(
    x, residual, weight, total, out, stride_x, stride_h, heads, stride_r, size, eps, offset,
    ROUND_FIRST: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    x += (row // heads) * stride_x + (row % heads) * stride_h
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + row * stride_r + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(out.dtype.element_ty)
        tl.store(total + row * size + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value) / size + eps)
    if ROUND_FIRST:
        value = value.to(out.dtype.element_ty).to(tl.float32) * scale
    else:
        value *= scale + offset
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), mask=inside)


_rms_norm_of_heads = triton.jit(
    _add_rms_norm.fn, do_not_specialize=["stride_x", "stride_h", "heads"], do_not_specialize_on_alignment=["x"]
)
"""Heads of a single token may lie at another address than those of many: in a copy, or where a product has put them. So
this kernel knows nothing of strides and alignment, for which Triton would choose another order of a sum."""
