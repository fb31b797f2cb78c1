"""fuse_rotary: in 16 bits the rotation of queries and keys by their positions joins tree attention."""

import torch
from torch import fx

from ..graph import ModelGraph
from ..kernels import HALF, attention
from .apply import comes_after
from .nodes import calls_op

aten = torch.ops.aten


@comes_after("use_tree_attention")
def fuse_rotary(graph: ModelGraph, settings) -> str:
    """Hand q and k to a backend that rotates as they were before their rotation, with its cos and sin.

    Only in a graph of 16 bits, and where all of q and of k is rotated, by halves as in Llama.
    """
    joined = 0
    for node in taking("cos", graph):
        turned = [_rotation(node.kwargs[name]) for name in ("q", "k")]
        if None not in turned and turned[0][1:] == turned[1][1:]:
            (q, cos, sin), (k, *_) = turned
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
    and all are of one dtype."""
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
    x_value, *values = (part.meta["val"] for part in (x, cos.args[0], sin.args[0]))
    batch, _, steps, size = x_value.shape
    if any(value.shape != (batch, steps, size) or value.dtype != x_value.dtype for value in values):
        return None
    return x, cos.args[0], sin.args[0]


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
