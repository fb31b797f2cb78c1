"""Quantised weights: each format is a file, and tells what its tensors mean.

It has one `Format`, which reads layers of its library and files of checkpoints, and classes of `WeightLayout`, unless
another file's classes say what its tensors mean.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from . import awq, bnb, compressed_tensors, fp4, fp8, gptq, torchao
from .codes import LAYOUTS, Packed, UnreadError, WeightLayout  # noqa: F401
from .formats import FORMATS, Format, Stored  # noqa: F401
from .held import PARTS, OneLayout, Rearranged, for_kernel, layer_of, rearranged, repacked, update  # noqa: F401
from .rows import rounds_activations

FORMATS += [each.FORMAT for each in (fp8, compressed_tensors, gptq, awq, bnb, torchao, fp4)]


def read(module: nn.Module) -> Packed | None:
    """A quantised linear layer of a format that is read, or None; UnreadError if it is not laid out as expected."""
    layer = layer_of(module)
    if layer is not None and all(map(layer.is_empty, layer.empty)):
        return Packed(layer.packed, dict(zip(PARTS, layer.parts)), module.bias, layer.inputs)
    return next((packed for format in FORMATS if (packed := format.read(module)) is not None), None)


def hold_in_one_layout(module: nn.Module, source: Packed, form: tuple[WeightLayout, list[Tensor]]) -> None:
    """Let a layer hold its weights only in the form that `WeightLayout.for_few_rows` has made of them, if that has all
    of their bits."""
    layer = OneLayout(source, *form)
    if not layer.is_exact:
        return
    layer.replace(module, source, form[1])
    module.register_load_state_dict_pre_hook(_fill)
    module.register_load_state_dict_post_hook(_take)


def _fill(module: nn.Module, *args) -> None:
    layer = layer_of(module)
    if layer is not None:
        layer.fill()


def _take(module: nn.Module, incompatible_keys) -> None:
    layer = layer_of(module)
    if layer is not None:
        layer.take(read(module))


@functools.cache
def layout_of(kind: str) -> WeightLayout:
    """The layout that `WeightLayout.kind` names; ValueError if there is none."""
    try:
        name, *fields = kind.split()
        return LAYOUTS[name](*map(int, fields))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"kind: expected the `WeightLayout.kind` of a layout, got {kind!r}") from error


@contextmanager
def unrounded_activations() -> Iterator[None]:
    """A context in which no layer rounds its activations, whatever its format and kernel."""
    token = rounds_activations.set(False)
    try:
        yield
    finally:
        rounds_activations.reset(token)
