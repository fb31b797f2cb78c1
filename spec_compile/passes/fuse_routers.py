"""fuse_routers: on a GPU the choice of experts by a softmax becomes one small kernel."""

import operator
from typing import NamedTuple

import torch
from torch import fx

from ..graph import ModelGraph, calls
from ..kernels import experts
from .apply import comes_after, supports_kernels

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
    if supports_kernels(graph, settings):
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
