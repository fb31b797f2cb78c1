"""fuse_append: on a GPU the merged product of q, k and v rotates them, and appends the block to the cache."""

import operator

import torch
from torch import fx

from ..graph import ModelGraph
from ..kernels import linear
from ..kernels.attention.call import ROTATION
from ..kernels.linear.product_ops import lack_of_append
from .apply import comes_after
from .fuse_rotary import taking
from .products import VIEWS, swaps_heads

aten = torch.ops.aten


@comes_after("merge_linears", "fuse_qk_norms", "fuse_residuals")
def fuse_append(graph: ModelGraph, settings) -> str:
    """Where an attention call rotates queries and keys, and these and the values are heads of one product that nothing
    else reads, put `product_to_heads`. The call then finds the block in the cache.

    Only in graphs that verify or prefill.
    """
    joined, lacks = 0, {}
    fits = settings.purpose != "draft" and graph.device.type == "cuda"
    for node in taking("cos", graph) if fits else []:
        product = _product_of(node)
        if product is not None:
            q, v = (node.kwargs[name].meta["val"] for name in ("q", "v"))
            lack = lack_of_append(q.shape[3], v.shape[3], node.kwargs.get("q_norm") is not None)
            if node.kwargs.get("scales") is not None:
                lack = "scales of keys and values"
            if lack is None:
                _join(graph.gm.graph, node, product)
                joined += 1
            else:
                lacks[lack] = None
    apart = f"; apart because of {', '.join(lacks)}" if lacks else ""
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
    end = {name: call.get(name) for name in ("cos", "sin", "q_norm", "k_norm", "key_cache", "value_cache", "lengths")}
    end |= {"head_eps": call.get("eps", 0.0), "head_offset": call.get("offset")}
    with graph.inserting_before(node):
        operands = *product.args[:2], linear.bias_of(product)
        heads = graph.call_function(linear.TO_HEADS, operands, {**product.kwargs, **end})
        queries = graph.call_function(aten.transpose.int, (heads, 1, 2))
    heads.meta = {**product.meta, "val": call["q"].args[0].meta["val"]}
    queries.meta = dict(call["q"].meta)
    rest = {name: value for name, value in call.items() if name not in ROTATION or name == "tiles"}
    node.kwargs = {**rest, "q": queries, "k": None, "v": None}
