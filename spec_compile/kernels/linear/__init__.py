"""Linear layers: the forms in which a graph computes ``F.linear``, one entry each in `FORMS`.

Passes, regions and drafters ask here which form serves a weight, and which nodes are products. A new sort of weight is
one more form and its kernel.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from ... import quantised
from ...graph import ModelGraph, attribute, calls
from .. import HALF
from ..ops import arguments_of
from . import cpu_gemm, cpu_products, product_ops, skinny_gemm  # noqa: F401
from .product_ops import packed_linear, quantised_linear  # noqa: F401

aten = torch.ops.aten


@dataclass(frozen=True)
class LinearForm:
    """A way to compute a linear layer.

    op: ``op(x, weight, bias)`` as `F.linear`.
    device, dtypes: which weights it serves.
    supports: True if it serves a dtype, on this CPU, in products of 1 row or of MANY.
    """

    op: Callable
    device: str
    dtypes: tuple[torch.dtype, ...]
    supports: Callable[[torch.dtype, float], bool] = lambda dtype, rows: True


MANY = math.inf  # rows of a prompt
PRODUCT = torch.ops.spec_compile.product.default
TO_STREAM = torch.ops.spec_compile.product_to_stream.default
TO_HEADS = torch.ops.spec_compile.product_to_heads.default
SKINNY_GEMM = LinearForm(PRODUCT, "cuda", HALF, lambda dtype, rows: rows < MANY)
CPU_GEMM = LinearForm(cpu_gemm.cpu_linear, "cpu", tuple(cpu_gemm.NUMBERS), cpu_gemm.multiplies)
TRANSPOSED = LinearForm(
    cpu_gemm.transposed_linear, "cpu", (torch.bfloat16,), lambda dtype, rows: rows < MANY and cpu_gemm.SUPPORTED
)
FORMS = SKINNY_GEMM, TRANSPOSED, CPU_GEMM
PLAIN = aten.linear.default
"""The op of a captured linear layer. A layer that no form serves keeps it."""
LINEARS = {PLAIN, PRODUCT, TO_STREAM, TO_HEADS} | {form.op for form in FORMS}
"""Ops of linear layers. A node's arguments are x, weight and bias as of ``F.linear``; all others stand in kwargs."""
QUANTISED = torch.ops.spec_compile.quantised_linear.default
"""The op of a captured quantised linear layer."""
PRODUCTS = LINEARS | {aten.addmm.default, QUANTISED, cpu_products.CPU_PRODUCTS}
"""Ops of matrix products with a weight."""


def choose(weight: Tensor, few_rows: bool) -> LinearForm | None:
    """The form that serves a weight [O, I], in products of few rows or of any number; None: `PLAIN` does."""
    for form in FORMS:
        fits = weight.device.type == form.device and weight.dtype in form.dtypes
        if fits and form.supports(weight.dtype, 1 if few_rows else MANY):
            return form
    return None


def _has_skinny_gemm(device: torch.device, dtype: torch.dtype) -> bool:
    return dtype in HALF and skinny_gemm.why_not_on(device) is None


def why_not_packed(layout: quantised.WeightLayout, parts: list[Tensor], dtype: torch.dtype) -> str | None:
    """Why no kernel multiplies few rows of a dtype by the parts of a layout; None if one does."""
    device = parts[0].device
    if _has_skinny_gemm(device, dtype):
        return skinny_gemm.why_not(parts[0], layout.kind, dtype)
    return cpu_gemm.why_not(layout, parts, dtype) if device.type == "cpu" else "its GPU has no kernel for this dtype"


def _readable(parts: list[Tensor], dtype: torch.dtype, repack: Callable[[bool], tuple | None]) -> tuple | None:
    """The layout and the parts of ``repack(on_cpu)``, if a kernel reads them."""
    device = parts[0].device
    on_cpu = not _has_skinny_gemm(device, dtype)
    if on_cpu and (device.type != "cpu" or cpu_gemm.why_not_on(dtype) is not None):
        return None
    form = repack(on_cpu)
    return None if form is None or why_not_packed(*form, dtype) is not None else form


def choose_packed(
    parts: list[Tensor], inputs: int, kind: str, dtype: torch.dtype
) -> tuple[Callable, str, list[Tensor]] | None:
    """The op, `PRODUCT` on a GPU and `QUANTISED` on a CPU, the kind and the parts by which a kernel multiplies few rows
    of a dtype in place of a quantised layer; None: it cannot."""
    layout = quantised.layout_of(kind)
    form = _readable(parts, dtype, lambda on_cpu: quantised.repacked(layout, parts, inputs, on_cpu))
    return form and (PRODUCT if _has_skinny_gemm(parts[0].device, dtype) else QUANTISED, form[0].kind, form[1])


def for_few_rows(packed: quantised.Packed, dtype: torch.dtype) -> quantised.Packed | None:
    """A quantised layer in the layout that a kernel for few rows reads, if it multiplies activations of a dtype; else
    None."""
    parts, layout = [*packed.parts.values()], packed.layout

    def repack(on_cpu: bool) -> tuple | None:
        if layout.packing and not on_cpu:
            return layout, parts
        return quantised.for_kernel(layout, parts, packed.inputs, on_cpu)

    form = _readable(parts, dtype, repack)
    return form and packed._replace(layout=form[0], parts=dict(zip(quantised.PARTS, form[1])))


def hold_packed(module: nn.Module, packed: quantised.Packed, dtype: torch.dtype) -> str | None:
    """Let a quantised layer hold its weights only in the layout that a kernel for few rows reads, if it multiplies
    activations of a dtype and its layout differs from the layer's. Returns why no kernel does; None if one does."""
    form = for_few_rows(packed, dtype)
    if form is None:
        return why_not_packed(packed.layout, [*packed.parts.values()], dtype)
    if form.layout != packed.layout:
        quantised.hold_in_one_layout(module, packed, (form.layout, [*form.parts.values()]))
    return None


def few_rows_linear(x: Tensor, weight: Tensor) -> Tensor:
    """``F.linear(x, weight)`` of few rows: x [..., I], weight [O, I] -> [..., O]."""
    form = choose(weight, few_rows=True)
    return torch.nn.functional.linear(x, weight) if form is None else form.op(x, weight, None)


def ends_plainly(node: fx.Node) -> bool:
    """True if a node is `PRODUCT` without a gate, so that another end may join it."""
    return node.target == PRODUCT and not node.kwargs.get("gated")


def weight_of(node: fx.Node) -> fx.Node | None:
    """The parameter [O, I] by which a linear layer multiplies, if it is one."""
    weight = node.args[1]
    return weight if weight.op == "get_attr" else None


def bias_of(node: fx.Node) -> fx.Node | None:
    """The bias of a linear layer."""
    return node.args[2] if len(node.args) > 2 else None


def linear_layers(graph: ModelGraph) -> list[fx.Node]:
    """The captured linear layers, ``linear(x, weight, bias)`` of a parameter, which have no other form yet."""
    return [node for node in calls(graph.gm, PLAIN) if node.args[1].op == "get_attr"]


def quantised_layers(graph: ModelGraph) -> list[fx.Node]:
    """The captured quantised linear layers, ``quantised_linear(x, parts, bias, kind)``."""
    return calls(graph.gm, QUANTISED)


def operands_of(node: fx.Node) -> list[fx.Node]:
    """The weights and the bias of a captured linear layer, quantised or not."""
    if node.target != QUANTISED:
        return list(node.args[1:])
    call = arguments_of(node)
    return [*call["parts"], *([] if call["bias"] is None else [call["bias"]])]


def with_operands(node: fx.Node, operands: list[fx.Node]) -> tuple:
    """The arguments of a captured linear layer with others in place of its `operands_of`."""
    if node.target != QUANTISED:
        return (node.args[0], *operands)
    call = arguments_of(node)
    bias = None if call["bias"] is None else operands[-1]
    return call["x"], operands[: len(call["parts"])], bias, call["kind"]


def head_products(graph: ModelGraph) -> list[fx.Node]:
    """The captured linear layers, quantised or not, that multiply by the output embedding."""
    head = attribute(graph.gm, graph.head_weight)
    layers = [*linear_layers(graph), *quantised_layers(graph)]
    weights = [(node, attribute(graph.gm, operands_of(node)[0].target)) for node in layers]
    # A DTensor has no address.
    return [node for node, weight in weights if weight is head or (weight.data_ptr() == head.data_ptr() != 0)]
