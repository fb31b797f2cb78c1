"""On a GPU the norms around a recurrence become small kernels.

`fuse_gated_norms` takes the RMSNorm of its output with its gate, `fuse_l2_norms` the L2 norms of the delta rule's
queries and keys.
"""

import operator
from typing import NamedTuple

import torch
from torch import fx

from ..graph import ModelGraph, attribute, calls
from ..kernels.recurrence import advance_or_look
from .apply import comes_after, replace_node, supports_kernels
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
    if supports_kernels(graph, settings):
        for root in calls(graph.gm, aten.rsqrt.default):
            norm = match_gated_norm(graph, root)
            if norm is not None:
                with graph.gm.graph.inserting_before(norm.out):
                    weight = graph.gm.graph.get_attr(norm.weight.target)
                    arguments = norm._replace(weight=weight)[:-1]
                    new = graph.gm.graph.call_function(torch.ops.spec_compile.gated_rms_norm.default, arguments)
                replace_node(norm.out, new)
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
    if shapes[2] not in shapes[:2] or attribute(graph.gm, weight.target).shape != shapes[2][-1:]:
        return None
    return GatedNorm(x, _origin(gate, size), weight, eps, size, activation, gate_first, round_first, node)


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


# L2 norms of queries and keys.


@comes_after("use_states")
def fuse_l2_norms(graph: ModelGraph, settings) -> str:
    """Replace the norms of q and k that a recurrence of kind "delta" reads by `spec_compile::l2_norms`.

    Only in a graph of 16 bits.
    """
    fused = 0
    if supports_kernels(graph, settings):
        for node in calls(graph.gm, advance_or_look):
            if node.kwargs["kind"] == "delta":
                fused += _fuse(graph.gm.graph, *node.kwargs["inputs"][:2])
    return f"{fused} pairs of L2 norms fused"


def _fuse(graph: fx.Graph, q: fx.Node, k: fx.Node) -> bool:
    """Put the kernel's op in the place of both norms. Returns True if they are norms that it computes."""
    is_scaled = q.target == aten.mul.Tensor and isinstance(q.args[1], float)
    normed, scale = q.args if is_scaled else (q, 1.0)
    norms = [_match(each) for each in (normed, k)]
    if None in norms or norms[0][1] != norms[1][1] or norms[0][0].meta["val"].shape != norms[1][0].meta["val"].shape:
        return False
    (before_q, eps), (before_k, _) = norms
    with graph.inserting_before(max(q, k)):
        both = graph.call_function(torch.ops.spec_compile.l2_norms.default, (before_q, before_k, eps, scale))
        parts = [graph.call_function(operator.getitem, (both, number)) for number in (0, 1)]
    both.meta = {key: value for key, value in q.meta.items() if key != "val"}
    both.meta["val"] = (q.meta["val"], k.meta["val"])
    for part, old in zip(parts, (q, k)):
        replace_node(old, part)
    return True


def _match(product: fx.Node) -> tuple[fx.Node, float] | None:
    """x and eps of ``x * rsqrt(sum(x * x) + eps)`` in float32; x as it is before its cast."""
    if product.target != aten.mul.Tensor or not all(isinstance(each, fx.Node) for each in product.args):
        return None
    wide, root = product.args
    shifted = root.args[0] if root.target == aten.rsqrt.default else None
    total, eps = shifted.args if shifted is not None and shifted.target == aten.add.Tensor else (None, None)
    if total is None or total.target != aten.sum.dim_IntList or total.args[1:] != ([-1], True):
        return None
    square = total.args[0]
    if square.target != aten.mul.Tensor or square.args != (wide, wide) or wide.meta["val"].dtype != torch.float32:
        return None
    return (wide.args[0] if wide.target in CASTS else wide), eps
