"""Products of many rows of 16 bits, such as those of prompts, with the bits of form "small_m" (see `wide_kernel`)."""

import torch

from ..all_reduce import Exchange
from ..card import HOPPER, card_of
from .plans import CUT, ProductTile, ceil_div, squared_columns
from .product import Gate, Product, QkvHeads, ResidualStream

try:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from .wide_kernel import wide_kernel
except ImportError:  # no GPU
    wide_kernel = None

LEAST_ROWS = 384
"""Rows from which on it is faster than `small_m_kernel`."""
TILE, SMALL_TILE = ProductTile(128, 64, 256, 8, 4), ProductTile(128, 64, 128, 8, 4)
"""The tile, and that of fewer rows and of products whose columns are cut, which holds two sums. They reach 0.81 to 0.96
of cuBLAS's speed with 2,048 rows of Llama-3.1-8B's layers on an H200."""
MANY_ROWS = 512
"""Rows from which on the larger tile is faster."""
GATED_TILE, LEAST_GATED_ROWS, BUSY = ProductTile(256, 64, 128, 8, 4), 65, 0.8
"""The tile of a gated product of LEAST_GATED_ROWS to MANY_ROWS rows whose columns are not cut, if its programs keep a
share of BUSY of the multiprocessors busy. That of Llama-3.1-8B took 0.88 of `small_m_kernel`'s time with 128 and with
256 rows on an H200. Tiles of few outputs, and cut columns, took 0.9 to 1.3."""
LEAST_HEIGHT = 64
"""Rows of the weights in a tile from which on groups of warps multiply (wgmma)."""


def has_descriptors(device: torch.device) -> bool:
    """True if a device reads tiles by descriptors."""
    return card_of(device).capability >= HOPPER


def serves(product: Product, parts: int, tile: ProductTile) -> bool:
    """True if `wide_kernel` computes a product in place of `small_m_kernel`, which would take these parts and tile."""
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


def launch(product: Product, out: torch.Tensor, parts: int, tile: ProductTile | None = None) -> None:
    """Run the kernel with the arguments of `small_m.launch`. tile: None: by the parts and rows."""
    x, weight, before, after = product.x, product.weight, product.before, product.after
    rows, inputs, outputs = *x.shape, len(weight)
    if tile is None:
        tile = TILE if parts == 1 and rows >= MANY_ROWS else SMALL_TILE
        tile = (GATED_TILE if _fills_gated_tiles(product, parts) else tile).fitting(card_of(x.device).memory)
    stream, heads = (after if isinstance(after, each) else None for each in (ResidualStream, QkvHeads))
    height = tile.block_o // 2 if heads or isinstance(after, Gate) else tile.block_o
    nodes, (_, kv_heads, capacity, size) = (heads.cos.shape[1], heads.key_cache.shape) if heads else (1, (0, 0, 0, 0))
    wide_kernel[(ceil_div(rows, tile.block_n), ceil_div(outputs, tile.block_o))](
        TensorDescriptor.from_tensor(x, [tile.block_n, tile.block_k]),
        TensorDescriptor.from_tensor(weight, [height, tile.block_k]),
        product.bias, out, before, stream, heads, rows, outputs, inputs, stream.residual.stride(0) if stream else 0,
        nodes, capacity,
        BLOCK_N=tile.block_n, HEIGHT=height, BLOCK_K=tile.block_k, CUT=CUT, PARTS=parts,
        TERMS=before.squares.shape[1] if before else 1, SQUARED=squared_columns(outputs),
        GATED=isinstance(after, Gate), HEADS=out.shape[1] // size if heads else 0, KV_HEADS=kv_heads, D=size,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
