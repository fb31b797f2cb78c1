"""fuse_around: on a CPU the addition and the norm before a product, and the gate after it, join the product."""

import operator

import torch
from torch import fx

from ..graph import ModelGraph, attribute, calls
from ..kernels import linear
from ..kernels.linear import around
from ..kernels.ops import arguments_of
from .apply import comes_after
from .fuse_norms import Norm, adds_rows, match_norm
from .fuse_swiglu import halves
from .nodes import replace_node

aten = torch.ops.aten


@comes_after("use_small_m_linears", "fuse_swiglu", "fuse_norms")
def fuse_around(graph: ModelGraph, settings) -> str:
    """Put `around_product` where a product of bfloat16 has a gate after it, or an RMSNorm before it that only the
    product reads, and `add_around_product` if the norm is of a sum.

    Not in graphs of ``torch.compile(backend="spec")``.
    """
    gates = norms = sums = 0
    if serves(graph, settings):
        for node in calls(graph.gm, aten.mul.Tensor):
            gates += _join_gate(graph, node)
        for node in calls(graph.gm, aten.rsqrt.default):
            norm = match_norm(graph, node)
            if norm is not None and len(norm.out.users) == 1:  # guard: norm-read-by-others
                joined = _join_norm(graph, norm, next(iter(norm.out.users)))
                norms += joined is not None
                sums += bool(joined)
    return f"{gates} gates, {norms} norms and {sums} additions joined to products"


def serves(graph: ModelGraph, settings) -> bool:
    """True if products of a graph take what stands around them."""
    return settings.purpose != "forward" and graph.dtype == torch.bfloat16 and graph.device.type == "cpu"


def _join_gate(graph: ModelGraph, product: fx.Node) -> bool:
    """Join ``silu(a) * b`` to the product of which a and b are the halves, if it is that."""
    for activated, up in (product.args, product.args[::-1]):
        source = halves(activated, up)
        if source is None or not (call := product_taken(graph, source)):
            continue
        gate = activated.args[0]
        if any(len(node.users) > 1 for node in (gate, up, source)):
            continue
        with graph.gm.graph.inserting_before(product):
            fused = graph.gm.graph.call_function(around.AROUND, (source.args[0], None, 0.0, None, *call, True))
        fused.meta = {**source.meta, "val": product.meta["val"]}
        product.replace_all_uses_with(fused)
        for node in (product, activated, gate, up, gate.args[0], source):  # so that the norm has one reader
            graph.gm.graph.erase_node(node)
        return True
    return False


def _join_norm(graph: ModelGraph, norm: Norm, product: fx.Node) -> bool | None:
    """Join a norm to the product that reads it. Returns True if the addition before it joined, too; None if nothing
    did."""
    gm, is_gated = graph.gm, False
    if product.target == around.AROUND and product.args[1] is None:
        call, is_gated = product.args[4:7], product.args[7]
    else:
        call = product_taken(graph, product)
    if not call or product.args[0] is not norm.out:
        return None
    adds, new = adds_rows(graph, norm.x), gm.graph.call_function
    with gm.graph.inserting_before(norm.x if adds else product):  # other readers of the sum may come before the product
        tail = *_parameters(gm, norm, *call), is_gated
        if adds:
            both = new(around.ADD_AROUND, (*norm.x.args, *tail))
            stream, fused = (new(operator.getitem, (both, place)) for place in (0, 1))
            both.meta = {name: value for name, value in product.meta.items() if name != "val"}
            stream.meta = dict(norm.x.meta)
            norm.x.replace_all_uses_with(stream)
        else:
            fused = new(around.AROUND, (norm.x, *tail))
    replace_node(product, fused)
    return adds


def _parameters(gm: fx.GraphModule, norm: Norm, parts: list, bias: fx.Node | None, kind: str) -> tuple:
    """The arguments of the ops for a norm and a product. Nodes of parameters are made anew."""
    weight, *parts = (gm.graph.get_attr(part.target) for part in (norm.weight, *parts))
    return weight, norm.eps, norm.offset, parts, None if bias is None else gm.graph.get_attr(bias.target), kind


def product_taken(graph: ModelGraph, node: fx.Node) -> tuple | None:
    """Parts, bias and kind of a product that the kernel takes; None for any other node."""
    if node.target is linear.FEW_ROWS.op and linear.weight_of(node) is not None:
        parts, bias, kind = [node.args[1]], linear.bias_of(node), ""
    elif node.target == linear.QUANTISED:
        call = arguments_of(node)
        parts, bias, kind = call["parts"], call["bias"], call["kind"]
    else:
        return None
    tensors = [attribute(graph.gm, part.target) for part in parts]
    return (parts, bias, kind) if around.serves(graph.dtype, tensors, kind) else None
