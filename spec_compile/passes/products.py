"""Products of a captured graph with its parameters."""

import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import fx

from ..kernels import experts

aten = torch.ops.aten


class WeightProduct(NamedTuple):
    """A node that multiplies by a parameter.

    dims: the parameter's dimensions of inputs and of outputs.
    blocks: equal stretches of the outputs, such as gate and up, from each of which a column of the result is made.
    """

    node: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    dims: tuple[int, int]
    blocks: int = 1


def product_of(node: fx.Node) -> WeightProduct | None:
    """The product with a parameter that a node is: a linear layer, or one of the two of experts."""
    if node.target is aten.linear.default and node.args[1].op == "get_attr":
        return WeightProduct(node, node.args[1], node.args[2] if len(node.args) > 2 else None, (1, 0))
    if node.target in (experts.UP, experts.DOWN):
        kind, parts = experts.format_of(node.args[-1]), experts.parts_of(node)
        blocks = 1 if kind.gate == "none" or kind.interleaved else 2
        return WeightProduct(node, parts[0], kind.bias(parts), (1, 2) if kind.transposed else (2, 1), blocks)
    return None


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
