"""Where the kernel of routed experts runs, and its launches."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import HALF, dependent_launch
from ..counters import zero_counters
from ..linear.small_m import lack_of_device
from . import plans
from .kinds import Kind

try:
    from ..linear.activations import has_fp8, rounded_blocks
    from .kernel import experts_kernel
    from .slots import FEW, MANY
except ImportError:  # no GPU
    experts_kernel = None


def lack(parts: Sequence[Tensor], kind: Kind) -> str | None:
    """Why the kernel cannot multiply by these weights in 16 bits, or by codes; None if it can."""
    reason, weight = lack_of_device(parts[0].device), parts[0]
    if reason is not None:
        return reason
    expected = (torch.int32,) if kind.mxfp4 else (torch.float8_e4m3fn,) if kind.block else HALF
    if weight.dtype not in expected:
        return f"the weights are of {weight.dtype}"
    return _lack_of_layout(parts, kind)


def _lack_of_layout(parts: Sequence[Tensor], kind: Kind) -> str | None:
    if not all(part.is_contiguous() for part in parts) or parts[0].data_ptr() % 16:
        return "the weights do not lie one behind the other"
    if kind.sizes(parts)[1] % 16:
        return f"{kind.sizes(parts)[1]} inputs are no multiple of 16"
    if kind.transposed and (kind.block or (kind.gate != "none" and not kind.interleaved)):
        return "its layout has no kernel"
    if kind.block not in (0, 128):
        return f"blocks of {kind.block} have no kernel"
    return None


def serves(x: Tensor, parts: Sequence[Tensor], kind: Kind) -> bool:
    """Whether the kernel computes a product of x [T, ...]: of few rows in 16 bits, and of any number in float32 or of
    quantised weights, for which PyTorch has no product that waits for nothing."""
    if not x.is_cuda or not len(x) or lack_of_device(x.device) is not None or not kind.rounds:
        return False
    fits = kind.mxfp4 or (x.dtype in HALF if kind.block else x.dtype == parts[0].dtype)
    few = kind.scale_size or x.dtype not in HALF or len(x) <= plans.MAX_ROWS
    return bool(fits and few) and x.dtype != torch.float64 and _lack_of_layout(parts, kind) is None


def up(x: Tensor, ids: Tensor, parts: Sequence[Tensor], kind: Kind, tile: plans.Tile | None = None) -> Tensor:
    """`experts_up` by the kernel; tile: None: that of the plans."""
    out = x.new_empty(*ids.shape, kind.columns(parts))
    _launch(x, ids, parts, kind, out, None, None, tile)
    return out


def down(
    x: Tensor, ids: Tensor, weights: Tensor, parts: Sequence[Tensor], kind: Kind, tile: plans.Tile | None = None
) -> Tensor:
    """`experts_down` by the kernel."""
    height = kind.columns(parts)
    pairs, out = x.new_empty(ids.numel(), height), x.new_empty(len(x), height)
    _launch(x.flatten(0, 1), ids, parts, kind, pairs, weights.contiguous(), out, tile)
    return out


def _launch(
    x: Tensor, ids: Tensor, parts: Sequence[Tensor], kind: Kind, pairs: Tensor, routing: Tensor | None,
    out: Tensor | None, tile: plans.Tile | None,
) -> None:  # fmt: skip
    """x [T, I], or with a router's weights, routing [T, k], x [T * k, I]; pairs [T * k, O]: what each expert gives;
    out [T, O]: their sums."""
    weight, scales, bias = parts[0], kind.scales(parts), kind.bias(parts)
    (tokens, top), experts, (outputs, inputs) = ids.shape, len(weight), kind.sizes(parts)
    tile = tile or plans.tile(tokens, top, experts, (outputs, inputs), kind.scale_size, x.element_size())
    x = x if x.stride(1) == 1 else x.contiguous()
    slots, tiles = min(ids.numel(), experts), -(-outputs // tile.block_o)
    early, units = dependent_launch.available(x), None
    if kind.block:
        x, units = rounded_blocks(x, kind.block, early)
    sums = arrived = None
    if tile.shared:
        sums = torch.empty(tile.parts, ids.numel(), outputs, dtype=torch.float32, device=x.device)
    if tile.shared or routing is not None:
        arrived = zero_counters(x.device, tiles * (slots if routing is None else 1))
    experts_kernel[(tiles * (tile.parts if tile.shared else 1), slots)](
        x, units, ids.contiguous(), weight, scales, bias, sums, pairs, routing, out, arrived, ids.numel(), outputs,
        inputs, weight.stride(0), weight.stride(1), x.stride(0), 0 if scales is None else scales.stride(0),
        tile.prefetch, kind.alpha, kind.limit, TOP=top, BY_PAIR=ids.numel() <= experts, ALONE=tokens == 1,
        GATED=kind.gate != "none", CLAMPED=kind.gate == "clamped", INTERLEAVED=kind.interleaved,
        TRANSPOSED=kind.transposed, SCALED=kind.block, PARTS=tile.parts,
        MXFP4=kind.mxfp4 > 0, PTX=x.is_cuda, DECODES=not has_fp8(x.device),
        CHUNK=FEW if ids.numel() <= FEW else MANY, BLOCK_N=tile.block_n, BLOCK_O=tile.block_o, BLOCK_K=tile.block_k,
        EVEN=inputs % tile.block_k == 0, PDL=early,
        num_warps=tile.warps, num_stages=tile.stages, maxnreg=tile.registers, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
