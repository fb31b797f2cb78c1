"""Drafts share things with their target: its hidden states, and the ranks of tensor parallelism, if that is faster."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..capture.copies import shared_copy
from ..capture.quantised import mark
from ..capture.trace import tapped
from ..errors import UnsupportedModelError
from ..graph import ModelGraph, attribute, calls
from ..kernels.linear import few_rows_linear
from ..parallel.ranks import ALONE, Alone
from ..parallel.slices import Cut
from ..passes.products import product_of
from .draft_weights import DraftWeights

BYTES_A_SECOND = 4.3e12
"""Rate at which an H200 reads weights."""
SUM_SECONDS, GATHER_SECONDS = 6.2e-6, 20e-6
"""Time of a sum over ranks by our kernel, and of a gather by NCCL, on two H200s."""


def choose_ranks(option: int | None, ranks: Alone, graph: ModelGraph, head_bytes: int = 0) -> tuple[Alone, str]:
    """The ranks that share a draft, and a line for ``explain()``.

    option: ``draft_tensor_parallel_size``: 1 (it is whole on each), the number of ranks, or None: the faster of the two
    by the bytes that a pass of the draft reads and the sums that sharing needs.
    ranks: of the target.
    graph: the captured draft.
    head_bytes: of an output matrix that is not in the graph.

    Raises ValueError, naming the option, if it is another number.
    """
    if option not in (None, 1, ranks.size):
        raise ValueError(
            f"draft_tensor_parallel_size: expected 1 (the draft is whole on each rank) or {ranks.size} (as many as "
            f"share the model), got {option}"
        )
    if ranks.size == 1:
        return ALONE, ""
    products = [product for node in calls(graph.gm) if (product := product_of(node)) is not None]
    weights = {part.target for product in products for part in product.parts}
    read = head_bytes + sum(attribute(graph.gm, name).nbytes for name in weights)
    saved = read * (1 - 1 / ranks.size) / BYTES_A_SECOND
    paid = 2 * len(graph.layers) * SUM_SECONDS + bool(head_bytes) * GATHER_SECONDS
    pays = saved > paid and graph.device.type == "cuda"
    heads = all(layer.heads % ranks.size == 0 for layer in graph.layers)
    if option == ranks.size and not heads:
        raise UnsupportedModelError(
            f"draft_tensor_parallel_size: the draft's {graph.layers[0].heads} heads do not divide among {ranks.size} "
            "ranks; pass 1"
        )
    is_shared = option == ranks.size or (option is None and pays and heads)
    reason = "as it was asked for"
    if option is None:
        reason = (
            f"a pass reads {read / 1e6:.0f} MB, of which sharing saves {saved * 1e6:.0f} us and pays {paid * 1e6:.0f}"
        )
    where = f"shared by {ranks.size} ranks" if is_shared else "whole on each rank"
    return (ranks if is_shared else ALONE), f"the draft is {where}: {reason}"


class DraftHead(nn.Module):
    """The output matrix [V, H] of a draft; if ranks share it, each has some of its rows."""

    def __init__(self, weight: Tensor, ranks: Alone, weights: DraftWeights):
        super().__init__()
        self.ranks, self.size = ranks, weight.shape[0]
        self.weight = weight if ranks.size == 1 else ranks.slices.part(weight, Cut(0, ranks.size))
        self.copy = weights.linear(self.weight, part="output")

    def forward(self, x: Tensor) -> Tensor:
        """Logits [..., V] of x [..., H]."""
        logits = few_rows_linear(x, self.weight) if self.copy is None else self.copy(x)
        if self.ranks.size == 1:
            return logits
        gathered = torch.ops.spec_compile.all_gather(logits, self.ranks.size, self.ranks.name)
        return gathered[..., : self.size]


def tapped_states(model: PreTrainedModel, taps: tuple[int, ...], ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """The tapped states [B, T, h] of the target at ids, and its choice of the next token at each [B, T]."""
    model = mark(shared_copy(model))
    with tapped(model, taps) as states:
        logits = model(input_ids=ids, use_cache=False).logits
    return states, logits.argmax(dim=-1)


def keep_row(buffer: Tensor, states: Tensor, row: Tensor, present: Tensor) -> None:
    """Copy the state at row [B] of states [B, T, C] to buffer [B, C], for the sequences with present [B]."""
    index = row.clamp(0, states.shape[1] - 1)[:, None, None].expand(-1, 1, states.shape[2])
    buffer.copy_(torch.where(present[:, None], states.gather(1, index)[:, 0], buffer.clone()))
