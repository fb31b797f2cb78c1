"""use_small_m_linears: linear layers take the form that reads their weights fastest."""

from collections.abc import Callable

from torch import Tensor, fx

from ..graph import ModelGraph, attribute
from ..kernels import linear
from ..kernels.ops import arguments_of
from .apply import comes_after

MANY_ROWS = {"cpu": ("prefill", "forward"), "cuda": ("forward",)}
"""Purposes of graphs whose products a library computes faster, by the type of the device."""


@comes_after("merge_linears", "select_logits")
def use_small_m_linears(graph: ModelGraph, settings) -> str:
    """Give each linear layer the form that `linear.choose` chooses. On a CPU a graph that prefills has many rows."""
    changed, few_rows = 0, settings.purpose not in MANY_ROWS[graph.device.type]
    for node in linear.linear_layers(graph):
        form = linear.choose(attribute(graph.gm, node.args[1].target), few_rows)
        if form is not None:
            node.target = form.op
            changed += 1
    is_library_faster = settings.purpose == "prefill" and settings.exact != "request"
    packs = graph.device.type == "cpu" or (few_rows and not is_library_faster)
    packed, copied = _use_packed(graph) if packs else (0, 0)
    summary = f"{changed + packed} linear layers take a form of ours"
    return f"{summary}; copies of quantised weights for it take {copied / 1e9:.2f} GB" if copied else summary


def _use_packed(graph: ModelGraph) -> tuple[int, int]:
    """How many quantised layers have a kernel and now take it, and the bytes of weights that were copied for them."""
    changed = copied = 0
    for node in linear.quantised_layers(graph):
        call = arguments_of(node)
        tensors = [attribute(graph.gm, part.target) for part in call["parts"]]
        form = linear.choose_packed(tensors, call["x"].meta["val"].shape[-1], call["kind"], graph.dtype)
        if form is not None:
            copied += _put(graph, node, f"packed_{changed}", *form)
            changed += 1
    return changed, copied


def _put(graph: ModelGraph, node: fx.Node, name: str, op: Callable, kind: str, tensors: list[Tensor]) -> int:
    """Put the kernel's product in place of a layer. Returns the bytes of weights that are copies."""
    call = arguments_of(node)
    parts, copied = list(call["parts"]), 0
    with graph.gm.graph.inserting_before(node):
        for index, tensor in enumerate(tensors):
            if tensor.data_ptr() != attribute(graph.gm, parts[index].target).data_ptr():
                copied += tensor.nbytes
                parts[index] = _buffer(graph, f"{name}_{index}", tensor)
    if op == linear.QUANTISED:
        node.args = call["x"], parts[: len(tensors)], call["bias"], kind
        return copied
    node.target, node.args = op, (call["x"], parts[0], call["bias"])
    node.kwargs = {"scales": parts[1], "kind": kind}
    return copied


def _buffer(graph: ModelGraph, name: str, tensor: Tensor) -> fx.Node:
    graph.gm.register_buffer(name, tensor, persistent=False)
    return graph.gm.graph.get_attr(name)
