"""Ops between the product of q, k and v and tree attention join one of the two.

`fuse_rotary` takes the rotation of queries and keys by their positions, `fuse_qk_norms` the RMSNorm of each head, and
`fuse_append` lets the merged product of q, k and v rotate them and append the block to the cache.
"""

import operator

import torch
from torch import fx

from ..graph import ModelGraph, calls
from ..kernels import HALF, attention, linear
from ..kernels.attention.base import ROTATION
from ..kernels.linear.product_ops import why_not_append
from .apply import VIEWS, calls_op, comes_after, swaps_heads
from .fuse_norms import Norm, match_norm

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
    and all are of one dtype; or the results of `_rotation_of_halves`."""
    if node.target == aten.cat.default:
        return _rotation_of_halves(node)
    if node.target != aten.add.Tensor or not all(calls_op(part, aten.mul.Tensor) for part in node.args):
        return None
    straight, turned = node.args
    (x, cos), (halves, sin) = straight.args, turned.args
    if not all(calls_op(angle, aten.unsqueeze.default) and angle.args[1] == 1 for angle in (cos, sin)):
        return None
    if not calls_op(halves, aten.cat.default) or not _are_halves(x, halves):
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
    """cos or sin of the whole heads x, [B, T, D]. whole: by the values of half a head, which all layers share."""
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


# Norms of heads, on a GPU.


@comes_after("fuse_rotary")
def fuse_qk_norms(graph: ModelGraph, settings) -> str:
    """Hand q and k that tree attention rotates to it as they were before their norms, with the norms' weights."""
    joined = 0
    norms = {norm.out: norm for root in calls(graph.gm, aten.rsqrt.default) if (norm := match_norm(graph, root))}
    for node in taking("q_norm", graph) if norms else ():
        # The norms that q and k [B, H, T, D] come out of, maybe before heads and tokens were swapped.
        q, k = (norms.get(x.args[0] if swaps_heads(x) else x) for x in (node.kwargs["q"], node.kwargs["k"]))
        if "cos" in node.kwargs and q and k and (q.eps, q.offset) == (k.eps, k.offset):
            edits = {"eps": q.eps, "offset": q.offset}
            with graph.gm.graph.inserting_before(node):
                for name, norm in (("q", q), ("k", k)):
                    edits[name] = _before(node.kwargs[name], norm)
                    edits[f"{name}_norm"] = graph.gm.graph.get_attr(norm.weight.target)
            node.kwargs = {**node.kwargs, **edits}
            joined += 1
    return f"{joined} layers norm queries and keys where they attend"


def _before(x: fx.Node, norm: Norm) -> fx.Node:
    """x as it would be without the norm."""
    if not swaps_heads(x):
        return norm.x
    swap = x.graph.call_function(x.target, (norm.x, *x.args[1:]))
    swap.meta = dict(x.meta)
    return swap


# The merged product of q, k and v, on a GPU.


@comes_after("merge_linears", "fuse_qk_norms", "fuse_residuals")
def fuse_append(graph: ModelGraph, settings) -> str:
    """Where an attention call rotates queries and keys, and these and the values are heads of one product that nothing
    else reads, put `product_to_heads`. The call then finds the block in the cache.

    Only in graphs that verify or prefill.
    """
    joined, reasons = 0, {}
    fits = settings.purpose != "draft" and graph.device.type == "cuda"
    for node in taking("cos", graph) if fits else []:
        product = _product_of(node)
        if product is not None:
            q, v = (node.kwargs[name].meta["val"] for name in ("q", "v"))
            reason = why_not_append(q.shape[3], v.shape[3], node.kwargs.get("q_norm") is not None)
            if node.kwargs.get("scales") is not None:
                reason = "scales of keys and values"
            if reason is None:
                _join(graph.gm.graph, node, product)
                joined += 1
            else:
                reasons[reason] = None
    apart = f"; apart because of {', '.join(reasons)}" if reasons else ""
    return f"{joined} layers append to the cache where the product of queries, keys and values ends{apart}"


def _product_of(node: fx.Node) -> fx.Node | None:
    """The product whose outputs are the heads of q, k and v of an attention call that rotates, in this order, and
    nothing else."""
    if "cos" not in node.kwargs:
        return None
    parts = [_part(node.kwargs[name]) for name in ("q", "k", "v")]
    splits = {part.args[0] for part in parts if part is not None}
    if None in parts or len(splits) != 1 or [part.args[1] for part in parts] != [0, 1, 2]:
        return None
    split = splits.pop()
    if split.target != aten.split_with_sizes.default or len(split.args[1]) != 3 or len(split.users) != 3:
        return None
    product = split.args[0]
    return product if linear.ends_plainly(product) and len(product.users) == 1 else None


def _part(x: fx.Node) -> fx.Node | None:
    """The part [B, N, H * D] of a split of which x [B, H, N, D] is the heads, if only x reads it."""
    if not swaps_heads(x):
        return None
    view = x.args[0]
    if view.target not in VIEWS or view.meta["val"].dim() != 4:
        return None
    part = view.args[0]
    alone = all(len(each.users) == 1 for each in (x, view, part))
    return part if alone and part.target is operator.getitem else None


def _join(graph: fx.Graph, node: fx.Node, product: fx.Node) -> None:
    call = node.kwargs
    names = "cos", "sin", "q_norm", "k_norm", "key_cache", "value_cache", "lengths", "table"
    end = {name: call.get(name) for name in names}
    end |= {"head_eps": call.get("eps", 0.0), "head_offset": call.get("offset")}
    with graph.inserting_before(node):
        operands = *product.args[:2], linear.bias_of(product)
        heads = graph.call_function(linear.TO_HEADS, operands, {**product.kwargs, **end})
        queries = graph.call_function(aten.transpose.int, (heads, 1, 2))
    heads.meta = {**product.meta, "val": call["q"].args[0].meta["val"]}
    queries.meta = dict(call["q"].meta)
    rest = {name: value for name, value in call.items() if name not in ROTATION or name == "tiles"}
    node.kwargs = {**rest, "q": queries, "k": None, "v": None}
