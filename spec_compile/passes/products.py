"""Products of a captured graph with its parameters."""

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, fx

from .. import quantised
from ..kernels import experts
from ..kernels.linear import QUANTISED
from ..kernels.ops import arguments_of
from ..quantised.codes import Place, WeightLayout

aten = torch.ops.aten


class PlainWeight:
    """The layout of a linear layer's weight [O, I] that is not quantised, as `WeightLayout`."""

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        return [Place((0, 1), (1, 1))]

    def of_inputs(self, size: int) -> "PlainWeight":
        return self


Layout: TypeAlias = PlainWeight | WeightLayout | experts.ExpertFormat
"""`PlainWeight`, or a `WeightLayout` or `ExpertFormat` of quantised weights: all say where parts can be cut."""


class WeightProduct(NamedTuple):
    """A node that multiplies by parameters.

    parts: the parameters that are its weights; one, unless they are quantised.
    layout: of the parts.
    sizes: its outputs and inputs.
    blocks: equal stretches of the outputs, such as gate and up, from each of which a column of the result is made.
    """

    node: fx.Node
    parts: list[fx.Node]
    bias: fx.Node | None
    layout: Layout
    sizes: tuple[int, int]
    blocks: int = 1


def product_of(node: fx.Node) -> WeightProduct | None:
    """The product with parameters that a node is: a linear layer, quantised or not, or one of the two of experts."""
    if node.target is aten.linear.default and node.args[1].op == "get_attr":
        bias, sizes = node.args[2] if len(node.args) > 2 else None, tuple(node.args[1].meta["val"].shape)
        return WeightProduct(node, [node.args[1]], bias, PlainWeight(), sizes)
    if node.target is QUANTISED:
        x, parts, bias, kind = arguments_of(node).values()
        sizes = node.meta["val"].shape[-1], x.meta["val"].shape[-1]
        return WeightProduct(node, parts, bias, quantised.layout_of(kind), sizes)
    if node.target in (experts.UP, experts.DOWN):
        kind, parts = experts.format_of(node.args[-1]), experts.parts_of(node)
        blocks = 1 if kind.gate == "none" or kind.interleaved else 2
        sizes = kind.sizes([part.meta["val"] for part in parts])
        weights = parts[:-1] if kind.biased else parts
        return WeightProduct(node, weights, kind.bias(parts), kind, sizes, blocks)
    return None


def rounds_rows(product: WeightProduct) -> torch.dtype | None:
    """To what a product rounds its inputs, if it does so with a scale for each row that depends on all of them."""
    layout, vals = product.layout, [part.meta["val"] for part in product.parts]
    if not isinstance(layout, WeightLayout) or layout.constant_scale(vals) is not None:
        return None
    return layout.row_dtype(vals[0])


def set_weights(product: WeightProduct, layout: Layout, parts: list[fx.Node]) -> None:
    """Let the node of a product multiply by other parts, in another layout."""
    node = product.node
    if node.target is QUANTISED:
        node.args = (node.args[0], parts, product.bias, layout.kind)
    elif node.target in (experts.UP, experts.DOWN):
        bias = [] if product.bias is None else [product.bias]
        node.args = (*node.args[:-2], [*parts, *bias], layout.text)
    else:
        node.update_arg(1, parts[0])


def output_sizes(products: list[fx.Node]) -> list[int]:
    return [node.meta["val"].shape[-1] for node in products]


def put_product(graph: fx.Graph, group: list[fx.Node], op: Callable, arguments: tuple) -> None:
    """Put one product, ``op(*arguments)``, and a split of its outputs in place of a group of products."""
    first = group[0]
    with graph.inserting_before(first):
        product = graph.call_function(op, arguments)
        product.meta = {key: first.meta[key] for key in ("nn_module_stack",) if key in first.meta}
        split = graph.call_function(aten.split_with_sizes.default, (product, output_sizes(group), -1))
    for place, node in enumerate(group):
        with graph.inserting_before(node):
            part = graph.call_function(operator.getitem, (split, place))
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.erase_node(node)
