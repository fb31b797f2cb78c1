"""The pipeline of ``torch.compile(backend="spec")``.

`lower`: a forward that Dynamo has traced becomes a graph of ATen calls, on which the passes of `speculate` run.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from ..graph import ModelGraph, attribute, calls
from ..kernels.attention import grouped
from .apply import calls_op, replace_node, shape_of
from .linears import join_parameters

aten = torch.ops.aten


class NotLowered(Exception):
    """The passes cannot run on a forward; the message says why."""


class ForwardSettings(NamedTuple):
    """Options of the passes: `backend.BackendOptions`, and the `passes.Settings.purpose` of the graph, which is
    "verify" for few rows and else "forward"."""

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
    for example in examples:  # Dynamo passes a float that varies as a float64 tensor without dimensions
        is_number = isinstance(example, Tensor) and example.dtype == torch.float64 and example.dim() == 0
        if is_number or not isinstance(example, (Tensor, torch.SymInt)):
            raise NotLowered("numbers that it takes vary")
    # Parameters of the ordinary class: not quantised, not sharded, no other subclass.
    places = [n for n, tensor in enumerate(inputs) if type(tensor) is nn.Parameter and type(tensor.data) is Tensor]
    if not 0 < len(places) < len(inputs):
        raise NotLowered("it has no parameters, or no other input")
    graph = _with_parameters(_trace(gm, examples), inputs, places)
    _check_writes(graph.gm)
    return graph


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
        replace_node(node, attribute)
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


# `bind`: the weights of a rewritten forward become inputs again, and follow the module's parameters.


def bind(graph: ForwardGraph, inputs: list, compile_graph: Callable) -> "BoundForward":
    """Compile a rewritten forward with its weights as inputs, the last ones.

    inputs: what the forward gets.
    compile_graph: ``compile_graph(gm, examples, kept) -> callable``; kept: places of the examples besides weights that
        stay where they are between calls, which `torch._dynamo.mark_static_address` has marked, such as caches.
    """
    held = {name: inputs[place] for name, place in graph.places.items()}
    groups, examples = [], [node.meta["val"] for node in graph.gm.graph.nodes if node.op == "placeholder"]
    mode = next(example.fake_mode for example in examples if isinstance(example, Tensor))
    last = [node for node in graph.gm.graph.nodes if node.op == "placeholder"]
    nodes = [node for node in graph.gm.graph.nodes if node.op == "get_attr"]
    for name in dict.fromkeys(node.target for node in nodes):
        weight = attribute(graph.gm, name)
        groups.append(tuple(graph.places[part] for part in ([name] if name in held else _parts(weight, held))))
        with mode:
            examples.append(
                torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)
            )
        with graph.gm.graph.inserting_after(last[-1]):
            last.append(graph.gm.graph.placeholder(name))
        for node in (node for node in nodes if node.target == name):
            node.replace_all_uses_with(last[-1])
            graph.gm.graph.erase_node(node)
    parameters = set(graph.places.values())
    others = [place for place in range(len(inputs)) if place not in parameters]
    kept = [at for at, place in enumerate(others) if getattr(inputs[place], "_dynamo_static_input_type", None)]
    without_weights = fx.GraphModule(nn.Module(), graph.gm.graph)
    compiled = compile_graph(without_weights, examples, kept)
    return BoundForward(compiled, others, groups)


def _parts(joined: Tensor, held: dict[str, nn.Parameter]) -> list[str]:
    """The names of the parameters that view `joined`, in the order of its rows."""
    begin, end = joined.data_ptr(), joined.data_ptr() + joined.nbytes
    inside = [name for name, parameter in held.items() if begin <= parameter.data_ptr() < end]
    return sorted(inside, key=lambda name: held[name].data_ptr())


class BoundForward:
    """A compiled forward that is called with a module's inputs and parameters.

    The first call with new parameters makes the parts of a joined weight views of one tensor, with equal values, so
    that in-place updates are seen. A parameter that was replaced since has another address, and all are joined anew.

    others: places of the inputs that are no parameters. groups: for each weight the places of its parameters.
    """

    def __init__(self, compiled: Callable, others: list[int], groups: list[tuple[int, ...]]):
        self.compiled, self.others, self.groups = compiled, others, groups
        self._places = [place for group in groups for place in group]
        self._addresses: list[int] = []
        self._weights: list[Tensor] = []

    def __call__(self, *arguments):
        if self._addresses != [arguments[place].data_ptr() for place in self._places]:  # guard: joined-weights
            self._weights = [join([arguments[place] for place in group]) for group in self.groups]
            self._addresses = [arguments[place].data_ptr() for place in self._places]
        return self.compiled(*(arguments[place] for place in self.others), *self._weights)


def join(parameters: list[nn.Parameter]) -> Tensor:
    """The rows of all parameters in one tensor, of which they become views, also inside ``torch.inference_mode``."""
    if len(parameters) == 1:
        return parameters[0]
    with torch.inference_mode(False), torch.no_grad():
        return join_parameters(parameters)


# use_grouped_attention: attention over repeated key-value heads reads each of them once.


SDPA = aten.scaled_dot_product_attention.default
MOST_TOKENS = 64
"""Query tokens of a rewritten attention. With more, products decide its time, and PyTorch's kernels are faster."""


def use_grouped_attention(graph: ForwardGraph, settings) -> str:
    """Put `kernels.attention.grouped` in place of ``sdpa(q, repeat(k), repeat(v), mask)`` of few tokens.

    The same sums over the same numbers: keys and values are read without the copy for every query head, and on a GPU
    only the slots that the mask shows. A call stays as it is if it is causal by flag or has dropout, and on a CPU if no
    head is repeated.
    """
    done = sum(_rewrite(node, graph.device.type) for node in calls(graph.gm, SDPA)) if settings.gqa else 0
    return f"{done} attention calls read un-repeated key-value heads" if settings.gqa else "off"


def _rewrite(node: fx.Node, device: str) -> bool:
    """Rewrite a call of attention, if it can be. Returns True if it was."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    call = dict(zip(names, node.args)) | node.kwargs
    if call.get("is_causal") or call.get("dropout_p"):
        return False
    q, mask, scale = call["query"], call.get("attn_mask"), call.get("scale")
    keys, first = _unrepeated(call["key"])
    values, second = _unrepeated(call["value"])
    if not _fits(q, keys, values, mask, device) or not all(is_quiet_between(x, node) for x in (first, second)):
        return False
    with node.graph.inserting_before(node):
        op = grouped.plain if device == "cpu" else grouped.GROUPED
        new = node.graph.call_function(op, (q, keys, values, mask, scale))
    replace_node(node, new)
    return True


def _fits(q: fx.Node, keys: fx.Node, values: fx.Node, mask: fx.Node | None, device: str) -> bool:
    """True if the op takes tensors of these shapes, and is worth it. Batch and slots may be symbols, whose comparison
    makes Dynamo check at every call that the result is still the same."""
    shapes = [shape_of(x) for x in (q, keys, values)]
    if any(len(shape) != 4 or not all(isinstance(shape[dim], int) for dim in (1, 3)) for shape in shapes):
        return False
    (batch, heads, tokens, _), (_, kv_heads, slots, _) = shapes[:2]
    if (
        not isinstance(tokens, int)
        or tokens > MOST_TOKENS
        or heads % kv_heads
        or (heads == kv_heads and device == "cpu")
    ):
        return False
    if list(shapes[2][:3]) != [batch, kv_heads, slots] or shapes[1][0] != batch:
        return False
    if mask is None:
        return True
    options = zip(shape_of(mask), ((1, batch), (1, heads), (1, tokens), (slots,)))
    return len(shape_of(mask)) == 4 and all(size in fits for size, fits in options)


def _unrepeated(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """x [B, Hkv, S, D] if `node` is x with each head repeated, and the first call that repeats it; else `node` twice.

    transformers' repeat_kv is ``x[:, :, None].expand(B, Hkv, G, S, D).reshape(B, Hkv * G, S, D)``.
    """
    if node.target == aten.repeat_interleave.self_int and node.args[2:3] == (1,):
        return (node.args[0], node) if isinstance(node.args[1], int) else (node, node)
    if not calls_op(node, aten.reshape.default) or not calls_op(expand := node.args[0], aten.expand.default):
        return node, node
    inner = expand.args[0]
    while calls_op(inner, aten.slice.Tensor) and shape_of(inner) == shape_of(inner.args[0]):
        inner = inner.args[0]
    if not calls_op(inner, aten.unsqueeze.default) or inner.args[1] != 2 or len(shape_of(inner.args[0])) != 4:
        return node, node
    x, wide = inner.args[0], shape_of(expand)
    batch, kv_heads, slots, size = shape_of(x)
    is_repeat = [*wide[:2], *wide[3:]] == [batch, kv_heads, slots, size]
    is_repeat = is_repeat and list(shape_of(node)) == [batch, kv_heads * wide[2], slots, size]
    return (x, inner) if is_repeat else (node, node)
