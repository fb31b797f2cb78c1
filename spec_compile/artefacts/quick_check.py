"""The quick check: graphs from an artefact must give the logits of the model's own forward on one short text."""

from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..capture.checks import linear_logits, on_some_text, random_ids, tree_logits
from ..capture.float32 import in_float32
from ..capture.yardstick import compare_logits, compare_rounding, has_half, in_float32_if_possible
from ..errors import UnsupportedModelError
from ..graph import ModelGraph
from ..kernels.plain import plain_kernels
from ..tree import ancestry

PREFIX = 17
"""Tokens before the tree."""
PARENTS = [-1, 0, 0, 1, 2, 3, 4]
"""Two paths of four nodes: 0, 1, 3, 5 and 0, 2, 4, 6."""
PART = "an artefact"


@torch.no_grad()
def quick_check(model: PreTrainedModel, prefill: ModelGraph, verify: ModelGraph) -> None:
    """Run a text of 24 tokens through both graphs, its end as a tree, and its two paths through the model's forward.

    The limits are those of the checks after capture. Operators have their plain meaning: an artefact has graphs and no
    kernels, so none is compiled for this. UnsupportedModelError if the logits differ by more.
    """
    name = type(model).__name__
    ancestors, depth = ancestry(torch.tensor([PARENTS], device=verify.device))
    prefix = min(PREFIX, (verify.position_limit or PREFIX + len(PARENTS)) - len(PARENTS))

    def check(seed: int) -> None:
        ids = random_ids(verify, 1, prefix + len(PARENTS), seed).to(verify.device)

        def own() -> Tensor:
            def run(texts: Tensor) -> Tensor:
                return model(input_ids=texts, use_cache=False).logits

            return linear_logits(run, ids, prefix, ancestors[0].tolist())

        def tree(dtype: torch.dtype) -> Tensor:
            kept = replace(verify, dtype=dtype, cache_dtype=None)
            return tree_logits((prefill, verify), kept, ids, prefix, ancestors, depth, [])

        if not has_half(verify):
            with in_float32():
                return compare_logits(name, PART, tree(verify.dtype), own())
        wide = in_float32_if_possible(PART, lambda: tree(torch.float32))
        exact = in_float32_if_possible("the model's own forward", own, model)
        if wide is not None and exact is not None:
            compare_logits(name, PART, wide, exact)
        reference = wide if exact is None else exact
        if reference is None:
            raise UnsupportedModelError(f"model: {name}: {PART} cannot be checked, because nothing runs in float32")
        compare_rounding(name, PART, tree(verify.dtype), own(), reference)

    with plain_kernels():
        on_some_text(verify, check)
