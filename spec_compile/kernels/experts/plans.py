"""How the products of experts are cut: the tuned constants."""

from typing import NamedTuple

from .mxfp4 import GROUP

MAX_ROWS = 512
"""Tokens that the kernel takes in 16 bits; the experts of more are PyTorch's grouped products."""


class Tile(NamedTuple):
    """What a program multiplies at a time, of one expert: block_o outputs by block_k inputs, and block_n rows. None of
    it changes a bit of the result, but for block_o: from 64 on the tensor cores take instructions of whole groups of
    warps. warps, stages: of Triton's pipeline. prefetch: the tiles that the second product fetches before it waits."""

    block_o: int
    block_k: int
    block_n: int
    warps: int = 4
    stages: int = 4
    prefetch: int = 1


TILES = Tile(64, 128, 16), Tile(64, 128, 32), Tile(64, 64, 64)
"""Of 16 bits, in ascending order of rows."""
SCALED = Tile(64, 128, 16, stages=5), Tile(64, 128, 32), Tile(64, 128, 64, stages=3)
"""Of FP8, whose inputs have scales in blocks of 128."""
MXFP4 = Tile(64, 256, 16), Tile(64, 256, 32), Tile(64, 256, 64, stages=3)
"""Of MXFP4, which is not tuned. Words have the codes of 256 inputs."""
MANY_PAIRS, MXFP4_OF_MANY = 16, (Tile(128, 256, 16, stages=3), Tile(128, 256, 32, stages=3), MXFP4[2])
"""Of MXFP4 from so many pairs of a token and an expert on, which keep a GPU busy with tiles of twice as many outputs. A
warp that decodes 32 rows of the weights takes three quarters of the instructions of one that decodes 16 (counted)."""
WIDE = (Tile(64, 32, 16, stages=2),)
"""Of float32, which is not tuned."""


def tile(tokens: int, top: int, experts: int, scale_size: int, size: int) -> Tile:
    """The tile for so many tokens, of which each has `top` of the experts. scale_size: of the `Kind`. size: bytes of a
    number of the activations.

    Rows of a tile are those that an expert has on average, twice over, so that few experts need a second tile.
    """
    tiles = SCALED if scale_size else WIDE if size == 4 else TILES
    if scale_size == GROUP:
        tiles = MXFP4 if tokens * top < MANY_PAIRS else MXFP4_OF_MANY
    rows = min(tokens, -(-2 * tokens * top // experts))
    return next((each for each in tiles if rows <= each.block_n), tiles[-1])
