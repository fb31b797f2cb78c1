"""merge_linears: linear layers that read the same input (q/k/v, gate/up) become one matrix product."""

import weakref
from collections import defaultdict

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..graph import ModelGraph, attribute
from ..kernels.linear import PLAIN, linear_layers, operands_of, quantised, quantised_layers, with_operands
from .apply import comes_after
from .products import output_sizes, put_product


@comes_after("tidy")
def merge_linears(graph: ModelGraph, settings) -> str:
    """Merge each group of ``linear(x, w_i, b_i)`` of one x into ``linear(x, cat(w), cat(b))`` and a split.

    The weights are not held twice: the model's own parameters become views of the merged storage, with equal values,
    so that later in-place updates of either are seen by both. Only plain parameters that nothing else uses take part,
    and none that a graph which is still there reads where it lies.
    """
    linears = [*linear_layers(graph), *quantised_layers(graph)]
    if not settings.merge_linears:
        for node in linears:
            for operand in operands_of(node):
                if operand is not None and operand.op == "get_attr":
                    _apart.setdefault(attribute(graph.gm, operand.target), weakref.WeakSet()).add(graph.gm)
        return "off"
    groups: dict[tuple, list[fx.Node]] = defaultdict(list)
    uses: dict[str, int] = defaultdict(int)
    for node in graph.gm.graph.nodes:
        if node.op == "get_attr":
            uses[node.target] += len(node.users)
    for node in linears:
        if _is_private(graph, node, uses):
            operands = operands_of(node)
            dtype = attribute(graph.gm, operands[0].target).dtype
            groups[node.args[0], node.target, len(operands), dtype, node.args[3:]].append(node)
    alike = [group for group in groups.values() if len(group) > 1 and _fits(group)]
    merged = [group for group in alike if not _is_apart(graph.gm, group)]
    for number, group in enumerate(merged):
        _merge(graph.gm, group, f"merged_linear_{number}")
    summary = f"merged {sum(map(len, merged))} linear layers into {len(merged)}"
    if len(merged) < len(alike):
        summary += f"; {len(alike) - len(merged)} groups stay apart for an earlier speculate(merge_linears=False)"
    return summary


_apart = WeakIdKeyDictionary()
"""Parameter -> the graphs that read it where it lies; their captured rounds hold its address."""


def _is_apart(gm: fx.GraphModule, group: list[fx.Node]) -> bool:
    """Whether merging would move a parameter that a graph reads where it lies."""
    for operands in zip(*map(operands_of, group)):
        parameters = [attribute(gm, operand.target) for operand in operands]
        if any(map(_apart.get, parameters)) and _joined(parameters) is None:
            return True
    return False


def _fits(group: list[fx.Node]) -> bool:
    """Whether the outputs of layers can lie one behind the other, so that no block with a scale of its own is cut."""
    if group[0].target is PLAIN:
        return True
    layout = quantised.layout_of(group[0].args[3])
    return layout.merges and all(size % layout.step == 0 for size in output_sizes(group)[:-1])


def _is_private(graph: ModelGraph, node: fx.Node, uses: dict[str, int]) -> bool:
    for operand in operands_of(node):
        if operand.op != "get_attr" or uses[operand.target] != 1 or operand.target == graph.head_weight:
            return False
        if type(attribute(graph.gm, operand.target).data) is not Tensor:  # quantised, sharded: left alone
            return False
    return True


def _merge(gm: fx.GraphModule, group: list[fx.Node], name: str) -> None:
    first, targets = group[0], []
    for number, operands in enumerate(zip(*map(operands_of, group))):
        target = f"{name}_{number}"
        parameters = [attribute(gm, operand.target) for operand in operands]
        gm.register_buffer(target, join_parameters(parameters), persistent=False)
        targets.append(target)
    with gm.graph.inserting_before(first):
        arguments = with_operands(first, [gm.graph.get_attr(target) for target in targets])
    put_product(gm.graph, group, first.target, arguments)


def _joined(parameters: list[nn.Parameter]) -> Tensor | None:
    """The rows of all parameters, if an earlier call has joined them."""
    first, end = parameters[0], parameters[0].data_ptr()
    for p in parameters:
        if p.data_ptr() != end or not p.is_contiguous() or p.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return None
        end += p.numel() * p.element_size()
    rows = sum(p.shape[0] for p in parameters)
    return first.data.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


def join_parameters(parameters: list[nn.Parameter]) -> Tensor:
    """The rows of all parameters in one tensor, which the parameters then view."""
    merged = _joined(parameters)
    if merged is not None:
        return merged
    merged = torch.cat([p.data for p in parameters])
    for p, part in zip(parameters, merged.split([p.shape[0] for p in parameters])):
        p.data = part
    return merged
