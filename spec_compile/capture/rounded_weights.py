"""The option ``weights``: a model's linear layers are rounded and packed at load, and held only so."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModelError
from ..kernels.linear import for_few_rows
from ..quantised import rounded
from .quantised import QuantisedLinear, RoundedHead, packed_layers
from .sharded import is_sharded

log = logging.getLogger("spec_compile")

READ_BY_OTHERS = ("dt_proj",)
"""Names of layers whose weights the module around them reads (Mamba's time steps)."""
HEADS = {"int8": rounded.int8, "int4": rounded.int8}
"""By the format of layers, the function that rounds the output head on a CPU. It never gets 4 bits;
llama.cpp's files of 4 bits keep 6 or 8 there, too."""


@contextmanager
def rounded_weights(model: PreTrainedModel, name: str | None, ranks: int = 1) -> Iterator[None]:
    """A context in which the linear layers of `model` are replaced by packed ones, which stay if it ends without error.

    name: a format of `made.FORMATS`; None changes nothing. The output head gets 8 bits on a CPU, see `HEADS`, and stays
    elsewhere. So does a layer whose weight another module reads, or whose inputs the groups of 4 bits do not divide.
    Layers that were rounded before stay as they are.
    ranks: that will share the model. If there are several, the output head stays.
    UnsupportedModelError, naming the option, if the model is quantised already, has adapters, is shared out among
    ranks, or has no layer to round.
    """
    if name is None:
        yield
        return
    _check(model)
    replaced, left = dict[str, nn.Linear](), []
    for path, layer in [*own_layers(model)]:
        packed = rounded.FORMATS[name](layer.weight)
        if packed is None:
            left.append(path)
            continue
        replaced[path] = layer
        put_layer(model, path, QuantisedLinear(packed._replace(bias=layer.bias)).eval())
    if not replaced and not packed_layers(model):
        raise UnsupportedModelError(
            f"weights: {type(model).__name__} has no linear layer that {name!r} can round; leave the option out"
        )
    if left:
        log.info("weights: %d layers stay as they are, because no group of inputs divides theirs", len(left))
    if ranks == 1 and model.device.type == "cpu" and name in HEADS:
        replaced |= _round_head(model, HEADS[name])
    try:
        yield
    except BaseException:
        for path, layer in replaced.items():
            put_layer(model, path, layer)  # guard: rounding-is-undone
        raise


def _round_head(model: PreTrainedModel, make: Callable) -> dict[str, nn.Linear]:
    """Round the output head if it is a linear layer. Returns this, by its path."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return {}
    path = next(path for path, layer in model.named_modules() if layer is head)
    is_tied = _readers(model)[id(head.weight)] > 1
    packed = make(head.weight)
    packed = (for_few_rows(packed, head.weight.dtype) or packed)._replace(bias=head.bias)
    put_layer(model, path, RoundedHead(packed, head.weight if is_tied else None, head.weight.dtype).eval())
    return {path: head}


def _check(model: PreTrainedModel) -> None:
    lacks = {
        "is quantised already": any(not isinstance(model.get_submodule(path), QuantisedLinear)
                                    for path in packed_layers(model)),
        "has adapters, whose layers hold the weights": hasattr(model, "peft_config"),
        "is shared out among ranks by transformers": is_sharded(model),
    }  # fmt: skip
    for lack, is_true in lacks.items():
        if is_true:
            raise UnsupportedModelError(f"weights: {type(model).__name__} {lack}; leave the option out")


def own_layers(model: PreTrainedModel) -> Iterator[tuple[str, nn.Linear]]:
    """The linear layers but the output head whose weights nobody else reads."""
    readers = _readers(model)
    for path, layer in model.named_modules():
        if type(layer) is not nn.Linear or layer is model.get_output_embeddings():
            continue
        if readers[id(layer.weight)] == 1 and path.rpartition(".")[2] not in READ_BY_OTHERS:
            yield path, layer


def _readers(model: PreTrainedModel) -> Counter[int]:
    """The number of modules that hold each parameter, by its id."""
    return Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))


def put_layer(model: PreTrainedModel, path: str, layer: nn.Module) -> None:
    """Put a layer in the place of another."""
    parent, _, child = path.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)
