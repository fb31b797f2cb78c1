"""How the products of experts are cut: the tuned constants."""

from typing import NamedTuple

from .mxfp4 import GROUP, WIDTH

MAX_ROWS = 512
"""Tokens that the kernel takes in 16 bits; the experts of more are PyTorch's grouped products."""


class Tile(NamedTuple):
    """What a program multiplies at a time, of one expert: block_o outputs by block_k inputs, and block_n rows.

    Two things decide the bits of a result, so that all tiles of a shape have them in common: block_o, because from 64
    on the tensor cores take instructions of whole groups of warps, and parts, into which the columns of MXFP4 are cut,
    and whose sums are added up in their order. shared: whether each part has a program of its own. warps, stages: of
    Triton's pipeline. registers: those that a thread may have, None: as many as the compiler finds best. prefetch: the
    tiles that the second product fetches before it waits.
    """

    block_o: int
    block_k: int
    block_n: int
    warps: int = 4
    stages: int = 4
    registers: int | None = None
    prefetch: int = 1
    parts: int = 1
    shared: bool = False


TILES = Tile(64, 128, 16), Tile(64, 128, 32), Tile(64, 64, 64)
"""Of 16 bits, in ascending order of rows."""
SCALED = Tile(64, 128, 16, stages=5), Tile(64, 128, 32), Tile(64, 128, 64, stages=3)
"""Of FP8, whose inputs have scales in blocks of 128."""
MXFP4 = Tile(128, 256, 16, stages=3, registers=168), Tile(128, 256, 32, stages=3), Tile(64, 256, 64, stages=3)
"""Of MXFP4, whose words have the codes of 256 inputs. Instructions bound it, not memory: a warp that decodes 32 rows of
the weights takes three quarters of those of one that decodes 16 (counted), and waits half as often for the tensor
cores."""
AT_ONCE = 3 * 132
"""Programs with the first of these tiles that an H200 runs at once: so many registers a thread leave room for three on
each multiprocessor."""
WIDE = (Tile(64, 32, 16, stages=2),)
"""Of float32, which is not tuned."""


def parts(outputs: int, inputs: int, top: int) -> int:
    """Parts into which the columns of MXFP4 are cut: as many as run at once for one token, of as many words each."""
    tiles, cuts = -(-outputs // MXFP4[0].block_o), -(-inputs // WIDTH)
    most = max(1, AT_ONCE // (tiles * top))
    return next(count for count in range(min(most, cuts), 0, -1) if cuts % count == 0)


def tile(tokens: int, top: int, experts: int, shape: tuple[int, int], scale_size: int, size: int) -> Tile:
    """The tile for so many tokens, of which each has `top` of the experts. shape: outputs and inputs. scale_size: of
    the `Kind`. size: bytes of a number of the activations.

    Rows of a tile are those that an expert has on average, twice over, so that few experts need a second tile.
    """
    tiles = MXFP4 if scale_size == GROUP else SCALED if scale_size else WIDE if size == 4 else TILES
    rows = min(tokens, -(-2 * tokens * top // experts))
    tile = next((each for each in tiles if rows <= each.block_n), tiles[-1])
    if scale_size != GROUP:
        return tile
    cut = parts(*shape, top)
    programs = -(-shape[0] // tile.block_o) * min(tokens * top, experts)
    return tile._replace(parts=cut, shared=cut > 1 and 3 * programs <= 2 * AT_ONCE)
