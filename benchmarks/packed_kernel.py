"""Products of few rows with quantised weights on a GPU: every plan that could serve, timed.

    python benchmarks/packed_kernel.py [--formats int4 nf4 fp8 mxfp4 experts-bf16 experts-fp8] [--rows 1 16 64]
                                       [--output FILE]

The layers of Llama-3.1-8B (int4: centred, groups of 128; nf4: blocks of 64; fp8: blocks of 128 x 128, with the kernel
that rounds x), and the experts of gpt-oss-20b (mxfp4) and Qwen3-30B-A3B (see `expert_tiles.py`). A figure is the time
in microseconds of one product in a CUDA graph of many, with weights that are in no cache. "floor" is the time in which
the GPU reads as many bytes. Of each format the plans of its present choice and of the fastest are printed; those whose
rows differ in a bit are passed over.

Without a GPU every tile multiplies small weights once in Triton's interpreter, and no times are printed.
"""

import argparse
import json
import multiprocessing
import os
import time
from collections import defaultdict
from pathlib import Path

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import expert_tiles  # noqa: E402
from matmul_kernel import MODELS, PARTS, Warm, read_bandwidth  # noqa: E402
from quantised_layers import NF4  # noqa: E402

from spec_compile.kernels.experts import launch  # noqa: E402
from spec_compile.kernels.linear import small_m, tune  # noqa: E402
from spec_compile.kernels.linear.plans import AT_ONCE, packed_plan  # noqa: E402
from spec_compile.kernels.linear.product import Product  # noqa: E402
from spec_compile.kernels.linear.quantised import nibbles  # noqa: E402
from spec_compile.kernels.linear.quantised.fp8_block import FP8, Fp8Block  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
CHIP = (132, 232_448)
"""Of an H200, where there is no GPU."""
SHARES = 1, 2, 4, 8
"""Programs that share the columns, beside those of the present plan."""
MANNERS = [dict(prefetch=count) for count in (1, 2, 4, 8)] + [dict(late=1), dict(late=AT_ONCE)]
"""How the fastest tile is begun and followed, tried at the end."""


def int4(outputs: int, inputs: int) -> tune.ProductShape:
    layout = nibbles.Nibbles(128, 0, 1)
    units = layout.units(torch.rand(inputs // 128, outputs, device=DEVICE).bfloat16() / 16, nibbles.ZERO)
    return tune.ProductShape(outputs, inputs, layout.kind, torch.bfloat16, [(_words(outputs, inputs // 8), units)])


def nf4(outputs: int, inputs: int) -> tune.ProductShape:
    codes = torch.randint(16, (outputs, inputs), dtype=torch.uint8, device=DEVICE)
    scales = torch.rand(inputs // 64, outputs, device=DEVICE)
    layout, parts = nibbles.pack_with_table(codes, torch.tensor(NF4, device=DEVICE), scales)
    return tune.ProductShape(outputs, inputs, layout.kind, torch.bfloat16, [tuple(parts)])


def fp8(outputs: int, inputs: int) -> tune.ProductShape:
    weight = torch.randn(outputs, inputs, device=DEVICE).to(FP8)
    scales = torch.rand(-(-outputs // 128), -(-inputs // 128), device=DEVICE)
    return tune.ProductShape(outputs, inputs, Fp8Block(128, 128).kind, torch.bfloat16, [(weight, scales)])


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, device=DEVICE)


FORMATS = {"int4": int4, "nf4": nf4, "fp8": fp8}


def candidates(product: tune.ProductShape, rows: int):
    """(parts, tile) of what `tune-kernels` tries, for so many rows."""
    chip = small_m.chip(torch.device(DEVICE)) if ON_GPU else CHIP
    present = packed_plan(product.outputs, product.inputs, product.bits, *chip)
    first = present.parts, present.tile(rows)
    yield first
    for width, parts, tile in tune.candidates(product, present, *chip):
        if width == first[1].block_n and parts in (*SHARES, first[0]) and (parts, tile) != first:
            yield parts, tile


def compile_all(formats: list[str], counts: list[int]) -> None:
    """The kernels of all candidates, into Triton's cache, with all processors."""
    begin, jobs = time.perf_counter(), set()
    for name in formats:
        for shape in MODELS["8B"][:4] if name in FORMATS else ():
            product = tune.ProductShape(*shape, FORMATS[name](128, 512).kind, torch.bfloat16, [])
            for rows in counts:
                jobs |= {(name, parts, tile._replace(late=1, prefetch=1)) for parts, tile in candidates(product, rows)}
    jobs |= expert_tiles.jobs([name for name in formats if name in expert_tiles.SHAPES], counts)
    with multiprocessing.get_context("spawn").Pool(max(1, len(os.sched_getaffinity(0)) - 1)) as pool:
        errors = [error for error in pool.imap_unordered(_compile, sorted(jobs, key=str), chunksize=2) if error]
    print(f"compiled {len(jobs)} kernels in {time.perf_counter() - begin:.0f} s", *errors[:5], sep="\n", flush=True)


def _compile(job) -> str | None:
    name, *how = job
    if not isinstance(small_m.small_m_kernel, Warm):
        small_m.small_m_kernel, launch.experts_kernel = Warm(small_m.small_m_kernel), Warm(launch.experts_kernel)
    try:
        if name in expert_tiles.SHAPES:
            mixture = expert_tiles.Mixture(name, expert_tiles.SHAPES[name], "meta")
            mixture.multiply(mixture.routes(how[0]), how[1:])
        else:
            (parts, tile), product = how, FORMATS[name](4096, 4096)
            (weight, scales), out = product.weights[0], torch.empty(tile.block_n, 4096, device=DEVICE).bfloat16()
            small_m.launch(Product(out, weight, None, scales, product.kind), out, parts, tile)
    except Exception as error:
        return f"{job}: {type(error).__name__} {str(error)[:100]}"
    return None


def time_linear(name: str, counts: list[int], bandwidth: float) -> dict[str, dict]:
    """Times of the present plan and of the fastest, of each layer and number of rows."""
    results, sums = {}, defaultdict(lambda: [0.0, 0.0, 0.0])
    for part, shape in zip(PARTS, MODELS["8B"][:4]):
        product = FORMATS[name](*shape)
        floor = sum(each.nbytes for each in product.weights[0]) / bandwidth * 1e6
        times: dict[int, list] = {}
        for rows in counts:
            tried = list(candidates(product, rows))
            taken = [(tune.time_of(product, rows, parts, tile), parts, tile) for parts, tile in tried]
            best = min(taken)
            taken += [
                (tune.time_of(product, rows, best[1], tile), best[1], tile)
                for manner in MANNERS
                if (tile := best[2]._replace(**manner)) != best[2]
            ]
            present, times[rows] = taken[0], sorted(taken)
            cells = "; ".join(f"{each:.2f} {parts} {tuple(tile)[:7]}" for each, parts, tile in times[rows][:4])
            print(f"{name} {part:8} N={rows}: floor {floor:.2f}, present {present[0]:.2f}, best {cells}", flush=True)
            for index, value in enumerate((floor, present[0], times[rows][0][0])):
                sums[rows][index] += value
            results[f"{name} {part} {rows}"] = {"floor": floor, "present": present, "tried": times[rows]}
        print(f"{name} {part:8} one plan for all rows: {_plan(product, times)}", flush=True)
    for rows, values in sums.items():
        cells = ", ".join(f"{key} {each * 32e-3:.3f}" for key, each in zip(("floor", "present", "best"), values))
        print(f"{name} N={rows}: 32 layers, milliseconds: {cells}", flush=True)
    return results


def _plan(product: tune.ProductShape, times: dict[int, list]) -> str:
    """The fastest plan whose rows have the same bits, of tiles for all rows that were timed."""
    grouped = defaultdict(lambda: defaultdict(list))
    for taken in times.values():
        for microseconds, parts, tile in taken:
            grouped[parts][tile.block_n].append((microseconds, tile))
    widths = {tile.block_n for taken in times.values() for _, _, tile in taken}
    plans = []
    for parts, tiles in grouped.items():
        if set(tiles) == widths:
            best = [min(tiles[width]) for width in sorted(widths)]
            plans.append((sum(taken for taken, _ in best), tune.ProductPlan(parts, tuple(tile for _, tile in best))))
    for taken, plan in sorted(plans):
        if tune.same_bits(product, plan):
            return f"{taken:.2f} in all, parts {plan.parts}, {[tuple(tile)[:7] for tile in plan.tiles]}"
    return "none has the same bits"


def check(formats: list[str], counts: list[int]) -> None:
    """Every tile multiplies once in the interpreter, as its layout says."""
    for name in formats:
        tiles = 0
        if name in expert_tiles.SHAPES:
            tiles = expert_tiles.check(name, counts)
        else:
            product = FORMATS[name](256, 512)
            (weight, scales), layout = product.weights[0], small_m.layout_of(product.kind)
            for rows in counts:
                x = torch.randn(rows, 512)
                want = layout.product(x, [weight, scales], None)
                for tile in {tile for _, tile in candidates(product, rows)}:
                    out = torch.empty_like(want)
                    small_m.launch(Product(x, weight, None, scales, product.kind), out, 1, tile)
                    torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-3 * float(want.abs().max()))
                    tiles += 1
        print(f"{name}: {tiles} tiles", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [*FORMATS, *expert_tiles.SHAPES]
    parser.add_argument("--formats", nargs="+", default=every, choices=every)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not ON_GPU:
        check(options.formats, options.rows)
        return
    compile_all(options.formats, options.rows)
    bandwidth = read_bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; reading alone: {bandwidth / 1e12:.2f} TB/s")
    results: dict[str, dict] = {}
    for name in options.formats:
        if name in expert_tiles.SHAPES:
            results |= expert_tiles.time_experts(name, options.rows, bandwidth)
        else:
            results |= time_linear(name, options.rows, bandwidth)
    if options.output:
        options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
