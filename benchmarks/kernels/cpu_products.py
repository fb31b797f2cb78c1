"""Products of few rows on a CPU: the linear layers of published models, ours compared with a read of their weights.

    python -m benchmarks.kernels.cpu_products [--models 135M 1B] [--formats bf16 int8 int4 ...] [--dtype bfloat16]
                                              [--layers gate_up down] [--rows 1 4 16] [--threads 2] [--json FILE]

A figure is the microseconds of one product, each with its own weights, so that no cache holds them: the least of some
bursts. With one thread it is the time of its processor, which other processes lengthen less. "floor" is the least time
of a sum over the same weights' bytes, measured between these bursts. "library" is PyTorch's own product: `F.linear`, of
int8 `_weight_int8pack_mm`, of int4 `_weight_int4pack_mm_for_cpu`. Formats: int8 and fp8 have a scale for each output;
w8a8 and fp8a8 round activations, too; int4 has groups of 128 inputs if these divide them, else of 64; int4g32 of 32.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import pin, save_rows, show, stamp
from benchmarks.kernels.matmul import LAYERS, MODELS
from spec_compile import quantised
from spec_compile.kernels.linear import cpu_gemm
from spec_compile.quantised.codes import WeightLayout
from spec_compile.quantised.compressed_tensors import PerChannel
from spec_compile.quantised.pack_gpu import ZERO, Nibbles
from spec_compile.quantised.torchao import Float8Weight, Int8Weight

BYTES, BURST = 96 << 20, 4 << 20
"""Bytes of all weights, more than caches hold, and of those of a burst."""
TURNS, SECONDS = 12, 1.5
"""At most so many turns over all weights, and so long, for a figure."""
FP8 = torch.float8_e4m3fn
KEYS = ("model", "layer", "format", "dtype")
"""The fields that tell the rows of the results apart."""


def channels(layout: WeightLayout, dtype: torch.dtype, outputs: int, inputs: int) -> tuple[WeightLayout, list[Tensor]]:
    codes = torch.randint(-100, 100, (outputs, inputs), dtype=torch.int8)
    codes = codes if dtype == torch.int8 else codes.to(dtype)
    return layout, [codes, torch.rand(outputs, 1) / 100]


def int4(group: int | None, outputs: int, inputs: int) -> tuple[WeightLayout, list[Tensor]]:
    layout = Nibbles(group or (128 if inputs % 128 == 0 else 64), 0, 1)
    words = layout.words(torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8))
    units = layout.units(torch.rand(words.shape[1] * 8 // layout.group, outputs).bfloat16() / 16, ZERO)
    return layout, [words, units]


PACKED: dict[str, Callable[[int, int], tuple[WeightLayout, list[Tensor]]]] = {
    "int8": partial(channels, Int8Weight(), torch.int8), "w8a8": partial(channels, PerChannel(), torch.int8),
    "int4": partial(int4, None), "int4g32": partial(int4, 32),
    "fp8": partial(channels, Float8Weight(), FP8), "fp8a8": partial(channels, PerChannel(), FP8),
}  # fmt: skip
FORMATS = ("bf16", "f32", *PACKED)


def ours(form: str, outputs: int, inputs: int) -> tuple[list[Tensor], Callable[[Tensor, list[Tensor]], Tensor]]:
    """The parts of a layer, and its product."""
    if form in PACKED:
        layout, parts = PACKED[form](outputs, inputs)
        layout, parts = quantised.for_kernel(layout, parts, inputs, on_cpu=True)
        kind = layout.kind
        return parts, lambda x, parts: cpu_gemm.quantised_product(kind, x, parts, None)
    dtype = torch.bfloat16 if form == "bf16" else torch.float32
    weight = torch.randn(outputs, inputs).to(dtype)
    return [weight], lambda x, parts: cpu_gemm.cpu_product(x, parts[0])


def library(form: str, outputs: int, inputs: int, dtype: torch.dtype) -> tuple | None:
    """The same of PyTorch, if it has one."""
    if form in ("bf16", "f32"):
        parts, _ = ours(form, outputs, inputs)
        return parts, lambda x, parts: F.linear(x, parts[0])
    if dtype != torch.bfloat16 or form not in ("int8", "int4", "int4g32"):
        return None
    if form == "int8":
        codes, scales = torch.randint(-100, 100, (outputs, inputs), dtype=torch.int8), torch.rand(outputs).bfloat16()
        return [codes, scales], lambda x, parts: torch.ops.aten._weight_int8pack_mm(x, *parts)
    group = 32 if form == "int4g32" else 128 if inputs % 128 == 0 else 64
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    units = torch.rand(inputs // group, outputs, 2).bfloat16()
    return [packed, units], lambda x, p: torch.ops.aten._weight_int4pack_mm_for_cpu(x, p[0], group, p[1])


def bursts(run: Callable[[list[Tensor]], object], layers: list[list[Tensor]]) -> float:
    """Microseconds of one of them, in the fastest of the bursts that are made of all."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    size, best = max(1, BURST // sum(part.nbytes for part in layers[0])), float("inf")
    for first in range(0, len(layers), size):
        some = layers[first : first + size]
        begin = clock()
        for parts in some:
            run(parts)
        best = min(best, (clock() - begin) / len(some))
    return best * 1e6


def read(parts: list[Tensor]) -> None:
    for part in parts:
        if part.nbytes % 8 == 0:
            part.view(-1).view(torch.int64).sum()


def times(made: tuple, xs: list[Tensor]) -> tuple[float, list[float]]:
    """Microseconds of a read of a layer's parts, and of its product with each x, with turns in between."""
    parts, run = made
    size = sum(part.nbytes for part in parts)
    layers = [[part.clone() for part in parts] for _ in range(max(2, -(-BYTES // size)))]
    calls = [read, *(lambda parts, x=x: run(x, parts) for x in xs)]
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + SECONDS * len(calls)
    for _ in range(TURNS):
        for number, call in enumerate(calls):
            best[number] = min(best[number], bursts(call, layers))
        if time.perf_counter() > end:
            break
    return best[0], best[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["135M", "1B"], choices=MODELS)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=LAYERS)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of x, with codes")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--library", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    pin(options.threads)
    rows, dtype = [], getattr(torch, options.dtype)
    for model in options.models:
        for layer, (outputs, inputs) in zip(LAYERS, MODELS[model]):
            for form in options.formats if layer in options.layers else ():
                if form not in PACKED:
                    dtype = torch.bfloat16 if form == "bf16" else torch.float32
                else:
                    dtype = getattr(torch, options.dtype)
                xs = [torch.randn(count, inputs).to(dtype) for count in options.rows]
                floor, mine = times(ours(form, outputs, inputs), xs)
                made = library(form, outputs, inputs, dtype) if options.library else None
                theirs = [float("nan")] * len(xs) if made is None else times(made, xs)[1]
                row = {"model": model, "layer": layer, "format": form, "dtype": str(dtype).removeprefix("torch.")}
                rows.append({**row, "floor": floor, "ours": dict(zip(options.rows, mine)),
                             "library": dict(zip(options.rows, theirs))})  # fmt: skip
                print(rows[-1]["format"], model, layer, f"floor {floor:.0f}",
                      *(f"{count}: {us:.0f} ({us / floor:.2f}) lib {them / floor:.2f}" for count, us, them in
                        zip(options.rows, mine, theirs)), flush=True)  # fmt: skip
    cells = [
        (
            *(row[key] for key in KEYS), f"{row['floor']:.0f}",
            *(f"{row['ours'][n]:.0f} = {row['ours'][n] / row['floor']:.2f}, {row['library'][n] / row['floor']:.2f}"
              for n in options.rows),
        ) for row in rows
    ]  # fmt: skip
    show((*KEYS, "floor", *(f"N={count}" for count in options.rows)), cells, "microseconds = over the floor, library's")
    if options.json:
        save_rows(options.json, rows, KEYS, stamp(torch.device("cpu")))


if __name__ == "__main__":
    main()
