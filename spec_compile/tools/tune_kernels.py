"""The search for plans of a model's matrix products on this GPU, for ``python -m spec_compile tune-kernels``."""

import time

import torch
from transformers import PreTrainedModel

from .. import passes
from ..capture.admit import admit
from ..capture.quantised import hold_one_layout
from ..capture.served_dtype import in_served_dtype
from ..capture.trace import capture
from ..kernels.linear import small_m, tuned
from . import tune_plans as tune


def check(device: torch.device, seconds: float) -> None:
    """ValueError if no kernel can be tuned on this device, or in this time."""
    if not seconds > 0:
        raise ValueError(f"--seconds: expected a number above 0, got {seconds}; 90 suffice for most models")
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ValueError(f"--device: kernels are tuned on the GPU that runs them; expected cuda, got {_got(device)}")
    lack = small_m.lack_of_device(device)
    if lack is not None:
        raise ValueError(f"--device: there is no kernel to tune on {device}, because {lack}")


@torch.no_grad()
def run(model: PreTrainedModel, seconds: float) -> None:
    """Tune the products of a model on its GPU, print a line for each, and keep the plans that are faster.

    seconds: of the search; each product has its share of what is left.
    """
    admit(model)
    in_served_dtype(model, converts=True)
    hold_one_layout(model)
    before_fusion = passes.PIPELINE[: passes.PIPELINE.index(passes.use_small_m_linears) + 1]
    products = tune.products(passes.run(capture(model), passes.Settings(), before_fusion))
    if not products:
        raise ValueError(
            f"--model: {model.config.name_or_path} has no product that these kernels multiply; expected weights of 16 "
            "bits (--dtype bfloat16), or of a format with a kernel"
        )
    path = small_m.tuned_file(products[0].weights[0][0].device)
    end = time.monotonic() + seconds
    for number, product in enumerate(products):
        outcome = tune.tune(product, (end - time.monotonic()) / (len(products) - number))
        print(_line(product.name, outcome), flush=True)
        if outcome.plan is not None:
            tuned.add(path, {product.name: outcome.plan}, (outcome.before, outcome.after))
    print(f"plans: {path}" if path.exists() else "no plan is faster than the present ones; no file was written")


def _got(device: torch.device) -> str:
    return str(device) if device.type != "cuda" else "a machine on which torch sees no GPU"


def _line(name: str, outcome: tune.SearchResult) -> str:
    """A product in the table that the command prints."""
    change = "stays" if outcome.plan is None else f"-> {outcome.after:.1f} us, {outcome.plan.parts} parts"
    refused = f"; bits of rows differed in {outcome.refused} faster plans" if outcome.refused else ""
    return f"{name}: {outcome.before:.1f} us for 1, 16 and 64 rows {change}{refused}"
