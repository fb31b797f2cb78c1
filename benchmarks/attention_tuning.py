"""The search for the fastest division of tree attention's work, on the GPU that it is on; `tree_tuning` has the result.

    python benchmarks/attention_tuning.py [--nodes 1 16 64] [--contexts 1024 8192 32768] [--batches 1 4]
        [--trees branches] [--spare 128] [--keep 2] [--output FILE] [--cpu]

What decides bits (keys of a chunk, positions of the smallest span, spans at most) must be the same for all nodes and
contexts; rows of a tile, warps, stages and spans of a program may be chosen for each. First all of the former are timed
with one choice of the latter, then the fastest --keep of them with every choice. Times are microseconds of a layer of
the Llama-3.1-8B shape inside a CUDA graph, appending and making the table of tiles left out. --trees: which of
`attention_kernel.TREES`. --spare: slots of a cache behind the context, for which there are programs, too.
`floor` is what reading the keys and values once takes at the speed of a large copy, `math` what the products take at
that of a large product, `exp` what the weights take at 16 a clock and multiprocessor. --cpu runs a small form
in Triton's interpreter (TRITON_INTERPRET=1), whose times mean nothing.
"""

import argparse
import functools
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from attention_kernel import ENOUGH, TREES, copy_speed, product_speed, replay_time, tree
from common import write_json
from triton.runtime.errors import OutOfResources

from spec_compile.kernels.attention import tree_attention as attention
from spec_compile.kernels.attention.call import AttentionCall
from spec_compile.kernels.attention.tail_tiles import nodes_per_tile, tail_tiles
from spec_compile.tree import ancestry

EXPONENTIALS = 16 * 132 * 1.75e9
"""Of a second, on an H200."""
LAYERS = 32


class Shape(NamedTuple):
    """Query heads, KV heads, head size, and where and in which numbers they are computed."""

    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    def bytes(self, case: "Case") -> int:
        """Of the keys and values of a layer, 16 bits each."""
        return 4 * case.batch * self.kv_heads * case.context * self.size


class Case(NamedTuple):
    batch: int
    nodes: int
    context: int
    tree: str = "branches"
    spare: int = 128


BITS = [dict(block_n=n, least=least, most=most) for n in (64, 128) for least in (128, 256) for most in (16, 32, 64)]
SMALL = [dict(block_n=16, least=least, most=4) for least in (16, 32)]
"""What decides bits, on a GPU and in the interpreter."""
FREE = "block_m", "warps", "stages", "together"
"""What decides none."""


def tunings(bits: dict, rows: int, pairs: int, every: bool, small: bool) -> list[attention.Tuning]:
    """Tunings that give the same bits for `rows` rows for each of `pairs` = B * Hkv; one of each size of a tile, or
    every one."""
    out = []
    for block_m, warps in [(16, 4)] if small else [(64, 4), *([(128, 8)] if rows > 64 else [])]:
        tiles = pairs * -(-rows // block_m)
        together = 4 if tiles >= attention.MANY else 1
        small_chunk = bits["block_n"] <= 64
        choices = [(3 if small_chunk and together == 1 else 2, together)]
        if every:
            several = {1, 2, 4} if tiles >= attention.MANY // 4 else {1}
            choices = sorted({*choices, *itertools.product((2, 3, 4) if small_chunk else (2, 3), several)})
        out += [
            attention.Tuning(block_m=block_m, warps=warps, stages=stages, together=together, **bits)
            for stages, together in choices
        ]
    return out


def calls(shape: Shape, case: Case, layers: int, context: int) -> list[AttentionCall]:
    """A call for each of `layers` layers, whose block is in the cache already, with `context` tokens committed."""
    made = dict(device=shape.device, dtype=shape.dtype)
    q = torch.randn(case.batch, shape.heads, case.nodes, shape.size, **made)
    parents = tree(case.nodes, shape.device, case.tree).expand(case.batch, -1)
    ancestors, depth = ancestry(parents)
    lengths = torch.full((case.batch,), context, device=shape.device)
    tiles = tail_tiles(ancestors, nodes_per_tile(shape.heads // shape.kv_heads))
    cache = case.batch, shape.kv_heads, context + case.spare, shape.size
    return [
        AttentionCall(
            q, None, None, torch.randn(cache, **made), torch.randn(cache, **made), lengths,
            ancestors if case.nodes > 1 else None, lengths[:, None] + depth, None, shape.size**-0.5, None, None,
            tiles=tiles,
        )
        for _ in range(layers)
    ]  # fmt: skip


def microseconds(run: Callable, device: str) -> float:
    """Of what `run` launches, in a CUDA graph; infinite where a kernel does not fit."""
    try:
        if device == "cuda":
            return replay_time(run, 9)
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) * 1e6
    except OutOfResources:
        return math.inf


class _Warm:
    """A kernel that only compiles."""

    def __init__(self, jitted):
        self.jitted = jitted

    def __getitem__(self, grid):
        return functools.partial(self.jitted.warmup, grid=grid)


def _compile(job: tuple[int, attention.Tuning]) -> str | None:
    nodes, tuning = job
    for name in ("tree_kernel", "merge_spans_kernel"):
        kernel = getattr(attention, name)
        if not isinstance(kernel, _Warm):
            setattr(attention, name, _Warm(kernel))
    try:
        attention.launch(calls(Shape(), Case(1, nodes, 1024), 1, 1024)[0], tuning)
    except Exception as error:
        return f"{tuning}: {type(error).__name__} {str(error)[:100]}"
    return None


def compile_all(jobs: set) -> None:
    """Into Triton's cache, with all processors."""
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(max(1, len(os.sched_getaffinity(0)) - 1)) as pool:
        errors = [error for error in pool.imap_unordered(_compile, sorted(jobs)) if error]
    print(f"compiled {len(jobs)} tunings in {time.perf_counter() - begin:.0f} s", *errors[:5], sep="\n", flush=True)


class Search:
    """Times of tunings by case."""

    def __init__(self, shape: Shape, cases: list[Case]):
        self.shape, self.cases, self.small = shape, cases, shape.device == "cpu"
        self.times: dict[Case, dict[attention.Tuning, float]] = {case: {} for case in cases}

    def tunings(self, bits: dict, case: Case, every: bool) -> list[attention.Tuning]:
        rows, pairs = case.nodes * self.shape.heads // self.shape.kv_heads, case.batch * self.shape.kv_heads
        return tunings(bits, rows, pairs, every, self.small)

    def time(self, choices: list[dict], every: bool) -> None:
        """All tunings of `choices` that have no time yet."""
        if not self.small:
            compile_all({(min(case.nodes, 16), tuning) for case in self.cases for bits in choices
                         for tuning in self.tunings(bits, case, every) if tuning not in self.times[case]})  # fmt: skip
        for case in self.cases:
            enough = -(-int(ENOUGH) // self.shape.bytes(case))
            layers = calls(self.shape, case, 2 if self.small else min(max(enough, 2), LAYERS), case.context)
            for bits in choices:
                outs = []
                for tuning in self.tunings(bits, case, every):
                    run = functools.partial(self._run, layers, tuning)
                    if tuning not in self.times[case]:
                        self.times[case][tuning] = microseconds(run, self.shape.device) / len(layers)
                    if self.times[case][tuning] < math.inf:
                        outs.append(attention.launch(layers[0], tuning))
                if not self.small and any(not torch.equal(out, outs[0]) for out in outs):
                    print(f"{case}: tunings with {bits} give DIFFERENT bits", flush=True)

    @staticmethod
    def _run(layers: list[AttentionCall], tuning: attention.Tuning) -> None:
        for call in layers:
            attention.launch(call, tuning)

    def best(self, case: Case, bits: dict) -> tuple[float, attention.Tuning]:
        table = self.times[case].items()
        return min((taken, tuning) for tuning, taken in table if bits.items() <= tuning._asdict().items())

    def ranked(self, choices: list[dict]) -> list[dict]:
        """From the smallest geometric mean of the cases' times to the largest."""
        return sorted(choices, key=lambda bits: sum(math.log(self.best(case, bits)[0]) for case in self.cases))


def report(search: Search, choices: list[dict], copies: float, products: float) -> None:
    shape = search.shape
    for case in search.cases:
        scores = case.batch * case.nodes * shape.heads * case.context
        limits = shape.bytes(case) / copies, 4 * scores * shape.size / products, scores / EXPONENTIALS
        named = "  ".join(f"{name} {1e6 * limit:.1f}" for name, limit in zip(("floor", "math", "exp"), limits))
        print(f"B={case.batch} N={case.nodes} {case.context} {case.tree}: {named}")
        for bits in choices:
            taken, tuning = search.best(case, bits)
            free = " ".join(f"{name}={getattr(tuning, name)}" for name in FREE)
            print(f"    {taken:8.1f}  {' '.join(f'{name}={value}' for name, value in bits.items()):32} {free}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192, 32768])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--trees", nargs="+", default=["branches"], choices=TREES)
    parser.add_argument("--spare", type=int, default=128)
    parser.add_argument("--keep", type=int, default=2)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    shape = Shape(4, 2, 16, "cpu", torch.float32) if args.cpu else Shape()
    copies, products = (1e12, 1e12) if args.cpu else (copy_speed(), product_speed())
    print(f"copies {copies / 1e12:.2f} TB/s, products {products / 1e12:.0f} TFLOP/s; µs a layer", flush=True)
    axes = args.batches, args.nodes, args.contexts, args.trees, [args.spare]
    cases = [Case(*case) for case in itertools.product(*axes)]
    search, choices = Search(shape, cases), SMALL if args.cpu else BITS
    search.time(choices, every=False)
    ranked = search.ranked(choices)
    print("\nOne choice of rows, warps and stages; first what is fastest over all cases")
    report(search, ranked, copies, products)
    search.time(ranked[: args.keep], every=True)
    print("\nEvery choice")
    report(search, search.ranked(ranked[: args.keep]), copies, products)
    if args.output:
        rows = [
            {**case._asdict(), **tuning._asdict(), "microseconds": taken}
            for case, table in search.times.items() for tuning, taken in table.items() if taken < math.inf
        ]  # fmt: skip
        write_json(args.output, rows)


if __name__ == "__main__":
    main()
