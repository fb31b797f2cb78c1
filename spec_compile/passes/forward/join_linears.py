"""join_linears: the pass `merge_linears` for graphs whose weights are inputs."""

import operator
from collections import defaultdict

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from ...graph import calls
from ..merge_linears import join_parameters
from .graph import ForwardGraph, is_method, is_plain_parameter, quiet_between, value


def join_linears(graph: ForwardGraph, settings) -> str:
    """Merge each group of ``F.linear(x, w_i, b_i)`` of one x into ``F.linear(x, w)`` and a split.

    The first weight's placeholder becomes that of the joined weight, which has the rows of all of them in order; the
    others are no longer read. `JoinedWeights` passes the joined tensor at every call, so that no copy of a weight can
    go stale. Only plain parameters that nothing else in the graph uses are joined.
    """
    if not settings.merge_linears:
        return "off"
    indices = {node: index for index, node in enumerate(graph.gm.graph.find_nodes(op="placeholder"))}
    groups: dict[tuple, list[fx.Node]] = defaultdict(list)
    for node in calls(graph.gm, F.linear):
        operands = node.args[1:] if len(node.args) < 3 or node.args[2] is not None else node.args[1:2]
        if not node.kwargs and all(_is_private(graph, operand, indices) for operand in operands) and _may_be_view(node):
            groups[node.args[0], len(operands), value(node.args[1]).dtype].append(node)
    merged = [group for group in groups.values() if len(group) > 1 and quiet_between(group[0], group[-1])]
    for group in merged:
        _merge(graph, group, indices)
    return f"merged {sum(map(len, merged))} linear layers into {len(merged)}"


def _is_private(graph: ForwardGraph, operand, indices: dict) -> bool:
    """True if an operand is a plain parameter that a single call uses."""
    return operand in indices and len(operand.users) == 1 and is_plain_parameter(graph.inputs[indices[operand]])


def _may_be_view(node: fx.Node) -> bool:
    """True if a call's result may be a view that is not contiguous: it is not an output of the graph."""
    return all(user.op != "output" for user in node.users) and value(node) is not None


def _merge(graph: ForwardGraph, group: list[fx.Node], indices: dict) -> None:
    """Replace the calls of a group by one product and the parts of its split."""
    first, joined = group[0], []
    for operands in zip(*(node.args[1:] for node in group)):
        if operands[0] is not None:
            graph.joined.append(tuple(indices[operand] for operand in operands))
            # The first operand's fake tensor becomes one of the joined shape, with which Inductor compiles.
            stand_in = value(operands[0])
            with stand_in.fake_mode, torch.no_grad():
                stand_in = torch.cat([value(operand).detach() for operand in operands])
            operands[0].meta["example_value"] = graph.inputs[indices[operands[0]]] = stand_in
            joined.append(operands[0])
    sizes = [value(node).shape[-1] for node in group]
    with first.graph.inserting_before(first):
        product = first.graph.call_function(F.linear, (first.args[0], *joined))
        parts = first.graph.call_function(torch.split, (product, sizes), {"dim": -1})
    for number, node in enumerate(group):
        with node.graph.inserting_before(node):
            part = node.graph.call_function(operator.getitem, (parts, number))
        part.meta = dict(node.meta)
        for user in list(node.users):
            if is_method(user, "view"):  # a part is not contiguous, so that view() may fail on it
                user.target = "reshape"
        node.replace_all_uses_with(part)
        node.graph.erase_node(node)


class JoinedWeights:
    """A compiled graph that is called with a module's parameters and gets the joined weights in their place.

    The first call with new parameters makes them views of one tensor (`merge_linears.join_parameters`), with equal
    values, so that in-place updates are seen. A parameter that was replaced since has another address, and all are
    joined anew.
    """

    def __init__(self, compiled, groups: list[tuple[int, ...]]):
        self.compiled, self.groups = compiled, groups
        self.indices = [index for group in groups for index in group]
        self.state = None, []

    def __call__(self, *arguments):
        arguments = list(arguments)
        addresses, weights = self.state
        if addresses != [arguments[index].data_ptr() for index in self.indices]:
            weights = [join([arguments[index] for index in group]) for group in self.groups]
            self.state = [arguments[index].data_ptr() for index in self.indices], weights
        for group, weight in zip(self.groups, weights):
            arguments[group[0]] = weight
        return self.compiled(*arguments)


def join(parameters: list[nn.Parameter]) -> Tensor:
    """The rows of all parameters in one tensor, of which they become views, also inside ``torch.inference_mode``."""
    with torch.inference_mode(False), torch.no_grad():
        return join_parameters(parameters)
