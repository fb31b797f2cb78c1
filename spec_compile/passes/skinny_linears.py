"""skinny_linears: on a CPU, products of very few rows take the form that reads the weights fastest."""

import torch

from ..graph import ModelGraph, attribute, calls
from ..kernels import ops


def skinny_linears(graph: ModelGraph, settings) -> str:
    """Replace ``aten.linear`` by `ops.skinny_linear` where the weights are float32 on a CPU."""
    skinny = 0
    for node in calls(graph.gm, torch.ops.aten.linear.default):
        if node.args[1].op != "get_attr":
            continue
        weight = attribute(graph.gm, node.args[1].target)
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            node.target = ops.skinny_linear
            skinny += 1
    return f"{skinny} linear layers multiply transposed when they have at most {ops.SKINNY_ROWS} rows"
