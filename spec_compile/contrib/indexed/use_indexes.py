"""use_indexes: every indexer chooses among the tokens that a node of the tree sees, over a static cache of its keys."""

import operator

from ...graph import ModelGraph, calls
from ...passes.apply import comes_after, replace_node
from . import choice


@comes_after("use_tree_attention")
def use_indexes(graph: ModelGraph, settings) -> str:
    """Replace each ``spec_compile::choose`` by `choice.append_and_choose`.

    The keys of indexers follow those of attention in the input ``cache``. All indexers see the same slots.
    """
    gm = graph.gm
    if not graph.indexes:
        return "no indexers"
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    inputs, positions = {node.target: node for node in placeholders}, placeholders[1]
    begin = graph.layer_tensors * len(graph.layers)
    visible = None
    for number, node in enumerate(calls(gm, choice.MARKER)):
        q, k, weights, topk = node.args
        with gm.graph.inserting_before(node):
            keys = gm.graph.call_function(operator.getitem, (inputs["cache"], begin + number))
            if visible is None:
                rows = positions, inputs["lengths"], inputs["ancestors"]
                visible = gm.graph.call_function(choice.visible_to, (*rows, keys, inputs["max_kv_len"]))
            new = gm.graph.call_function(choice.CHOOSE, (q, k, weights, keys, inputs["lengths"], visible, topk))
        replace_node(node, new)
    tokens = ", ".join(sorted({str(spec.topk) for spec in graph.indexes}))
    indexed = sum(layer.indexed for layer in graph.layers)
    return f"{len(graph.indexes)} indexers choose {tokens} tokens for {indexed} layers"
