"""Indexers: each query attends to the few tokens that score best (DeepSeek sparse attention, DeepSeek-AI 2025, eq. 1).

    score[n, s] = sum_h weight[n, h] * relu(q[n, h] . k[s])        over the index heads h, in float32

A node chooses the `topk` largest scores among all that it sees: the committed tokens, its ancestors and itself. If it
sees no more than `topk`, it chooses all. The earlier slots win among equal scores, so a choice depends on the
tokens of a path only, not on the tree; torch.topk, which transformers calls, promises no order there.

Shapes: B rows, N tree nodes or chunk tokens, H index heads, D their size, S cache slots.
"""

import math
import operator

import torch
from torch import Tensor

from ...graph import ModelGraph, calls
from ...kernels import ops
from ...kernels.attention.base import attention_calls
from ...kernels.launching import are_plain, new_op
from ...kernels.ops import visible_slots
from ...passes.apply import comes_after, replace_node


@new_op("choose", lambda q, k, weights, topk: q.new_empty(*q.shape[:2], topk, dtype=torch.int32))
def choose(q: Tensor, k: Tensor, weights: Tensor, topk: int) -> Tensor:
    """The choice of every token of a whole sequence, which capture puts in place of a model's own indexer.

    q [B, T, H, D], k [B, T, D], weights [B, T, H] float32 -> [B, T, topk] int32, see `largest`.
    """
    steps = torch.arange(q.shape[1], device=q.device)
    return largest(index_scores(q, k, weights, (steps[:, None] >= steps)[None]), topk)


@new_op(
    "append_and_choose", lambda q, _, weights, *others: q.new_empty(*q.shape[:2], others[3], dtype=torch.int32),
    writes=("index_keys",),
)  # fmt: skip
def append_and_choose(
    q: Tensor, k: Tensor, weights: Tensor, index_keys: Tensor, lengths: Tensor, visible: Tensor, topk: int,
    table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Append a block of N index keys to their cache, and choose for each query among the slots that it sees.

    q: [B, N, H, D]; index queries.
    k: [B, N, D]; index keys.
    weights: [B, N, H] float32; of the heads.
    index_keys: [P, 1, S, D], contiguous; written at the slots lengths[b] .. lengths[b] + N.
    lengths: [B] int64; committed slots.
    visible: [B, N, S'] bool; `visible_to`. Slots from S' on are not read.
    table: [B, n] int32; the pages of each row, as in `attention.base.AttentionCall`.
    -> [B, N, topk] int32, see `largest`.
    """
    ops.append(index_keys, k[:, None], lengths, table)
    if q.is_cuda and not are_plain():
        from .attention import scores  # needs Triton

        return largest(scores(q, index_keys, weights, visible, table), topk)
    keys = ops.first_slots(index_keys, visible.shape[2], table)[:, 0]
    return largest(index_scores(q, keys, weights, visible), topk)


MARKER = torch.ops.spec_compile.choose.default
CHOOSE = torch.ops.spec_compile.append_and_choose.default


def visible_to(
    positions: Tensor, lengths: Tensor, ancestors: Tensor | None, index_keys: Tensor, max_kv_len: int,
    table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The slots that each node sees, bool [B, N, S']: S' is max_kv_len on a CPU, and all slots on a GPU, where no shape
    may depend on a value. It takes the arguments of `ops.tree_mask`."""
    of_row = index_keys.shape[2] * (1 if table is None else table.shape[1])
    slots = of_row if index_keys.is_cuda else max_kv_len
    return visible_slots(positions, lengths, ancestors, slots)[0]


def index_scores(q: Tensor, keys: Tensor, weights: Tensor, visible: Tensor) -> Tensor:
    """The scores [B, N, S] of keys [B, S, D] for q [B, N, H, D] and weights [B, N, H] in float32.

    visible: bool [B, N, S]; elsewhere the score is minus infinity.
    """
    products = q.float() @ keys.float().transpose(1, 2)[:, None]
    scores = (weights.float()[:, :, None] @ products.relu())[:, :, 0]
    return scores.masked_fill(~visible, -math.inf)


def largest(scores: Tensor, topk: int) -> Tensor:
    """The places of the `topk` largest scores [B, N, S], ascending, then -1; int32 [B, N, topk].

    topk = 3: scores [1, 0, 2, 0, 0] give [0, 1, 2], and [-inf, 0, 2, -inf] give [1, 2, -1].
    """
    batch, nodes, slots = scores.shape
    most = min(topk, slots)
    # All above the least of the largest are chosen, and as many of its equals, the earlier first, as there is room.
    least = scores.topk(most, sorted=False).values.amin(dim=2, keepdim=True)
    above, equal = scores > least, (scores == least) & (scores > -math.inf)
    chosen = above | equal & (equal.cumsum(dim=2) <= most - above.sum(dim=2, keepdim=True))
    # Each chosen slot goes to its place in the list; what is not chosen goes to a column that is cut off.
    place = torch.where(chosen, chosen.cumsum(dim=2) - 1, topk)
    slot = torch.arange(slots, dtype=torch.int32, device=scores.device)
    out = torch.full((batch, nodes, topk + 1), -1, dtype=torch.int32, device=scores.device)
    return out.scatter(2, place, slot.expand_as(place))[..., :topk].contiguous()


@comes_after("use_tree_attention")
def use_indexes(graph: ModelGraph, settings) -> str:
    """Replace each ``spec_compile::choose`` by `append_and_choose`.

    It is the pass by which every indexer chooses among the tokens that a node of the tree sees, over a static cache of
    its keys. The keys of indexers follow the keys of attention in the input ``cache``. All indexers see the same slots.
    """
    gm = graph.gm
    if not graph.indexes:
        return "no indexers"
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    inputs, positions = {node.target: node for node in placeholders}, placeholders[1]
    begin = graph.layer_tensors * len(graph.layers)
    visible, table = None, attention_calls(graph)[0].kwargs.get("table")
    for number, node in enumerate(calls(gm, MARKER)):
        q, k, weights, topk = node.args
        with gm.graph.inserting_before(node):
            keys = gm.graph.call_function(operator.getitem, (inputs["cache"], begin + number))
            if visible is None:
                rows = positions, inputs["lengths"], inputs["ancestors"]
                visible = gm.graph.call_function(visible_to, (*rows, keys, inputs["max_kv_len"], table))
            new = gm.graph.call_function(CHOOSE, (q, k, weights, keys, inputs["lengths"], visible, topk, table))
        replace_node(node, new)
    tokens = ", ".join(sorted({str(spec.topk) for spec in graph.indexes}))
    indexed = sum(layer.indexed for layer in graph.layers)
    return f"{len(graph.indexes)} indexers choose {tokens} tokens for {indexed} layers"
