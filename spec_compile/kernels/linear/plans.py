"""How the skinny GEMM is cut, for each shape: the tuned constants."""

import functools
from typing import NamedTuple

CUT = 256
"""Where programs share the columns of the weights, they are cut at multiples of this."""
AT_ONCE = 1 << 30
RESERVE = 4096
"""Bytes of shared memory that a tile leaves for sums and reductions."""


class ProductTile(NamedTuple):
    """The stretch of a product that a program multiplies at a time; it changes no bit of the result.

    block_o: rows of the weights.
    block_k: columns of the weights.
    block_n: rows of activations.
    warps, stages: sizes of Triton's pipeline.
    late: tiles that are left when the next kernel may begin.
    prefetch: a program's first tiles that are fetched to the L2 cache before the wait.
    bits: size of a weight.
    blocks: how many blocks of block_n rows it serves if a larger tile follows.
    unroll: stretches of block_k columns that a step multiplies; only FP8 with scales for blocks has more than one.
    turns: parts of the columns that a program multiplies one after the other; an even number only of 4 bits.
    """

    block_o: int
    block_k: int
    block_n: int
    warps: int
    stages: int
    late: int = 1
    prefetch: int = 1
    bits: int = 16
    blocks: int = 1
    unroll: int = 1
    turns: int = 1

    def fitting(self, memory: int) -> "ProductTile":
        """The tile with as many stages, and if need be fewer columns, as fit into `memory` bytes of shared memory."""
        tile, room = self, memory - RESERVE
        while self.bits == 16 and tile.block_k > 32 and 2 * tile._stage_bytes > room:
            tile = tile._replace(block_k=tile.block_k // 2)
        return tile._replace(stages=max(1, min(tile.stages, room // tile._stage_bytes)))

    @property
    def registers(self) -> int | None:
        """The most registers that a thread may take if weights and activations have 8 bits; None: the compiler decides.

        128 suffice for two tiles of 32 sums, one of a step and one of all. The compiler would take more for the
        steps around a product, and a multiprocessor would hold fewer programs, which hide each other's waiting. Parts
        in turn have more sums.
        """
        return 128 if self.turns == 1 and self.block_o * self.block_n == 32 * 32 * self.warps else None

    def fits(self, memory: int) -> bool:
        """True if it fits into `memory` bytes of shared memory."""
        return self.bytes <= memory - RESERVE

    @property
    def bytes(self) -> int:
        """The shared memory that its stages take."""
        return self.stages * self._stage_bytes

    @property
    def sums(self) -> int:
        """Numbers of the result that a thread holds."""
        return self.block_o * self.block_n // (32 * self.warps)

    @property
    def _stage_bytes(self) -> int:
        return self.unroll * self.block_k * (self.block_o * self.bits + self.block_n * 16) // 8


class ProductPlan(NamedTuple):
    """How the products of one shape of weights are computed. No number of rows changes what decides the bits: parts,
    and the instructions of the tensor cores, which belong to groups of warps (Hopper's wgmma) if `block_o` is 64 or
    more, else to single warps.

    parts: programs that share the columns.
    tiles: in ascending order of the rows that they serve, blocks * block_n; the last one also serves more.
    """

    parts: int
    tiles: tuple[ProductTile, ...]

    def tile(self, rows: int) -> ProductTile:
        return next((tile for tile in self.tiles if rows <= tile.blocks * tile.block_n), self.tiles[-1])


MANY_OUTPUTS = (
    ProductTile(128, 128, 16, 8, 4),
    ProductTile(128, 128, 32, 8, 4),
    ProductTile(128, 128, 64, 8, 4),
    ProductTile(128, 64, 128, 8, 4),
    ProductTile(128, 64, 256, 8, 4),
)
OUTPUTS = (
    ProductTile(64, 256, 16, 4, 4),
    ProductTile(64, 128, 64, 4, 5),
    ProductTile(64, 64, 128, 4, 6),
    ProductTile(128, 64, 128, 8, 6),
)
OVER_64 = ProductTile(64, 64, 64, 4, 5, blocks=2), ProductTile(64, 64, 128, 4, 4)
SHARED = ProductTile(64, 256, 16, 4, 4), ProductTile(64, 128, 32, 4, 5), ProductTile(64, 128, 64, 4, 5), *OVER_64
SHORT = ProductTile(64, 128, 16, 4, 5), ProductTile(64, 128, 32, 4, 5), ProductTile(64, 128, 64, 4, 5), *OVER_64
SMALL = ProductTile(64, 128, 16, 4, 5), ProductTile(64, 128, 32, 4, 5, blocks=2), *OVER_64
FEW_OUTPUTS = ProductTile(16, 256, 16, 4, 4), ProductTile(16, 256, 64, 4, 3, blocks=2), ProductTile(32, 64, 128, 4, 4)
FEW_SHARED = (ProductTile(16, 256, 16, 2, 4), *FEW_OUTPUTS[1:])
NARROW = ProductTile(32, 128, 16, 4, 3), ProductTile(32, 128, 64, 4, 6), ProductTile(32, 64, 128, 4, 4)
BROAD = ProductTile(128, 128, 16, 4, 5), ProductTile(64, 128, 64, 4, 5), *OVER_64
"""Few programs multiply a small product, so that two blocks of rows are faster than one: with 128 rows, products of
SmolLM2-135M and Qwen3-0.6B take 0.5 to 0.8 of the time of a tile of 128 or 256 rows. SMALL has two for 33 to 64 rows,
too, if all programs run at once: rounds of Qwen3-0.6B take 0.94 of the time; Llama-3.2-1B, with too many, took 1.07.

The next kernel's programs begin on multiprocessors that have room for them, so only whole rounds tell a fast tile. Up
to 16 rows, rounds of SmolLM2-135M take 0.94 of the time if the gate has NARROW tiles, and 0.99 with FEW_SHARED ones;
rounds of Qwen3-0.6B take 0.95 if the gate has BROAD tiles. Tuned on an H200 with layers of Llama-3.1-8B, Llama-3.2-1B,
Qwen3-0.6B and SmolLM2-135M, and for more than 64 rows with Llama-3.1-8B's."""
EIGHT_BITS: tuple[dict[int, ProductTile], ...] = (
    {3: ProductTile(64, 128, 16, 4, 3, unroll=2), 4: ProductTile(64, 128, 16, 4, 5)},
    {2: ProductTile(64, 128, 32, 4, 5), 3: ProductTile(64, 128, 32, 4, 3), 4: ProductTile(64, 128, 32, 4, 4)},
    {2: ProductTile(64, 128, 64, 4, 5), 4: ProductTile(64, 128, 64, 4, 3)},
    {4: ProductTile(128, 128, 128, 8, 3)},
)
"""Tiles of 8 bits, and the most programs of a multiprocessor with which each is taken; the last one is also taken with
more. For up to 64 rows they were tuned on an H200 with the layers of Llama-3.1-8B, and with Llama-3.1-70B's as two or
four GPUs share them. Example: 14336 outputs make 224 programs, at most two for each of 132 multiprocessors, so the
first tile is taken of 16 rows, and of 64; 28672 make 448, at most four, so the second ones are."""
FEW, SOME, MANY = ProductTile(128, 256, 16, 4, 4), ProductTile(128, 256, 32, 4, 3), ProductTile(128, 256, 64, 8, 3)
SPREAD = ProductTile(64, 256, 32, 4, 3)
"""Tiles of 4 bits if programs share the columns. SPREAD serves up to 32 rows instead of SOME if more than two programs
share them, and up to 64 where MANY would make too few programs."""
BEGIN, TURNED_BLOCKS, BUSY = 1024, 8, 0.8
"""The columns that a program of MANY multiplies while it begins and ends, the blocks of rows up to which the faster
number of turns is chosen, beyond which a program multiplies all parts, and the share of multiprocessors that are to be
busy. Llama-3.1-8B's product with 14336 inputs takes 25.6 us of 64 rows in pairs and 34.0 part by part, and 631 us and
792 of 2,048 rows if programs multiply all parts; its rounds of 64 rows take 0.91 of the time. With SOME and SPREAD,
rounds of 32 rows take 0.88 of the time of MANY."""
UNSHARED = FEW, SOME, ProductTile(256, 256, 64, 8, 3)
"""Tiles of 4 bits if no programs share the columns. A tile of twice the outputs reads x half as often, which at 64 rows
is most of what it reads."""
PARTS = {(1024, 3072): 4, (4096, 1024): 1}
"""Programs that share the columns, by (outputs, inputs), where another number than the rule's in `plan` was faster."""
MAX_HEAD = 64
"""The largest head that the product's end norms. A tile has to hold a whole head, and larger tiles are fewer."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def squared_columns(size: int) -> int:
    """Columns of a residual stream of this width whose squares are added up together."""
    return 64 if size >= 4096 else 32 if size >= 2048 else 16


def appending(tile: ProductTile, head: int, memory: int) -> ProductTile:
    """The tile of a product that ends in heads. It has rows for a whole head of size `head` if heads are normed (0:
    they are not)."""
    if tile.block_o >= head:
        return tile
    return tile._replace(block_o=head, warps=8 if head > 64 else 4).fitting(memory)


@functools.cache
def plan(outputs: int, inputs: int, processors: int = 132, memory: int = 232_448) -> ProductPlan:
    """The plan of a product with weights [outputs, inputs] on a GPU with `processors` multiprocessors, and `memory`
    bytes of shared memory for a program.

    Programs share columns only as far as each multiprocessor gets at most one, and each program at least 512 of them.
    """
    tiles, elements = ceil_div(outputs, 64), outputs * inputs
    if outputs < 1024:
        parts = min(max(1, inputs // 512), max(1, 2 * processors // ceil_div(outputs, 16)))
        sizes = FEW_SHARED if parts > 1 else FEW_OUTPUTS
    elif tiles <= processors // 2 and inputs < 1024:
        parts, sizes = 1, NARROW
    elif tiles > 2 * processors or (tiles > processors and inputs >= 2048):
        parts, sizes = 1, MANY_OUTPUTS
    else:
        parts = PARTS.get((outputs, inputs)) or min(max(processors // tiles, 1), max(inputs // 512, 1), 8)
        sizes = SHARED if parts > 1 else OUTPUTS
        if elements < 1 << 23:
            sizes = SMALL if 2 * tiles * parts <= processors else BROAD if parts == 1 else SHORT
    manner = {"late": AT_ONCE if elements <= 1 << 24 else 1, "prefetch": 4 if elements < 1 << 23 else 1}
    return ProductPlan(parts, tuple(tile._replace(**manner).fitting(memory) for tile in sizes))


@functools.cache
def packed_plan(outputs: int, inputs: int, bits: int, processors: int = 132, memory: int = 232_448) -> ProductPlan:
    """`plan` of a product with quantised weights of `bits` bits.

    At most four programs share the columns, 512 or more each, as far as each multiprocessor gets at most three. Eight
    share many columns of 4 bits: rounds of Llama-3.1-8B of up to 16 rows take 0.92 of the time that four take. Tiles of
    4 bits are halved where each multiprocessor would get less than one.
    """
    tiles = ceil_div(outputs, 128 if bits == 4 else 64)
    parts = max(1, min(3 * processors // tiles, inputs // 512, 8 if bits == 4 and inputs >= 12288 else 4))
    manner = {"late": AT_ONCE if outputs * inputs * bits <= 1 << 28 else 1, "bits": bits}
    if bits == 8:
        busiest = min(4, ceil_div(tiles * parts, processors))
        sizes = [next(tile for most, tile in known.items() if busiest <= most) for known in EIGHT_BITS]
    else:
        parts = next(each for each in range(parts, 0, -1) if ceil_div(inputs, CUT) % each == 0)
        if parts > 1:
            sizes = sizes_in_turns(outputs, parts, inputs, processors)
        else:
            sizes = [_halved(tile) for tile in UNSHARED] if 2 * tiles <= processors else [*UNSHARED]
    return ProductPlan(parts, tuple(tile._replace(**manner).fitting(memory) for tile in sizes))


def _halved(tile: ProductTile) -> ProductTile:
    return tile._replace(block_o=64, warps=4)


def sizes_in_turns(outputs: int, parts: int, inputs: int, processors: int) -> list[ProductTile]:
    """Tiles of 4 bits for 16 and 32 rows, and for ever more blocks of 64, with the faster numbers of turns.

    Example: 32 tiles, 8 parts of 1792 columns. 256 rows are 4 blocks, and pairs 512 programs, which 132 multiprocessors
    run one after the other in the time of 4 * (3584 + 1024) columns; all parts are 128 programs, 14336 + 1024.
    """

    def programs(turns: int, blocks: int) -> int:
        return blocks * ceil_div(outputs, MANY.block_o) * parts // turns

    def time(turns: int, blocks: int) -> int:
        return ceil_div(programs(turns, blocks), processors) * (turns * inputs // parts + BEGIN)

    choices = (1, 2, parts) if parts % 2 == 0 else (1,)
    sizes = [_halved(FEW) if 2 * programs(1, 1) <= processors else FEW, SOME]
    if parts > 2:
        made = 2 * programs(1, 1)  # tiles have half the height
        turns = 1 if made <= 3 * processors or parts % 2 else 2
        sizes[1] = SPREAD._replace(turns=turns, stages=4 if made // turns <= 2 * processors else 3)
    for blocks in range(1, TURNED_BLOCKS + 1):
        # Beyond 64 rows pairs, or all parts, so that few kernels are compiled.
        known = choices if blocks == 1 else choices[-2:]
        turns = min(known, key=lambda each, blocks=blocks: time(each, blocks))
        tile, made = MANY._replace(blocks=blocks, turns=turns), programs(turns, blocks)
        if 2 * made <= processors:
            tile = _halved(tile)
        elif blocks == 1 and made < BUSY * processors and 4 * made <= 3 * processors:
            tile = SPREAD._replace(blocks=2, turns=turns)
        sizes.append(tile)
    return [*sizes, MANY._replace(turns=choices[-1])]
