"""Quantised linear layers: the op that marks them in a graph, and the formats that it computes, a file each.

A format is a `WeightLayout`, and ``read(module)``, which takes a layer of its library apart without a copy.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .. import few_rows
from . import awq, bitsandbytes, blocks, compressed_tensors, fp4, fp8_block, gptq, nibbles, torchao, w4a8
from .layout import Packed, UnreadError, WeightLayout  # noqa: F401
from .one_layout import PARTS, OneLayout, layer_of
from .rearranged import Rearranged, rearranged  # noqa: F401
from .repack import for_kernel, repacked, update  # noqa: F401
from .rows import rounds_activations

FORMATS = (fp8_block, compressed_tensors, gptq, awq, bitsandbytes, torchao)
LAYOUTS = {layout.__name__: layout for format in (*FORMATS, blocks, fp4, nibbles, w4a8) for layout in format.LAYOUTS}
REFILLED = {
    bitsandbytes.Table4: bitsandbytes.refilled, torchao.IntGroups: torchao.refilled,
    torchao.Int8Weight: torchao.refilled,
}  # fmt: skip
"""Functions that make an owner of parts anew, by the layout."""


def read(module: nn.Module) -> Packed | None:
    """A quantised linear layer of a format that is read, or None; UnreadError if it is not laid out as expected."""
    layer = layer_of(module)
    if layer is not None and all(map(layer.is_empty, layer.empty)):
        return Packed(layer.packed, dict(zip(PARTS, layer.parts)), module.bias, layer.inputs)
    return next((packed for format in FORMATS if (packed := format.read(module)) is not None), None)


def hold_in_one_layout(module: nn.Module, source: Packed, form: tuple[WeightLayout, list[Tensor]]) -> None:
    """Let a layer hold its weights only in the form that `WeightLayout.for_few_rows` has made of them, if that has all
    of their bits."""
    layer = OneLayout(source, *form, REFILLED.get(type(source.layout)))
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


def _product(x: Tensor, parts: list[Tensor], bias: Tensor | None, kind: str) -> Tensor:
    """A layer by the kernel of a CPU if that serves it, else by its plain meaning."""
    if not parts or not x.dim():
        raise ValueError(f"x, parts: expected [..., I] and the parts of a layer, got {list(x.shape)} and {len(parts)}")
    if not rounds_activations.get():
        return layout_of(kind).unrounded(x, parts, bias)  # guard: rounded-activations
    out = few_rows.quantised_product(kind, x, parts, bias)
    if out is not None:
        return out
    few_rows.check_activations(x)
    try:
        return layout_of(kind).product(x, parts, bias)
    except (IndexError, KeyError, ZeroDivisionError) as error:
        raise ValueError(f"parts: expected a layer of the kind {kind!r} with {x.shape[-1]} inputs") from error


def _quantised_linear(x: Tensor, parts: list[Tensor], bias: Tensor | None, kind: str) -> Tensor:
    return _product(x, parts, bias, kind).contiguous()


# `torch.library.custom_op` would add 15 microseconds to each of the hundred products of a round.
_LIBRARY = torch.library.Library("spec_compile", "FRAGMENT")
_LIBRARY.define("quantised_linear(Tensor x, Tensor[] parts, Tensor? bias, str kind) -> Tensor")
_LIBRARY.impl("quantised_linear", _quantised_linear, "CompositeExplicitAutograd")
quantised_linear = torch.ops.spec_compile.quantised_linear
"""A quantised linear layer: x [..., I], the parts of a layout, bias [O] or None -> [..., O] of x's dtype.

kind: of the layout. It is the same text for all layers that are laid out alike, so that they are compiled once.
"""


@torch.library.register_fake("spec_compile::quantised_linear")
def _(x, parts, bias, kind):
    few_rows.check_devices(x, *parts, bias)
    return x.new_empty(*x.shape[:-1], layout_of(kind).outputs(parts, x.shape[-1]))


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, scales: Tensor | None, kind: str) -> Tensor:
    """``F.linear``, or with a kind `quantised_linear` of its two parts."""
    return _product(x, [weight, scales], bias, kind) if kind else nn.functional.linear(x, weight, bias)
