"""use_small_m_linears: linear layers take the form that reads their weights fastest."""

from ..graph import ModelGraph, attribute
from ..kernels import linear
from .apply import comes_after


@comes_after("merge_linears", "select_logits")
def use_small_m_linears(graph: ModelGraph, settings) -> str:
    """Give each linear layer the form that `linear.choose` chooses; only a graph that verifies has few rows."""
    changed = 0
    for node in linear.linear_layers(graph):
        form = linear.choose(attribute(graph.gm, node.args[1].target), few_rows=settings.purpose != "prefill")
        if form is not None:
            node.target, node.args = form.op, (*node.args[:2], linear.bias_of(node))
            changed += 1
    return f"{changed} linear layers take the form for few rows"
