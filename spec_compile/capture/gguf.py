"""GGUF files: `load_gguf` keeps the weights of linear layers in the file's 4 or 8 bits, which transformers unpacks.

transformers may rename tensors and put rows into another order while it loads. So a layer's tensor is not looked for
by its name: it is the one that has the layer's rows. A layer is replaced only if all of its weights are equal to those
that transformers has unpacked.
"""

import logging
import os
from collections import Counter
from collections.abc import Collection
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel
from transformers.utils import cached_file

from ..kernels.linear import for_few_rows
from ..quantised import gguf
from ..quantised.codes import WEIGHTS, Packed, UnreadError
from .mxfp4 import FROM_HUB
from .quantised import QuantisedLinear
from .rounded_weights import own_layers, put_layer

log = logging.getLogger("spec_compile")


class FileMatrix(NamedTuple):
    """A matrix of a file.

    kind: of `gguf.FORMATS`.
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
        put_layer(model, layer_path, QuantisedLinear(form._replace(bias=layer.bias)).eval())
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

    dtype: of the model.
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
