"""`lower`: a forward that Dynamo has traced becomes a graph of ATen calls, on which the passes of `speculate` run."""

import operator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ...graph import ModelGraph, calls

aten = torch.ops.aten


class NotLowered(Exception):
    """The passes cannot run on a forward; the message says why."""


class ForwardSettings(NamedTuple):
    """Options of the passes: those of `backend.BackendOptions`, and the `passes.Settings.purpose` of the graph, which
    is "verify" for few rows and else "forward"."""

    merge_linears: bool = True
    gqa: bool = True
    purpose: str = "verify"


@dataclass
class ForwardGraph(ModelGraph):
    """A forward: its placeholders are the inputs that are no parameters, and its parameters are attributes.

    places: name of a parameter -> its place among the inputs of the forward.
    """

    places: dict[str, int] = field(default_factory=dict)


def lower(gm: fx.GraphModule, inputs: list) -> ForwardGraph:
    """The ATen graph of a forward. gm: as Dynamo has traced it. inputs: one for each placeholder.

    Raises NotLowered: for numbers that vary, for constants made in the forward, for writes to values that products or
    norms read, and for what cannot be traced.
    """
    examples = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    if not all(isinstance(example, torch.SymInt) or _is_data(example) for example in examples):
        raise NotLowered("numbers that it takes vary")
    places = [place for place, tensor in enumerate(inputs) if _is_plain_parameter(tensor)]
    if not 0 < len(places) < len(inputs):
        raise NotLowered("it has no parameters, or no other input")
    graph = _with_parameters(_trace(gm, examples), inputs, places)
    _check_writes(graph.gm)
    return graph


def _is_data(example) -> bool:
    """True for a tensor that is not one varying number, as which Dynamo passes a float."""
    return isinstance(example, Tensor) and not (example.dtype == torch.float64 and example.dim() == 0)


def _is_plain_parameter(tensor) -> bool:
    """True for a parameter of the ordinary class, neither quantised nor sharded nor another subclass."""
    return type(tensor) is nn.Parameter and type(tensor.data) is Tensor


class _WithoutConstants(fx.Interpreter):
    """Runs a graph, and makes the tensors of ``torch.tensor(number)`` and ``torch.tensor([])`` by ops that a trace
    shows. Otherwise it would hold them, as tensors without memory."""

    def call_function(self, target, args, kwargs):
        if target is torch.tensor and isinstance(args[0], bool | int | float):
            return torch.full((), args[0], **kwargs)
        if target is torch.tensor and args[0] == []:
            return torch.empty(0, **kwargs)
        return super().call_function(target, args, kwargs)


def _trace(gm: fx.GraphModule, examples: list) -> fx.GraphModule:
    """The forward in ATen calls, before the dispatcher decomposes any."""

    def run(*arguments):
        with fx.traceback.preserve_node_meta():
            return _WithoutConstants(gm).run(*arguments)

    mode = next(example.fake_mode for example in examples if isinstance(example, Tensor))
    try:
        with torch.no_grad(), mode:
            lowered = make_fx(run, tracing_mode="real", pre_dispatch=True, _allow_non_fake_inputs=True)(*examples)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise NotLowered(f"it cannot be traced ({type(error).__name__}: {reason})") from error
    constant = next(iter(lowered.graph.find_nodes(op="get_attr")), None)
    if constant is not None:
        raise NotLowered(f"it holds a constant, {constant.target}")
    return lowered


def _with_parameters(gm: fx.GraphModule, inputs: list, places: list[int]) -> ForwardGraph:
    """The graph with parameters as attributes in place of placeholders."""
    names: dict[str, int] = {}
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    for place in places:
        name, node = f"parameter_{place}", placeholders[place]
        gm.register_parameter(name, inputs[place])
        names[name] = place
        with gm.graph.inserting_after(placeholders[-1]):
            attribute = gm.graph.get_attr(name)
        attribute.meta = dict(node.meta)
        node.replace_all_uses_with(attribute)
        gm.graph.erase_node(node)
    first = next((node for node in calls(gm, aten.linear.default) if node.args[1].target in names), None)
    dtype = inputs[names[first.args[1].target] if first else places[0]].dtype
    return ForwardGraph(gm, (), 0, 0, dtype, None, "", places=names)


def _check_writes(gm: fx.GraphModule) -> None:
    """NotLowered if a write could be seen by a call that a pass moves.

    A forward may write to its inputs, as a cache is filled and a counter moves on. Passes move only one sort of call
    that reads such an input, attention, and `use_grouped_attention` looks for writes itself.
    """
    aliases: dict[fx.Node, None] = {}
    for node in calls(gm):
        for written in _written(node):
            if written.op != "placeholder":
                raise NotLowered(f"{node.name} writes to a value that the forward made")
            aliases[written] = None
    for node in calls(gm):
        if any(source in aliases for source in node.all_input_nodes) and (_written(node) or _is_view(node)):
            aliases[node] = None
    for node in aliases:
        for user in node.users:
            kept = _written(user) or _is_view(user) or user.target in READERS or user.op == "output"
            if not kept and node.meta["val"].is_floating_point():  # guard: writes-keep-order
                raise NotLowered(f"{user.name} reads an input that the forward writes to")


READERS = {aten.reshape.default, aten.clone.default, aten.scaled_dot_product_attention.default}
"""Calls that may read an input of floating-point numbers to which the forward writes."""


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments that a call writes to."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    arguments = dict(zip((argument.name for argument in schema.arguments), node.args)) | node.kwargs
    return [
        arguments[argument.name]
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in arguments
    ]


def _is_view(node: fx.Node) -> bool:
    """True if a result may share memory with an argument."""
    schema = getattr(node.target, "_schema", None)
    return node.target is operator.getitem or (
        schema is not None and any(result.alias_info is not None for result in schema.returns)
    )


def is_quiet_between(first: fx.Node, last: fx.Node) -> bool:
    """True if nothing from `first` up to `last`, which follows it, writes to a floating-point tensor."""
    node = first
    while node is not last:
        if any(written.meta["val"].is_floating_point() for written in _written(node)):
            return False
        node = node.next
    return True
