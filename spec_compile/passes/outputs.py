"""The outputs of a graph: hidden states that a draft reads, and the logits of the rows that are wanted."""

from torch import fx

from ..graph import ModelGraph, layer_of
from ..kernels import ops
from ..kernels.linear import head_products
from .apply import comes_after

FINAL = -1
"""The tap of the output head's input: the hidden state after the final norm."""


@comes_after("tidy")
def tap_hidden_states(graph: ModelGraph, settings) -> str:
    """Append the residual stream after each layer in `settings.taps` (0: the embeddings; or `FINAL`) to the outputs.

    The residual stream after layer i is the one tensor of hidden size that crosses from layer i to what follows it.
    """
    if not settings.taps:
        return "none wanted"
    layers = graph.decoder_layers
    outside = [tap for tap in settings.taps if not FINAL <= tap <= layers]
    if outside:
        raise ValueError(f"taps: expected 0 to {layers} for a model of {layers} layers, got {outside}")
    states = _residual_stream(graph)
    if FINAL in settings.taps:
        states[FINAL] = head_products(graph)[-1].args[0]
    output = next(node for node in graph.gm.graph.nodes if node.op == "output")
    output.args = ((*output.args[0], *(states[tap] for tap in settings.taps)),)
    return f"returns hidden states {', '.join(map(str, settings.taps))}"


def _residual_stream(graph: ModelGraph) -> dict[int, fx.Node]:
    """Hidden state number -> the node that holds it."""
    nodes = list(graph.gm.graph.nodes)
    layer = {node: layer_of(node) for node in nodes}
    states: dict[int, fx.Node] = {}
    for node in nodes:
        value = node.meta.get("val")
        if (
            node.op == "get_attr"
            or not hasattr(value, "shape")
            or value.dim() != 3
            or value.shape[2] != graph.hidden_size
        ):
            continue
        following = [layer[user] for user in node.users if layer[user] != layer[node]]
        if layer[node] is None:  # embeddings, scaled or normed: the last one that enters layer 0
            if 0 in following:
                states[0] = node
        elif any(then is None or then > layer[node] for then in following):
            states[layer[node] + 1] = node
    return states


# Logits.


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
