"""tree_attention: every marker becomes attention over our static key-value cache, masked by the tree."""

import operator

import torch

from ..graph import ModelGraph, calls
from ..kernels import ops


def tree_attention(graph: ModelGraph, settings) -> str:
    """Replace each ``spec_compile::attention`` by `ops.tree_attention` on the layer's cache.

    The graph gains the inputs ``lengths[B]``, ``ancestors[B, N]`` (or None), ``cache`` (key, value, key, ... of each
    layer in turn) and ``span``; see `ops.tree_attention`.
    """
    gm = graph.gm
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    positions = inputs[1]
    with gm.graph.inserting_after(inputs[-1]):
        span = gm.graph.placeholder("span")
        cache = gm.graph.placeholder("cache")
        ancestors = gm.graph.placeholder("ancestors")
        lengths = gm.graph.placeholder("lengths")
    markers = calls(gm, torch.ops.spec_compile.attention.default)
    for layer, node in enumerate(markers):
        q, k, v, sinks, scale, window, softcap, _ = node.args
        with gm.graph.inserting_before(node):
            keys, values = (gm.graph.call_function(operator.getitem, (cache, 2 * layer + i)) for i in (0, 1))
            new = gm.graph.call_function(
                ops.tree_attention,
                (q, k, v, keys, values, positions, lengths, ancestors, span, sinks, scale, window, softcap),
            )
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    windows = sum(layer.window is not None for layer in graph.layers)
    return f"{len(markers)} layers attend over the static cache ({windows} with a sliding window)"
