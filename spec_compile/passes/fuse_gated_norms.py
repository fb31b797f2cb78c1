"""fuse_gated_norms: on a GPU the RMSNorm of a recurrence's output, with its gate, becomes one small kernel."""

from typing import NamedTuple

import torch
from torch import fx

from ..graph import ModelGraph, attribute, calls
from .apply import takes_kernels
from .fuse_norms import CASTS, only_user, root_mean_square

aten = torch.ops.aten
GATES = {aten.silu.default: "silu", aten.sigmoid.default: "sigmoid"}


class GatedNorm(NamedTuple):
    """An RMSNorm with a gate, as `kernels.norms.gated_rms_norm` takes it; out: its last node."""

    x: fx.Node
    gate: fx.Node
    weight: fx.Node
    eps: float
    size: int
    activation: str
    gate_first: bool
    round_first: bool
    out: fx.Node


def fuse_gated_norms(graph: ModelGraph, settings) -> str:
    """Replace ``norm(x) * act(gate)`` and ``norm(x * act(gate))`` by `spec_compile::gated_rms_norm`.

    Only in a graph of 16 bits.
    """
    fused = 0
    if takes_kernels(graph, settings):
        for root in calls(graph.gm, aten.rsqrt.default):
            norm = match_gated_norm(graph, root)
            if norm is not None:
                with graph.gm.graph.inserting_before(norm.out):
                    weight = graph.gm.graph.get_attr(norm.weight.target)
                    arguments = norm._replace(weight=weight)[:-1]
                    new = graph.gm.graph.call_function(torch.ops.spec_compile.gated_rms_norm.default, arguments)
                new.meta = dict(norm.out.meta)
                norm.out.replace_all_uses_with(new)
                fused += 1
    return f"{fused} gated norms fused"


def match_gated_norm(graph: ModelGraph, root: fx.Node) -> GatedNorm | None:
    """The gated RMSNorm whose reciprocal root mean square this is, if it is one."""
    norm = root_mean_square(root)
    if norm is None:
        return None
    wide, eps, node = norm
    size = wide.meta["val"].shape[-1]
    x, gate, activation = _gated(_origin(wide))
    gate_first, weight, round_first = gate is not None, None, False
    while (node := only_user(node)) is not None:
        if node.target in CASTS and node.meta["val"].dtype == graph.dtype:
            if weight is not None:
                break
            round_first = True
        elif node.target == aten.mul.Tensor and weight is None:
            weight = _weight(graph, node, round_first)
            if weight is None:
                return None
        elif node.target == aten.mul.Tensor and gate is None:
            _, gate, activation = _gated(node)
        elif node.target != aten.reshape.default:
            return None
    if None in (node, weight, gate):
        return None
    if not gate_first:
        x = wide.args[0] if wide.target in CASTS else wide
    shapes = [each.meta["val"].shape for each in (x, _origin(x), node)]
    x = x if shapes[0] == shapes[2] else _origin(x)
    fits = shapes[2] in shapes[:2] and attribute(graph.gm, weight.target).shape == shapes[2][-1:]
    return (
        GatedNorm(x, _origin(gate, size), weight, eps, size, activation, gate_first, round_first, node)
        if fits
        else None
    )


def _gated(product: fx.Node) -> tuple[fx.Node, fx.Node | None, str]:
    """x, the gate and its activation, of a product of x and the activation of a gate in float32; gate None: no gate."""
    if product.target == aten.mul.Tensor:
        for x, gate in (product.args, product.args[::-1]):
            if isinstance(gate, fx.Node) and gate.target in GATES and gate.args[0].target in CASTS:
                return x, gate.args[0].args[0], GATES[gate.target]
    return product, None, ""


def _weight(graph: ModelGraph, product: fx.Node, is_rounded: bool) -> fx.Node | None:
    """The parameter of the graph's dtype that a product multiplies by, maybe reshaped or in float32."""
    for factor in product.args:
        while isinstance(factor, fx.Node) and factor.target in CASTS | {aten.reshape.default}:
            factor = factor.args[0]
        if isinstance(factor, fx.Node) and factor.op == "get_attr":
            dtypes = attribute(graph.gm, factor.target).dtype, product.meta["val"].dtype
            return factor if dtypes == (graph.dtype, graph.dtype if is_rounded else torch.float32) else None
    return None


def _origin(node: fx.Node, size: int = 1) -> fx.Node:
    """The node that a node is a reshape of, as long as its last dimension is a multiple of `size`."""
    while node.target == aten.reshape.default and node.args[0].meta["val"].shape[-1] % size == 0:
        node = node.args[0]
    return node
