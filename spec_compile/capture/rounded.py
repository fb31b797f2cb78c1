"""Weights in fewer bits from the load on: ``weights`` rounds a model's layers, `load_gguf` keeps the bits of a file."""

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel
from transformers.utils import cached_file

from ..errors import UnsupportedModelError, log
from ..kernels.linear import for_few_rows
from ..quantised import gguf, rounded
from ..quantised.codes import WEIGHTS, Packed, UnreadError
from .admit import Inventory
from .experts import FROM_HUB
from .quantised import QuantisedLinear, RoundedHead
from .ranks import is_sharded

READ_BY_OTHERS = ("dt_proj",)
"""Names of layers whose weights the module around them reads (Mamba's time steps)."""
HEADS = {"int8": rounded.int8, "int4": rounded.int8}
"""By the format of layers, the function that rounds the output head on a CPU. It never gets 4 bits;
llama.cpp's files of 4 bits keep 6 or 8 there, too."""


@contextmanager
def rounded_weights(inventory: Inventory, name: str | None, ranks: int = 1) -> Iterator[None]:
    """A context in which the linear layers of a model are replaced by packed ones, which stay if it ends without error.

    name: a key of `rounded.FORMATS`; None changes nothing. The output head gets 8 bits on a CPU, see `HEADS`, and stays
    elsewhere. So does a layer whose weight another module reads, or whose inputs the groups of 4 bits do not divide.
    Layers that were rounded before stay as they are.
    ranks: that will share the model. If there are several, the output head stays.
    UnsupportedModelError, naming the option, if the model is quantised already, has adapters, is shared out among
    ranks, or has no layer to round.
    """
    if name is None:
        yield
        return
    model = inventory.model
    _check(inventory)
    replaced, left = dict[str, nn.Linear](), []
    for path, layer in [*own_layers(model)]:
        packed = rounded.FORMATS[name](layer.weight)
        if packed is None:
            left.append(path)
            continue
        replaced[path] = layer
        model.set_submodule(path, QuantisedLinear(packed._replace(bias=layer.bias)).eval())
    if not replaced and not inventory.packed:
        raise UnsupportedModelError(
            f"weights: {inventory.name} has no linear layer that {name!r} can round; leave the option out"
        )
    if left:
        log.info("weights: %d layers stay as they are, because no group of inputs divides theirs", len(left))
    if ranks == 1 and model.device.type == "cpu" and name in HEADS:
        replaced |= _round_head(model, HEADS[name])
    inventory.packed |= replaced.keys()
    try:
        yield
    except BaseException:
        for path, layer in replaced.items():
            model.set_submodule(path, layer)  # guard: rounding-is-undone
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
    model.set_submodule(path, RoundedHead(packed, head.weight if is_tied else None, head.weight.dtype).eval())
    return {path: head}


def _check(inventory: Inventory) -> None:
    model = inventory.model
    packed = map(model.get_submodule, inventory.packed)
    why_not = {
        "is quantised already": any(not isinstance(part, QuantisedLinear) for part in packed),
        "has adapters, whose layers hold the weights": hasattr(model, "peft_config"),
        "is shared out among ranks by transformers": is_sharded(model),
    }
    for reason, holds in why_not.items():
        if holds:
            raise UnsupportedModelError(f"weights: {inventory.name} {reason}; leave the option out")


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


# GGUF files: `load_gguf` keeps the weights of linear layers in the file's 4 or 8 bits, which transformers unpacks.
#
# transformers may rename tensors and put rows into another order while it loads. So a layer's tensor is not looked for
# by its name: it is the one that has the layer's rows. A layer is replaced only if all of its weights are equal to
# those that transformers has unpacked.


class FileMatrix(NamedTuple):
    """A matrix of a file.

    kind: a key of `gguf.FORMATS`.
    data: [O, bytes of a row] uint8, a numpy array over the file.
    keys: [O] int64, see `row_keys`.
    """

    kind: str
    data: Any
    keys: Tensor


def load_gguf(name: str | PathLike, gguf_file: str, **options: Any) -> PreTrainedModel:
    """A model of a GGUF file, whose linear layers keep the formats of the file that have a kernel on their device.

    name, gguf_file, options: as for ``AutoModelForCausalLM.from_pretrained``, without quantization_config.

    Other layers, the embedding and the output head are numbers of ``dtype``, as transformers loads them; one line of
    the log says how many layers, and why. Raises ValueError if a tensor of the file has scales that are not finite.
    """
    if "quantization_config" in options:
        raise ValueError("quantization_config: load_gguf keeps layers as they are in the file; leave it out")
    model = AutoModelForCausalLM.from_pretrained(
        name, gguf_file=gguf_file, quantization_config=GgufConfig(dequantize=True), **options
    ).eval()
    path = gguf_file
    if not os.path.isfile(path):
        path = cached_file(name, gguf_file, **{key: options[key] for key in FROM_HUB if key in options})
    kinds = gguf.FORMATS.keys() if model.device.type == "cpu" else gguf.ON_GPU
    matrices, others = _read(path, model.dtype, kinds)
    kept, left = 0, 0
    for layer_path, layer in [*own_layers(model)]:
        packed = _found(matrices, layer.weight)
        form = packed and for_few_rows(packed.to(layer.weight.device), layer.weight.dtype)
        if form is None:
            left += 1
            continue
        model.set_submodule(layer_path, QuantisedLinear(form._replace(bias=layer.bias)).eval())
        kept += 1
    log.info("gguf: %d linear layers keep the bits of %s", kept, os.path.basename(path))
    if left:
        log.warning(
            "gguf: %d linear layers of %s are unpacked to %s, because kernels of this %s read only %s (the file has "
            "%s)", left, os.path.basename(path), model.dtype, model.device.type, ", ".join(kinds),
            ", ".join(f"{count} of {kind}" for kind, count in others.items()) or "no other",
        )  # fmt: skip
    return model


def _read(path: str, dtype: torch.dtype, kinds: Collection[str]) -> tuple[dict[tuple, list[FileMatrix]], Counter]:
    """The matrices of a file of some types, by `fingerprint`, and the number of others by their type.

    dtype: the dtype in which transformers has unpacked the file.
    """
    from gguf import GGUFReader  # transformers needs the package, too

    matrices: dict[tuple, list[FileMatrix]] = {}
    others: Counter = Counter()
    for tensor in GGUFReader(path).tensors:
        kind = tensor.tensor_type.name
        if len(tensor.shape) != 2 or kind not in kinds:
            others.update([kind] if len(tensor.shape) == 2 else [])
            continue
        try:
            packed = gguf.FORMATS[kind](torch.tensor(tensor.data))
        except UnreadError as error:
            raise ValueError(f"gguf_file: {os.path.basename(path)}: {tensor.name} ({kind}) {error}") from error
        keys = row_keys(packed.weight(), dtype)
        matrices.setdefault(fingerprint(keys, packed.inputs), []).append(FileMatrix(kind, tensor.data, keys))
    return matrices, others


def _found(matrices: dict[tuple, list[FileMatrix]], weight: Tensor) -> Packed | None:
    """A matrix of the file in the order of rows of a layer's weight, to which it is equal; None: there is none."""
    keys = row_keys(weight, weight.dtype)
    for matrix in matrices.get(fingerprint(keys, weight.shape[1]), []):
        order = torch.empty_like(keys)
        order[keys.argsort()] = matrix.keys.argsort()
        packed = gguf.FORMATS[matrix.kind](torch.tensor(matrix.data)[order])
        if torch.equal(packed.weight().to(weight), weight):
            return packed
    return None


def row_keys(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A number for each row of a weight [O, I] in a dtype, [O] int64; equal for rows that are equal in every bit."""
    factors = torch.randint(1 << 62, (weight.shape[1],), generator=torch.Generator().manual_seed(0)) | 1
    words = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    some = weight.detach().split(max(WEIGHTS // weight.shape[1], 1))
    return torch.cat([(rows.to(dtype).cpu().view(words).long() * factors).sum(dim=1) for rows in some])


def fingerprint(keys: Tensor, inputs: int) -> tuple:
    """A key of a matrix, equal for matrices of the same rows in whatever order."""
    return len(keys), inputs, int(keys.sum())
