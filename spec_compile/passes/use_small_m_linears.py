"""use_small_m_linears: linear layers take the form that reads their weights fastest."""

from collections import defaultdict

from torch import Tensor, fx

from ..graph import ModelGraph, attribute
from ..kernels import linear
from .apply import comes_after
from .products import put_product


@comes_after("merge_linears", "select_logits")
def use_small_m_linears(graph: ModelGraph, settings) -> str:
    """Give each linear layer the form that `linear.choose` chooses; only a graph that verifies has few rows."""
    changed = 0
    for node in linear.linear_layers(graph):
        form = linear.choose(attribute(graph.gm, node.args[1].target), few_rows=settings.purpose != "prefill")
        if form is not None:
            node.target, node.args = form.op, (*node.args[:2], linear.bias_of(node))
            changed += 1
    packed, copied = _use_packed(graph, settings.merge_linears) if settings.purpose != "prefill" else (0, 0)
    summary = f"{changed + packed} linear layers take the form for few rows"
    return f"{summary}; copies of quantised weights for it take {copied / 1e9:.2f} GB" if copied else summary


def _use_packed(graph: ModelGraph, merge: bool) -> tuple[int, int]:
    """How many quantised layers have a kernel and now take it, and the bytes of weights that were copied for them.

    merge: layers of one input that the kernel reads as copies become one product.
    """
    alike: dict[tuple | fx.Node, list[fx.Node]] = defaultdict(list)
    for node in linear.quantised_layers(graph):
        x, _, bias, kind = node.args
        alike[(x, kind) if merge and bias is None else node].append(node)
    changed = copied = 0
    for group in alike.values():
        forms = [(group, _packed(graph, group))]
        if len(group) > 1 and forms[0][1] is None:
            forms = [([node], _packed(graph, [node])) for node in group]
        for products, form in forms:
            if form is not None:
                copied += _put(graph, products, f"packed_{changed}", *form)
                changed += len(products)
    return changed, copied


def _packed(graph: ModelGraph, products: list[fx.Node]) -> tuple[str, list[Tensor]] | None:
    """The kind and the parts by which the kernel multiplies in place of layers of one input, if it does."""
    x, _, _, kind = products[0].args
    parts = [[attribute(graph.gm, part.target) for part in node.args[1]] for node in products]
    return linear.choose_packed(parts, x.meta["val"].shape[-1], kind, graph.dtype)


def _put(graph: ModelGraph, products: list[fx.Node], name: str, kind: str, tensors: list[Tensor]) -> int:
    """Put the kernel's product in place of layers. Returns the bytes of weights that are copies."""
    first = products[0]
    x, parts, bias, _ = first.args
    parts, copied = list(parts), 0
    with graph.gm.graph.inserting_before(first):
        for index, tensor in enumerate(tensors):
            if tensor.data_ptr() != attribute(graph.gm, parts[index].target).data_ptr():
                copied += tensor.nbytes
                parts[index] = _buffer(graph, f"{name}_{index}", tensor)
    arguments = x, parts[0], bias, parts[1], kind
    if len(products) > 1:
        put_product(graph.gm.graph, products, linear.SMALL_M.op, arguments)
    else:
        first.target, first.args = linear.SMALL_M.op, arguments
    return copied


def _buffer(graph: ModelGraph, name: str, tensor: Tensor) -> fx.Node:
    graph.gm.register_buffer(name, tensor, persistent=False)
    return graph.gm.graph.get_attr(name)
