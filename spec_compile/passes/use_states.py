"""use_states: every recurrence reads a static state, which trees do not change."""

import operator
from collections import Counter

import torch
from torch import fx

from ..graph import ModelGraph, calls
from ..kernels.recurrence import advance_or_look, clamp_in_prompt, walk_of
from .apply import comes_after
from .products import replace_node

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
