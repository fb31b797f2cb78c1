"""Computed plans of matrix products next to tuned ones, on a GPU that has tuned plans: Hopper, or after `tune-kernels`.

    python -m benchmarks.kernels.plans [--models 8B 1B 0.6B 135M] [--formats bf16 fp8 int4] [--rows 1 16 64]
                                       [--json FILE]

Tuned plans are hidden from the model of `spec_compile.kernels.linear.computed`, which chooses from the facts that the
driver tells. A figure is the microseconds of one product with cold weights; "ratio" is the time of the computed plan
over that of the tuned one, with all numbers of rows together. "predicted" is the model's time over the measured one, of
the tuned plan. Quantised formats are compared with the layers of Llama-3.1-8B, for which their plans were tuned.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.common import save_rows, show, stamp
from benchmarks.kernels.matmul import FORMATS, KEYS, LAYERS, MODELS
from spec_compile.kernels.card import card_of
from spec_compile.kernels.linear import computed, small_m
from spec_compile.kernels.linear.plans import ProductPlan
from spec_compile.tools import tune_kernels as tune

TURNS = 2
"""Both plans are timed in turn; the least time counts."""


def tuned_plan(product: tune.ProductShape) -> ProductPlan | None:
    """The plan that a kernel takes here, or None if it is computed."""
    weight = product.weights[0][0]
    measured = product.name in small_m._tuned(weight.device)
    if not measured and card_of(weight.device).capability != small_m.TUNED:
        return None
    return small_m.plan_of(weight.new_empty(1, product.inputs, dtype=product.dtype), weight, product.kind)


def text(plan: ProductPlan, counts: list[int]) -> str:
    """2: 64x256 64x128 of two parts and tiles of outputs x inputs, for each number of rows."""
    tiles = dict.fromkeys(f"{tile.block_o}x{tile.block_k}" for tile in map(plan.tile, counts))
    return f"{plan.parts}: {' '.join(tiles)}"


def measure(product: tune.ProductShape, tuned: ProductPlan, counts: list[int]) -> dict:
    """The times of both plans, by rows."""
    card = card_of(product.weights[0][0].device)
    mine = computed.plan(product.outputs, product.inputs, product.bits, card)
    times: dict[str, dict[int, float]] = {"tuned": {}, "computed": {}, "predicted": {}}
    for rows in counts:
        cuts = [(plan.parts, plan.tile(rows)._replace(blocks=1)) for plan in (tuned, mine)]
        least = [[tune.time_of(product, rows, *cut) for cut in dict.fromkeys(cuts)] for _ in range(TURNS)]
        best = [min(each) for each in zip(*least, strict=True)]
        times["tuned"][rows], times["computed"][rows] = best[0], best[-1]
        times["predicted"][rows] = computed.microseconds(product.outputs, product.inputs, rows, *cuts[0], card)
    return times | {"plans": [text(plan, counts) for plan in (tuned, mine)]}


def ratio(row: dict, one: str, other: str) -> float:
    return sum(row[one].values()) / sum(row[other].values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8", "int4"], choices=FORMATS)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    rows = []
    for model in options.models:
        for layer, shape in zip(LAYERS, MODELS[model], strict=True):
            formats = options.formats if model == "8B" and layer != "lm_head" else {"bf16"} & {*options.formats}
            for form in formats:
                product = FORMATS[form](*shape)
                if (tuned := tuned_plan(product)) is not None:
                    keys = {"model": model, "layer": layer, "format": form}
                    rows.append(keys | measure(product, tuned, options.rows))
    if not rows:
        parser.error(f"{torch.cuda.get_device_name()} has no tuned plans of these; run tune-kernels for a model first")
    cells = [
        (*(row[key] for key in KEYS), *row["plans"],
         *(f"{row['tuned'][count]:.1f} / {row['computed'][count]:.1f}" for count in options.rows),
         f"{ratio(row, 'computed', 'tuned'):.2f}", f"{ratio(row, 'predicted', 'tuned'):.2f}")
        for row in rows
    ]  # fmt: skip
    head = (*KEYS, "tuned", "computed", *(f"N={count}" for count in options.rows), "ratio", "predicted")
    show(head, cells, "microseconds, by the tuned plan / by the computed one")
    print(f"the largest ratio: {max(ratio(row, 'computed', 'tuned') for row in rows):.3f}")
    if options.json:
        save_rows(options.json, rows, KEYS, stamp(torch.device("cuda")))


if __name__ == "__main__":
    main()
