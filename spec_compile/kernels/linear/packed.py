"""The op of quantised linear layers, which marks them in a graph and computes them."""

import torch
from torch import Tensor, nn

from ...quantised import layout_of
from ...quantised.rows import rounds_activations
from . import few_rows


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
