"""Form "skinny_gemm": products of rows of 16 bits on a GPU, which read the weights once if rows are few.

Its kernels begin while the kernel before them still runs (see `launching`), and read weights before they wait
for it. So **no kernel of a layer may write weights**.
"""

import functools
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ...quantised import layout_of
from ...quantised.rows import FP8, LARGEST
from .. import HALF
from ..all_reduce import Exchange
from ..card import AMPERE, HOPPER, card_of, launches_early
from ..launching import are_plain, zero_counters
from ..ops import as_rows
from . import computed, tuned
from .plans import BUSY, CUT, ProductPlan, ProductTile, ceil_div, packed_plan, plan, squared_columns
from .product import Gate, Matrix, Product, QkvHeads, ResidualStream

try:
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    from .quantised_kernel import as_read, has_fp8, look_up, round_rows_kernel, rounded_blocks
    from .skinny_gemm_kernel import skinny_gemm_kernel, wide_kernel
except ImportError:  # no GPU
    triton = None

TUNED = HOPPER
"""The compute capability for which the rules of `plans` were tuned."""


def why_not_on(device: torch.device) -> str | None:
    """Why the kernel cannot run on a device; None if it can."""
    if triton is None:
        return "Triton is not installed"
    if device.type != "cuda":
        return f"it is on {device.type}, not on a GPU"
    card = card_of(device)
    if card.capability < AMPERE:
        return f"Triton uses no tensor cores of compute capability {card.number}"
    return None


def why_not(weight: Tensor, kind: str = "", dtype: torch.dtype | None = None) -> str | None:
    """Why the kernel cannot multiply x of a dtype (None: the weight's) by `weight` [O, I]; None if it can."""
    reason = why_not_on(weight.device)
    if reason is not None:
        return reason
    if kind and (dtype not in HALF or not layout_of(kind).supports(dtype)):
        return f"its kernel takes no {dtype}"
    if not kind and weight.dtype not in HALF:
        return f"it is of {weight.dtype}"
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        return "its rows do not lie one behind the other"
    if weight.shape[1] % 16:
        return f"{weight.shape[1]} inputs are no multiple of 16"
    return None


def plan_of(x: Tensor, weight: Tensor, kind: str = "") -> ProductPlan | None:
    """The plan of a product; None if the kernel cannot run, or shall not."""
    if (
        not x.is_cuda
        or are_plain()
        or why_not(weight, kind, x.dtype) is not None
        or (not kind and x.dtype != weight.dtype)
        or not x.numel()
    ):
        return None
    return _plan(len(weight), x.shape[-1], kind, weight.dtype, x.device)


@functools.cache
def _plan(outputs: int, inputs: int, kind: str, dtype: torch.dtype, device: torch.device) -> ProductPlan:
    known = _tuned(device).get(tuned.name_of(kind, dtype, outputs, inputs))
    if known is not None:
        return known
    bits, card = layout_of(kind).bits if kind else 16, card_of(device)
    if card.capability != TUNED:
        return computed.plan(outputs, inputs, bits, card)
    facts = card.processors, card.memory
    return packed_plan(outputs, inputs, bits, *facts) if kind else plan(outputs, inputs, *facts)


@functools.cache
def _tuned(device: torch.device) -> dict[str, ProductPlan]:
    return tuned.read(tuned_file(device))


def tuned_file(device: torch.device) -> Path:
    """The file of the plans that `tune-kernels` writes on a GPU; it need not exist."""
    return tuned.file_of(torch.cuda.get_device_name(device), triton.__version__)


def source_of_plans(device: torch.device) -> str:
    """A sentence's end about the source of a GPU's plans."""
    path, card = tuned_file(device), card_of(device)
    others = "the built-in ones, tuned on an H200"
    if card.capability != TUNED:
        facts = f"{card.processors} multiprocessors, {card.bandwidth / 1e9:.0f} GB/s"
        others = f"computed, not measured, from the facts of this GPU ({facts}); tune-kernels measures them"
    return f"tuned on this GPU, {path}; for other shapes {others}" if path.exists() else others


def run(product: Product, plan: ProductPlan, dtype: torch.dtype | None = None) -> Tensor:
    """A product by a plan, as `launch` computes it -> [..., O], gated [..., O / 2], of a dtype (None: of x's)."""
    x, outputs = product.x, len(product.weight) // (2 if isinstance(product.after, Gate) else 1)
    out = x.new_empty(x.numel() // x.shape[-1], outputs, dtype=dtype)
    launch(product, out, plan.parts, plan.tile(len(out)))
    return out.view(*x.shape[:-1], outputs)


def launch(product: Product, out: Tensor | None, parts: int, tile: ProductTile) -> None:
    """Run the kernel on x of R rows [..., I], weight [O, I], contiguous, and bias [O].

    out: contiguous; [R, O], gated [R, O / 2], of heads the queries [R, H * D], R = B * N; None if the product is sent.
    """
    bias = product.bias
    product = replace(product, x=as_rows(product.x), bias=None if bias is None else bias.contiguous())
    if supports_many_rows(product, parts, tile):
        return launch_many_rows(product, out, parts)
    x, weight, scales = product.x, product.weight, product.scales
    rows, inputs, outputs = *x.shape, len(weight)
    layout = layout_of(product.kind) if product.kind else None
    early, units = launches_early(x.device), None
    form, group = layout.packing if layout else (None, 1)
    if form == "fp8_blocks":
        x, units = rounded_blocks(x, group, early)
    dtype, lacks_fp8 = layout.row_dtype(weight) if layout else None, not has_fp8(x.device)
    if dtype is not None:
        static = layout.constant_scale([weight, scales])
        x, units = _rounded_rows(x, torch.uint8 if dtype == FP8 and lacks_fp8 else dtype, early, static)
    weight = as_read(weight)
    grid = ceil_div(outputs, tile.block_o), ceil_div(rows, tile.block_n)
    shared = None
    programs = parts // tile.turns
    if programs > 1:
        size = grid[0] * grid[1] * programs * tile.block_o * tile.block_n
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        shared = partial, zero_counters(x.device, grid[0] * grid[1])
    exchange = product.after if isinstance(product.after, Exchange) else None
    skinny_gemm_kernel[(grid[1], grid[0] * programs)](
        Matrix(x, units, x.stride(0)), Matrix(weight, scales, weight.stride(0)), shared=shared,
        sent=(exchange.peers, exchange.state, exchange.words) if exchange else None,
        rank=exchange.rank if exchange else 0, late=tile.late, prefetch=tile.prefetch,
        RANKS=exchange.ranks if exchange else 1, SHOTS=exchange.shots(rows * outputs) if exchange else 1,
        BLOCK_O=tile.block_o, TURNS=tile.turns, EVEN=inputs % tile.block_k == 0, UNROLL=tile.unroll, PDL=early,
        FORMAT=form, GROUP=group,
        TABLE=look_up(layout.table) if layout and layout.table is not None else None, PTX=x.is_cuda,
        maxnreg=None if units is None else tile.registers, launch_pdl=early, **_arguments(product, out, parts, tile),
    )  # fmt: skip


def _arguments(product: Product, out: Tensor | None, parts: int, tile: ProductTile) -> dict:
    """The arguments that both kernels take."""
    (rows, inputs), outputs, before = product.x.shape, len(product.weight), product.before
    stream, heads = (product.after if isinstance(product.after, each) else None for each in (ResidualStream, QkvHeads))
    nodes, (_, kv_heads, _, size) = (heads.cos.shape[1], heads.key_cache.shape) if heads else (1, (0, 0, 0, 0))
    capacity, page = (heads.slots, heads.page) if heads else (0, 0)
    return dict(
        bias_ptr=product.bias, out_ptr=out, before=before, to_stream=stream, heads=heads, rows=rows, outputs=outputs,
        inputs=inputs, stride_r=stream.residual.stride(0) if stream else 0, nodes=nodes, capacity=capacity,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, CUT=CUT, PARTS=parts,
        TERMS=before.squares.shape[1] if before else 1, SQUARED=squared_columns(outputs),
        GATED=isinstance(product.after, Gate), HEADS=out.shape[1] // size if heads else 0, KV_HEADS=kv_heads,
        PAGE=page, D=size, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _rounded_rows(x: Tensor, dtype: torch.dtype, early: bool, static: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [R, I] rounded by row to a dtype of weights: codes [R, I], and scales [R] float32. If weights are bytes,
    because the GPU has no FP8, codes are numbers of x's dtype. static: the scale of all rows, or None."""
    rows, inputs = x.shape
    codes = x.new_empty(rows, inputs, dtype=x.dtype if dtype == torch.uint8 else dtype)
    units, block = x.new_empty(rows, dtype=torch.float32), triton.next_power_of_2(inputs)
    largest = LARGEST[torch.int8 if dtype == torch.int8 else FP8]
    round_rows_kernel[(rows,)](
        x, codes, units, static, inputs, x.stride(0), largest,
        BLOCK=block, EARLY=early, launch_pdl=early, num_warps=min(max(block // 512, 1), 16),
    )  # fmt: skip
    return codes, units


# Products of many rows, such as prompts have, with the same bits (see `wide_kernel`).

LEAST_ROWS = 384
"""Rows from which on it is faster than `skinny_gemm_kernel`."""
TILE, SMALL_TILE = ProductTile(128, 64, 256, 8, 4), ProductTile(128, 64, 128, 4, 5)
CUT_TILE = ProductTile(128, 64, 128, 8, 4)
"""The tile, another for fewer rows, and one for products whose columns are cut, which holds two sums. They reach 0.81
to 0.96 of cuBLAS's speed with 2,048 rows of Llama-3.1-8B's layers on an H200."""
MANY_ROWS = 512
"""Rows from which on the larger tile may be faster."""
FIXED_ROWS = 12
"""The rows whose time a program takes for anything but rows: a turn takes 49 us with 256 rows and 26 us with 128."""
GATED_TILE, LEAST_GATED_ROWS = ProductTile(256, 64, 128, 8, 4), 65
"""The tile of a gated product of LEAST_GATED_ROWS to MANY_ROWS rows whose columns are not cut, if its programs keep a
share of BUSY of the multiprocessors busy. Llama-3.1-8B's product took 0.88 of the time of `skinny_gemm_kernel` with
128 and with 256 rows on an H200. Tiles of few outputs, and cut columns, took 0.9 to 1.3."""
LEAST_HEIGHT = 64
"""Rows of the weights in a tile from which on groups of warps multiply (wgmma)."""


def has_descriptors(device: torch.device) -> bool:
    """True if a device reads tiles by descriptors."""
    return card_of(device).capability >= HOPPER


def supports_many_rows(product: Product, parts: int, tile: ProductTile) -> bool:
    """True if `wide_kernel` computes a product for which `skinny_gemm_kernel` would take these parts and this tile."""
    x, after = product.x, product.after
    if not has_descriptors(x.device) or tile.block_o < LEAST_HEIGHT:
        return False
    if len(x) < LEAST_ROWS and not _fills_gated_tiles(product, parts):
        return False
    if product.kind or isinstance(after, Exchange) or x.stride(0) % 8 or x.data_ptr() % 16:
        return False
    return not isinstance(after, QkvHeads) or (after.q_norm is None and after.key_cache.shape[3] % TILE.block_o == 0)


def _fills_gated_tiles(product: Product, parts: int) -> bool:
    """True if the tiles of a gated product keep the multiprocessors busy: 28672 outputs and 128 rows are 112 programs
    for 132 of them, a share of 0.85; 36864 outputs are 144 programs, which run in two turns, a share of 0.55."""
    rows = len(product.x)
    if not isinstance(product.after, Gate) or parts > 1 or not LEAST_GATED_ROWS <= rows < MANY_ROWS:
        return False
    processors = card_of(product.x.device).processors
    programs = ceil_div(len(product.weight), GATED_TILE.block_o) * ceil_div(rows, GATED_TILE.block_n)
    return programs >= BUSY * ceil_div(programs, processors) * processors


def tile_of_many(rows: int, outputs: int, parts: int, processors: int) -> ProductTile:
    """The faster tile for this product on a GPU with `processors` multiprocessors, each of which runs one program at a
    time.

    Llama-3.1-8B's gated product has 28,672 outputs. With 512 rows it is 4 turns of an H200's 132 multiprocessors in
    blocks of 256 rows, which take 201 us, or 7 in blocks of 128, 190 us. With 1,024 rows: 7, 342 us, or 14, 365 us.
    """

    def time(tile: ProductTile) -> int:
        programs = ceil_div(rows, tile.block_n) * ceil_div(outputs, tile.block_o)
        return ceil_div(programs, processors) * (tile.block_n + FIXED_ROWS)

    choices = (TILE, SMALL_TILE) if rows >= MANY_ROWS else (SMALL_TILE,)
    return CUT_TILE if parts > 1 else min(choices, key=time)


def launch_many_rows(product: Product, out: torch.Tensor, parts: int, tile: ProductTile | None = None) -> None:
    """Run the kernel with the arguments of `skinny_gemm.launch`. tile: None: by the parts and rows."""
    x, weight = product.x, product.weight
    rows, outputs = len(x), len(weight)
    if tile is None:
        card = card_of(x.device)
        tile = tile_of_many(rows, outputs, parts, card.processors)
        tile = (GATED_TILE if _fills_gated_tiles(product, parts) else tile).fitting(card.memory)
    height = tile.block_o // 2 if isinstance(product.after, QkvHeads | Gate) else tile.block_o
    wide_kernel[(ceil_div(rows, tile.block_n), ceil_div(outputs, tile.block_o))](
        TensorDescriptor.from_tensor(x, [tile.block_n, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [height, tile.block_k]),
        HEIGHT=height, **_arguments(product, out, parts, tile),
    )  # fmt: skip
