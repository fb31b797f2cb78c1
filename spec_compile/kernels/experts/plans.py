"""`ExpertTile`: how the products of experts are cut, with the tuned constants."""

from typing import NamedTuple

from ...quantised.mxfp4 import GROUP, WIDTH

LEAST_PAIRS, LEAST_MXFP4_PAIRS = 256, 64
"""Pairs of a token and an expert from which on they are sorted, because each program of `experts_kernel` looks through
all of them for its expert's. In MXFP4 instructions bound the time: 64 pairs of gpt-oss-20b take 164 us sorted,
171 looked through on an H200."""


class ExpertTile(NamedTuple):
    """The tile that a program multiplies at a time: block_o outputs by block_k inputs of one expert, and block_n rows.

    All tiles of a shape agree in two things, because they decide the bits of a result: in `parts`, and in whether
    block_o is at least 64, from where on a group of warps shares an instruction of the tensor cores.

    block_o, block_k, block_n: sizes of the tile.
    warps, stages: sizes of Triton's pipeline.
    registers: the most registers of a thread; None: as the compiler chooses.
    parts: stretches into which the columns of MXFP4 are cut; their sums are added in ascending order.
    shared: each part has its own program.
    sorted: the pairs are sorted by expert first (`wide_kernel`).
    """

    block_o: int
    block_k: int
    block_n: int
    warps: int = 4
    stages: int = 4
    registers: int | None = None
    parts: int = 1
    shared: bool = False
    sorted: bool = False


HALF_TILES = (
    ExpertTile(64, 128, 16), ExpertTile(64, 128, 32), ExpertTile(128, 64, 64), ExpertTile(128, 64, 128, 8, 3),
)  # fmt: skip
"""Tiles for weights in 16 bits; these and the others in ascending order of rows."""
FP8_TILES = ExpertTile(64, 128, 16, stages=5), ExpertTile(64, 128, 32), ExpertTile(128, 128, 64, 8, 3)
"""Tiles for weights in FP8 with scales for blocks of 128."""
SHORT, LONG = 1024, 4096
"""Numbers of inputs that decide the tile of few rows in 16 bits and FP8, see `_of_few_rows`. Rows of up to SHORT inputs
are soon read, so that larger tiles lose less time at the ends of programs: in the second product of Qwen3-30B-A3B in
bfloat16 16 tokens take 66 us, with the tiles of longer rows 79, on an H200. Up to LONG inputs three stages suffice."""
MXFP4_TILES = (
    ExpertTile(128, 256, 16, stages=3, registers=168), ExpertTile(128, 256, 32, stages=3),
    ExpertTile(64, 256, 64, stages=3),
)  # fmt: skip
"""Tiles for weights in MXFP4, whose words have the codes of 256 inputs. Instructions bound these products, not memory:
per row of weights, a warp that decodes 32 rows needs three quarters of the instructions of one that decodes 16, and it
waits half as often for the tensor cores."""
AT_ONCE = 3 * 132
"""Programs with the first tile of MXFP4 that an H200 runs at once: with 168 registers a thread, a multiprocessor has
room for three."""
FLOAT32_TILES = (ExpertTile(64, 32, 16, stages=2),)
"""The tile for float32; not tuned."""


def parts(outputs: int, inputs: int, top: int) -> int:
    """Parts into which the columns of MXFP4 are cut: for one token all programs run at once, and parts are equal.

    gpt-oss, 5760 outputs, 2880 inputs, top = 4: 45 tiles of outputs, 12 words of 256 columns; 396 // (45 * 4) = 2 parts
    of 6 words.
    """
    tiles, cuts = -(-outputs // MXFP4_TILES[0].block_o), -(-inputs // WIDTH)
    most = max(1, AT_ONCE // (tiles * top))
    return next(count for count in range(min(most, cuts), 0, -1) if cuts % count == 0)


def _of_few_rows(tile: ExpertTile, tokens: int, inputs: int, scale_size: int) -> ExpertTile:
    """A tile of up to 16 rows, changed to suit the number of inputs. One token has few programs, which gain nothing.

    Qwen3-30B-A3B in bfloat16 with 16 tokens: (64, 128, 16) with 3 stages in the first product, which has 2,048 inputs,
    and (128, 64, 16) with 3 stages in the second one, which has 768.
    """
    if tokens == 1 or inputs > LONG:
        return tile
    if inputs > SHORT:
        return tile._replace(stages=3)
    return tile._replace(block_o=128, block_k=scale_size or 64, stages=3)


def tile(tokens: int, top: int, experts: int, shape: tuple[int, int], scale_size: int, size: int) -> ExpertTile:
    """The tile for `tokens` tokens that go to `top` of `experts` experts each.

    A tile has twice the rows of an average expert, so that few experts need a second tile.

    shape: outputs and inputs.
    scale_size: `ExpertFormat.scale_size`.
    size: bytes of a number of the activations.
    """
    if scale_size:
        tiles = MXFP4_TILES if scale_size == GROUP else FP8_TILES
    else:
        tiles = FLOAT32_TILES if size == 4 else HALF_TILES
    rows = min(tokens, -(-2 * tokens * top // experts))
    tile = next((each for each in tiles if rows <= each.block_n), tiles[-1])
    tile = tile._replace(sorted=tokens * top >= (LEAST_MXFP4_PAIRS if scale_size == GROUP else LEAST_PAIRS))
    if scale_size != GROUP:
        return _of_few_rows(tile, tokens, shape[1], scale_size) if tile.block_n == 16 and size == 2 else tile
    cut = parts(*shape, top)
    programs = -(-shape[0] // tile.block_o) * min(tokens * top, experts)
    return tile._replace(parts=cut, shared=not tile.sorted and cut > 1 and 3 * programs <= 2 * AT_ONCE)
