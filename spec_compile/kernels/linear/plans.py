"""How the small-m product is cut, for each shape: the tuned constants."""

from typing import NamedTuple

MAX_ROWS = 512
"""Rows of activations that the kernel takes."""
CUT = 256
"""Where programs share the columns of the weights, they are cut at multiples of this."""


class Tile(NamedTuple):
    """What one program multiplies at a time; none of it changes a bit of the result.

    block_o: rows of the weights, and block_k columns. block_n: rows of activations (at most; fewer take less). warps,
    stages: of Triton's pipeline. late: the next kernel may begin when so many tiles are left. prefetch: so many of a
    program's first tiles are fetched to the L2 cache before the wait.
    """

    block_o: int
    block_k: int
    block_n: int
    warps: int = 4
    stages: int = 4
    late: int = 1
    prefetch: int = 1


class Plan(NamedTuple):
    """How the products of one shape of weights are computed. What decides the bits holds for every number of rows.

    parts: programs that share the columns. tiles: by the number of rows, in ascending order of `block_n`; the last one
    serves all larger numbers, too. All of them take the same instructions of the tensor cores: those of whole groups of
    warps if `block_o` is 64 or more, or else those of single warps.
    """

    parts: int
    tiles: tuple[Tile, ...]

    def tile(self, rows: int) -> Tile:
        return next((tile for tile in self.tiles if rows <= tile.block_n), self.tiles[-1])


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def squared_columns(size: int) -> int:
    """Columns of the residual stream, of `size`, whose squares one program adds up."""
    return 64 if size >= 4096 else 32 if size >= 2048 else 16


def plan(outputs: int, inputs: int, processors: int = 132) -> Plan | None:
    """The plan of a product with weights [outputs, inputs] on so many multiprocessors; None: the kernel cannot run."""
    if inputs % 16:
        return None
    wide = Tile(128, 64, 256, warps=8, stages=3, prefetch=0)
    tiles = ceil_div(outputs, 64)
    if tiles > 2 * processors:
        few = Tile(128, 128, 32, warps=8, stages=3)
        return Plan(1, (few, few._replace(block_n=64, stages=4), wide))
    few = Tile(64, 128, 16, stages=8)
    parts = min(max(processors // tiles, 1), ceil_div(inputs, CUT), 8)
    return Plan(parts, (few, few._replace(block_n=64, stages=5), wide))
