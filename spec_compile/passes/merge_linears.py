"""merge_linears: linear layers that read the same input (q/k/v, gate/up) become one matrix product."""

import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary

from .. import quantised
from ..graph import ModelGraph, attribute
from ..kernels.linear import PLAIN, linear_layers, operands_of, quantised_layers, with_operands
from ..kernels.ops import arguments_of
from .apply import comes_after
from .products import output_sizes, put_product

MERGED = "merged_linear_"
"""Begins the names of merged weights."""


@comes_after("tidy")
def merge_linears(graph: ModelGraph, settings) -> str:
    """Merge each group of ``linear(x, w_i, b_i)`` of one x into ``linear(x, cat(w), cat(b))`` and a split.

    The weights are not held twice: the model's own parameters become views of the merged storage, with equal values,
    so that later in-place updates of either are seen by both. Only plain parameters that nothing else uses take part,
    and none that a graph which is still there reads where it lies.
    """
    linears = [*linear_layers(graph), *quantised_layers(graph)]
    if not settings.merge_linears:
        operands = [operand for node in linears for operand in operands_of(node) if operand is not None]
        keep_apart(graph.gm, {operand.target for operand in operands if operand.op == "get_attr"})
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
            kind = "" if node.target is PLAIN else arguments_of(node)["kind"]
            groups[node.args[0], node.target, len(operands), dtype, kind].append(node)
    alike = [group for group in groups.values() if len(group) > 1 and _fits(graph.gm, group)]
    merged = [group for group in alike if not _is_apart(graph.gm, group)]
    for number, group in enumerate(merged):
        _merge(graph.gm, group, f"{MERGED}{number}")
    summary = f"merged {sum(map(len, merged))} linear layers into {len(merged)}"
    if len(merged) < len(alike):
        summary += f"; {len(alike) - len(merged)} groups stay apart for an earlier speculate(merge_linears=False)"
    return summary


_apart = WeakIdKeyDictionary()
"""Parameter -> the graphs that read it where it lies; their captured rounds hold its address."""


def keep_apart(gm: fx.GraphModule, names: Iterable[str]) -> None:
    """Note that a graph reads the parameters of these names where they lie."""
    for name in names:
        _apart.setdefault(attribute(gm, name), weakref.WeakSet()).add(gm)


def is_kept_apart(parameters: Iterable[Tensor]) -> bool:
    """True if a graph that is still there reads one of the parameters where it lies."""
    return any(map(_apart.get, parameters))


def _is_apart(gm: fx.GraphModule, group: list[fx.Node]) -> bool:
    """True if merging would move a parameter that a graph reads where it lies."""
    for dim, parameters in _operands(gm, group):
        if is_kept_apart(parameters) and joined(parameters, dim) is None:
            return True
    return False


def _operands(gm: fx.GraphModule, group: list[fx.Node]) -> list[tuple[int, list[Tensor]]]:
    """For each operand the dimension of outputs, and the parameters of all layers."""
    first = group[0]
    dims = () if first.target is PLAIN else _layout(first).dims[: len(arguments_of(first)["parts"])]
    parameters = [[attribute(gm, operand.target) for operand in operands] for operands in zip(*map(operands_of, group))]
    return list(itertools.zip_longest(dims, parameters, fillvalue=0))


def _fits(gm: fx.GraphModule, group: list[fx.Node]) -> bool:
    """True if the outputs of layers can follow each other, so that no block with a scale of its own is cut."""
    if group[0].target is PLAIN:
        return True
    layout = _layout(group[0])
    if not layout.merges or any(size % layout.step for size in output_sizes(group)[:-1]):
        return False
    return layout.fits([[attribute(gm, part.target) for part in arguments_of(node)["parts"]] for node in group])


def _layout(node: fx.Node) -> quantised.WeightLayout:
    """The layout of a quantised layer."""
    return quantised.layout_of(arguments_of(node)["kind"])


def _is_private(graph: ModelGraph, node: fx.Node, uses: dict[str, int]) -> bool:
    for operand in operands_of(node):
        if operand.op != "get_attr" or uses[operand.target] != 1 or operand.target == graph.head_weight:
            return False
        if type(attribute(graph.gm, operand.target).data) is not Tensor:  # quantised, sharded: not merged
            return False
    return True


def _merge(gm: fx.GraphModule, group: list[fx.Node], name: str) -> None:
    first, targets = group[0], []
    for number, (dim, parameters) in enumerate(_operands(gm, group)):
        target = f"{name}_{number}"
        gm.register_buffer(target, join_parameters(parameters, dim), persistent=False)
        targets.append(target)
    with gm.graph.inserting_before(first):
        arguments = with_operands(first, [gm.graph.get_attr(target) for target in targets])
    put_product(gm.graph, group, first.target, arguments)


def joined(parameters: list[Tensor], dim: int) -> Tensor | None:
    """All parameters in one tensor, if an earlier call has joined them."""
    first, end = parameters[0], parameters[0].data_ptr()
    total = sum(p.shape[dim] for p in parameters)
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    stride = first.stride() if dim == 0 else (total, 1)  # of two dimensions
    for p in parameters:
        if p.data_ptr() != end or p.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return None
        if not p.is_contiguous() if dim == 0 else p.stride() != stride:
            return None
        end += (p.numel() if dim == 0 else p.shape[dim]) * p.element_size()
    return first.data.as_strided(shape, stride, first.storage_offset())


def join_parameters(parameters: list[Tensor], dim: int = 0) -> Tensor:
    """All parameters along a dimension in one tensor, which the parameters then view."""
    merged = joined(parameters, dim)
    if merged is not None:
        return merged
    merged = torch.cat([p.data for p in parameters], dim)
    for p, part in zip(parameters, merged.split([p.shape[dim] for p in parameters], dim)):
        p.data = part
    return merged
