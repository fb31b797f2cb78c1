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
LEAST_HEIGHT = 64
"""Rows of the weights in a tile from which on groups of warps multiply (wgmma)."""


def has_descriptors(device: torch.device) -> bool:
    """True if a device reads tiles by descriptors."""
    return card_of(device).capability >= HOPPER


def serves(product: Product, tile: ProductTile) -> bool:
    """True if `wide_kernel` computes a product in place of `small_m_kernel`, which would take this tile."""
    x, after = product.x, product.after
    if len(x) < LEAST_ROWS or not has_descriptors(x.device) or tile.block_o < LEAST_HEIGHT:
        return False
    if product.kind or isinstance(after, Exchange) or x.stride(0) % 8 or x.data_ptr() % 16:
        return False
    return not isinstance(after, QkvHeads) or (after.q_norm is None and after.key_cache.shape[3] % TILE.block_o == 0)


def launch(product: Product, out: torch.Tensor, parts: int, tile: ProductTile | None = None) -> None:
    """Run the kernel with the arguments of `small_m.launch`. tile: None: by the parts."""
    x, weight, before, after = product.x, product.weight, product.before, product.after
    rows, inputs, outputs = *x.shape, len(weight)
    tile = tile or (TILE if parts == 1 and rows >= MANY_ROWS else SMALL_TILE).fitting(card_of(x.device).memory)
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
