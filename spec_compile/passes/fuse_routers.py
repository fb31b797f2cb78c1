"""fuse_routers: on a GPU the choice of experts by a softmax becomes one small kernel."""

import operator
from typing import NamedTuple

import torch
from torch import fx

from ..graph import ModelGraph, calls
from ..kernels import HALF, experts
from .apply import comes_after, takes_kernels
from .fuse_norms import CASTS
from .products import replace_node

aten = torch.ops.aten


class Router(NamedTuple):
    """The choice that a graph makes, as `kernels.experts.route` takes it. nodes: what it replaces, the last first."""

    logits: fx.Node
    top: int
    among: str
    nodes: list[fx.Node]


@comes_after("tidy")
def fuse_routers(graph: ModelGraph, settings) -> str:
    """Replace softmax and top-k of a router's logits, in either order, by `spec_compile::route`.

    Only in a graph of 16 bits, and of float32 softmaxes. Other routers stay as they are.
    """
    fused = 0
    if takes_kernels(graph, settings):
        for node in calls(graph.gm, experts.DOWN):
            router = match_router(node.args[2], node.args[1])
            if router is not None:
                _fuse(graph.gm.graph, node.args[2], node.args[1], router)
                fused += 1
    return f"{fused} routers fused"


def match_router(weights: fx.Node, ids: fx.Node) -> Router | None:
    """The choice whose results `weights` and `ids` are, if it is one that the kernel makes."""
    nodes, node, among = [], weights, "all"

    def step(target) -> bool:
        return isinstance(node, fx.Node) and node.target == target

    if step(aten.to.dtype) or step(aten.type_as.default):
        nodes, node = [*nodes, node], node.args[0]
    if step(aten.div.Tensor):
        value, total = node.args
        if total.target != aten.sum.dim_IntList or total.args != (value, [-1], True):
            return None
        nodes, node, among = [*nodes, node, total], value, "all, to a sum of 1"
    if step(aten.softmax.int) and among == "all" and node.args[1] in (1, -1):
        nodes, node, among = [*nodes, node], node.args[0], "chosen"
    top = node.args[0] if step(operator.getitem) and node.args[1] == 0 else None
    if top is None or top.target != aten.topk.default or len(top.args) > 2 or top.kwargs:
        return None
    if ids.target != operator.getitem or ids.args != (top, 1):
        return None
    nodes, node, count = [*nodes, node, ids, top], top.args[0], top.args[1]
    if among != "chosen":
        if not step(aten.softmax.int) or node.args[1] not in (1, -1) or node.meta["val"].dtype != torch.float32:
            return None
        nodes, node = [*nodes, node], node.args[0]
        if step(aten.to.dtype) and node.meta["val"].dtype == torch.float32:
            nodes, node = [*nodes, node], node.args[0]
    inside = {*nodes}
    private = all(user in inside for each in nodes if each not in (weights, ids) for user in each.users)
    return Router(node, count, among, nodes) if private and node.meta["val"].dim() == 2 else None


def _fuse(graph: fx.Graph, weights: fx.Node, ids: fx.Node, router: Router) -> None:
    """Put the kernel's op in the place of a router."""
    arguments = router.logits, router.top, router.among, weights.meta["val"].dtype
    with graph.inserting_after(router.logits):
        both = graph.call_function(torch.ops.spec_compile.route.default, arguments)
    both.meta = {key: value for key, value in router.logits.meta.items() if key != "val"}
    both.meta["val"] = (weights.meta["val"], ids.meta["val"])
    after = both
    for old, index in ((weights, 0), (ids, 1)):
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (both, index))
        after.meta = dict(old.meta)
        old.replace_all_uses_with(after)
    for node in router.nodes:
        graph.erase_node(node)


# order_sums: on a GPU the sums that other passes leave of routers have an order that other rows do not change.


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
