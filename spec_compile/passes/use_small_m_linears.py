"""use_small_m_linears: products of few rows take the form that reads the weights fastest."""

import torch

from ..graph import ModelGraph, attribute, calls
from ..kernels import ops

HALF = (torch.bfloat16, torch.float16)


def use_small_m_linears(graph: ModelGraph, settings) -> str:
    """Replace ``aten.linear`` by `ops.skinny_linear` where the weights are float32 on a CPU, and in a graph that
    verifies by `kernels.skinny_matmul` where they are of 16 bits on a GPU."""
    skinny = 0
    for node in calls(graph.gm, torch.ops.aten.linear.default):
        if node.args[1].op != "get_attr":
            continue
        weight = attribute(graph.gm, node.args[1].target)
        if weight.device.type == "cpu" and weight.dtype == torch.float32:
            node.target = ops.skinny_linear
            skinny += 1
        elif weight.device.type == "cuda" and weight.dtype in HALF and settings.logits != "none":
            bias = node.args[2] if len(node.args) > 2 else None
            node.args = (*node.args[:2], bias)
            node.target = torch.ops.spec_compile.skinny_matmul.default
            skinny += 1
    return f"{skinny} linear layers take the form for few rows"
