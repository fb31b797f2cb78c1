"""order_sums: on a GPU the sums that other passes leave of routers have an order that other rows do not change."""

import torch
from torch import fx

from ..graph import ModelGraph, calls
from ..kernels import HALF
from .apply import comes_after, takes_kernels
from .fuse_norms import CASTS
from .nodes import replace_node

aten, ops = torch.ops.aten, torch.ops.spec_compile
LONGEST = 1024
"""Entries of a row whose sum is replaced. Longer rows are those of norms, where two more kernels would be felt."""


@comes_after("fuse_routers", "use_small_m_linears", "fuse_gated_norms", "fuse_l2_norms", "fuse_norms")
def order_sums(graph: ModelGraph, settings) -> str:
    """Replace short sums over the last dimension by `row_sum`, and float32 linear layers by `linear_float32`.

    Only in a graph of 16 bits.
    """
    if not takes_kernels(graph, settings):
        return "0 sums and 0 products in float32 ordered"
    sums = [node for node in calls(graph.gm, aten.sum.dim_IntList) if _is_short(node)]
    products = [node for node in calls(graph.gm, aten.linear.default) if _is_float32(node)]
    for node in sums:
        with graph.gm.graph.inserting_before(node):
            new = graph.gm.graph.call_function(ops.row_sum.default, (node.args[0], node.meta["val"].dtype))
            new.meta = dict(node.meta)
            if node.args[2:] == (True,):
                new.meta["val"] = node.meta["val"].squeeze(-1)
                new = graph.gm.graph.call_function(aten.unsqueeze.default, (new, -1))
        replace_node(node, new)
    for node in products:
        with graph.gm.graph.inserting_before(node):
            new = graph.gm.graph.call_function(ops.linear_float32.default, tuple(map(_before_cast, node.args)))
        replace_node(node, new)
    return f"{len(sums)} sums and {len(products)} products in float32 ordered"


def _is_short(node: fx.Node) -> bool:
    x = node.args[0].meta["val"]
    return x.is_floating_point() and list(node.args[1]) in ([-1], [x.dim() - 1]) and x.shape[-1] <= LONGEST


def _is_float32(node: fx.Node) -> bool:
    """True if it is a linear layer in float32 without a bias."""
    x = node.args[0].meta.get("val")
    return len(node.args) == 2 and x is not None and x.dtype == torch.float32


def _before_cast(node: fx.Node) -> fx.Node:
    """The input of a cast from 16 bits; any other node itself."""
    before = node.args[0].meta.get("val") if node.target in CASTS else None
    return node if before is None or before.dtype not in HALF else node.args[0]
