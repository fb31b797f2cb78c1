"""select_logits: the output head runs on the wanted rows only, or not at all."""

from ..graph import ModelGraph
from ..kernels import ops
from ..kernels.linear import head_products
from .apply import comes_after


@comes_after("tap_hidden_states")
def select_logits(graph: ModelGraph, settings) -> str:
    """A graph that prefills loses its head; in one that drafts the head runs on the rows of a new input ``rows[B, R]``.

    A graph that verifies computes the logits of all rows, and a draft head has its output matrix outside the graph.
    """
    if settings.purpose == "verify" or not graph.head_weight:
        return "all rows wanted"
    gm = graph.gm
    output = next(node for node in gm.graph.nodes if node.op == "output")
    if settings.purpose == "prefill":
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
    wanted.meta["val"] = heads[0].args[0].meta["val"]  # alike but for the number of rows, which varies
    heads[0].replace_input_with(heads[0].args[0], wanted)
    return "the output head runs on chosen rows"
