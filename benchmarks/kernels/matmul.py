"""Products of few rows on a GPU: the linear layers of published models, ours compared with cuBLAS.

    python -m benchmarks.kernels.matmul [--models 8B 1B 0.6B 135M] [--formats bf16 int4 nf4 fp8] [--rows 1 16 64 256]
                                        [--json FILE]

A figure is the microseconds of one product in a CUDA graph of many, each with its own weights, so that no cache holds
them. "floor" is the time in which the GPU reads as many bytes; cuBLAS multiplies weights of 16 bits. "bits" says if
every row has the same bits with 1 to 2,048 rows. int4 has groups of 128 inputs, nf4 blocks of 64, fp8 blocks of 128 x
128. `python -m spec_compile tune-kernels` searches for faster plans.
"""

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import save_rows, show, stamp
from benchmarks.rounds.quantised_layers import NF4
from benchmarks.timers import bandwidth, captured, replay_us
from spec_compile.kernels.linear import skinny_gemm
from spec_compile.quantised import pack_gpu
from spec_compile.quantised.codes import Codes
from spec_compile.quantised.fp8 import FP8, Fp8Block
from spec_compile.tools import tune_kernels as tune

LAYERS = ("qkv", "o", "gate_up", "down", "lm_head")
MODELS = {
    "8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)),
    "1B": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048)),
    "0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151936, 1024)),
    "135M": ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576)),
}
"""Model -> the shape of each layer's weight [O, I], in the order of `LAYERS`."""
KEYS = ("model", "layer", "format")
"""The fields that tell the rows of the results apart."""


def bf16(outputs: int, inputs: int) -> tune.ProductShape:
    weight = torch.randn(outputs, inputs, device="cuda").mul_(inputs**-0.5).bfloat16()
    return tune.ProductShape(outputs, inputs, "", torch.bfloat16, [(weight, None)])


def int4(outputs: int, inputs: int) -> tune.ProductShape:
    words = torch.randint(-(1 << 31), 1 << 31, (outputs, inputs // 8), dtype=torch.int32, device="cuda")
    layout = pack_gpu.Nibbles(128, 0, 1)
    units = layout.units(torch.rand(inputs // 128, outputs, device="cuda").bfloat16() / 16, pack_gpu.ZERO)
    return tune.ProductShape(outputs, inputs, layout.kind, torch.bfloat16, [(words, units)])


def nf4(outputs: int, inputs: int) -> tune.ProductShape:
    codes = torch.randint(16, (outputs, inputs), dtype=torch.uint8, device="cuda")
    scales = torch.rand(inputs // 64, outputs, device="cuda")
    layout, parts = pack_gpu.pack(Codes(codes, scales, table=torch.tensor(NF4, device="cuda")))
    return tune.ProductShape(outputs, inputs, layout.kind, torch.bfloat16, [tuple(parts)])


def fp8(outputs: int, inputs: int) -> tune.ProductShape:
    weight = torch.randn(outputs, inputs, device="cuda").to(FP8)
    scales = torch.rand(math.ceil(outputs / 128), math.ceil(inputs / 128), device="cuda")
    return tune.ProductShape(outputs, inputs, Fp8Block(128, 128).kind, torch.bfloat16, [(weight, scales)])


FORMATS = {"bf16": bf16, "int4": int4, "nf4": nf4, "fp8": fp8}


def library_us(outputs: int, inputs: int, rows: int) -> float:
    """Microseconds of cuBLAS's product in 16 bits."""
    count = min(max(4, (200 << 20) // (2 * outputs * inputs)), 128)  # more weights than the L2 cache holds
    weights: list[Tensor] = [bf16(outputs, inputs).weights[0][0] for _ in range(count)]
    x = torch.randn(rows, inputs, device="cuda").bfloat16()
    return replay_us(captured(lambda: [F.linear(x, weight) for weight in weights])) / count


def measure(form: str, outputs: int, inputs: int, counts: list[int], speed: float) -> dict:
    """The figures of one layer. speed: bytes a second of a large read."""
    product = FORMATS[form](outputs, inputs)
    x = torch.empty(1, inputs, dtype=product.dtype, device="cuda")
    plan = skinny_gemm.plan_of(x, product.weights[0][0], product.kind)
    size = sum(part.nbytes for part in product.weights[0] if part is not None)
    return {
        "floor": size / speed * 1e6,
        "ours": {rows: tune.time_of(product, rows, plan.parts, plan.tile(rows)) for rows in counts},
        "cuBLAS": {rows: library_us(outputs, inputs, rows) for rows in counts},
        "same_bits": tune.same_bits(product, plan),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["8B"], choices=MODELS)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    speed, rows = bandwidth()["read"], []
    for model in options.models:
        for layer, shape in zip(LAYERS, MODELS[model]):
            for form in options.formats if layer != "lm_head" else ["bf16"]:
                rows.append({"model": model, "layer": layer, "format": form})
                rows[-1] |= measure(form, *shape, options.rows, speed)
                print(rows[-1], flush=True)
    cells = [
        (*(row[key] for key in KEYS), f"{row['floor']:.2f}", "same" if row["same_bits"] else "DIFFER",
         *(f"{row['ours'][count]:.2f} / {row['cuBLAS'][count]:.2f}" for count in options.rows))
        for row in rows
    ]  # fmt: skip
    show((*KEYS, "floor", "bits", *(f"N={count}" for count in options.rows)), cells, "microseconds, ours / cuBLAS")
    if options.json:
        save_rows(options.json, rows, KEYS, stamp(torch.device("cuda")))


if __name__ == "__main__":
    main()
