"""fuse_norms: on a GPU an RMSNorm, with the addition before it, becomes one small kernel."""

import operator
from typing import NamedTuple

import torch
from torch import fx

from ..graph import ModelGraph, attribute, calls
from ..kernels.recurrence import advance_or_look
from .apply import comes_after, takes_kernels
from .fuse_rotary import taking
from .products import calls_op, swaps_heads

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
    if takes_kernels(graph, settings):
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
    if _is_cast(then, graph.dtype):
        out = only_user(then)
        weight, offset = _other(out, then), None
    else:
        out = only_user(then)
        weight, offset = _shifted(_other(then, scaled))
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


def _shifted(factor) -> tuple[fx.Node | None, float]:
    """Weight and offset of a factor ``weight.float() + offset``."""
    weight, offset = factor, 0.0
    if calls_op(factor, aten.add.Tensor) and isinstance(factor.args[1], float):
        weight, offset = factor.args
    return (weight.args[0] if _is_cast(weight, torch.float32) else weight), offset


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
            total.meta = dict(x.meta)
            x.replace_all_uses_with(total)
        else:
            normed = new(ops.rms_norm.default, (x, weight, eps, offset))
    normed.meta = dict(out.meta)
    out.replace_all_uses_with(normed)
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


# fuse_qk_norms: on a GPU the RMSNorm of every query and key head joins tree attention, as its rotation did before.


@comes_after("fuse_rotary")
def fuse_qk_norms(graph: ModelGraph, settings) -> str:
    """Hand q and k that tree attention rotates to it as they were before their norms, with the norms' weights."""
    joined = 0
    norms = {norm.out: norm for root in calls(graph.gm, aten.rsqrt.default) if (norm := match_norm(graph, root))}
    for node in taking("q_norm", graph) if norms else ():
        q, k = (_norm_of(node.kwargs[name], norms) for name in ("q", "k"))
        if "cos" in node.kwargs and q and k and (q.eps, q.offset) == (k.eps, k.offset):
            edits = {"eps": q.eps, "offset": q.offset}
            with graph.gm.graph.inserting_before(node):
                for name, norm in (("q", q), ("k", k)):
                    edits[name] = _before(node.kwargs[name], norm)
                    edits[f"{name}_norm"] = graph.gm.graph.get_attr(norm.weight.target)
            node.kwargs = {**node.kwargs, **edits}
            joined += 1
    return f"{joined} layers norm queries and keys where they attend"


def _norm_of(x: fx.Node, norms: dict[fx.Node, Norm]) -> Norm | None:
    """The norm over the last dimension that x [B, H, T, D] comes out of, maybe before heads and tokens were swapped."""
    return norms.get(x.args[0] if swaps_heads(x) else x)


def _before(x: fx.Node, norm: Norm) -> fx.Node:
    """x as it would be without the norm."""
    if not swaps_heads(x):
        return norm.x
    swap = x.graph.call_function(x.target, (norm.x, *x.args[1:]))
    swap.meta = dict(x.meta)
    return swap


# fuse_gated_norms: on a GPU the RMSNorm of a recurrence's output, with its gate, becomes one small kernel.


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


# fuse_l2_norms: on a GPU the L2 norms of the delta rule's queries and keys become one small kernel.


@comes_after("use_states")
def fuse_l2_norms(graph: ModelGraph, settings) -> str:
    """Replace the norms of q and k that a recurrence of kind "delta" reads by `spec_compile::l2_norms`.

    Only in a graph of 16 bits.
    """
    fused = 0
    if takes_kernels(graph, settings):
        for node in calls(graph.gm, advance_or_look):
            if node.kwargs["kind"] == "delta":
                fused += _fuse_l2_norm(graph.gm.graph, *node.kwargs["inputs"][:2])
    return f"{fused} pairs of L2 norms fused"


def _fuse_l2_norm(graph: fx.Graph, q: fx.Node, k: fx.Node) -> bool:
    """Put the kernel's op in the place of both norms. Returns True if they are norms that it computes."""
    scale, normed = _scaled(q)
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
        part.meta = dict(old.meta)
        old.replace_all_uses_with(part)
    return True


def _scaled(q: fx.Node) -> tuple[float, fx.Node]:
    """The number by which q is multiplied, and what it multiplies."""
    if q.target == aten.mul.Tensor and isinstance(q.args[1], float):
        return q.args[1], q.args[0]
    return 1.0, q


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
