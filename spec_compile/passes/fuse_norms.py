"""On a GPU an RMSNorm with the addition before it becomes one small kernel (`fuse_norms`).

`fuse_residuals` then joins the residual stream and the norm after it to the products that end and begin there.
"""

import operator
from typing import NamedTuple

import torch
from torch import fx

from ..graph import ModelGraph, attribute, calls
from ..kernels import experts, linear
from ..kernels.ops import arguments_of
from .apply import VIEWS, calls_op, comes_after, replace_node, supports_kernels

aten = torch.ops.aten
CASTS = {aten.to.dtype, aten.type_as.default}


class Norm(NamedTuple):
    """An RMSNorm of the graph, as `kernels.rms_norm` takes it; out: its last node."""

    x: fx.Node
    weight: fx.Node
    eps: float
    offset: float | None
    out: fx.Node


@comes_after("fuse_qk_norms")
def fuse_norms(graph: ModelGraph, settings) -> str:
    """Replace each RMSNorm of x [B, T, ..., C] by `kernels.rms_norm`, with the sum that x is by `kernels.add_rms_norm`.

    Only in a graph of 16 bits.
    """
    fused = sums = 0
    if supports_kernels(graph, settings):
        for node in calls(graph.gm, aten.rsqrt.default):
            norm = match_norm(graph, node)
            if norm is not None and norm.x.meta["val"].dim() >= 3:
                fused += 1
                sums += _fuse(graph, norm)
    return f"{fused} norms fused, {sums} of them with the addition before"


def match_norm(graph: ModelGraph, root: fx.Node) -> Norm | None:
    """The RMSNorm over the last dimension whose reciprocal root mean square this is, if it is one in 16 bits."""
    norm = root_mean_square(root)
    if norm is None or not _is_cast(norm[0], torch.float32):
        return None
    wide, eps, scaled = norm
    x, then = wide.args[0], only_user(scaled)
    out = only_user(then)
    if _is_cast(then, graph.dtype):
        weight, offset = _other(out, then), None
    else:  # a factor weight.float() + offset
        weight, offset = _other(then, scaled), 0.0
        if calls_op(weight, aten.add.Tensor) and isinstance(weight.args[1], float):
            weight, offset = weight.args
        weight = weight.args[0] if _is_cast(weight, torch.float32) else weight
    fits = _is_rows(graph, x) and _is_rows(graph, out) and _is_weight(graph, weight, x.meta["val"].shape[-1])
    return Norm(x, weight, eps, offset, out) if fits else None


def root_mean_square(root: fx.Node) -> tuple[fx.Node, float, fx.Node] | None:
    """(x, eps, quotient) of x over its root mean square, of which `root` is the reciprocal; None if it is not that."""
    shifted = root.args[0]
    mean, eps = shifted.args if calls_op(shifted, aten.add.Tensor) else (None, None)
    square = mean.args[0] if calls_op(mean, aten.mean.dim) and mean.args[1:] == ([-1], True) else None
    if not isinstance(eps, float) or not calls_op(square, aten.pow.Tensor_Scalar) or square.args[1] != 2:
        return None
    wide, scaled = square.args[0], only_user(root)
    return (wide, eps, scaled) if calls_op(scaled, aten.mul.Tensor) and wide in scaled.args else None


def _fuse(graph: ModelGraph, norm: Norm) -> bool:
    """Put the kernel's op in the norm's place. Returns True if it also adds."""
    x, weight, eps, offset, out = norm
    new, ops = graph.gm.graph.call_function, torch.ops.spec_compile
    adds = adds_rows(graph, x)
    with graph.gm.graph.inserting_before(x if adds else out):
        if adds:
            weight = graph.gm.graph.get_attr(weight.target)  # the norm's own node may come later
            both = new(ops.add_rms_norm.default, (*x.args, weight, eps, offset))
            total, normed = (new(operator.getitem, (both, place)) for place in (0, 1))
            replace_node(x, total)
        else:
            normed = new(ops.rms_norm.default, (x, weight, eps, offset))
    replace_node(out, normed)
    return adds


def adds_rows(graph: ModelGraph, node: fx.Node) -> bool:
    """True if a node is the sum of two tensors of the graph's dtype that are as large as itself."""
    if not calls_op(node, aten.add.Tensor) or node.kwargs:
        return False
    return all(_is_rows(graph, part, node.meta["val"]) for part in node.args)


def only_user(node) -> fx.Node | None:
    """The one user of a node."""
    return next(iter(node.users)) if isinstance(node, fx.Node) and len(node.users) == 1 else None


def _other(product, factor: fx.Node):
    """By what a product multiplies `factor`."""
    if not calls_op(product, aten.mul.Tensor):
        return None
    a, b = product.args
    return b if a is factor else a


def _is_cast(node, dtype: torch.dtype) -> bool:
    return isinstance(node, fx.Node) and node.target in CASTS and node.meta["val"].dtype == dtype


def _is_rows(graph: ModelGraph, node, like: torch.Tensor | None = None) -> bool:
    """A tensor of the graph's dtype, as large as `like`."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dtype != graph.dtype:
        return False
    return like is None or value.shape == like.shape


def _is_weight(graph: ModelGraph, node, size: int) -> bool:
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return False
    weight = attribute(graph.gm, node.target)
    return weight.shape == (size,) and weight.dtype == graph.dtype


# The residual stream.


ops = torch.ops.spec_compile


@comes_after("fuse_swiglu", "fuse_norms")
def fuse_residuals(graph: ModelGraph, settings) -> str:
    """Where a product is added to the residual stream and normed for the next one, put `product_to_stream`, or after
    experts `experts_down_to_stream`, and give the next `product` the sums of squares, so that the norm needs no kernel.

    Only in bfloat16, because the first half of a norm may leave the range of float16. Other readers of the normed
    stream, such as a draft that taps a hidden state, get a separate norm. If the ranks of tensor parallelism sum
    their products before the addition, `product_to_stream` does it.
    """
    joined, fits = 0, graph.dtype == torch.bfloat16 and graph.device.type == "cuda"
    for both in calls(graph.gm, ops.add_rms_norm.default) if fits else []:
        summand, residual = _product_and_residual(both)
        parts = {user.args[1]: user for user in both.users}
        readers = [user for user in parts[1].users if _begins(user, parts[1])] if 1 in parts else []
        if summand is not None and readers:
            _join(graph.gm.graph, both, summand, residual, parts, readers)
            joined += 1
    return f"{joined} additions and norms joined to the products around them"


def _product_and_residual(both: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The summand that is a product which only this sum reads, or the sum of ranks of one, and the other summand. The
    second product of experts may be viewed by batches."""
    for summand, residual in (both.args[:2], both.args[1::-1]):
        product = _product(summand)
        alone = len(product.users) == len(summand.users) == 1
        if (linear.ends_plainly(product) or _is_view_of_experts(summand)) and alone and summand is not residual:
            return summand, residual
    return None, None


def _product(summand: fx.Node) -> fx.Node:
    """The part of this rank, if ranks sum; the experts' product, if it is viewed."""
    is_apart = summand.target == ops.all_reduce.default or _is_view_of_experts(summand)
    return summand.args[0] if is_apart else summand


def _is_view_of_experts(summand: fx.Node) -> bool:
    """True if a summand is the second product of experts, viewed."""
    return summand.target in VIEWS and summand.args[0].target == experts.DOWN


def _begins(user: fx.Node, normed: fx.Node) -> bool:
    """True if a node is a product of the normed stream, and may be of the stream before it is divided."""
    kind = user.kwargs.get("kind")
    is_product = user.target == linear.PRODUCT and user.args[0] is normed
    return is_product and (not kind or linear.quantised.layout_of(kind).norms_after)


def _join(graph: fx.Graph, both: fx.Node, summand: fx.Node, residual: fx.Node, parts: dict, readers: list) -> None:
    norm, product = arguments_of(both), _product(summand)
    weight, eps, offset = norm["weight"], norm["eps"], norm["offset"]
    end = {"residual": residual, "norm_weight": weight, "offset": offset or 0.0}
    if summand.target == ops.all_reduce.default:
        end["group_name"] = arguments_of(summand)["group_name"]
    with graph.inserting_before(both):
        if product.target == experts.DOWN:
            op, operands = experts.TO_STREAM, product.args
        else:
            op, operands = linear.TO_STREAM, (*product.args[:2], linear.bias_of(product))
        ended = graph.call_function(op, operands, {**product.kwargs, **end})
        ended.meta = {key: value for key, value in product.meta.items() if key != "val"}
        stream, scaled, squares = (graph.call_function(operator.getitem, (ended, index)) for index in range(3))
    stream.meta = dict(summand.meta)
    for reader in readers:
        reader.args = scaled, *reader.args[1:]
        reader.kwargs = {**reader.kwargs, "squares": squares, "eps": eps}
    if parts[1].users:
        with graph.inserting_before(parts[1]):
            apart = graph.call_function(ops.rms_norm.default, (stream, weight, eps, offset))
        apart.meta = dict(parts[1].meta)
        parts[1].replace_all_uses_with(apart)
    if 0 in parts:
        parts[0].replace_all_uses_with(stream)
    for node in dict.fromkeys((*parts.values(), both, summand, product)):
        graph.erase_node(node)
