"""How the small-m product is cut, for each shape: the tuned constants."""

from typing import NamedTuple

MAX_ROWS = 64
"""Rows of activations that a tile holds."""


class Plan(NamedTuple):
    """How one product is computed."""

    block_o: int  # a tile: so many rows of the weights
    block_k: int  # and columns
    programs: int
    warps: int = 4
    stages: int = 4  # tiles in the pipeline
    dot: bool = True  # on the tensor cores; else at most 4 rows
    late: int = 1 << 30  # let the next kernel begin when a program has so many tiles left
    prefetch: int = 0  # of each program's first tiles, so many are fetched to L2 before the wait
    pdl: bool = True  # programmatic dependent launch


TUNED = {  # programs: -1, `plan` says how many
    # One row, without tensor cores; "a wave": as many tiles as multiprocessors.
    "1 row, a wave": Plan(8, 512, -1, stages=9, dot=False, late=6),
    "1 row, 4 waves": Plan(8, 512, -1, stages=4, dot=False, late=6),
    "1 row, 8 waves": Plan(16, 512, -1, stages=4, dot=False, late=6),
    "1 row, 8 waves, short": Plan(16, 256, -1, stages=4, dot=False, late=6),
    "1 row, long": Plan(4, 1024, -1, stages=5, dot=False, late=6),
    "4 rows": Plan(8, 256, -1, stages=14, dot=False, late=6),
    # On the tensor cores, a whole row of tiles a program.
    "many outputs": Plan(128, 128, -1, warps=8, stages=3, late=1, prefetch=1),
    "many outputs, many rows": Plan(128, 128, -1, warps=8, stages=4, late=1, prefetch=1),
    "outputs": Plan(64, 128, -1, stages=4, late=1, prefetch=1),
    "narrow": Plan(32, 256, -1, stages=6, late=1),
    # On the tensor cores, a row of tiles shared by several programs.
    "small": Plan(32, 256, -1, stages=6, late=4, prefetch=2),
    "shared": Plan(64, 128, -1, stages=5, late=1, prefetch=2),
    "alone": Plan(64, 128, -1, stages=8, late=1, prefetch=2),
}
"""Found by ``python benchmarks/matmul_kernel.py --tune`` on an H200 with the layers of Llama-3.1-8B, Llama-3.2-1B and
Qwen3-0.6B; `prefetch` with kernels before the product that let it begin at once."""


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def plan(rows: int, outputs: int, inputs: int, processors: int = 132) -> Plan | None:
    """The plan for a product on so many multiprocessors; None where cuBLAS is not slower, or the kernel cannot run.

    Programs that all fit at once share rows of tiles only as far as each multiprocessor gets at most one.
    """
    if not 0 < rows <= MAX_ROWS or inputs % 16 or outputs * inputs < 1 << 19:
        return None
    name, programs = _single_row(outputs, inputs, processors) if rows == 1 else (None, 0)
    if 1 < rows <= 4 and outputs <= 8 * processors:
        name, programs = "4 rows", ceil_div(outputs, 8)
    if name is None:
        name, programs = _on_tensor_cores(rows, outputs, inputs, processors)
    return None if name is None else TUNED[name]._replace(programs=programs)


def _single_row(outputs: int, inputs: int, processors: int) -> tuple[str | None, int]:
    """A key of `TUNED` and the number of programs for one row; None: the tensor cores are as fast."""
    tiles = ceil_div(outputs, 8)
    if tiles <= processors:
        return "1 row, a wave", tiles
    if tiles <= 4 * processors:
        return "1 row, 4 waves", tiles
    if tiles <= 8 * processors:
        return "1 row, 8 waves" if inputs > 1024 else "1 row, 8 waves, short", ceil_div(outputs, 16)
    return ("1 row, long", ceil_div(outputs, 4)) if inputs >= 4096 else (None, 0)


def _on_tensor_cores(rows: int, outputs: int, inputs: int, processors: int) -> tuple[str | None, int]:
    """A key of `TUNED` and the number of programs; None: cuBLAS is as fast."""
    tiles = ceil_div(outputs, 64)
    if tiles > 2 * processors and (rows > 32 or tiles > 7 * processors):
        return "many outputs, many rows" if rows > 32 else "many outputs", ceil_div(outputs, 128)
    if tiles > processors:
        return "outputs", tiles
    narrow = ceil_div(outputs, 32)
    if rows <= 16 and inputs > 2 * outputs and 0.9 * processors < narrow <= processors:
        return "narrow", narrow
    if rows <= 16 and outputs * inputs <= 1 << 22 and narrow * (processors // narrow) > 0.9 * processors:
        return "small", narrow * (processors // narrow)
    shares = min(processors // tiles, ceil_div(inputs, 128), 8)
    if shares > 1 and tiles * shares < 0.8 * processors:
        return None, 0
    return "alone" if shares == 1 and rows <= 16 else "shared", tiles * shares
