"""Form "small_m": products of at most 512 rows of 16 bits on a GPU, which read the weights once.

Its kernels begin while the kernel before them still runs (see `dependent_launch`), and read weights before they wait
for it. So **no kernel of a layer may write weights**.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import HALF, dependent_launch
from ..all_reduce import Exchange
from ..counters import zero_counters
from ..ops import as_rows
from . import tuned
from .plans import CUT, MAX_ROWS, Plan, Tile, ceil_div, packed_plan, plan, squared_columns
from .quantised import layout_of, packed_linear
from .quantised.compressed_tensors import LARGEST

try:
    import triton

    from .activations import has_fp8, rounded_blocks
    from .nibbles_kernel import look_up
    from .quantised_kernel import round_rows_kernel
    from .small_m_kernel import small_m_kernel
except ImportError:  # no GPU
    triton = None

OLDEST = (8, 0)
"""The first compute capability whose tensor cores take bfloat16."""


class Normed(NamedTuple):
    """x of a product is the first half of an RMSNorm: ``x = stream * (norm weight + offset)``, to be divided by the
    root mean square of the stream. squares [R, T] float32: sums of its squares, T a row. eps: of the norm."""

    squares: Tensor
    eps: float


class Heads(NamedTuple):
    """The product is queries, keys and values, in the order of its outputs: heads of size D of which queries and keys
    are normed and rotated, and keys and values appended to the caches. The arguments are those of
    `attention.call.Call`."""

    cos: Tensor
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    offset: float | None
    key_cache: Tensor
    value_cache: Tensor
    lengths: Tensor


NO_HEADS = Heads(None, None, None, None, 0.0, None, None, None, None)


class Stream(NamedTuple):
    """The residual stream that a product is added to, and the norm that follows.

    residual [R, O]: the stream before. weight [O], offset: of the norm. scaled [R, O], squares [R, T] float32: the
    memory for the first half of the norm, see `Normed`.
    """

    residual: Tensor
    weight: Tensor
    offset: float
    scaled: Tensor
    squares: Tensor


@torch.library.custom_op("spec_compile::small_m_matmul", mutates_args=())
def small_m_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None = None, kind: str = ""
) -> Tensor:
    """``F.linear``: x [..., I], weight [O, I], bias [O] or None -> [..., O], fp32 accumulation, x's dtype.

    scales, kind: of a quantised weight, whose `Layout` has this kind and a `packing`, and as parts weight and scales.
    The kernel takes bf16 and fp16, up to 512 rows, where `lack` is None; else it is `packed_linear`.
    """
    how = plan_of(x, weight, kind)
    if how is None:
        return packed_linear(x, weight, bias, scales, kind)
    return run(x, weight, bias, how, scales=scales, kind=kind)


@small_m_matmul.register_fake
def _(x, weight, bias, scales=None, kind=""):
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("spec_compile::small_m_swiglu", mutates_args=())
def small_m_swiglu(x: Tensor, weight: Tensor, scales: Tensor | None = None, kind: str = "") -> Tensor:
    """``silu(gate) * up`` of ``gate, up = F.linear(x, weight).chunk(2, -1)``.

    x [..., I], weight [O, I] -> [..., O / 2]. The kernel rounds once, at the end.
    """
    how = plan_of(x, weight, kind)
    if how is None or weight.shape[0] % 2:
        gate, up = packed_linear(x, weight, None, scales, kind).chunk(2, -1)
        return F.silu(gate) * up
    return run(x, weight, None, how, gated=True, scales=scales, kind=kind)


@small_m_swiglu.register_fake
def _(x, weight, scales=None, kind=""):
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


@functools.cache
def chip(device: torch.device) -> tuple[int, int]:
    """Multiprocessors of a GPU, and bytes of shared memory that a program may take; none if it is too old."""
    facts = torch.cuda.get_device_properties(device)
    if (facts.major, facts.minor) < OLDEST:
        return 0, 0
    return facts.multi_processor_count, facts.shared_memory_per_block_optin


def memory_of(device: torch.device) -> int:
    """Bytes of shared memory that a program may take on a GPU."""
    return chip(device)[1]


def lack_of_device(device: torch.device) -> str | None:
    """Why the kernel cannot run on a device; None if it can."""
    if triton is None:
        return "Triton is not installed"
    if device.type != "cuda":
        return f"it is on {device.type}, not on a GPU"
    return None if chip(device)[0] else "the GPU has a compute capability below {}.{}".format(*OLDEST)


def lack(weight: Tensor, kind: str = "", dtype: torch.dtype | None = None) -> str | None:
    """Why the kernel cannot multiply by `weight` [O, I], or of this kind, x of a dtype (None: of the weight's); None if
    it can."""
    reason = lack_of_device(weight.device)
    if reason is not None:
        return reason
    if kind and (dtype not in HALF or not layout_of(kind).serves(dtype)):
        return f"its kernel takes no {dtype}"
    if not kind and weight.dtype not in HALF:
        return f"it is of {weight.dtype}"
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        return "its rows do not lie one behind the other"
    if weight.shape[1] % 16:
        return f"{weight.shape[1]} inputs are no multiple of 16"
    return None


def plan_of(x: Tensor, weight: Tensor, kind: str = "") -> Plan | None:
    """The plan where the kernel can run."""
    if not x.is_cuda or lack(weight, kind, x.dtype) is not None or (not kind and x.dtype != weight.dtype):
        return None
    rows = x.numel() // x.shape[-1]
    if not 0 < rows <= MAX_ROWS:
        return None
    return _plan(len(weight), x.shape[-1], kind, weight.dtype, x.device)


@functools.cache
def _plan(outputs: int, inputs: int, kind: str, dtype: torch.dtype, device: torch.device) -> Plan:
    known = _tuned(device).get(tuned.name_of(kind, dtype, outputs, inputs))
    if known is not None:
        return known
    if kind:
        return packed_plan(outputs, inputs, layout_of(kind).bits, *chip(device))
    return plan(outputs, inputs, *chip(device))


@functools.cache
def _tuned(device: torch.device) -> dict[str, Plan]:
    return tuned.read(tuned_file(device))


def tuned_file(device: torch.device) -> Path:
    """The file of the plans that `tune-kernels` has found on a GPU, whether it is there or not."""
    return tuned.file_of(torch.cuda.get_device_name(device), triton.__version__)


def run(
    x: Tensor, weight: Tensor, bias: Tensor | None, how: Plan, *, gated: bool = False, normed: Normed | None = None,
    stream: Stream | None = None, dtype: torch.dtype | None = None, scales: Tensor | None = None, kind: str = "",
) -> Tensor:  # fmt: skip
    """x [..., I] times weight [O, I] by a plan, as `launch` computes it -> [..., O], gated [..., O / 2], of x's dtype
    or the one given."""
    flat = as_rows(x)
    out = x.new_empty(flat.shape[0], weight.shape[0] // (1 + gated), dtype=dtype)
    bias = bias if bias is None else bias.contiguous()
    launch(
        flat, weight, bias, out, how.parts, how.tile(len(flat)), gated=gated, normed=normed, stream=stream,
        scales=scales, kind=kind,
    )  # fmt: skip
    return out.view(*x.shape[:-1], out.shape[1])


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, parts: int, tile: Tile, *, gated: bool = False,
    normed: Normed | None = None, stream: Stream | None = None, heads: Heads | None = None, early: bool | None = None,
    exchange: Exchange | None = None, scales: Tensor | None = None, kind: str = "",
) -> None:  # fmt: skip
    """Run the kernel: x [R, I] of any row stride, weight [O, I] and bias [O] contiguous, out [R, O] contiguous.

    gated: the first half of the weights' rows is a gate, the second half what it gates; out [R, O / 2]. normed: x is
    the first half of a norm. stream: out is the residual stream with the product added. heads: out [R, H * D] is the
    queries, R = B * N. early: whether to use programmatic dependent launch (None: where the GPU can). exchange: the
    product goes to all ranks, and to no out. scales, kind: of a quantised weight.
    """
    rows, inputs, outputs = *x.shape, len(weight)
    (form, group), table = (layout_of(kind).packing, layout_of(kind).table) if kind else ((None, 1), None)
    early, units = dependent_launch.available(x) if early is None else early, None
    if form == "fp8_blocks":
        x, units = rounded_blocks(x, group, early)
    if weight.dtype == torch.float8_e4m3fn and not has_fp8(x.device):
        weight = weight.view(torch.uint8)
    if kind and layout_of(kind).rounds_rows:
        x, units = _rounded_rows(x, weight.dtype, early, scales[outputs:])
    grid = ceil_div(outputs, tile.block_o), ceil_div(rows, tile.block_n)
    partial = arrived = None
    if parts > 1:
        size = grid[0] * grid[1] * parts * tile.block_o * tile.block_n
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        arrived = zero_counters(x.device, grid[0] * grid[1])
    squares, eps = normed or (None, 0.0)
    terms = 1 if squares is None else squares.shape[1]
    residual, norm, offset, scaled, new_squares = stream or (None, None, 0.0, None, None)
    cos, sin, q_norm, k_norm, head_eps, head_offset, key_cache, value_cache, lengths = heads or NO_HEADS
    nodes, (_, kv_heads, capacity, size) = (cos.shape[1], key_cache.shape) if heads else (1, (0, 0, 0, 0))
    sent = (exchange.peers, exchange.state, exchange.rank, exchange.words) if exchange else (None, None, 0, 0)
    small_m_kernel[(grid[1], grid[0] * parts)](
        x, units, weight, scales, bias, squares, residual, norm, out, scaled, new_squares, partial, arrived,
        cos, sin, q_norm, k_norm, key_cache, value_cache, lengths, rows, outputs, inputs,
        weight.stride(0), x.stride(0), 0 if residual is None else residual.stride(0), tile.late, tile.prefetch, eps,
        offset, nodes, capacity, head_eps, head_offset or 0.0,
        *sent, RANKS=exchange.ranks if exchange else 1,
        BLOCK_N=tile.block_n, BLOCK_O=tile.block_o, BLOCK_K=tile.block_k, CUT=CUT, PARTS=parts,
        TERMS=terms, BLOCK_TERMS=triton.next_power_of_2(terms), SQUARED=squared_columns(outputs), GATED=gated,
        EVEN=inputs % tile.block_k == 0, PDL=early,
        HEADS=out.shape[1] // size if heads else 0, KV_HEADS=kv_heads, D=size, ROUND_FIRST=head_offset is None,
        FORMAT=form, GROUP=group, TABLE=None if table is None else look_up(table), PTX=x.is_cuda,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=None if units is None else tile.registers,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def _rounded_rows(x: Tensor, dtype: torch.dtype, early: bool, static: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, I] rounded by row as weights of a dtype are: codes [R, I], and scales [R] float32. Where weights are bytes,
    because the GPU has no FP8, codes are numbers of x's dtype. static: the scale of all rows, or empty."""
    rows, inputs = x.shape
    codes = x.new_empty(rows, inputs, dtype=x.dtype if dtype == torch.uint8 else dtype)
    units, block = x.new_empty(rows, dtype=torch.float32), triton.next_power_of_2(inputs)
    largest = LARGEST[torch.int8 if dtype == torch.int8 else torch.float8_e4m3fn]
    round_rows_kernel[(rows,)](
        x, codes, units, static if len(static) else None, inputs, x.stride(0), largest,
        BLOCK=block, EARLY=early, num_warps=min(max(block // 512, 1), 16), **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return codes, units
