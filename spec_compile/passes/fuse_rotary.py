"""fuse_rotary: in 16 bits the rotation of queries and keys by their positions joins tree attention."""

import operator

import torch
from torch import fx

from ..graph import ModelGraph
from ..kernels import HALF, attention
from .apply import comes_after
from .products import calls_op

aten = torch.ops.aten


@comes_after("use_tree_attention")
def fuse_rotary(graph: ModelGraph, settings) -> str:
    """Hand q and k to a backend that rotates as they were before their rotation, with its cos and sin.

    Only in a graph of 16 bits, and where all of q and of k is rotated, by halves as in Llama or in gpt-oss.
    """
    joined, whole = 0, {}
    for node in taking("cos", graph):
        turned = [_rotation(node.kwargs[name]) for name in ("q", "k")]
        if None not in turned and turned[0][1:] == turned[1][1:]:
            (q, *angles), (k, *_) = turned
            cos, sin = (_repeated(graph.gm.graph, angle, q, whole) for angle in angles)
            node.kwargs = {**node.kwargs, "q": q, "k": k, "cos": cos, "sin": sin}
            joined += 1
    return f"{joined} layers rotate queries and keys where they attend"


def taking(argument: str, graph: ModelGraph) -> list[fx.Node]:
    """The attention calls of a graph of 16 bits, if its backend takes such an argument."""
    if graph.dtype not in HALF or not graph.backend:
        return []
    return attention.attention_calls(graph) if argument in attention.BACKENDS[graph.backend].takes else []


def _rotation(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """x [B, H, T, D], cos and sin [B, T, D] of ``x * cos[:, None] + cat([-x2, x1], -1) * sin[:, None]``, if it is that
    and all are of one dtype; or those of `_rotation_of_halves`."""
    if node.target == aten.cat.default:
        return _rotation_of_halves(node)
    if node.target != aten.add.Tensor or not all(calls_op(part, aten.mul.Tensor) for part in node.args):
        return None
    straight, turned = node.args
    (x, cos), (halves, sin) = straight.args, turned.args
    if not (
        calls_op(cos, aten.unsqueeze.default)
        and calls_op(sin, aten.unsqueeze.default)
        and calls_op(halves, aten.cat.default)
    ):
        return None
    if cos.args[1] != 1 or sin.args[1] != 1 or not _are_halves(x, halves):
        return None
    return _angles_of(x, cos, sin, 1)


def _angles_of(x: fx.Node, cos: fx.Node, sin: fx.Node, parts: int) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """x and what stands in cos and sin [B, 1, T, D / parts], if they have this shape and x's dtype."""
    x_value, *values = (part.meta["val"] for part in (x, cos.args[0], sin.args[0]))
    batch, _, steps, size = x_value.shape
    if any(value.shape != (batch, steps, size // parts) or value.dtype != x_value.dtype for value in values):
        return None
    return x, cos.args[0], sin.args[0]


def _rotation_of_halves(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """x [B, H, T, D], cos and sin [B, T, D / 2] of ``cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)``, if it is
    that, with a dimension of heads in cos and sin, and all are of one dtype."""
    parts, dim = (*node.args, 0)[:2]
    if dim not in (-1, 3) or len(parts) != 2:
        return None
    for part, target in zip(parts, (aten.sub.Tensor, aten.add.Tensor), strict=True):
        if not calls_op(part, target) or part.kwargs or not all(calls_op(each, aten.mul.Tensor) for each in part.args):
            return None
    (x1, cos), (x2, sin) = (product.args for product in parts[0].args)
    if [product.args for product in parts[1].args] != [(x2, cos), (x1, sin)]:  # guard: rotation-by-halves
        return None
    if not all(calls_op(angle, aten.unsqueeze.default) and angle.args[1] == 1 for angle in (cos, sin)):
        return None
    if not all(calls_op(half, operator.getitem) and half.args[1] == place for place, half in enumerate((x1, x2))):
        return None
    chunk = x1.args[0]
    if x2.args[0] is not chunk or not calls_op(chunk, aten.chunk.default) or chunk.args[1:] not in ((2, -1), (2, 3)):
        return None
    return _angles_of(chunk.args[0], cos, sin, 2)


def _repeated(graph: fx.Graph, angle: fx.Node, x: fx.Node, whole: dict[fx.Node, fx.Node]) -> fx.Node:
    """cos or sin of the whole heads x, [B, T, D]. whole: by those of half a head, which all layers share."""
    value = angle.meta["val"]
    if value.shape[2] == x.meta["val"].shape[3]:
        return angle
    if angle not in whole:
        with graph.inserting_after(angle):
            whole[angle] = graph.call_function(aten.cat.default, ([angle, angle], -1))
        whole[angle].meta = {**angle.meta, "val": torch.cat([value, value], -1)}
    return whole[angle]


def _are_halves(x: fx.Node, cat: fx.Node) -> bool:
    """True if `cat` is x with its halves swapped, the second, now first, negated."""
    parts, dim = (*cat.args, 0)[:2]
    half = x.meta["val"].shape[3] // 2
    if dim not in (-1, 3) or len(parts) != 2 or not calls_op(parts[0], aten.neg.default):
        return False
    ends = parts[0].args[0], parts[1]
    if not all(calls_op(end, aten.slice.Tensor) and end.args[0] is x and end.args[1] in (-1, 3) for end in ends):
        return False
    (_, _, begin, _), (_, _, start, stop) = (end.args for end in ends)
    return (begin, start, stop) == (half, 0, half) and ends[0].meta["val"].shape[3] == half
