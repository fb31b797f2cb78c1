"""The search for the fastest plans of a model's matrix products on this GPU: ``python -m spec_compile tune-kernels``.

A plan holds for every number of rows: tiles of different numbers of rows share its cuts of the columns and take the
same instructions of the tensor cores. Before a plan is taken, the bits of all rows are compared.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from time import monotonic as clock
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import passes
from ..capture.admit import admit, in_served_dtype
from ..capture.quantised import hold_one_layout
from ..capture.trace import capture
from ..graph import ModelGraph, attribute
from ..kernels.card import Card, card_of
from ..kernels.linear import LINEARS, computed, skinny_gemm, tuned, weight_of
from ..kernels.linear.plans import ProductPlan, ProductTile
from ..kernels.linear.product import Product
from ..quantised import layout_of

WIDTHS = 16, 64, 128
"""Rows of a tile; a round most often has as few as the first two."""
ROWS = 1, 2, 5, 16, 17, 33, 64, 65, 100, 128, 300, 512, 2048
"""Numbers of rows whose bits are compared; the last has all."""
SLACK, MOST_TILES = 1.3, 4
"""Plans that should take more than `SLACK` times the fastest one's time, by the model, are not tried. The
others give at most `MOST_TILES` tiles of each number of rows."""
GAIN = 0.98
"""A new plan takes at most this share of the present one's time."""


class ProductShape(NamedTuple):
    """Products of one shape and format. weights: of each product the weight and, if it is quantised, the scales."""

    outputs: int
    inputs: int
    kind: str
    dtype: torch.dtype
    weights: list[tuple[Tensor, Tensor | None]]

    @property
    def bits(self) -> int:
        return layout_of(self.kind).bits if self.kind else 16

    @property
    def name(self) -> str:
        return tuned.name_of(self.kind, self.weights[0][0].dtype, self.outputs, self.inputs)


class SearchResult(NamedTuple):
    """The end of the search of a product.

    before, after: microseconds of 1, 16 and 64 rows together.
    plan: None if the present one stays.
    refused: faster plans in which bits of rows differed.
    """

    before: float
    after: float
    plan: ProductPlan | None
    refused: int


def check(device: torch.device, seconds: float) -> None:
    """ValueError if no kernel can be tuned on this device, or in this time."""
    if not seconds > 0:
        raise ValueError(f"--seconds: expected a number above 0, got {seconds}; 90 suffice for most models")
    if device.type != "cuda" or not torch.cuda.is_available():
        got = device if device.type != "cuda" else "a machine on which torch sees no GPU"
        raise ValueError(f"--device: kernels are tuned on the GPU that runs them; expected cuda, got {got}")
    reason = skinny_gemm.why_not_on(device)
    if reason is not None:
        raise ValueError(f"--device: there is no kernel to tune on {device}, because {reason}")


@torch.no_grad()
def run(model: PreTrainedModel, seconds: float) -> None:
    """Tune the products of a model on its GPU, print a line for each, and keep the plans that are faster.

    seconds: time for the search; each product has its share of what is left.
    """
    in_served_dtype(admit(model), converts=True)
    hold_one_layout(model)
    # The model's products, captured before anything is fused into them.
    before_fusion = passes.PIPELINE[: passes.PIPELINE.index(passes.use_linear_forms) + 1]
    products = products_of(passes.run(capture(model), passes.Settings(), before_fusion))
    if not products:
        raise ValueError(
            f"--model: {model.config.name_or_path} has no product that these kernels multiply; expected weights of 16 "
            "bits (--dtype bfloat16), or of a format with a kernel"
        )
    # Each product has its share of the time that is left.
    path = skinny_gemm.tuned_file(products[0].weights[0][0].device)
    end = clock() + seconds
    for number, product in enumerate(products):
        outcome = tune(product, (end - clock()) / (len(products) - number))
        print(_line(product.name, outcome), flush=True)
        if outcome.plan is not None:
            tuned.add(path, {product.name: outcome.plan}, (outcome.before, outcome.after))
    print(f"plans: {path}" if path.exists() else "no plan is faster than the present ones; no file was written")


def _line(name: str, outcome: SearchResult) -> str:
    """A product in the table that the command prints."""
    change = "stays" if outcome.plan is None else f"-> {outcome.after:.1f} us, {outcome.plan.parts} parts"
    refused = f"; bits of rows differed in {outcome.refused} faster plans" if outcome.refused else ""
    return f"{name}: {outcome.before:.1f} us for 1, 16 and 64 rows {change}{refused}"


def products_of(graph: ModelGraph) -> list[ProductShape]:
    """The products of a graph that the kernel multiplies, one entry for each shape and format. No step around a product
    may be fused into it yet."""
    groups: dict[tuple, list] = defaultdict(list)
    for node in graph.gm.graph.nodes:
        if node.target not in LINEARS or (source := weight_of(node)) is None:
            continue
        weight, kind = attribute(graph.gm, source.target), node.kwargs.get("kind", "")
        scales = attribute(graph.gm, node.kwargs["scales"].target) if kind else None
        if skinny_gemm.why_not(weight, kind, graph.dtype) is None:
            inputs = node.args[0].meta["val"].shape[-1]
            groups[len(weight), inputs, kind].append((weight, scales))
    return [ProductShape(*key, graph.dtype, weights) for key, weights in groups.items()]


def tune(product: ProductShape, seconds: float = math.inf, time: Callable | None = None) -> SearchResult:
    """Search for a plan of a product, in the order in which the model of `computed` has them.

    seconds: no further tile is tried after them.
    time: ``time(product, rows, parts, tile)`` -> microseconds.
    """
    time, end = time or time_of, clock() + seconds
    x = product.weights[0][0].new_empty(1, product.inputs, dtype=product.dtype)
    present = skinny_gemm.plan_of(x, product.weights[0][0], product.kind)
    before = sum(time(product, rows, present.parts, present.tile(rows)) for rows in (1, 16, 64))
    # Times of tiles, by what must be one for all rows of a plan: the parts, and the instructions.
    times = defaultdict(lambda: defaultdict(list))
    for width, parts, tile in candidates(product, card_of(x.device)):
        if clock() > end:
            break
        rows = {16: (1, 16), 64: (64,)}.get(width, (width,))
        taken = sum(time(product, each, parts, tile) for each in rows)
        times[parts, tile.block_o >= 64][width].append((taken, tile))
    # The fastest plan that gains enough, and whose rows have the same bits with any number of rows.
    refused = 0
    for after, plan in ranked(times):
        if after > GAIN * before:
            break
        if same_bits(product, plan):
            return SearchResult(before, after, plan, refused)
        refused += 1
    return SearchResult(before, before, None, refused)


def candidates(product: ProductShape, card: Card) -> Iterator[tuple[int, int, ProductTile]]:
    """Rows of a tile, parts, and the tile, of each plan to try. The most promising parts come first, and of each first
    the tiles that make a plan, so that a search that ends early has whole ones."""
    known = computed.choices(product.outputs, product.inputs, product.bits, card)
    for choice in known:
        if choice.time > SLACK * known[0].time:
            break
        for tiles in itertools.zip_longest(*(choice.tiles[width][:MOST_TILES] for width in WIDTHS)):
            for width, tile in zip(WIDTHS, tiles, strict=True):
                if tile is not None:
                    yield width, choice.plan.parts, tile


def ranked(times: dict) -> list[tuple[float, ProductPlan]]:
    """Plans, the fastest with few rows first, from times by (parts, instructions) and the rows of a tile."""
    plans = []
    for (parts, _), widths in times.items():
        best = [min(widths.get(width, [(float("inf"), None)])) for width in WIDTHS]
        if best[-1][0] < float("inf"):
            taken = sum(taken for taken, _ in best[:-1])
            plans.append((taken, ProductPlan(parts, tuple(tile for _, tile in best))))
    return sorted(plans, key=lambda plan: plan[0])


def same_bits(product: ProductShape, plan: ProductPlan) -> bool:
    """True if a plan gives every row the same bits with any number of rows."""
    weight, scales = product.weights[0]
    generator = torch.Generator(weight.device).manual_seed(0)
    x = torch.randn(ROWS[-1], product.inputs, device=weight.device, generator=generator).to(product.dtype)

    def multiply(rows: int) -> Tensor:
        return skinny_gemm.run(Product(x[:rows], weight, None, scales, product.kind), plan)

    reference = multiply(ROWS[-1])
    return all(torch.equal(multiply(rows), reference[:rows]) for rows in ROWS[:-1])


def time_of(product: ProductShape, rows: int, parts: int, tile: ProductTile) -> float:
    """Microseconds of one product, with weights that are in no cache."""
    from triton.runtime.errors import OutOfResources
    from triton.testing import do_bench_cudagraph

    # Enough weights that none is in a cache when its turn comes again.
    x = torch.ones(rows, product.inputs, device=product.weights[0][0].device, dtype=product.dtype)
    size = product.weights[0][0].nbytes
    weights = list(itertools.islice(product.weights, 1 + (400 << 20) // size))
    while len(weights) * size < 200 << 20 and len(weights) < 128:  # more than the L2 cache holds
        weight, scales = product.weights[0]
        weights.append((weight.clone(), scales))
    plan = ProductPlan(parts, (tile,))

    def run() -> None:
        for weight, scales in weights:
            skinny_gemm.run(Product(x, weight, None, scales, product.kind), plan)

    try:
        return do_bench_cudagraph(run, rep=0, return_mode="median") * 1e3 / len(weights)  # one run in the graph
    except OutOfResources:
        return float("inf")
