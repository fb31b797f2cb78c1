"""Facts that passes ask of any node, and the replacement of a node."""

import torch
from torch import fx

aten = torch.ops.aten
SAME = {"alias", "clone", "contiguous", "copy_", "detach", "dropout", "to", "_to_copy", "type_as"}
"""ATen ops that keep the shape."""
VIEWS = {aten.view.default, aten.reshape.default, aten.unflatten.int}
"""ATen ops that only give the shape, as of batches and nodes, or of heads."""


def name_of(node: fx.Node) -> str:
    """The name of the op that a node calls, without namespace and overload."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema is not None else getattr(node.target, "__name__", str(node.target))


def is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or name_of(node) in SAME


def shape_of(node: fx.Node) -> torch.Size:
    return node.meta["val"].shape


def calls_op(node, target) -> bool:
    """True if an argument is a node that calls an op."""
    return isinstance(node, fx.Node) and node.target == target


def swaps_heads(x: fx.Node) -> bool:
    """True if a node swaps heads and tokens, the dimensions 1 and 2 of 4."""
    return x.target == aten.transpose.int and {dim % 4 for dim in x.args[1:]} == {1, 2}


def replace_node(node: fx.Node, new: fx.Node) -> None:
    """Put a node, which describes the same value, in the place of another."""
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
