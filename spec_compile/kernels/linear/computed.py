"""Plans of matrix products for cards on which nobody has tuned them, by a model of their time.

    time = START + sum over rounds of (norm(memory, port, cache, units, loop, decode) + end) + (JOIN + PART * parts)

A **round** is as many programs as the multiprocessors hold at once; the last round may have fewer. Each of its terms is
the time in which one part of the card would do its share. W and X are the bytes of weights and activations that a
program reads, p is the number of programs of the busiest multiprocessor:

- memory: W of all programs / the card's bandwidth; and X, if the L2 cache does not hold the activations
- port: p * W / what a multiprocessor gets from memory, so that few programs cannot use the whole bandwidth
- cache: p * (W + X) / what a multiprocessor gets from the L2 cache
- units: p * multiplications / the speed of the tensor cores
- loop: steps of a program * the longer of a wait for memory, and a step's instructions, which form one chain
- decode: p * weights of 4 or 8 bits / what a multiprocessor decodes

`norm` is the largest of them, and a little more if others come near. `end`: sums are rounded and stored, or sent as a
part. The last term counts if several programs share the columns, and add up their parts.

Example: 4096 outputs, 4096 inputs, one row of 16 bits on an H200 (132 multiprocessors, 4.46 TB/s of its 4.92), tiles
of 64 outputs by 256 inputs. One program has all columns: 64 programs, memory 7.5 us, port 64 * 4096 * 2 / 50.7 GB/s =
10.3 us, together 1.3 + 10.7 + 0.3 = 12.4 us. Two programs share them: 128 programs, memory 7.5, port 5.2 us, together
1.3 + 7.6 + 0.3 + 0.9 + 2 * 0.25 + 0.1 = 10.7 us, so two share. Measured: 11.4 us.

The constants are an H200's. The model gives the time of all products of a round of Llama-3.1-8B, Llama-3.2-1B,
Qwen3-0.6B and SmolLM2-135M with 1, 16 and 64 rows within 7 % of what was measured there.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

from ..card import REGISTERS, Card
from .plans import AT_ONCE, CUT, ProductPlan, ProductTile, ceil_div, squared_columns

START, JOIN, PART, END = 1.3, 0.9, 0.25, 0.04
"""Microseconds: of a launch and a program's first loads; of a sum of parts, and for each part; of an end, for each sum
that a thread holds."""
BANDWIDTH, PIECE = 0.918, 6
"""The share of the nominal bandwidth that reads reach, and the bytes that a tile's piece of a row takes longer."""
LATENCY = 0.8
"""Microseconds of a read from memory, under load."""
STEP, GROUP, WARP = 100, 30, 50
"""Clocks of a step besides its products, and of an instruction of the tensor cores in a chain, by a group of warps and
by a warp."""
PORT = {(10, 0): 38.0}
CACHE = {(8, 0): 32.0, (9, 0): 42.0, (10, 0): 50.0}
"""Bytes a clock that a multiprocessor gets from memory, elsewhere 25.6, and from the L2 cache, elsewhere 16, by
capability."""
UNITS = {(7, 5): 1024, (8, 0): 2048, (9, 0): 4096, (10, 0): 8192}
"""Operations a clock of a multiprocessor's tensor cores, by capability; elsewhere 512, as on cards for games."""
REACHED = 0.7
"""The share of the tensor cores' speed that products reach."""
OF_WARPS = {9: 0.2, 10: 0.1}
"""The share that instructions of single warps reach, where there are others."""
DECODED = {4: (26, 5.3, 0.5), 8: (16, 3.0, 0.85)}
"""By the bits of a weight: weights that a multiprocessor, and a warp, decodes a clock, and the share of that with tiles
of more than 16 rows, whose products wait."""
UNROLLED = 1.4
"""How much faster that is if a step multiplies two tiles, whose products wait together."""
MANY_ROWS = 512
ROWS = {1: 1.0, 16: 1.0, 64: 1.0, 128: 0.2, MANY_ROWS: 0.06}
"""Numbers of rows for which a plan is chosen, and their weights: a round has few, most often."""
TIMED = {16: (1, 16), 64: (64,), 128: (128,), 256: (MANY_ROWS,)}
"""By the rows of a tile: the numbers of rows by which such tiles are compared."""
TILES: dict[int, dict[int, list[tuple[int, ...]]]] = {
    # By the bits of a weight and the rows of a tile: (block_o, block_k, warps, stages), and `unroll` if it is not 1.
    16: {
        16: [(128, 128, 8, 4), (64, 256, 4, 4), (64, 128, 4, 5), (64, 64, 4, 4), (32, 256, 4, 4), (16, 256, 4, 4)],
        64: [(128, 128, 8, 4), (128, 64, 8, 6), (64, 128, 4, 5), (64, 64, 4, 3), (32, 128, 4, 5), (16, 256, 4, 3)],
        128: [(128, 64, 8, 4), (64, 64, 4, 4), (32, 64, 4, 4), (16, 64, 4, 4)],
        256: [(128, 64, 8, 4)],
    },
    8: {
        16: [(64, 128, 4, 3), (64, 128, 4, 5), (64, 128, 4, 3, 2)],
        64: [(64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5)],
        128: [(128, 128, 8, 3), (64, 128, 4, 3)],
    },
    4: {
        16: [(128, 256, 4, 4), (64, 256, 4, 4)],
        64: [(128, 256, 8, 3), (256, 256, 8, 3), (64, 256, 4, 3)],
        128: [(128, 256, 8, 2), (64, 256, 4, 2)],
    },
}  # fmt: skip
MOST_PARTS = {16: 8, 8: 4, 4: 4}
"""Programs that share the columns, at most, by the bits of a weight."""


class Choice(NamedTuple):
    """A plan, and the tiles that it was chosen from.

    time: microseconds of all `ROWS` by their weights.
    tiles: by their rows, the fastest first, as the model has it.
    """

    time: float
    plan: ProductPlan
    tiles: dict[int, list[ProductTile]]


@functools.cache
def plan(outputs: int, inputs: int, bits: int, card: Card) -> ProductPlan:
    """The plan of a product with weights [outputs, inputs] of `bits` bits (16: not quantised) that should be the
    fastest on a card. ValueError if no tile fits into the card's shared memory."""
    found = choices(outputs, inputs, bits, card)
    if not found:
        raise ValueError(
            f"card: {card.memory} bytes of shared memory hold no tile of a product; expected 48,000 or more"
        )
    return found[0].plan


def choices(outputs: int, inputs: int, bits: int, card: Card) -> list[Choice]:
    """The fastest plan of each number of parts, and on cards that have both of each family of instructions; the
    fastest first."""
    found = []
    for parts in parts_of(inputs, bits):
        for grouped in (True, False) if card.has_groups else (None,):
            tiles = {width: tiles_of(outputs, inputs, bits, card, width, grouped) for width in TILES[bits]}
            if tiles[16] and tiles[64]:
                found.append(_choice(outputs, inputs, parts, tiles, card))
    return sorted(found, key=lambda choice: choice.time)


def parts_of(inputs: int, bits: int) -> Iterator[int]:
    """The numbers of programs that may share the columns: each has 512 or more, and of 4 bits all have equally many."""
    for parts in range(1, max(1, min(MOST_PARTS[bits], inputs // 512)) + 1):
        if bits != 4 or ceil_div(inputs, CUT) % parts == 0:
            yield parts


def tiles_of(
    outputs: int, inputs: int, bits: int, card: Card, width: int, grouped: bool | None = None
) -> list[ProductTile]:
    """The tiles of `width` rows that fit into a card. grouped: True for those that groups of warps multiply, False for
    the others, None for all."""
    reading = outputs * inputs * bits / 8 / (BANDWIDTH * card.bandwidth) * 1e6
    manner = {"late": AT_ONCE if reading <= 7.6 else 1, "prefetch": 4 if bits == 16 and reading < 3.8 else 1}
    tiles = []
    for sizes in TILES[bits].get(width, ()):
        block_o, block_k, warps, stages, unroll = (*sizes, 1)[:5]
        tile = ProductTile(block_o, block_k, width, warps, stages, bits=bits, unroll=unroll, **manner)
        tile = tile.fitting(card.memory)
        if block_o >= squared_columns(outputs) and tile.fits(card.memory) and grouped in (None, block_o >= 64):
            tiles.append(tile)
    return tiles


def _choice(outputs: int, inputs: int, parts: int, tiles: dict[int, list[ProductTile]], card: Card) -> Choice:
    """The plan of `parts` parts with the fastest of the tiles, by their rows."""

    def time(tile: ProductTile, *rows: int) -> float:
        return sum(microseconds(outputs, inputs, each, parts, tile, card) for each in rows)

    for width, fitting in tiles.items():
        fitting.sort(key=lambda tile, rows=TIMED[width]: time(tile, *rows))
    few, some = tiles[16][0], tiles[64][0]
    twice = some._replace(blocks=2)
    many = min([twice, *tiles[128]], key=lambda tile: time(tile, 128))
    most = min(tiles[128] + tiles.get(256, []) or [some], key=lambda tile: time(tile, MANY_ROWS))
    chosen = [few, twice] if many == twice else [few, some, many]
    plan = ProductPlan(parts, tuple(chosen if chosen[-1] == most else [*chosen, most]))
    return Choice(sum(weight * time(plan.tile(rows), rows) for rows, weight in ROWS.items()), plan, tiles)


def microseconds(outputs: int, inputs: int, rows: int, parts: int, tile: ProductTile, card: Card) -> float:
    """The time of a product with weights that are in no cache, by the formula above."""
    blocks = ceil_div(rows, tile.block_n)
    programs = ceil_div(outputs, tile.block_o) * blocks * parts
    rounds, rest = divmod(programs, resident(tile, card) * card.processors)
    columns = min(inputs, ceil_div(ceil_div(inputs, CUT), parts) * CUT)
    time = START + (JOIN + PART * parts if parts > 1 else 0.0)
    end = END * tile.sums
    if parts > 1:
        end += parts * tile.block_o * tile.block_n / (CACHE.get(card.capability, 16) * card.clock * 1e-6)
    x_bytes = min(rows, tile.block_n) * columns * 2
    cached = 2 * rows * inputs * 2 <= card.cache
    for count, size in ((rounds, resident(tile, card) * card.processors), (1, rest)):
        if count and size:
            time += count * (end + _round(size, blocks, columns, x_bytes, cached, tile, card))
    return time


def resident(tile: ProductTile, card: Card) -> int:
    """Programs that a multiprocessor holds at once. A thread takes 64 registers, and 1.25 for each of its sums.

    Groups of warps read a tile from shared memory while the next ones arrive, so they need memory for one more.
    """
    threads = 32 * tile.warps
    registers = tile.registers if tile.bits == 8 and tile.registers else min(255, 64 + int(1.25 * tile.sums))
    held = tile.bytes if _in_groups(tile, card) else tile.bytes * max(1, tile.stages - 1) // tile.stages
    programs = card.shared // (held + 1024), REGISTERS // (registers * threads), card.threads // threads
    return max(1, min(programs))


def _in_groups(tile: ProductTile, card: Card) -> bool:
    return card.has_groups and tile.block_o >= 64


def _round(
    programs: int, blocks: int, columns: int, x_bytes: int, cached: bool, tile: ProductTile, card: Card
) -> float:
    """Microseconds of programs that run at once, of which `blocks` read the same weights. cached: True if the
    L2 cache holds the activations."""
    busiest, clock = ceil_div(programs, card.processors), card.clock * 1e-6
    bandwidth = BANDWIDTH * card.bandwidth * 1e-6 / (1 + PIECE * 8 / (tile.block_k * tile.bits))
    weights = tile.block_o * columns * tile.bits / 8
    in_groups = _in_groups(tile, card)
    speed = REACHED * UNITS.get(card.capability, 512) * (1 if in_groups else OF_WARPS.get(card.capability[0], 1))
    products = 2 * tile.block_o * tile.block_n / speed  # clocks a column
    columns_of_step = tile.unroll * tile.block_k
    chain = (STEP + columns_of_step * ((GROUP if in_groups else WARP) / 16 + products)) / clock
    step = max(LATENCY / (tile.stages - 1), chain) if tile.stages > 1 else LATENCY + chain
    times = (
        programs * (weights / blocks + (0 if cached else x_bytes)) / bandwidth,
        busiest * weights / (PORT.get(card.capability, 25.6) * clock),
        busiest * (weights + x_bytes) / (CACHE.get(card.capability, 16) * clock),
        busiest * products * columns / clock,
        ceil_div(columns, columns_of_step) * step,
        _decode(busiest, columns, tile) / clock,
    )
    return sum(time**6 for time in times) ** (1 / 6)


def _decode(busiest: int, columns: int, tile: ProductTile) -> float:
    """Clocks in which the busiest multiprocessor decodes weights, and with more rows waits for products."""
    if tile.bits not in DECODED:
        return 0.0
    most, by_warp, waiting = DECODED[tile.bits]
    rate = min(most, by_warp * tile.warps * busiest) * (1 if tile.block_n <= 16 else waiting)
    rate *= UNROLLED if tile.unroll > 1 else 1
    if tile.bits == 4 and tile.block_o < 32 * tile.warps:
        rate *= 0.75
    return busiest * tile.block_o * columns / rate
