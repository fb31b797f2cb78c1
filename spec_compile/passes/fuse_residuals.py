"""fuse_residuals: on a GPU the residual stream and the norm behind it join the products that end and begin there."""

import operator

import torch
from torch import fx

from ..graph import ModelGraph, calls
from ..kernels import linear
from .apply import comes_after

ops = torch.ops.spec_compile


@comes_after("fuse_swiglu", "fuse_norms")
def fuse_residuals(graph: ModelGraph, settings) -> str:
    """Where a product is added to the residual stream and normed for the next one, put `small_m_add` and
    `normed_matmul` or `normed_swiglu`, so that the norm needs no kernel.

    Only in bfloat16, because the first half of a norm may leave the range of float16. What else reads the normed
    stream, as a hidden state that a draft taps does, gets a norm for itself.
    """
    joined, fits = 0, graph.dtype == torch.bfloat16 and graph.device.type == "cuda"
    for both in calls(graph.gm, ops.add_rms_norm.default) if fits else []:
        product, residual = _product_and_residual(both)
        parts = {user.args[1]: user for user in both.users}
        readers = [user for user in parts[1].users if _begins(user, parts[1])] if 1 in parts else []
        if product is not None and readers:
            _join(graph.gm.graph, both, product, residual, parts, readers)
            joined += 1
    return f"{joined} additions and norms joined to the products around them"


def _product_and_residual(both: fx.Node) -> tuple[fx.Node | None, fx.Node | None]:
    """The summand that is a product for this sum alone, and the other one."""
    for product, residual in (both.args[:2], both.args[1::-1]):
        if product.target == linear.SMALL_M.op and len(product.users) == 1 and product is not residual:
            return product, residual
    return None, None


def _begins(user: fx.Node, normed: fx.Node) -> bool:
    """Whether a node is a product of the normed stream."""
    return user.target in (linear.SMALL_M.op, linear.SMALL_M.swiglu) and user.args[0] is normed


def _join(graph: fx.Graph, both: fx.Node, product: fx.Node, residual: fx.Node, parts: dict, readers: list) -> None:
    _, _, weight, eps, offset = both.args
    with graph.inserting_before(both):
        arguments = *product.args[:2], linear.bias_of(product), residual, weight, offset or 0.0
        ended = graph.call_function(ops.small_m_add.default, arguments)
        ended.meta = {key: value for key, value in product.meta.items() if key != "val"}
        stream, scaled, squares = (graph.call_function(operator.getitem, (ended, index)) for index in range(3))
    stream.meta = dict(product.meta)
    for reader in readers:
        with graph.inserting_before(reader):
            if reader.target == linear.SMALL_M.op:
                arguments = scaled, squares, reader.args[1], linear.bias_of(reader), eps
                new = graph.call_function(ops.normed_matmul.default, arguments)
            else:
                new = graph.call_function(ops.normed_swiglu.default, (scaled, squares, reader.args[1], eps))
        new.meta = dict(reader.meta)
        reader.replace_all_uses_with(new)
        graph.erase_node(reader)
    if parts[1].users:
        with graph.inserting_before(parts[1]):
            apart = graph.call_function(ops.rms_norm.default, (stream, weight, eps, offset))
        apart.meta = dict(parts[1].meta)
        parts[1].replace_all_uses_with(apart)
    if 0 in parts:
        parts[0].replace_all_uses_with(stream)
    for node in (*parts.values(), both, product):
        graph.erase_node(node)
