"""Layers of one kind: which layers of a model are alike, and a copy of the model with a few of them, to be traced.

Decoder layers are of one kind if a trace of one is a trace of the other under another number: equal classes, plain
attributes, shapes and entries of the configuration. Any layer can be made from a template: a traced layer of its kind
that follows a layer of the same kind as it does. The copy has the first two layers, a template for each such pair of
kinds, and the last layer::

    layers   0 1 2 3 4 5 6 7 8 9
    kinds    a a a a b a a a b a
    copy     a a a   b a       a   kept = [0, 1, 2, 4, 5, 9], numbered 0 to 5
    source   0 1 2 2 3 4 2 2 3 5   the template of each layer, by its number in the copy

`Expansion` copies the templates' parts of the graph to the other layers.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.graph_module import _assign_attr
from torch.utils import _pytree as pytree
from transformers import PreTrainedConfig, PreTrainedModel

from ..graph import LAYER, attribute, is_size, layer_of
from ..inventory import configs_of, held_items, held_tensors
from .changes import BOOKKEEPING, GLOBAL_HOOKS, INTERNALS, is_plain, value_hooks
from .copies import shallow, shared_copy
from .experts import library_tensors
from .quantised import packed_experts, packed_layers
from .ranks import is_sharded
from .replaced import is_compiled

WORTH = 0.75
"""Largest share of a model's layers in a copy that is made."""
ARITHMETIC = "add sub mul truediv floordiv mod divmod pow lshift rshift and or xor".split()
ARITHMETIC += [f"r{name}" for name in ARITHMETIC]
ARITHMETIC += "eq ne lt le gt ge hash bool neg abs float str format".split()
"""Methods of an int whose result depends on its value. An index of a list is no such use: `copy_of` cuts the lists."""


class UnlikeLayersError(Exception):
    """The layers of a model cannot be captured by kinds. The text is the reason, a sentence without its subject."""


@dataclass(frozen=True)
class Repeats:
    """A model of which some layers are templates for the others.

    path: the path of the list of layers, such as "model.layers".
    kept: the numbers of the layers in the copy, ascending.
    source: for each layer of the model, the number in the copy of the layer that it is made from.
    kinds: the kind of each layer in the copy.
    """

    path: str
    kept: list[int]
    source: list[int]
    kinds: list[int]

    @property
    def depth(self) -> int:
        """The number of layers of the model."""
        return len(self.source)


class _LayerNumber(int):
    """The number of a layer in the copy. Computing with it raises, because layers would differ by more than weights."""


def _refuse(self, *others):
    raise UnlikeLayersError("has layers that compute with their own number")


for _name in ARITHMETIC:
    setattr(_LayerNumber, f"__{_name}__", _refuse)


def is_known(model: nn.Module) -> bool:
    """True if all code of a model is PyTorch's and transformers', of which tests compare both ways of capture."""
    return all(type(part).__module__.startswith(("torch.nn.", "transformers.")) for part in model.modules())


def repeats_of(model: PreTrainedModel) -> Repeats:
    """The pattern of a model's layers; UnlikeLayersError if there is none, or if more than their weights may differ."""
    _check_model(model)
    path, layers = _list_of_layers(model)
    lists = _lists_by_layer(model, len(layers))
    # Two layers, or a layer and the rest of the model, may not share modules or tensors.
    seen: set[int] = set()
    for module in (_without_layers(model, path, []), *layers):
        own = {*map(id, module.modules()), *map(id, held_tensors(module))}
        if own & seen:
            raise UnlikeLayersError("has layers that share modules or weights")
        seen |= own
    # Number the kinds in the order of their first layers.
    kinds: list[tuple] = []
    numbers = []
    for number, layer in enumerate(layers):
        kind = _kind(layer, number), tuple(repr(values[number]) for values in lists)
        if kind not in kinds:
            kinds.append(kind)
        numbers.append(kinds.index(kind))
    return _templates(path, numbers)


def copy_of(model: PreTrainedModel, repeats: Repeats) -> PreTrainedModel:
    """A `shared_copy` of a model that has the layers ``repeats.kept``, numbered from 0."""
    # Copy a model that has only the layers that are kept.
    layers = model.get_submodule(repeats.path)
    kept = [layers[number] for number in repeats.kept]
    copied = shared_copy(_without_layers(model, repeats.path, kept))
    # Its configurations tell of these layers.
    for config in configs_of(copied):
        if getattr(config, "num_hidden_layers", None) == repeats.depth:
            for name, values in _lists_of(config, repeats.depth).items():
                vars(config)[name] = type(values)(values[number] for number in repeats.kept)
            config.num_hidden_layers = len(kept)
    # Layers that know their number get the new one, which raises if they compute with it.
    for position, layer in enumerate(copied.get_submodule(repeats.path)):
        for part in layer.modules():
            for name, value in vars(part).items():
                if _is_number(name, value, repeats.kept[position]):
                    vars(part)[name] = _LayerNumber(position)
    return copied


def _check_model(model: PreTrainedModel) -> None:
    """Refuse models whose tensors or calls do not belong to their modules."""
    special = {
        "is shared out among ranks": is_sharded(model),
        "reads pictures": model.config.get_text_config(decoder=True) is not model.config,
        "has adapters": hasattr(model, "peft_config"),
        "skips layers": bool(getattr(model.config, "cross_attention_layers", None)),
        "was compiled": is_compiled(model),
        "is quantised": bool(packed_layers(model) or packed_experts(model) or library_tensors(model)),
        "has tensors of a class of their own": any(type(tensor.data) is not Tensor for tensor in held_tensors(model)),
        "is watched by hooks": bool(value_hooks(GLOBAL_HOOKS)),
    }
    for reason, holds in special.items():
        if holds:
            raise UnlikeLayersError(reason)
    for path, part in model.named_modules():
        if value_hooks((part._forward_hooks, part._forward_pre_hooks)):
            raise UnlikeLayersError(f"has a hook ({path or 'of the model'})")
        if "forward" in vars(part):
            raise UnlikeLayersError(f"has a forward of its own ({path or 'of the model'})")
        for name, value in _attributes(part):
            if not isinstance(value, (PreTrainedConfig, Tensor)) and _text(value) is None:
                raise UnlikeLayersError(f"keeps a {type(value).__name__} ({path}.{name})".replace("(.", "("))


def _list_of_layers(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Path and list of the decoder layers."""
    depth = getattr(model.config, "num_hidden_layers", None)
    lists = [each for each in model.named_modules() if isinstance(each[1], (nn.ModuleList, nn.ParameterList))]
    outermost = [(path, part) for path, part in lists if len(part) == depth and not LAYER.search(f".{path}")]
    if len(outermost) != 1 or not LAYER.fullmatch(f".{outermost[0][0].rpartition('.')[2]}.0"):
        raise UnlikeLayersError("has no list of layers, or several lists as long")
    if type(outermost[0][1]) is not nn.ModuleList:
        raise UnlikeLayersError("has its layers in a list of a class of its own")
    return outermost[0]


def _without_layers(model: PreTrainedModel, path: str, layers: list[nn.Module]) -> PreTrainedModel:
    """A second object over the state of a model, whose list of layers has only these."""
    top = module = shallow(model)
    *names, last = path.split(".")
    for name in names:
        module._modules[name] = module = shallow(module._modules[name])
    module._modules[last] = nn.ModuleList(layers)
    return top


def _lists_of(config: PreTrainedConfig, depth: int) -> dict[str, Any]:
    """The lists in a configuration that have a value for each layer; UnlikeLayersError if one may be another list."""
    lists = {
        name: each for name, each in vars(config).items() if isinstance(each, (list, tuple)) and len(each) == depth
    }
    for name in lists:
        if "layer" not in name and name != "indexer_types":
            raise UnlikeLayersError(f"has as many values in config.{name} as layers")
    return lists


def _lists_by_layer(model: PreTrainedModel, depth: int) -> list:
    """All lists with a value for each layer; UnlikeLayersError if one is not certainly such a list."""
    lists = [values for config in configs_of(model) for values in _lists_of(config, depth).values()]
    for part in model.modules():
        for name, values in _attributes(part):
            if isinstance(values, (list, tuple, dict)) and len(values) == depth:
                raise UnlikeLayersError(f"has as many values in {type(part).__name__}.{name} as layers")
    return lists


def _kind(layer: nn.Module, number: int) -> list[tuple]:
    """All of a layer on which its trace depends. Two layers are of one kind if these are equal."""
    kind, ties = [], {}
    for path, part in layer.named_modules():
        kind.append((path, type(part), [*part._modules]))
        for name, value in _attributes(part):
            if isinstance(value, Tensor):
                raise UnlikeLayersError(f"has a tensor in each layer that is no parameter or buffer ({path}.{name})")
            kind.append((name, "number" if _is_number(name, value, number) else _text(value) or id(value)))
        for holder in (part._parameters, part._buffers):
            for name, x in held_items(holder):
                layout = x is not None and (x.shape, x.dtype, x.stride(), x.device, x.requires_grad, type(x))
                kind.append((name, layout, ties.setdefault(id(x), (path, name)) if x is not None else None))
    return kind


def _attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a module that its forward may read, except its parameters, buffers and modules."""
    private = isinstance(part, PreTrainedModel)
    for name, value in vars(part).items():
        if name not in INTERNALS and name not in BOOKKEEPING and not (private and name.startswith("_")):
            yield name, value


def _text(value: Any) -> str | None:
    """A text that equal values share; None for a value of an unknown class."""
    if isinstance(value, partial) and type(value) is partial:
        parts = _text(value.func), _text(value.args), _text(value.keywords)
        return None if None in parts else f"partial{parts}"
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return f"function {id(value)}"
    return repr(value) if is_plain(value) else None


def _is_number(name: str, value: Any, number: int) -> bool:
    """True if an attribute of a layer is the number of this layer."""
    return type(value) is int and value == number and any(word in name for word in ("layer", "idx", "index"))


def _templates(path: str, kinds: list[int]) -> Repeats:
    """The `Repeats` of layers of these kinds."""
    depth, kept = len(kinds), [*range(min(2, len(kinds)))]
    template: dict[tuple[int, int], int] = {}

    def keep(number: int) -> None:
        """Add a layer to the copy, where it follows a layer of the same kind as in the model."""
        if kinds[kept[-1]] != kinds[number - 1]:
            keep(number - 1)
        template.setdefault((kinds[number - 1], kinds[number]), len(kept))
        kept.append(number)

    for number in range(2, depth):
        if number == depth - 1 or (kinds[number - 1], kinds[number]) not in template:
            keep(number)
    if not kept or len(kept) > WORTH * depth:
        raise UnlikeLayersError(f"has {depth} layers, of which too few repeat a pattern")
    pairs = enumerate(pairwise(kinds), 1)
    source = [0, *(kept.index(number) if number in kept else template[pair] for number, pair in pairs)]
    return Repeats(path, kept, source, [kinds[number] for number in kept])


# The graph of such a copy is expanded to the depth of the model.
#
# Each layer of the model gets the nodes of its template in the copy. A node that reads the layer before in the copy
# reads the layer before in the model, in the same place, whatever template that layer has::
#
#     layers     0 1 2 3 4 5 6 7 8 9
#     kinds      a a a a b a a a b a
#     template   0 1 2 2 3 4 2 2 3 5     layers 1, 2 and 4 of the copy are of one kind, node for node. Layer 6 has the
#                                        nodes of layer 2, which read nodes of layer 1; it reads their like in layer 5


ATTENTION = torch.ops.spec_compile.attention.default
PLACE = [argument.name for argument in ATTENTION._schema.arguments].index("layer")
"""The position of the argument that counts attention nodes."""
LIFTED = re.compile(r"\.lifted_tensor_(\d+)$")
"""The name that export gives to a tensor that code makes of numbers."""
ROOT = "model."
"""The part of the names in a captured graph that stands for the model."""


class Expansion:
    """The expansion of `gm`, the graph of a model's copy, to the graph of the model, whose tensors it gets.

    UnlikeLayersError if two layers of one kind in the copy differ by more than their numbers.

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
            is_early = node.op == "call_function" and is_size(node) and any(self.place[u] != place for u in node.users)
            if place is not None and not is_early:
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
        """The model's tensor of this name, which is called `traced` in the copy. is_own: the layer is the same."""
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
                raise UnlikeLayersError("runs its layers in another order than their list has")
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
        return [self._unnumbered(path) for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


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
    return repr(fx.map_arg((args, node.kwargs), lambda each: "<node>")), _value(node)


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
