"""RMSNorm of groups of entries, with the gate before or after it, in one small kernel.

Import this module only where Triton is installed. A program takes a group of a row, so that other rows do not change a
row's bits. The kernel knows nothing of strides and alignment: Triton would otherwise choose another layout, and so
another order of a sum, for rows that lie elsewhere.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from . import dependent_launch
from .ops import as_groups
from .plain import on_gpu

ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}


@torch.library.custom_op("spec_compile::gated_rms_norm", mutates_args=(), device_types="cpu")
def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, size: int, activation: str, gate_first: bool, round_first: bool
) -> Tensor:
    """RMSNorm of each `size` entries of x [..., C], times the activation of the gate -> [..., C] of the weight's dtype.

    gate: as many entries as x, in the same order, of any shape whose last dimension is a multiple of `size`. weight
    [C]. activation: a key of `ACTIVATIONS`. gate_first: the gate comes before the norm (Mamba-2), otherwise after it
    (Gated DeltaNet). round_first: the norm is rounded before it is multiplied by the weight, and the product, too.
    Computed in float32. ValueError for a weight of another size.
    """
    _check(x, weight, size)
    opened = ACTIVATIONS[activation](gate.float()).reshape(x.shape)
    wide = x.float() * opened if gate_first else x.float()
    groups = wide.unflatten(-1, (-1, size))
    normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    normed = weight * normed.to(weight.dtype) if round_first else weight.float() * normed
    return (normed if gate_first else normed * opened).to(weight.dtype).contiguous()


@gated_rms_norm.register_fake
def _(x, gate, weight, eps, size, activation, gate_first, round_first):
    return x.new_empty(x.shape, dtype=weight.dtype)


def _check(x: Tensor, weight: Tensor, size: int) -> None:
    if weight.shape != x.shape[-1:] or x.shape[-1] % size:
        raise ValueError(f"weight: expected [{x.shape[-1]}], as x has, in groups of {size}, got {list(weight.shape)}")


@on_gpu(gated_rms_norm)
def launch(x, gate, weight, eps, size, activation, gate_first, round_first) -> Tensor:
    """`gated_rms_norm` by the kernel."""
    _check(x, weight, size)
    out = x.new_empty(x.shape, dtype=weight.dtype)
    x, gate = (as_groups(tensor, size) for tensor in (x, gate))
    block, early = triton.next_power_of_2(size), dependent_launch.available(x)
    if out.numel():
        gated_rms_norm_kernel[(out.numel() // size,)](
            x, gate, weight.contiguous(), out, *x.stride()[:2], x.shape[1], *gate.stride()[:2], gate.shape[1],
            size, len(weight) // size, eps, SIGMOID=activation == "sigmoid", GATE_FIRST=gate_first,
            ROUND_FIRST=round_first, BLOCK=block, EARLY=early, num_warps=min(max(block // 512, 1), 16),
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out


STRIDES = ["stride_x", "stride_xg", "groups_x", "stride_g", "stride_gg", "groups_g"]


@triton.jit(do_not_specialize=STRIDES, do_not_specialize_on_alignment=["x", "gate", "weight", "out"])
def gated_rms_norm_kernel(
    x, gate, weight, out, stride_x, stride_xg, groups_x, stride_g, stride_gg, groups_g, size, groups_w, eps,
    SIGMOID: tl.constexpr, GATE_FIRST: tl.constexpr, ROUND_FIRST: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out [programs, size]: one group of a row a program. x, gate [rows, groups, size], weight [groups_w, size]."""
    if EARLY:
        gdc_launch_dependents()
    group = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    scale = tl.load(weight + (group % groups_w) * size + column, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
    x += (group // groups_x) * stride_x + (group % groups_x) * stride_xg
    gate += (group // groups_g) * stride_g + (group % groups_g) * stride_gg
    value = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + column, mask=inside, other=0.0).to(tl.float32)
    if SIGMOID:
        opened = 1.0 / (1.0 + tl.exp(-opened))
    else:
        opened = opened / (1.0 + tl.exp(-opened))
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
