"""tap_hidden_states: hidden states that a draft model reads become outputs of the graph."""

from torch import fx

from ..graph import ModelGraph, layer_of
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
