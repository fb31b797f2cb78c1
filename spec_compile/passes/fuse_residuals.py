"""fuse_residuals: on a GPU the residual stream and the norm after it join the products that end and begin there."""

import operator

import torch
from torch import fx

from ..graph import ModelGraph, calls
from ..kernels import experts, linear
from ..kernels.ops import arguments_of
from .apply import comes_after
from .products import VIEWS

ops = torch.ops.spec_compile


@comes_after("fuse_swiglu", "fuse_norms")
def fuse_residuals(graph: ModelGraph, settings) -> str:
    """Where a product is added to the residual stream and normed for the next one, put `product_to_stream`, or after
    experts `experts_down_to_stream`, and give the next `product` the sums of squares, so that the norm needs no kernel.

    Only in bfloat16, because the first half of a norm may leave the range of float16. Other readers of the normed
    stream, such as a draft that taps a hidden state, get a norm of their own. If the ranks of tensor parallelism sum
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
