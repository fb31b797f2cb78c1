"""Launches of the products of routed experts of many tokens, such as those of prompts (see `wide_kernel`)."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from .. import HALF, dependent_launch
from ..linear.plans import squared_columns
from ..linear.product import ResidualStream
from ..linear.wide import LEAST_HEIGHT, has_descriptors
from .format import ExpertFormat
from .plans import ExpertTile

try:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from ..linear.activations import as_read, has_fp8, rounded_blocks
    from .sort import sort_pairs
    from .wide_kernel import combine_kernel, wide_experts_kernel
except ImportError:  # no GPU
    wide_experts_kernel = None


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


def launch(
    x: Tensor, ids: Tensor, parts: Sequence[Tensor], layout: ExpertFormat, pairs: Tensor, end: ExpertsEnd | None,
    tile: ExpertTile,
) -> None:  # fmt: skip
    """Launch the kernels for the first product, or with `end` for the second. Arguments: see `launch._launch`."""
    weight, scales, bias = as_read(parts[0]), layout.scales(parts), layout.bias(parts)
    (tokens, top), experts, (outputs, inputs) = ids.shape, len(weight), layout.sizes(parts)
    early, units = dependent_launch.available(x), None
    options = {"launch_pdl": True} if early else {}
    if layout.block:
        x, units = rounded_blocks(x, layout.block, early)
    order, tiles = sort_pairs(ids, layout.first, experts, tile.block_n, early)
    by_tile = None
    if reads_tiles(weight, layout, tile):
        by_tile = TensorDescriptor.from_tensor(weight.flatten(0, 1), [_height(layout, tile), tile.block_k])
    wide_experts_kernel[(-(-outputs // tile.block_o), len(tiles))](
        x, units, order, tiles, weight if by_tile is None else by_tile, scales, bias, pairs, len(x), outputs, inputs,
        weight.stride(0), weight.stride(1), x.stride(0), 0 if scales is None else scales.stride(0),
        layout.alpha, layout.limit, TOP=top if end is None else 1,
        GATED=layout.gate != "none", CLAMPED=layout.gate == "clamped", INTERLEAVED=layout.interleaved,
        TRANSPOSED=layout.transposed, SCALED=layout.block, MXFP4=layout.mxfp4 > 0, PTX=x.is_cuda,
        DECODES=not has_fp8(x.device), BLOCK_N=tile.block_n, BLOCK_O=tile.block_o, BLOCK_K=tile.block_k,
        EVEN=inputs % tile.block_k == 0, PARTS=tile.parts, TILED=by_tile is not None, EARLY=early,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers, **options,
    )  # fmt: skip
    if end is not None:
        height = pairs.shape[1]
        combine_kernel[(-(-height // COLUMNS), -(-tokens // TOKENS))](
            pairs, ids, end, tokens, height, TOP=top, BLOCK_R=TOKENS, HEIGHT=COLUMNS, FIRST=layout.first,
            HELD=experts if layout.of else 0, SQUARED=squared_columns(height), EARLY=early, **options,
        )  # fmt: skip
