"""join_linears: `merge_linears` for graphs whose weights are inputs."""

import operator
from collections import defaultdict

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ...graph import calls
from ..merge_linears import _join
from .graph import ForwardGraph, is_method, is_plain_parameter, quiet_between, value


def join_linears(graph: ForwardGraph, settings) -> str:
    """Merge each group of ``F.linear(x, w_i, b_i)`` of one x into ``F.linear(x, w)`` and a split.

    The first weight's placeholder becomes that of the joined weight (rows of all of them, in order), the others fall
    idle; `JoinedWeights` provides the joined tensor at every call, so no copy of a weight can go stale. Only plain
    parameters that nothing else in the graph uses take part.
    """
    if not settings.merge_linears:
        return "off"
    places = {node: place for place, node in enumerate(graph.gm.graph.find_nodes(op="placeholder"))}
    groups: dict[tuple, list[fx.Node]] = defaultdict(list)
    for node in calls(graph.gm, F.linear):
        operands = node.args[1:] if len(node.args) < 3 or node.args[2] is not None else node.args[1:2]
        if not node.kwargs and all(_is_private(graph, operand, places) for operand in operands) and _may_be_view(node):
            groups[node.args[0], len(operands), value(node.args[1]).dtype].append(node)
    merged = [group for group in groups.values() if len(group) > 1 and quiet_between(group[0], group[-1])]
    for group in merged:
        _merge(graph, group, places)
    return f"merged {sum(map(len, merged))} linear layers into {len(merged)}"


def _is_private(graph: ForwardGraph, operand, places: dict) -> bool:
    return operand in places and len(operand.users) == 1 and is_plain_parameter(graph.inputs[places[operand]])


def _may_be_view(node: fx.Node) -> bool:
    """A part of the merged product is not contiguous: not to be returned as it is."""
    return all(user.op != "output" for user in node.users) and value(node) is not None


def _merge(graph: ForwardGraph, group: list[fx.Node], places: dict) -> None:
    first, joined = group[0], []
    for operands in zip(*(node.args[1:] for node in group)):
        if operands[0] is not None:
            graph.joined.append(tuple(places[operand] for operand in operands))
            stand_in = value(operands[0])
            with stand_in.fake_mode, torch.no_grad():
                stand_in = torch.cat([value(operand).detach() for operand in operands])
            operands[0].meta["example_value"] = graph.inputs[places[operands[0]]] = stand_in
            joined.append(operands[0])
    sizes = [value(node).shape[-1] for node in group]
    with first.graph.inserting_before(first):
        product = first.graph.call_function(F.linear, (first.args[0], *joined))
        parts = first.graph.call_function(torch.split, (product, sizes), {"dim": -1})
    for place, node in enumerate(group):
        with node.graph.inserting_before(node):
            part = node.graph.call_function(operator.getitem, (parts, place))
        part.meta = dict(node.meta)
        for user in list(node.users):
            if is_method(user, "view"):
                user.target = "reshape"
        node.replace_all_uses_with(part)
        node.graph.erase_node(node)


class JoinedWeights:
    """Puts the joined weights among the arguments of a compiled graph.

    The first call with given parameters makes them views of one tensor (`merge_linears._join`), with equal values, so
    that in-place updates are seen; a parameter that was replaced since has another address and is joined anew.
    """

    def __init__(self, compiled, groups: list[tuple[int, ...]]):
        self.compiled, self.groups = compiled, groups
        self.places = [place for group in groups for place in group]
        self.state = None, []

    def __call__(self, *arguments):
        arguments = list(arguments)
        addresses, weights = self.state
        if addresses != [arguments[place].data_ptr() for place in self.places]:
            weights = [join([arguments[place] for place in group]) for group in self.groups]
            self.state = [arguments[place].data_ptr() for place in self.places], weights
        for group, weight in zip(self.groups, weights):
            arguments[group[0]] = weight
        return self.compiled(*arguments)


def join(parameters: list[nn.Parameter]) -> Tensor:
    """The rows of all parameters in one ordinary tensor that they then view, also inside ``torch.inference_mode``."""
    with torch.inference_mode(False), torch.no_grad():
        return _join(parameters)
