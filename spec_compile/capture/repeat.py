"""`repeat` expands the graph of a model's copy with a few layers of each kind (see `kinds`) to the depth of the model.

Each layer of the model gets the nodes of its template in the copy. A node that reads the layer before in the copy reads
the layer before in the model, in the same place, whatever template that layer has::

    layers     0 1 2 3 4 5 6 7 8 9
    kinds      a a a a b a a a b a
    template   0 1 2 2 3 4 2 2 3 5     layers 1, 2 and 4 of the copy are of one kind, node for node. Layer 6 has the
                                       nodes of layer 2, which read nodes of layer 1; it reads their like in layer 5
"""

import re
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

    UnlikeLayersError if two layers of one kind in the copy differ by more than their numbers.
    """
    return _Expansion(gm, model, repeats).graph_module()


class _Expansion:
    """One call of `repeat`.

    place: for each node of the copy's graph, the number of its layer in the copy; None before the first layer. A call
        outside of layers belongs to the layer before it.
    nodes: for each layer in the copy, its nodes, without sizes that later layers read, too.
    index: the position of each node in its list of `nodes`.
    """

    def __init__(self, gm: fx.GraphModule, model: nn.Module, repeats: Repeats):
        self.gm, self.model, self.repeats = gm, model, repeats
        self.names = re.compile(rf"((?:^|\b|_){re.escape(ROOT + repeats.path)}\.)(\d+)(?=\.|$)")
        self.place = self._places()
        self.nodes: list[list[fx.Node]] = [[] for _ in repeats.kept]
        for node, place in self.place.items():
            # A size that a layer computes for the first time is read by later layers, and is not computed again.
            if place is not None and not (_is_size(node) and any(self.place[user] != place for user in node.users)):
                self.nodes[place].append(node)
        self.index = {node: number for nodes in self.nodes for number, node in enumerate(nodes)}
        last = len(self.nodes) - 1
        first_of_kind: dict[int, int] = {}
        for layer in range(1, last):
            self._check_alike(first_of_kind.setdefault(repeats.kinds[layer], layer), layer)

    def graph_module(self) -> fx.GraphModule:
        """The expanded graph."""
        self._graph, self._root = fx.Graph(), nn.Module()
        self._attentions = self._constants = 0
        self._made: list[dict[fx.Node, fx.Node]] = [{} for _ in self.repeats.source]
        """For each layer of the model, the new node of each of its template's nodes."""
        self._shared: dict[fx.Node, fx.Node] = {}
        """The new nodes of all others."""
        run: list[fx.Node] = []  # consecutive nodes of layers, of which the model's others are made, too
        for node in self.gm.graph.nodes:
            if self.place[node] is not None:
                run.append(node)
                continue
            self._add_layers(run)
            run = []
            self._shared[node] = self._add(node, None)
        self._add_layers(run)
        expanded = fx.GraphModule(self._root, self._graph)  # has the root's tensors in the order of the graph
        expanded.training, expanded.meta = self.gm.training, self.gm.meta
        return expanded

    def _add_layers(self, run: list[fx.Node]) -> None:
        """Add nodes of the copy's layers as often as the model has such layers, layer after layer."""
        for layer, source in enumerate(self.repeats.source):
            is_own = self.repeats.kept[source] == layer
            for node in run:
                if self.place[node] == source and node in self.index:
                    self._made[layer][node] = self._add(node, layer)
                elif self.place[node] == source and is_own:
                    self._shared[node] = self._add(node, layer)

    def _source(self, node: fx.Node, reader: fx.Node, layer: int | None) -> fx.Node:
        """The new node that a layer of the model reads where its template's node `reader` reads `node`."""
        if node in self._shared:
            return self._shared[node]
        place = self.place[node]
        if place == self.place[reader]:
            return self._made[layer][node]
        if place == self.place[reader] - 1:  # the layer before may have another template of the same kind
            template = self.repeats.source[layer - 1]
            same = self.nodes[template][self.index[node]] if template != place else node
            return self._made[layer - 1][same]
        if place == 0:
            return self._made[0][node]
        raise UnlikeLayersError("has layers that read more than the layer before them")

    def _add(self, node: fx.Node, layer: int | None) -> fx.Node:
        """A copy of a node in a layer of the model; None outside of layers."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda read: self._source(read, node, layer))
        target = node.target
        is_own = layer is None or self.repeats.kept[self.repeats.source[layer]] == layer
        if node.op == "get_attr":
            target = self._name_in(node.target, layer)
            if LIFTED.search(target):
                target, self._constants = LIFTED.sub(f".lifted_tensor_{self._constants}", target), self._constants + 1
            _assign_attr(self._tensor(node.target, target, is_own), self._root, target)
        elif target is ATTENTION:
            args = (*args[:PLACE], self._attentions, *args[PLACE + 1 :])
            self._attentions += 1
        new = self._graph.create_node(node.op, target, args, kwargs, node.name if is_own else None, node.type)
        new.meta = dict(node.meta)
        if stack := node.meta.get("nn_module_stack"):
            new.meta["nn_module_stack"] = {
                self._name_in(key, layer): (self._name_in(path, layer), cls) for key, (path, cls) in stack.items()
            }
        return new

    def _name_in(self, name: str, layer: int | None) -> str:
        """ "model.layers.2.mlp" is "model.layers.5.mlp" in layer 5."""
        return name if layer is None else self.names.sub(lambda match: f"{match[1]}{layer}", name)

    def _tensor(self, traced: str, name: str, is_own: bool) -> Tensor:
        """The model's tensor of this name, which is called `traced` in the copy. is_own: of the same layer."""
        tensor = attribute(self.gm, traced)
        if not self.names.search(traced) or LIFTED.search(traced):
            return tensor
        own = attribute(self.model, name.removeprefix(ROOT))
        if is_own and own is not tensor and not torch.equal(own, tensor):
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

    def _check_alike(self, first: int, second: int) -> None:
        """UnlikeLayersError unless two layers of the copy do the same under another number."""
        nodes = self.nodes[first], self.nodes[second]
        if len(nodes[0]) != len(nodes[1]):
            raise UnlikeLayersError("has layers of one kind that run other operations")
        for one, other in zip(*nodes):
            same = [_form(one), one.op, self._stack(one)] == [_form(other), other.op, self._stack(other)]
            if one.op == "get_attr":
                same &= self._unnumbered(one.target) == self._unnumbered(other.target)
                if LIFTED.search(one.target):
                    same &= torch.equal(attribute(self.gm, one.target), attribute(self.gm, other.target))
            else:
                same &= one.target == other.target
            read = zip(_inputs(one), _inputs(other))
            if not same or not all(self._read_alike(one, other, *pair) for pair in read):  # guard: layers-alike
                raise UnlikeLayersError(f"has layers of one kind that differ in the operation {other.name}")

    def _read_alike(self, one: fx.Node, other: fx.Node, first: fx.Node, second: fx.Node) -> bool:
        """True if two nodes of layers of one kind read nodes that are shared, or in the same place of their layer or of
        the layer before it. first: read by `one`. second: read by `other`."""
        if first not in self.index and second not in self.index:
            return first is second
        places = self.place[first], self.place[second]
        steps = [None if p is None else self.place[n] - p for n, p in zip((one, other), places)]
        if steps == [0, 0]:
            return self.index.get(first) == self.index.get(second)
        if steps == [1, 1]:
            before = [self.repeats.kinds[place] for place in places]
            is_same = before[0] != before[1] or 0 in places or self.index.get(first) == self.index.get(second)
            return is_same and first.op == second.op == "call_function" and _value(first) == _value(second)
        return first is second

    def _unnumbered(self, name: str) -> str:
        """A name without the numbers of the layer and of a constant."""
        return LIFTED.sub(".lifted_tensor", self.names.sub(r"\1", name))

    def _stack(self, node: fx.Node) -> list[str]:
        stack = (node.meta.get("nn_module_stack") or {}).values()
        return [self._unnumbered(path) for path, _ in stack]


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
