"""`ForwardGraph`, a forward as Dynamo has traced it, and the questions that passes ask about its nodes."""

import inspect
import operator
from dataclasses import dataclass, field
from types import FunctionType

import torch
from torch import fx, nn

from ...graph import PassReport

IN_PLACE_OPERATORS = {
    getattr(operator, name)
    for name in (
        "iadd", "iand", "iconcat", "ifloordiv", "ilshift", "imatmul", "imod", "imul", "ior", "ipow", "irshift", "isub",
        "itruediv", "ixor", "setitem", "delitem",
    )
}  # fmt: skip


@dataclass
class ForwardGraph:
    """One graph of torch calls, whose placeholders are the user's inputs, parameters, buffers and sizes.

    gm: passes rewrite it in place.
    inputs: Dynamo's value of each placeholder, in order.
    joined: groups of indices of placeholders; the first of a group now stands for the joined tensor of all its weights.
    """

    gm: fx.GraphModule
    inputs: list
    joined: list[tuple[int, ...]] = field(default_factory=list)
    log: list[PassReport] = field(default_factory=list)
    is_functional = False
    """A call may write to existing tensors, so that it cannot be dropped only because nobody reads its result."""


def value(node) -> torch.Tensor | None:
    """The fake tensor of a node's result, or None if the result is no tensor."""
    result = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return result if isinstance(result, torch.Tensor) else None


def is_method(node, name: str) -> bool:
    """True if a node is a call of the tensor method `name`."""
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target == name


def changes_something(node: fx.Node) -> bool:
    """True if a call may write to an existing tensor, or in doubt."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return True
    if node.op == "call_method":
        return node.target.endswith("_") or node.target == "__setitem__"
    if node.op != "call_function" or isinstance(node.target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return any(getattr(node.target, name)._schema.is_mutable for name in node.target.overloads())
    if node.target in IN_PLACE_OPERATORS or getattr(node.target, "__name__", "_").endswith("_"):
        return True
    if isinstance(node.target, FunctionType):  # F.relu(x, True)
        try:
            return bool(inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments.get("inplace"))
        except (TypeError, ValueError):
            return True
    return False


def quiet_between(first: fx.Node, last: fx.Node) -> bool:
    """True if nothing from `first` up to `last`, which follows it, may write to a tensor."""
    node = first
    while node is not last:
        if changes_something(node):
            return False
        node = node.next
    return True


def same_sizes(a, b) -> bool:
    """True if two shapes are equal, number for number or symbol for symbol. This adds no guard."""
    return len(a) == len(b) and all(_expression(x) == _expression(y) for x, y in zip(a, b))


def _expression(size):
    return size.node.expr if isinstance(size, torch.SymInt) else size


def erase_unused(nodes) -> None:
    """Erase those of `nodes` (calls that change nothing) whose values nobody reads, from the last to the first."""
    for node in sorted(nodes, reverse=True):
        if not node.users:
            node.graph.erase_node(node)


def is_plain_parameter(tensor) -> bool:
    """True if a tensor is a parameter of the ordinary class, neither quantised nor sharded nor another subclass."""
    return type(tensor) is nn.Parameter and type(tensor.data) is torch.Tensor
