"""Layers of one kind: which layers of a model are alike, and a copy of the model with a few of them, to be traced.

Decoder layers are of one kind if a trace of one is a trace of the other under another number: equal classes, plain
attributes, shapes and entries of the configuration. Any layer can be made from a template: a traced layer of its kind
that follows a layer of the same kind as it does. The copy has the first two layers, a template for each such pair of
kinds, and the last layer::

    layers   0 1 2 3 4 5 6 7 8 9
    kinds    a a a a b a a a b a
    copy     a a a   b a       a   kept = [0, 1, 2, 4, 5, 9], numbered 0 to 5
    source   0 1 2 2 3 4 2 2 3 5   the template of each layer, by its number in the copy

`repeat` copies the templates' parts of the graph.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..graph import LAYER
from ..inventory import configs_of, held_items, held_tensors
from .adapters import is_compiled, shallow, twin
from .admit import reads_pictures
from .changes import BOOKKEEPING, GLOBAL_HOOKS, INTERNALS, is_plain, value_hooks
from .experts import library_tensors
from .quantised import packed_experts, packed_layers
from .sharded import is_sharded

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

    path: of the list of layers, as "model.layers".
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


def why_whole(model: PreTrainedModel) -> str | None:
    """The reason why all layers of a model are captured, in a sentence; None if a few of each kind are."""
    try:
        repeats_of(model)
    except UnlikeLayersError as reason:
        return f"{type(model).__name__} {reason}, so each of its layers is captured"
    return None


def is_known(model: nn.Module) -> bool:
    """True if all code of a model is that of PyTorch and transformers, of which tests compare both ways of capture."""
    return all(type(part).__module__.startswith(("torch.nn.", "transformers.")) for part in model.modules())


def repeats_of(model: PreTrainedModel) -> Repeats:
    """The pattern of a model's layers; UnlikeLayersError if there is none, or if more than their weights may differ."""
    _check_model(model)
    path, layers = _list_of_layers(model)
    outside = _without_layers(model, path, [])
    lists = _lists_by_layer(model, len(layers))
    _check_apart(outside, layers)
    kinds: list[tuple] = []
    numbers = []
    for number, layer in enumerate(layers):
        kind = _kind(layer, number), tuple(repr(values[number]) for values in lists)
        if kind not in kinds:
            kinds.append(kind)
        numbers.append(kinds.index(kind))
    return _templates(path, numbers)


def copy_of(model: PreTrainedModel, repeats: Repeats) -> PreTrainedModel:
    """A `twin` of a model with the layers ``repeats.kept``, numbered from 0. Nothing of it is part of the model."""
    layers = model.get_submodule(repeats.path)
    kept = [layers[number] for number in repeats.kept]
    copied = twin(_without_layers(model, repeats.path, kept))
    for config in configs_of(copied):
        if getattr(config, "num_hidden_layers", None) == repeats.depth:
            for name, values in _lists_of(config, repeats.depth):
                vars(config)[name] = type(values)(values[number] for number in repeats.kept)
            config.num_hidden_layers = len(kept)
    for position, layer in enumerate(copied.get_submodule(repeats.path)):
        for part in layer.modules():
            for name, value in vars(part).items():
                if _is_number(name, value, repeats.kept[position]):
                    vars(part)[name] = _LayerNumber(position)
    return copied


def _check_model(model: PreTrainedModel) -> None:
    """Refuse models whose tensors or calls are not those of their modules."""
    special = {
        "is shared out among ranks": is_sharded(model),
        "reads pictures": reads_pictures(model) or model.config.get_text_config(decoder=True) is not model.config,
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
    found = [
        (path, part) for path, part in model.named_modules() if isinstance(part, (nn.ModuleList, nn.ParameterList))
    ]
    outermost = [(path, part) for path, part in found if len(part) == depth and not LAYER.search(f".{path}")]
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


def _lists_of(config: PreTrainedConfig, depth: int) -> list[tuple[str, Any]]:
    """Names and values of the lists in a configuration that have a value for each layer."""
    lists = [item for item in vars(config).items() if isinstance(item[1], (list, tuple)) and len(item[1]) == depth]
    return [item for item in lists if _is_by_layer(item[0])]


def _is_by_layer(name: str) -> bool:
    """True if a list of this name has a value for each layer."""
    return "layer" in name or name == "indexer_types"


def _lists_by_layer(model: PreTrainedModel, depth: int) -> list:
    """All lists with a value for each layer; UnlikeLayersError if one is not certainly such a list."""
    lists = []
    for config in configs_of(model):
        for name, values in vars(config).items():
            if isinstance(values, (list, tuple)) and len(values) == depth and not _is_by_layer(name):
                raise UnlikeLayersError(f"has as many values in config.{name} as layers")
        lists += [values for _, values in _lists_of(config, depth)]
    for part in model.modules():
        for name, values in _attributes(part):
            if isinstance(values, (list, tuple, dict)) and len(values) == depth:
                raise UnlikeLayersError(f"has as many values in {type(part).__name__}.{name} as layers")
    return lists


def _check_apart(outside: nn.Module, layers: nn.ModuleList) -> None:
    """Refuse modules and tensors that two layers share, or a layer and the rest of the model."""
    seen: set[int] = set()
    for module in (outside, *layers):
        own = {*map(id, module.modules()), *map(id, held_tensors(module))}
        if own & seen:
            raise UnlikeLayersError("has layers that share modules or weights")
        seen |= own


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
