"""use_tree_attention: every marker becomes attention over our static key-value cache, masked by the tree."""

import operator

import torch
from torch import fx

from ..graph import ModelGraph, calls
from ..kernels import attention, ops


def use_tree_attention(graph: ModelGraph, settings) -> str:
    """Replace each ``spec_compile::attention`` by `ops.tree_attention` on the layer's cache.

    The graph gains the inputs ``lengths[B]``, ``ancestors[B, N]`` (or None), ``cache`` (key, value, key, ... of each
    layer in turn) and ``span``. On a CPU `ops.tree_mask` runs once for each distinct window; on a GPU the op of the
    backend that `kernels.attention.choose` finds reads lengths and ancestors itself, and needs no span.
    """
    gm = graph.gm
    on_gpu = bool(graph.layers) and graph.device.type == "cuda"
    backend = attention.choose(settings.attention, graph) if graph.layers else None
    graph.backend = backend.name if backend else ""
    if settings.attention.fp8:
        graph.cache_dtype = torch.float8_e4m3fn
    op = backend.load(settings.attention) if on_gpu else ops.tree_attention
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    positions = inputs[1]
    with gm.graph.inserting_after(inputs[-1]):
        span = gm.graph.placeholder("span")
        cache = gm.graph.placeholder("cache")
        ancestors = gm.graph.placeholder("ancestors")
        lengths = gm.graph.placeholder("lengths")
    markers = calls(gm, torch.ops.spec_compile.attention.default)
    masks: dict[tuple, fx.Node] = {}
    for number, (node, layer) in enumerate(zip(markers, graph.layers)):
        q, k, v, sinks, scale, window, softcap, _ = node.args
        kind = (window, layer.heads // layer.kv_heads, graph.dtype)
        if kind not in masks and not on_gpu:
            with gm.graph.inserting_before(node):
                masks[kind] = gm.graph.call_function(ops.tree_mask, (positions, lengths, ancestors, span, *kind))
        with gm.graph.inserting_before(node):
            keys, values = (gm.graph.call_function(operator.getitem, (cache, 2 * number + i)) for i in (0, 1))
            block = (q, k, v, keys, values, lengths)
            if on_gpu:
                arguments = (*block, ancestors, positions, sinks, scale, softcap, window)
            else:
                arguments = (*block, masks[kind], sinks, scale, softcap)
            new = gm.graph.call_function(op, arguments)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
    windows = sum(layer.window is not None for layer in graph.layers)
    how = f"by {backend.name}" if on_gpu else f"{len(masks)} masks"
    return f"{len(markers)} layers attend over the static cache ({windows} with a sliding window, {how})"
