"""Products of few rows on a GPU: each linear layer of a model, ours against cuBLAS.

    python benchmarks/matmul_kernel.py [--models 8B 1B 0.6B 135M] [--rows 1 16 64] [--tune | --wide] [--output FILE]

A figure is the time of one product in a CUDA graph of many, each with weights of its own, so that none are in a cache.
"floor" is the time in which the GPU reads as many bytes. "bits" says whether every row is the same to the last bit in
products of 1 to 512 rows. --tune tries other plans, prints the fastest for each shape, whose cuts of the columns hold
for all numbers of rows, and checks the bits of every one. --wide tries other tiles for --rows (256 if they are not
given), with the parts of the plan, beside what the arithmetic takes at the speed of a large product.
"""

import argparse
import functools
import json
import multiprocessing
import os
import time
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from spec_compile.kernels.linear import product as products
from spec_compile.kernels.linear import small_m as kernel
from spec_compile.kernels.linear.plans import CUT, ProductPlan, ProductTile, ceil_div, plan
from spec_compile.kernels.linear.tune import graph_time

PARTS = ("qkv", "o", "gate_up", "down", "lm_head")
MODELS = {  # of each part the shape of the weights
    "8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    "1B": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)),
    "0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)),
    "135M": ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)),
}
TUNED_ROWS = (1, 16, 64)
WIDE = 256
TILES = {  # block_o, block_k, warps, stages; for up to so many rows
    16: [(64, 128, 4, 5), (64, 128, 4, 8), (64, 256, 4, 4), (128, 128, 8, 4), (64, 64, 4, 10),
         (32, 256, 4, 4), (32, 256, 4, 6), (32, 128, 4, 6), (16, 256, 4, 4), (16, 256, 2, 6)],
    64: [(64, 128, 4, 4), (64, 128, 4, 5), (128, 64, 8, 6), (128, 128, 8, 3), (128, 128, 8, 4), (64, 64, 4, 6),
         (32, 128, 4, 5), (32, 256, 4, 3), (16, 256, 4, 3), (16, 128, 4, 5)],
    WIDE: [(128, 64, 8, 3), (128, 64, 8, 4), (64, 64, 4, 4), (64, 128, 8, 2), (32, 64, 4, 4), (16, 64, 4, 4)],
}  # fmt: skip


WIDE_TILES = [  # block_o, block_k, block_n, warps, stages
    *((128, 64, 256, 8, stages) for stages in (3, 4)), (128, 128, 256, 8, 2),
    *((128, 64, 128, 8, stages) for stages in (3, 4, 5, 6)), (128, 128, 128, 8, 3), (128, 64, 128, 4, 3),
    *((256, 64, 128, 8, stages) for stages in (3, 4)), *((64, 64, 256, 4, stages) for stages in (2, 4)),
    *((64, 64, 128, 4, stages) for stages in (3, 4, 6)), (64, 128, 128, 4, 4), (64, 64, 64, 4, 6),
    *((128, 64, 64, 8, stages) for stages in (4, 6)), *((128, 128, 64, 8, stages) for stages in (2, 4)),
    *((64, 128, 64, 4, stages) for stages in (3, 5)),
]  # fmt: skip


class Product:
    """The weights of several products of one shape, random, more than the L2 cache holds."""

    def __init__(self, outputs: int, inputs: int, seed: int = 0):
        self.shape = outputs, inputs
        self.bytes = 2 * outputs * inputs
        generator = torch.Generator("cuda").manual_seed(seed)
        copies = min(max(4, ceil_div(200 << 20, self.bytes)), 128)
        self.weights = [
            torch.randn(outputs, inputs, device="cuda", generator=generator).mul_(inputs**-0.5).bfloat16()
            for _ in range(copies)
        ]
        self.x = torch.randn(512, inputs, device="cuda", generator=generator).bfloat16()

    def multiply(self, rows: int, parts: int, tile: ProductTile, weight=None) -> torch.Tensor:
        out = self.x.new_empty(rows, self.shape[0])
        layer = products.Product(self.x[:rows], self.weights[0] if weight is None else weight)
        kernel.launch(layer, out, parts, tile)
        return out

    def time(self, rows: int, parts: int = 0, tile: ProductTile | None = None) -> float:
        """Microseconds; without a tile of cuBLAS."""

        def run():
            for weight in self.weights:
                if tile is None:
                    F.linear(self.x[:rows], weight)
                else:
                    self.multiply(rows, parts, tile, weight)

        try:
            return graph_time(run) / len(self.weights)
        except triton.runtime.errors.OutOfResources:
            return float("inf")


@triton.jit
def _read(x, out, blocks, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), num_stages=4):
        total += tl.load(x + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total))


def read_bandwidth() -> float:
    """Bytes a second of a kernel that only reads."""
    x = torch.ones(1 << 31, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(528, device="cuda")
    return x.numel() * 2 / graph_time(lambda: _read[(528,)](x, out, x.numel() // 4096, 4096)) * 1e6


def same_bits(product: Product, how: ProductPlan) -> bool:
    """Whether the rows of every product are those of the product of 512 rows."""
    reference = product.multiply(512, how.parts, how.tile(512))
    return all(
        torch.equal(product.multiply(rows, how.parts, how.tile(rows)), reference[:rows])
        for rows in (1, 2, 5, 16, 17, 33, 64, 65, 100, 128, 192, 256, 300)
    )


def compare(models, counts, bandwidth: float) -> dict:
    results = {}
    for model in models:
        for name, shape in zip(PARTS, MODELS[model]):
            product, how = Product(*shape), plan(*shape)
            times = {rows: [product.time(rows, how.parts, how.tile(rows)), product.time(rows)] for rows in counts}
            floor, bits = product.bytes / bandwidth * 1e6, same_bits(product, how)
            cells = "  ".join(f"N={rows} {ours:.2f} / {theirs:.2f}" for rows, (ours, theirs) in times.items())
            print(f"{model} {name:8} floor {floor:.2f}  ours / cuBLAS: {cells}  bits {'same' if bits else 'DIFFER'}")
            results[f"{model} {name}"] = {"floor": floor, "times": times, "bits": bits}
    return results


def product_speed() -> float:
    """Operations a second of a large product of random numbers in bfloat16."""
    a, b = torch.randn(2, 8192, 8192, dtype=torch.bfloat16, device="cuda")
    return 2 * 8192**3 / graph_time(lambda: a @ b) * 1e6


def wide(models, counts, bandwidth: float) -> dict:
    """The fastest tiles of `counts` rows of each shape, with the parts of its plan."""
    shapes = [(f"{model} {name}", shape) for model in models for name, shape in zip(PARTS, MODELS[model])]
    tiles = [ProductTile(*tile) for tile in WIDE_TILES]
    compile_all({(min(shape[0], 4096), plan(*shape).parts, tile) for _, shape in shapes for tile in tiles})
    speed, results = product_speed(), {}
    print(f"large products: {speed / 1e12:.0f} TFLOP/s", flush=True)
    for name, shape in shapes:
        product, how = Product(*shape), plan(*shape)
        for rows in counts:
            limits = product.bytes / bandwidth * 1e6, 2 * rows * shape[0] * shape[1] / speed * 1e6
            tile = how.tile(rows)
            ours, theirs = product.time(rows, how.parts, tile), product.time(rows)
            times = sorted((product.time(rows, how.parts, tile), tile) for tile in tiles)
            times = [(taken, tile) for taken, tile in times if taken < float("inf")]
            out = product.multiply(rows, how.parts, tile)
            odd = [each for _, each in times if not torch.equal(product.multiply(rows, how.parts, each), out)]
            print(f"\n{name}, {rows} rows: bytes {limits[0]:.1f}, arithmetic {limits[1]:.1f}, cuBLAS {theirs:.1f}, "
                  f"plan {ours:.1f} {tuple(tile)[:5]} in {how.parts} parts; bits {odd or 'same'}")  # fmt: skip
            print("    " + "; ".join(f"{taken:.1f} {tuple(tile)[:5]}" for taken, tile in times[:6]), flush=True)
            results[f"{name} {rows}"] = {"limits": limits, "cuBLAS": theirs, "plan": ours, "odd": odd, "tiles": times}
        del product
    return results


def candidates(outputs: int, inputs: int, rows: int):
    """(parts, tile) to try for a product."""
    width = next(most for most in TILES if rows <= most)
    for block_o, block_k, warps, stages in TILES[width]:
        if stages * 2 * block_k * (block_o + width) > 220 * 1024:
            continue
        tiles = ceil_div(outputs, block_o)
        for parts in (1, 2, 3, 4, 6, 8):
            programs = tiles * parts * ceil_div(rows, width)
            if parts <= ceil_div(inputs, CUT) and (parts == 1 or programs <= 400):
                yield parts, ProductTile(block_o, block_k, width, warps, stages)


class Warm:
    """A kernel that only compiles."""

    def __init__(self, jitted):
        self.jitted = jitted

    def __getitem__(self, grid):
        return functools.partial(self.jitted.warmup, grid=grid)


def _compile(job) -> str | None:
    outputs, parts, tile = job
    if not isinstance(kernel.small_m_kernel, Warm):
        kernel.small_m_kernel = Warm(kernel.small_m_kernel)
    x, weight = (torch.empty(rows, 4096, dtype=torch.bfloat16, device="cuda") for rows in (tile.block_n, outputs))
    try:
        kernel.launch(products.Product(x, weight), x.new_empty(len(x), outputs), parts, tile)
    except Exception as error:
        return f"{tile}: {type(error).__name__} {str(error)[:100]}"
    return None


def compile_all(jobs: set) -> None:
    """Kernels (outputs, parts, tile) into Triton's cache, with all processors."""
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(max(1, len(os.sched_getaffinity(0)) - 1)) as pool:
        errors = [error for error in pool.imap_unordered(_compile, sorted(jobs), chunksize=2) if error]
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - begin:.0f} s", *errors[:5], sep="\n", flush=True)


def tune(models, bandwidth: float) -> dict:
    """The fastest tiles of each shape, for every (parts, instructions), and the sum of their times over the floor."""
    shapes = [(f"{model} {name}", shape) for model in models for name, shape in zip(PARTS, MODELS[model])]
    counts = (*TUNED_ROWS[1:], WIDE)
    compile_all({(min(shape[0], 4096), *job) for _, shape in shapes for rows in counts
                 for job in candidates(*shape, rows)})  # fmt: skip
    results = {}
    for name, shape in shapes:
        product = Product(*shape)
        floor = product.bytes / bandwidth * 1e6
        times: dict[tuple[int, str], dict[int, list]] = {}
        bits: dict[tuple[int, str], torch.Tensor] = {}
        odd = []
        for rows in (*TUNED_ROWS, WIDE):
            for parts, tile in candidates(*shape, rows):
                if shape[0] > 40000 and tile.block_o < 64:
                    continue
                key = parts, "groups of warps" if tile.block_o >= 64 else "warps"
                taken = product.time(rows, parts, tile)
                if taken == float("inf"):
                    continue
                times.setdefault(key, {}).setdefault(rows, []).append((taken, tile))
                out = product.multiply(rows, parts, tile)
                reference = bits.setdefault(key, product.multiply(512, parts, tile) if rows == 1 else out)
                if not torch.equal(out, reference[:rows]):
                    odd.append((key, rows, tile))
        theirs = {rows: round(product.time(rows), 2) for rows in (*TUNED_ROWS, WIDE)}
        best = {key: {rows: sorted(tiles)[:3] for rows, tiles in table.items()} for key, table in times.items()}
        full = {key: table for key, table in best.items() if len(table) == len(TUNED_ROWS) + 1}
        ranked = sorted(full, key=lambda key: sum(full[key][rows][0][0] for rows in TUNED_ROWS))
        print(f"\n{name} {shape}: floor {floor:.2f}, cuBLAS {theirs}; bits: {len(odd)} differ {odd[:6]}", flush=True)
        for key in ranked[:5]:
            print(f"  parts {key[0]}, {key[1]}")
            for rows, tiles in full[key].items():
                print(f"    N={rows}: " + "; ".join(f"{taken:.2f} {tuple(tile)[:5]}" for taken, tile in tiles))
        results[name] = {"floor": floor, "cuBLAS": theirs, "odd": len(odd), "ranked": [
            {"parts": key[0], "instructions": key[1], "tiles": full[key]} for key in ranked]}  # fmt: skip
        del product
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, bf16")
    print(f"reading alone: {bandwidth / 1e12:.2f} TB/s; microseconds", flush=True)
    if options.tune:
        results = tune(options.models, bandwidth)
    elif options.wide:
        results = wide(options.models, options.rows or [WIDE], bandwidth)
    else:
        results = compare(options.models, options.rows or [1, 16, 64, 256], bandwidth)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
