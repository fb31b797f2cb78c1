"""Markers become reads and writes of static memory: attention over the key-value cache, recurrences over their states.

Trees mask attention, and do not change the states.
"""

import operator
from collections import Counter

import torch
from torch import fx

from ..graph import ModelGraph, calls
from ..kernels import attention
from ..kernels.ops import arguments_of
from ..kernels.recurrence import advance_or_look, clamp_in_prompt, walk_of
from .apply import comes_after, replace_node


@comes_after("tidy")
def use_tree_attention(graph: ModelGraph, settings) -> str:
    """Replace each ``spec_compile::attention`` by a call of the backend that `kernels.attention.choose` chooses.

    The graph gains the inputs ``lengths[B]``, ``ancestors[B, N]`` (or None), ``cache`` (`cache.Cache.argument`, whose
    last entry is the table of pages) and ``max_kv_len``, the slots that may hold anything visible.
    """
    gm = graph.gm
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    with gm.graph.inserting_after(inputs[-1]):
        last_input = gm.graph.placeholder("max_kv_len")
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
    markers = calls(gm, torch.ops.spec_compile.attention.default)
    with gm.graph.inserting_after(last_input):  # others may read it before attention does
        table = gm.graph.call_function(operator.getitem, (cache, -1))
    block = {"lengths": lengths, "ancestors": ancestors, "positions": positions, "table": table}
    for number, node in enumerate(markers):
        marker = arguments_of(node)
        layer = {name: marker[name] for name in ("sinks", "scale", "softcap", "window")}
        layer |= {name: marker[name] for name in ("chunk", "slopes", "chosen") if marker[name] is not None}
        layer["scales"] = None  # the op has no default for it
        with gm.graph.inserting_before(node):
            first = number * graph.layer_tensors
            for name, index in zip(("key_cache", "value_cache", "scales"), range(first, first + graph.layer_tensors)):
                layer[name] = gm.graph.call_function(operator.getitem, (cache, index))
            arguments = {**{name: marker[name] for name in ("q", "k", "v")}, **block, **layer}
            new = gm.graph.call_function(op, kwargs=arguments)
        replace_node(node, new)
    shared = attention.prepare(graph)
    windows = sum(layer.window is not None for layer in graph.layers)
    how = f"{windows} with a sliding window, by {backend.name}{shared}"
    return f"{len(graph.layers)} layers attend over the static cache ({how})"


def _positions_of_slots(gm: fx.GraphModule, positions: fx.Node, lengths: fx.Node) -> fx.Node:
    """The positions [B, N] that attention goes by where RoPE's positions have an offset in each row: slots, of which
    the first token of a block, the root or the first of a chunk, has ``lengths[b]``."""
    *_, last_input = (node for node in gm.graph.nodes if node.op == "placeholder")
    with gm.graph.inserting_before(last_input.next):
        first = gm.graph.call_function(torch.ops.aten.slice.Tensor, (positions, 1, 0, 1))
        steps = gm.graph.call_function(torch.ops.aten.sub.Tensor, (positions, first))
        begins = gm.graph.call_function(torch.ops.aten.unsqueeze.default, (lengths, 1))
        slots = gm.graph.call_function(torch.ops.aten.add.Tensor, (steps, begins))
    slots.meta["val"] = positions.meta["val"]
    return slots


# Recurrences.


RECURRENCE, CLAMP = torch.ops.spec_compile.recurrence.default, torch.ops.spec_compile.clamp_prompt.default


@comes_after("use_tree_attention")
def use_states(graph: ModelGraph, settings) -> str:
    """Replace each ``spec_compile::recurrence`` by `kernels.recurrence.advance_or_look` over a static state.

    The states follow the keys and values in the input ``cache``, see `cache.States.tensors`.
    """
    gm = graph.gm
    if not graph.recurrences:
        return "no recurrences"
    inputs = {node.target: node for node in gm.graph.nodes if node.op == "placeholder"}
    positions = [node for node in gm.graph.nodes if node.op == "placeholder"][1]
    begin = graph.layer_tensors * len(graph.layers) + len(graph.indexes)

    def entry(number: int) -> fx.Node:
        return gm.graph.call_function(operator.getitem, (inputs["cache"], number))

    for node in calls(gm, CLAMP):
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(clamp_in_prompt, (*node.args, positions, entry(begin + 1)))
        replace_node(node, new)
    rows = {"ancestors": inputs["ancestors"]}
    if graph.device.type == "cuda":
        with gm.graph.inserting_after(inputs["ancestors"]):
            rows["walk"] = gm.graph.call_function(walk_of, (inputs["ancestors"],))
    first = begin + 2
    for spec, node in zip(graph.recurrences, calls(gm, RECURRENCE)):
        with gm.graph.inserting_before(node):
            valid, state, *stash = map(entry, (begin, first, *range(first + 1, first + 1 + len(spec.stash))))
            kind, tensors = node.args
            arguments = {"kind": kind, "inputs": tensors, "state": state, "stash": stash, "valid": valid}
            new = gm.graph.call_function(advance_or_look, kwargs={**arguments, **rows})
        replace_node(node, new)
        first += 1 + len(spec.stash)
    kinds = Counter(spec.kind for spec in graph.recurrences)
    return "states of " + ", ".join(f"{count} of kind {kind}" for kind, count in kinds.items())
