"""Launches of the kernels of routed experts, and the cases that they serve."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...quantised.experts import ExpertFormat
from .. import HALF
from ..card import card_of, launches_early
from ..launching import zero_counters
from ..linear import skinny_gemm
from ..linear.plans import squared_columns
from ..linear.product import Matrix, ResidualStream
from ..linear.skinny_gemm import LEAST_HEIGHT, has_descriptors
from . import plans
from .plans import ExpertTile

try:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from ..linear.quantised_kernel import as_read, rounded_blocks
    from .kernel import FEW, MANY, experts_kernel
    from .wide_kernel import combine_kernel, sort_pairs, wide_experts_kernel
except ImportError:  # no GPU
    experts_kernel = None

GATES = "none", "silu", "clamped"
"""Gates by the kernel's numbers of them."""


# Launches of the products of routed experts of many tokens, such as a prompt's (see `wide_kernel`).


class ExpertsEnd(NamedTuple):
    """The second product's end: the sum of each token's experts.

    routing: [T, k]; the router's weights.
    out: [T, height], written.
    stream: the sum is added to it, and the norm that follows is begun; or None.
    """

    routing: Tensor
    out: Tensor
    stream: ResidualStream | None


TOKENS, COLUMNS = 16, 128
"""Tokens and columns of which a program adds up the experts' results."""


def _height(layout: ExpertFormat, tile: ExpertTile) -> int:
    """Rows of the weights that are read at once: gates and what they gate are read apart, unless they alternate."""
    return tile.block_o if layout.gate == "none" or layout.interleaved else tile.block_o // 2


def reads_tiles(weight: Tensor, layout: ExpertFormat, tile: ExpertTile) -> bool:
    """True if descriptors read the tiles of the weights, and the same instructions multiply as in `experts_kernel`."""
    fits = weight.dtype in HALF and not layout.transposed and _height(layout, tile) >= LEAST_HEIGHT
    return fits and has_descriptors(weight.device)


def _launch_sorted(
    ids: Tensor, weight: Tensor, layout: ExpertFormat, end: ExpertsEnd | None, tile: ExpertTile, arguments: dict
) -> None:
    """Launch the kernels that sort the pairs. weight: as kernels read it. arguments: what `_launch` gives to all."""
    (tokens, top), experts, early = ids.shape, len(weight), arguments["EARLY"]
    order, tiles = sort_pairs(ids, layout.first, experts, tile.block_n, early)
    by_tile = reads_tiles(weight, layout, tile)
    if by_tile:
        shape = [_height(layout, tile), tile.block_k]
        arguments = {**arguments, "weight": TensorDescriptor.from_tensor(weight.flatten(0, 1), shape)}
    wide_experts_kernel[(-(-arguments["outputs"] // tile.block_o), len(tiles))](
        order_ptr=order, tiles_ptr=tiles, x_rows=len(arguments["x"].data), TOP=top if end is None else 1,
        TILED=by_tile, **arguments,
    )  # fmt: skip
    if end is not None:
        pairs = arguments["pairs_ptr"]
        height = pairs.shape[1]
        combine_kernel[(-(-height // COLUMNS), -(-tokens // TOKENS))](
            pairs, ids, end, tokens, height, TOP=top, BLOCK_R=TOKENS, HEIGHT=COLUMNS, FIRST=layout.first,
            HELD=experts if layout.of else 0, SQUARED=squared_columns(height), EARLY=early, launch_pdl=early,
        )  # fmt: skip


def why_not(parts: Sequence[Tensor], layout: ExpertFormat) -> str | None:
    """The reason why the kernels cannot multiply by these weights, in 16 bits or quantised; None if it can."""
    weight = parts[0]
    reason = why_not_on(weight.device, layout)
    if reason is not None:
        return reason
    expected = (torch.int32,) if layout.mxfp4 else (torch.float8_e4m3fn,) if layout.block else HALF
    if weight.dtype not in expected:
        return f"the weights are of {weight.dtype}"
    return _why_not_layout(parts, layout)


def why_not_on(device: torch.device, layout: ExpertFormat) -> str | None:
    """The reason why a device has no kernel for weights of this layout; None if it has."""
    reason = skinny_gemm.why_not_on(device)
    if reason is not None and card_of(device).lacks_tensor_cores and experts_kernel is not None:
        return f"its weights are quantised, and {reason}" if layout.block or layout.mxfp4 else None
    return reason


def _why_not_layout(parts: Sequence[Tensor], layout: ExpertFormat) -> str | None:
    if not all(part.is_contiguous() for part in parts) or parts[0].data_ptr() % 16:
        return "the weights do not lie one behind the other"
    if layout.sizes(parts)[1] % 16:
        return f"{layout.sizes(parts)[1]} inputs are no multiple of 16"
    if layout.transposed and (layout.block or (layout.gate != "none" and not layout.interleaved)):
        return "its layout has no kernel"
    if layout.block not in (0, 128):
        return f"blocks of {layout.block} have no kernel"
    return None


def supports(x: Tensor, parts: Sequence[Tensor], layout: ExpertFormat) -> bool:
    """True if the kernels compute a product of x [T, ...]."""
    if not x.is_cuda or not len(x) or why_not_on(x.device, layout) is not None or not layout.rounds:
        return False
    fits = layout.mxfp4 or (x.dtype in HALF if layout.block else x.dtype == parts[0].dtype)
    return bool(fits) and x.dtype != torch.float64 and _why_not_layout(parts, layout) is None


def up(
    x: Tensor, ids: Tensor, parts: Sequence[Tensor], layout: ExpertFormat, tile: plans.ExpertTile | None = None
) -> Tensor:
    """`experts_up` by the kernels. tile: None takes what `plans.tile` says."""
    out = x.new_empty(*ids.shape, layout.columns(parts))
    _launch(x, ids, parts, layout, out, None, tile)
    return out


def down(
    x: Tensor, ids: Tensor, weights: Tensor, parts: Sequence[Tensor], layout: ExpertFormat,
    tile: plans.ExpertTile | None = None, stream: ResidualStream | None = None,
) -> Tensor:  # fmt: skip
    """`experts_down` by the kernels; with a stream, the residual stream of `experts_down_to_stream`."""
    height = layout.columns(parts)
    pairs, out = x.new_empty(ids.numel(), height), x.new_empty(len(x), height)
    _launch(x.flatten(0, 1), ids, parts, layout, pairs, ExpertsEnd(weights.contiguous(), out, stream), tile)
    return out


def _launch(
    x: Tensor, ids: Tensor, parts: Sequence[Tensor], layout: ExpertFormat, pairs: Tensor,
    end: ExpertsEnd | None, tile: plans.ExpertTile | None,
) -> None:  # fmt: skip
    """Launch the kernels for the first product, or with `end` for the second.

    x: [T, I]; second product: [T * k, I].
    ids: [T, k] int64.
    pairs: [T * k, height], written; the results of each expert, after the gate.
    """
    weight, scales = as_read(parts[0]), layout.scales(parts)
    (tokens, top), experts, (outputs, inputs) = ids.shape, len(weight), layout.sizes(parts)
    x = x.float() if card_of(x.device).lacks_tensor_cores else x  # weights are multiplied in x's dtype
    tile = tile or plans.tile(tokens, top, layout.of or experts, (outputs, inputs), layout.scale_size, x.element_size())
    x = x if x.stride(1) == 1 else x.contiguous()
    early, units = launches_early(x.device), None
    if layout.block:
        x, units = rounded_blocks(x, layout.block, early)
    arguments = dict(
        x=Matrix(x, units, x.stride(0)), weight=Matrix(weight, scales, weight.stride(1)), bias_ptr=layout.bias(parts),
        pairs_ptr=pairs, outputs=outputs, inputs=inputs, stride_e=weight.stride(0),
        scale_stride=0 if scales is None else scales.stride(0), alpha=layout.alpha, limit=layout.limit,
        GATE=GATES.index(layout.gate), INTERLEAVED=layout.interleaved, TRANSPOSED=layout.transposed,
        SCALED=layout.block, MXFP4=layout.mxfp4 > 0, PTX=x.is_cuda, BLOCK_N=tile.block_n, BLOCK_O=tile.block_o,
        BLOCK_K=tile.block_k, EVEN=inputs % tile.block_k == 0, PARTS=tile.parts, EARLY=early,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers, launch_pdl=early,
    )  # fmt: skip
    if tile.sorted:
        return _launch_sorted(ids, weight, layout, end, tile, arguments)
    by_pair = ids.numel() <= experts or tokens == 1
    slots, tiles = ids.numel() if by_pair else experts, -(-outputs // tile.block_o)
    sums = arrived = None
    if tile.shared:
        sums = torch.empty(tile.parts, ids.numel(), outputs, dtype=torch.float32, device=x.device)
    if tile.shared or end is not None:
        arrived = zero_counters(x.device, tiles * (slots if end is None else 1))
    experts_kernel[(tiles * (tile.parts if tile.shared else 1), slots)](
        ids_ptr=ids.contiguous(), parts_ptr=sums, end=end, arrived_ptr=arrived, pairs=ids.numel(),
        TOP=top, BY_PAIR=by_pair, ONE_TOKEN=tokens == 1, FIRST=layout.first, HELD=experts if layout.of else 0,
        SQUARED=0 if end is None else squared_columns(outputs), CHUNK=FEW if ids.numel() <= FEW else MANY, **arguments,
    )  # fmt: skip
