"""use_tree_attention: every marker becomes attention over our static key-value cache, masked by the tree."""

import operator

import torch
from torch import fx

from ..graph import ModelGraph, calls
from ..kernels import attention
from ..kernels.ops import arguments_of
from .apply import comes_after
from .products import replace_node


@comes_after("tidy")
def use_tree_attention(graph: ModelGraph, settings) -> str:
    """Replace each ``spec_compile::attention`` by a call of the backend that `kernels.attention.choose` chooses.

    The graph gains the inputs ``lengths[B]``, ``ancestors[B, N]`` (or None), ``cache`` (`cache.Cache.argument`) and
    ``max_kv_len``, the slots that may hold anything visible.
    """
    gm = graph.gm
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    with gm.graph.inserting_after(inputs[-1]):
        gm.graph.placeholder("max_kv_len")
        cache = gm.graph.placeholder("cache")
        ancestors = gm.graph.placeholder("ancestors")
        lengths = gm.graph.placeholder("lengths")
    if not graph.layers:
        return "0 layers attend"
    backend = attention.choose(settings.attention, graph)
    graph.backend = backend.name
    if settings.attention.fp8:
        graph.cache_dtype, graph.scaled_cache = torch.float8_e4m3fn, settings.attention.scaled
    op = backend.load(settings.attention)
    positions = inputs[1]
    if graph.shifts_positions and settings.purpose != "draft":
        positions = _positions_of_slots(gm, positions, lengths)
    block = {"lengths": lengths, "ancestors": ancestors, "positions": positions}
    for number, node in enumerate(calls(gm, torch.ops.spec_compile.attention.default)):
        marker = arguments_of(node)
        layer = {name: marker[name] for name in ("sinks", "scale", "softcap", "window")}
        layer |= {name: marker[name] for name in ("chunk", "slopes", "chosen") if marker[name] is not None}
        if "scales" in backend.takes:
            layer["scales"] = None
        with gm.graph.inserting_before(node):
            first = number * graph.layer_tensors
            for name, index in zip(("key_cache", "value_cache", "scales"), range(first, first + graph.layer_tensors)):
                layer[name] = gm.graph.call_function(operator.getitem, (cache, index))
            arguments = {**{name: marker[name] for name in ("q", "k", "v")}, **block, **layer}
            new = gm.graph.call_function(op, kwargs=arguments)
        replace_node(node, new)
    shared = attention.prepare(graph)
    windows = sum(layer.window is not None for layer in graph.layers)
    return (
        f"{len(graph.layers)} layers attend over the static cache ({windows} with a sliding window, by {backend.name}"
        f"{shared})"
    )


def _positions_of_slots(gm: fx.GraphModule, positions: fx.Node, lengths: fx.Node) -> fx.Node:
    """The positions [B, N] that attention goes by, which are slots, where those of RoPE have an offset in each row.

    The first token of a block, the root or the first of a chunk, lies in slot ``lengths[b]``.
    """
    *_, last_input = (node for node in gm.graph.nodes if node.op == "placeholder")
    with gm.graph.inserting_before(last_input.next):
        first = gm.graph.call_function(torch.ops.aten.slice.Tensor, (positions, 1, 0, 1))
        steps = gm.graph.call_function(torch.ops.aten.sub.Tensor, (positions, first))
        begins = gm.graph.call_function(torch.ops.aten.unsqueeze.default, (lengths, 1))
        slots = gm.graph.call_function(torch.ops.aten.add.Tensor, (steps, begins))
    slots.meta["val"] = positions.meta["val"]
    return slots
