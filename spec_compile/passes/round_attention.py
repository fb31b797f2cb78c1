"""round_attention: attention before a product that rounds its input to FP8 by blocks ends with the codes."""

import operator

import torch
from torch import fx

from ..graph import ModelGraph, calls
from ..kernels import linear
from ..kernels.linear.quantised import layout_of
from .apply import comes_after
from .nodes import replace_node, shape_of

aten, ops = torch.ops.aten, torch.ops.spec_compile
VIEWS = {aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.clone.default, aten.contiguous.default}


@comes_after("use_tree_attention", "fuse_residuals")
def round_attention(graph: ModelGraph, settings) -> str:
    """Where only a `product_to_stream` of FP8 blocks reads tree attention, whose heads are whole blocks of columns, put
    `rounded_attention`, so that no kernel of its own rounds the input of the product."""
    joined, fits = 0, graph.backend == "triton" and graph.device.type == "cuda"
    for product in calls(graph.gm, linear.TO_STREAM) if fits else []:
        kind = product.kwargs.get("kind")
        packing = layout_of(kind).packing if kind else None
        source = _attention_of(product)
        if source is not None and packing and packing[0] == "fp8_blocks" and not shape_of(source)[-1] % packing[1]:
            _join(graph.gm.graph, source, product)
            joined += 1
    return f"{joined} attention calls end with the codes of the product after them"


def _attention_of(product: fx.Node) -> fx.Node | None:
    """The tree attention [B, N, H, D] of which a product's x [B, N, H * D] is a view, if nothing else reads it."""
    x = product.args[0]
    while x.target in VIEWS and len(x.users) == 1:
        x = x.args[0]
    return x if x.target == ops.tree_attention.default and len(x.users) == 1 else None


def _join(graph: fx.Graph, source: fx.Node, product: fx.Node) -> None:
    with graph.inserting_before(source):
        rounded = graph.call_function(ops.rounded_attention.default, kwargs=dict(source.kwargs))
        codes, units = (graph.call_function(operator.getitem, (rounded, index)) for index in range(2))
    rounded.meta = {key: value for key, value in source.meta.items() if key != "val"}
    replace_node(source, codes)
    product.update_kwarg("units", units)
