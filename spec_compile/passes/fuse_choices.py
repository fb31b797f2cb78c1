"""fuse_choices: on a GPU the choice of experts joins the router's product."""

import torch
from torch import fx

from ..graph import ModelGraph, calls
from ..kernels import linear
from ..kernels.ops import arguments_of
from .apply import comes_after


@comes_after("fuse_routers", "use_small_m_linears", "fuse_residuals")
def fuse_choices(graph: ModelGraph, settings) -> str:
    """Replace `route` of a product that nothing else reads by `product_to_experts`."""
    joined, routers = 0, torch.ops.spec_compile.route.default if graph.device.type == "cuda" else None
    for node in calls(graph.gm, routers) if routers else []:
        product = node.args[0]
        if linear.ends_plainly(product) and len(product.users) == 1:
            _join(graph.gm.graph, node, product)
            joined += 1
    return f"{joined} choices of experts joined to the products before them"


def _join(graph: fx.Graph, node: fx.Node, product: fx.Node) -> None:
    choice = arguments_of(node)
    end = {name: choice[name] for name in ("top", "among", "dtype")}
    with graph.inserting_before(node):
        operands = *product.args[:2], linear.bias_of(product)
        both = graph.call_function(linear.TO_EXPERTS, operands, {**product.kwargs, **end})
    both.meta = {**product.meta, "val": node.meta["val"]}
    node.replace_all_uses_with(both)
    for each in (node, product):
        graph.erase_node(each)
