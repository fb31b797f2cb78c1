"""fuse_swiglu: on a GPU the activation of a gated MLP joins the merged product of gate and up."""

import operator

import torch

from ..graph import ModelGraph, calls
from ..kernels.linear import PRODUCT, bias_of, ends_plainly
from .apply import comes_after

aten = torch.ops.aten


@comes_after("use_small_m_linears")
def fuse_swiglu(graph: ModelGraph, settings) -> str:
    """Replace ``silu(a) * b``, with a and b the halves of one product, by that product with a gate."""
    joined = 0
    for product in calls(graph.gm, aten.mul.Tensor):
        for activated, up in (product.args, product.args[::-1]):
            source = halves(activated, up)
            if source is not None and ends_plainly(source):
                with graph.gm.graph.inserting_before(product):
                    fused = graph.gm.graph.call_function(PRODUCT, source.args, {**source.kwargs, "gated": True})
                fused.meta = dict(source.meta)
                product.replace_all_uses_with(fused)
                graph.gm.graph.erase_node(product)
                joined += 1
                break
    return f"{joined} activations joined to the product before them"


def halves(activated, up) -> torch.fx.Node | None:
    """The node whose halves these are, the first through silu, if there is one and it has no bias."""
    if not all(isinstance(node, torch.fx.Node) for node in (activated, up)) or activated.target != aten.silu.default:
        return None
    gate = activated.args[0]
    if gate.target is not operator.getitem or up.target is not operator.getitem or gate.args[0] is not up.args[0]:
        return None
    split = gate.args[0]
    if (gate.args[1], up.args[1]) != (0, 1) or split.target != aten.split_with_sizes.default:
        return None
    source, sizes = split.args[0], split.args[1]
    if len(sizes) != 2 or sizes[0] != sizes[1] or len(activated.users) > 1 or len(split.users) > 2:
        return None
    return source if bias_of(source) is None else None
