"""`repeat` expands the graph of a model's copy with a few layers of each kind (see `kinds`) to the depth of the model.

The copy has the two periods A and B of layers alike. The nodes of B are repeated; each copy reads the period before it
as B reads A. With layers 0 to 4 and 9 of ten, and two layers a period::

    0 | 1 2 | 3 4 | 9   ->   0 | 1 2 | 3 4 | 5 6 | 7 8 | 9
        A     B                  A     B     B     B
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph_module import _assign_attr
from torch.utils import _pytree as pytree

from ..graph import attribute, is_size, layer_of
from .kinds import Repeats, UnlikeLayersError

ATTENTION = torch.ops.spec_compile.attention.default
PLACE = [argument.name for argument in ATTENTION._schema.arguments].index("layer")
"""The position of the argument that counts attention nodes."""
LIFTED = re.compile(r"\.lifted_tensor_(\d+)$")
"""The name that export gives to a tensor that code makes of numbers."""
ROOT = "model."
"""The part of the names in a captured graph that stands for the model."""


def repeat(gm: fx.GraphModule, model: nn.Module, repeats: Repeats) -> fx.GraphModule:
    """The graph of `model`, from the graph `gm` of its copy; the tensors are those of the model.

    UnlikeLayersError if the two periods of the copy differ by more than the numbers of their layers.
    """
    return _Expansion(gm, model, repeats).graph_module()


class _Expansion:
    """One call of `repeat`.

    place: for each node of the copy's graph, the number of its layer in the copy; None before the first layer. A call
        outside of layers belongs to the layer before it.
    later: B's node for each node of A.
    """

    def __init__(self, gm: fx.GraphModule, model: nn.Module, repeats: Repeats):
        self.gm, self.model, self.repeats = gm, model, repeats
        self.names = re.compile(rf"((?:^|\b|_){re.escape(ROOT + repeats.path)}\.)(\d+)(?=\.|$)")
        self.place = self._places()
        begin, period = repeats.first, repeats.period
        self.a, self.b = (self._nodes_in(range(start, start + period)) for start in (begin, begin + period))
        self.inside_b = {*self.b}
        # A size that A computes for the first time is read by later layers, too, and is not computed again.
        self.a = [node for node in self.a if not (_is_size(node) and any(map(self._is_later, node.users)))]
        if len(self.a) != len(self.b):
            raise UnlikeLayersError("has layers of one kind that run other operations")
        self.later = dict(zip(self.a, self.b))
        self.attentions = sum(node.target is ATTENTION for node in self.b)
        """Attention nodes of a period."""
        self.constants = sum(bool(LIFTED.search(node.target)) for node in self.b if node.op == "get_attr")
        """Tensors of a period that its code makes of numbers."""
        for first, second in self.later.items():
            self._check_alike(first, second)

    def graph_module(self) -> fx.GraphModule:
        """The expanded graph."""
        graph, copies = fx.Graph(), self.repeats.times - 2
        made: list[dict[fx.Node, fx.Node]] = [{} for _ in range(copies + 1)]
        """The new nodes: of all nodes of the copy's graph, and of B's in each of its copies."""
        self._root = nn.Module()
        run: list[fx.Node] = []  # consecutive nodes of B
        for node in self.gm.graph.nodes:
            if node not in self.inside_b:
                for number in range(1, copies + 1):
                    for each in run:
                        made[number][each] = self._add(graph, each, number, self._of_copy(made, number))
                run = []
            else:
                run.append(node)
            is_after = self._is_later(node) and node not in self.inside_b
            sources = self._after(made) if is_after else made[0].__getitem__
            made[0][node] = self._add(graph, node, copies if is_after else 0, sources)
        expanded = fx.GraphModule(self._root, graph)  # has the root's tensors in the order of the graph
        expanded.training, expanded.meta = self.gm.training, self.gm.meta
        return expanded

    def _of_copy(self, made: list[dict[fx.Node, fx.Node]], number: int):
        """The function from a node that a node of B reads to the node that its copy reads. number: of the copy."""

        def source(node: fx.Node) -> fx.Node:
            if node in self.inside_b:
                return made[number][node]
            return made[number - 1][self.later[node]] if node in self.later else made[0][node]

        return source

    def _after(self, made: list[dict[fx.Node, fx.Node]]):
        """The same function for a node after the periods."""

        def source(node: fx.Node) -> fx.Node:
            if node in self.later:
                raise UnlikeLayersError("has layers that read more than the layer before them")
            return made[-1][node] if node in self.inside_b else made[0][node]

        return source

    def _add(self, graph: fx.Graph, node: fx.Node, number: int, source) -> fx.Node:
        """A copy of a node whose layer is `number` periods later."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), source)
        target, shift = node.target, number * self.repeats.period
        if node.op == "get_attr":
            target = self._later_attribute(target, number)
            _assign_attr(self._tensor(node.target, target), self._root, target)
        elif target is ATTENTION:
            args = *args[:PLACE], args[PLACE] + number * self.attentions, *args[PLACE + 1 :]
        new = graph.create_node(node.op, target, args, kwargs, None if shift else node.name, node.type)
        new.meta = dict(node.meta)
        stack = node.meta.get("nn_module_stack")
        if stack and shift:
            later = self._later_name
            new.meta["nn_module_stack"] = {
                later(key, shift): (later(path, shift), cls) for key, (path, cls) in stack.items()
            }
        return new

    def _later_name(self, name: str, shift: int) -> str:
        """ "model.layers.2.mlp" is "model.layers.5.mlp" three layers later."""
        return self.names.sub(lambda match: f"{match[1]}{int(match[2]) + shift}", name) if shift else name

    def _later_attribute(self, name: str, number: int) -> str:
        """The name of a tensor of the same layer, `number` periods later. Constants are numbered, too."""
        name = self._later_name(name, number * self.repeats.period)
        return LIFTED.sub(lambda match: f".lifted_tensor_{int(match[1]) + number * self.constants}", name)

    def _tensor(self, traced: str, name: str) -> Tensor:
        """The model's tensor of this name, whose layer was traced as that with the name `traced`."""
        tensor = attribute(self.gm, traced)
        if not self.names.search(traced) or LIFTED.search(traced):
            return tensor
        own = attribute(self.model, name.removeprefix(ROOT))
        if traced == name and own is not tensor and not torch.equal(own, tensor):
            raise UnlikeLayersError("has layers with constants of their own")
        return own

    def _places(self) -> dict[fx.Node, int | None]:
        place: dict[fx.Node, int | None] = {}
        last = None
        for node in self.gm.graph.nodes:
            if node.op == "get_attr":
                match = self.names.search(node.target)
                place[node] = int(match[2]) if match else None
                continue
            number = layer_of(node) if node.op == "call_function" else None
            if number is not None and last is not None and number < last:
                raise UnlikeLayersError("runs its layers in another order than that of their list")
            last = place[node] = last if number is None else number
        return place

    def _is_later(self, node: fx.Node) -> bool:
        """True for a node of B or after it."""
        return (self.place[node] or 0) >= self.repeats.first + self.repeats.period

    def _nodes_in(self, layers: Iterable[int]) -> list[fx.Node]:
        return [node for node in self.gm.graph.nodes if self.place[node] in layers]

    def _check_alike(self, first: fx.Node, second: fx.Node) -> None:
        """UnlikeLayersError unless a node of B does with the period before it what a node of A does."""
        same = [_form(first), first.op, self._stack(first, self.repeats.period)]
        is_same = same == [_form(second), second.op, self._stack(second, 0)]
        if first.op == "get_attr":
            is_same &= self._later_attribute(first.target, 1) == second.target
            if LIFTED.search(first.target):
                is_same &= torch.equal(attribute(self.gm, first.target), attribute(self.gm, second.target))
        else:
            is_same &= first.target == second.target
        read = zip(_inputs(first), _inputs(second))
        if not is_same or not all(self._read_alike(*pair) for pair in read):
            raise UnlikeLayersError(f"has layers of one kind that differ in the operation {second.name}")

    def _read_alike(self, first: fx.Node, second: fx.Node) -> bool:
        """True if nodes of A and B read nodes that are shared, in the same place of their period, or in the period
        before it."""
        if second in self.inside_b:
            return self.later.get(first) is second
        if second in self.later:
            is_before = first not in self.later and self.place[first] is not None
            return is_before and first.op == second.op == "call_function" and _value(first) == _value(second)
        return first is second

    def _stack(self, node: fx.Node, shift: int) -> list[str]:
        stack = (node.meta.get("nn_module_stack") or {}).values()
        return [self._later_name(path, shift) for path, _ in stack]


def _inputs(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, in order, each as often as it occurs."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda each: found.append(each) or each)
    return found


def _form(node: fx.Node) -> tuple[str, str]:
    """The arguments of a node without the nodes among them, and a description of its result."""
    args = node.args
    if node.target is ATTENTION:
        args = *args[:PLACE], *args[PLACE + 1 :]
    return repr(fx.map_arg((args, node.kwargs), lambda each: _Input())), _value(node)


def _is_size(node: fx.Node) -> bool:
    return node.op == "call_function" and is_size(node)


class _Input:
    """Stands for a node among arguments."""

    def __repr__(self):
        return "node"


def _value(node: fx.Node) -> str:
    """Shapes, strides, dtypes and devices of a result; UnlikeLayersError if a size is known only when it is run."""

    def describe(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{tuple(value.shape)} {value.stride()} {value.dtype} {value.device}"
        return str(value)

    text = str(pytree.tree_map(describe, node.meta.get("val")))
    if re.search(r"\bu\d+\b", text):
        raise UnlikeLayersError("has layers whose sizes depend on values")
    return text
