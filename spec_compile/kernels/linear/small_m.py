"""Form "small_m": products of at most 64 rows of 16 bits on a Hopper GPU, which read the weights once.

Its kernels begin while the kernel before them still runs (see `dependent_launch`), and read weights before they wait
for it. So **no kernel of a layer may write weights**.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import HALF
from ..counters import zero_counters
from .plans import Plan, ceil_div, plan

try:
    import triton

    from .small_m_kernel import small_m_kernel
except ImportError:  # no GPU
    triton = None

DEPENDENT_LAUNCH = True
"""Let the ops use programmatic dependent launch."""


@torch.library.custom_op("spec_compile::small_m_matmul", mutates_args=())
def small_m_matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear``: x [..., I], weight [O, I], bias [O] or None -> [..., O], fp32 accumulation, x's dtype.

    The kernel takes bf16 and fp16, up to 64 rows, on Hopper, where `plan` has one; else it is ``F.linear``.
    """
    how = _plan(x, weight)
    if how is None:
        return F.linear(x, weight, bias)
    return _run(x, weight, bias if bias is None else bias.contiguous(), how, False)


@small_m_matmul.register_fake
def _(x, weight, bias):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("spec_compile::small_m_swiglu", mutates_args=())
def small_m_swiglu(x: Tensor, weight: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``gate, up = F.linear(x, weight).chunk(2, -1)``.

    x [..., I], weight [O, I] -> [..., O / 2]. The kernel rounds once, at the end.
    """
    how = _plan(x, weight)
    if how is None or weight.shape[0] % 2:
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.silu(gate) * up
    return _run(x, weight, None, how, True)


@small_m_swiglu.register_fake
def _(x, weight):
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


@functools.cache
def _processors(device: torch.device) -> int:
    """Multiprocessors of a Hopper GPU; 0 for any other, for which there are no plans."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major == 9 else 0


def _plan(x: Tensor, weight: Tensor) -> Plan | None:
    """The plan where the kernel can run and is worth it."""
    if triton is None or not x.is_cuda or x.dtype not in HALF or x.numel() == 0:
        return None
    if weight.dtype != x.dtype or not weight.is_contiguous() or weight.data_ptr() % 16:
        return None
    processors = _processors(x.device)
    return plan(x.numel() // x.shape[-1], *weight.shape, processors) if processors else None


def _run(x: Tensor, weight: Tensor, bias: Tensor | None, how: Plan, gated: bool) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = x.new_empty(flat.shape[0], weight.shape[0] // 2 if gated else weight.shape[0])
    launch(flat, weight, bias, out, how._replace(pdl=DEPENDENT_LAUNCH), gated)
    return out.view(*x.shape[:-1], out.shape[1])


def launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, plan: Plan, gated: bool = False) -> None:
    """Run the kernel: x [N, I] of any row stride, weight [O, I] and bias [O] contiguous, out [N, O] contiguous.

    Gated: the first half of the weights' rows is a gate, the second half what it gates; out [N, O / 2].
    """
    rows, (outputs, inputs) = x.shape[0], weight.shape
    block_n = triton.next_power_of_2(rows)
    if plan.dot:
        block_n = max(16, block_n)
    steps = ceil_div(inputs, plan.block_k)
    height = ceil_div(outputs, plan.block_o)
    programs = min(plan.programs, steps * height)
    share, more = divmod(steps * height, programs)
    parts = shared_by(steps, steps * height, programs)
    tile = plan.block_o * block_n
    partial = arrived = None
    if parts > 1:
        partial = torch.empty(2 * programs * tile, dtype=torch.float32, device=x.device)
        arrived = zero_counters(x.device, height)
    small_m_kernel[(programs,)](
        x,
        weight,
        bias,
        out,
        partial,
        arrived,
        rows,
        outputs,
        inputs,
        x.stride(0),
        share,
        more,
        plan.late,
        plan.prefetch,
        BLOCK_N=block_n,
        BLOCK_O=plan.block_o,
        BLOCK_K=plan.block_k,
        PARTS=parts,
        GROUP=min(parts, max(1, 1024 * plan.warps // tile)),  # 32 registers of partial sums a thread
        STAGES=plan.stages,
        GATED=gated,
        DOT=plan.dot,
        PDL=plan.pdl,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **({"launch_pdl": True} if plan.pdl else {}),
    )


def shared_by(steps: int, tiles: int, programs: int) -> int:
    """At most so many programs share a row of `steps` tiles; a power of two."""
    share = tiles // programs
    if tiles % programs == 0 and (steps % share == 0 or share % steps == 0):
        parts = max(1, steps // share)
    else:
        parts = (steps + share - 2) // share + 1
    return 1 << (parts - 1).bit_length()
