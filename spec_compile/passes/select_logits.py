"""select_logits: the output head runs on the wanted rows only, or not at all."""

from ..graph import ModelGraph
from ..kernels import ops
from ..kernels.linear import head_products


def select_logits(graph: ModelGraph, settings) -> str:
    """With logits="rows" select rows before the head (new input ``rows[B, R]``); with "none" drop the head."""
    if settings.logits == "all":
        return "all rows wanted"
    gm = graph.gm
    output = next(node for node in gm.graph.nodes if node.op == "output")
    if settings.logits == "none":
        output.args = (output.args[0][1:],)
        return "dropped the output head"
    heads = head_products(graph)
    if len(heads) != 1:
        raise ValueError(f"select_logits: expected one output head, found {len(heads)}")
    last = [node for node in gm.graph.nodes if node.op == "placeholder"][-1]
    with gm.graph.inserting_after(last):
        rows = gm.graph.placeholder("rows")
    with gm.graph.inserting_before(heads[0]):
        wanted = gm.graph.call_function(ops.gather_rows, (heads[0].args[0], rows))
    heads[0].replace_input_with(heads[0].args[0], wanted)
    return "the output head runs on chosen rows"
