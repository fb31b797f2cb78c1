"""How the small-m product is cut, for each shape: the tuned constants."""

import functools
from typing import NamedTuple

MAX_ROWS = 512
"""Rows of activations that the kernel takes."""
CUT = 256
"""Where programs share the columns of the weights, they are cut at multiples of this."""
AT_ONCE = 1 << 30


class Tile(NamedTuple):
    """What one program multiplies at a time; none of it changes a bit of the result.

    block_o: rows of the weights, and block_k columns. block_n: rows of activations. warps, stages: of Triton's
    pipeline. late: the next kernel may begin when so many tiles are left. prefetch: so many of a program's first tiles
    are fetched to the L2 cache before the wait. bits: of a weight.
    """

    block_o: int
    block_k: int
    block_n: int
    warps: int
    stages: int
    late: int = 1
    prefetch: int = 1
    bits: int = 16

    def fitting(self, memory: int) -> "Tile":
        """The tile with as many stages as so many bytes of shared memory hold, and fewer columns if it has to be."""
        tile, reserve = self, 4096
        while self.bits == 16 and tile.block_k > 32 and 2 * tile._stage_bytes > memory - reserve:
            tile = tile._replace(block_k=tile.block_k // 2)
        return tile._replace(stages=max(1, min(tile.stages, (memory - reserve) // tile._stage_bytes)))

    @property
    def registers(self) -> int | None:
        """The most that a thread may take where weights and activations have 8 bits; None: as the compiler decides.

        With two tiles of 32 sums, of a step and of all, 128 suffice. The compiler takes more for what stands around a
        product, and a multiprocessor would hold fewer of the programs that hide each other's waiting.
        """
        return 128 if self.block_o * self.block_n == 32 * 32 * self.warps else None

    @property
    def _stage_bytes(self) -> int:
        return self.block_k * (self.block_o * self.bits + self.block_n * 16) // 8


class Plan(NamedTuple):
    """How the products of one shape of weights are computed. What decides the bits holds for every number of rows.

    parts: programs that share the columns. tiles: by the number of rows, in ascending order of `block_n`; the last one
    serves all larger numbers, too. All of them take the same instructions of the tensor cores: those of whole groups of
    warps (Hopper's wgmma) if `block_o` is 64 or more, or else those of single warps.
    """

    parts: int
    tiles: tuple[Tile, ...]

    def tile(self, rows: int) -> Tile:
        return next((tile for tile in self.tiles if rows <= tile.block_n), self.tiles[-1])


MANY_OUTPUTS = Tile(128, 128, 16, 8, 4), Tile(128, 128, 64, 8, 4), Tile(128, 64, 128, 8, 4), Tile(128, 64, 256, 8, 4)
OUTPUTS = Tile(64, 256, 16, 4, 4), Tile(64, 128, 64, 4, 5), Tile(64, 64, 128, 4, 6), Tile(128, 64, 128, 8, 6)
SHARED = Tile(64, 256, 16, 4, 4), Tile(64, 128, 64, 4, 5), Tile(64, 64, 128, 4, 4)
SHORT = Tile(64, 128, 16, 4, 5), Tile(64, 128, 64, 4, 5), Tile(64, 64, 128, 4, 4)
FEW_OUTPUTS = Tile(16, 256, 16, 4, 4), Tile(16, 256, 64, 4, 3), Tile(16, 64, 256, 4, 4)
"""Tuned by ``python -m benchmarks.kernels.matmul --tune`` on an H200 with the layers of Llama-3.1-8B, Llama-3.2-1B,
Qwen3-0.6B and SmolLM2-135M, and for more than 64 rows by `--wide` with those of Llama-3.1-8B."""
PACKED = {
    8: (Tile(64, 128, 16, 4, 3), Tile(64, 128, 64, 4, 3), Tile(128, 128, 128, 8, 3)),
    4: (Tile(128, 256, 16, 4, 4), Tile(128, 256, 64, 8, 3), Tile(128, 256, 128, 8, 2)),
}
ALONE = Tile(128, 256, 16, 4, 4), Tile(256, 256, 64, 8, 3), Tile(128, 256, 128, 8, 2)
"""Of quantised weights, by their bits, and of 4 bits where no programs share the columns; for up to 64 rows tuned by
``python -m benchmarks.kernels.matmul`` on an H200 with the layers of Llama-3.1-8B. A tile of twice the outputs reads x
half as often, which at 64 rows is most of what it reads."""
PARTS = {(1024, 3072): 4, (4096, 1024): 1}
"""Programs that share the columns, by (outputs, inputs), where it was found to differ from the rule in `plan`."""


MAX_HEAD = 64
"""The largest head whose norm the product's end forms, because a tile has to hold it whole: larger tiles are fewer."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def squared_columns(size: int) -> int:
    """Columns of a residual stream of this width whose squares are added up together."""
    return 64 if size >= 4096 else 32 if size >= 2048 else 16


def appending(tile: Tile, head: int, memory: int) -> Tile:
    """The tile of a product that ends in heads, with rows for a whole one of size `head` if they are normed (0: they
    are not)."""
    if tile.block_o >= head:
        return tile
    return tile._replace(block_o=head, warps=8 if head > 64 else 4).fitting(memory)


@functools.cache
def plan(outputs: int, inputs: int, processors: int = 132, memory: int = 232_448) -> Plan:
    """The plan of a product with weights [outputs, inputs] on a GPU with so many multiprocessors, and so many bytes of
    shared memory for a program.

    Programs share columns only as far as each multiprocessor gets at most one, and each program at least 512 of them.
    """
    tiles, elements = ceil_div(outputs, 64), outputs * inputs
    if outputs < 1024:
        parts, sizes = max(1, inputs // 512), FEW_OUTPUTS
        parts = min(parts, max(1, 2 * processors // ceil_div(outputs, 16)))
    elif tiles > 2 * processors or (tiles > processors and inputs >= 2048):
        parts, sizes = 1, MANY_OUTPUTS
    else:
        parts = PARTS.get((outputs, inputs)) or min(max(processors // tiles, 1), max(inputs // 512, 1), 8)
        sizes = SHARED if parts > 1 else OUTPUTS
        sizes = SHORT if elements < 1 << 23 else sizes
    manner = {"late": AT_ONCE if elements <= 1 << 24 else 1, "prefetch": 4 if elements < 1 << 23 else 1}
    return Plan(parts, tuple(tile._replace(**manner).fitting(memory) for tile in sizes))


@functools.cache
def packed_plan(outputs: int, inputs: int, bits: int, processors: int = 132, memory: int = 232_448) -> Plan:
    """`plan` of a product with quantised weights of so many bits.

    At most four programs share the columns, 512 or more each, as far as each multiprocessor gets at most three. Tiles
    of 4 bits are halved where each would get less than one, or the memory is small.
    """
    sizes = PACKED[bits]
    tiles = ceil_div(outputs, sizes[0].block_o)
    parts = max(1, min(3 * processors // tiles, inputs // 512, 4))
    manner = {"late": AT_ONCE if outputs * inputs * bits <= 1 << 28 else 1, "bits": bits}
    if bits == 4:
        parts = next(each for each in range(parts, 0, -1) if ceil_div(inputs, CUT) % each == 0)
        sizes = ALONE if parts == 1 else sizes
        if 2 * tiles * parts <= processors or memory < 160_000:
            manner |= {"block_o": 64, "warps": 4}
    return Plan(parts, tuple(tile._replace(**manner).fitting(memory) for tile in sizes))
