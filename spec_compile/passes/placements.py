"""Placements of a graph's values on the ranks of tensor parallelism, derived from how the weights are cut."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ..kernels import experts
from ..kernels.ops import arguments_of
from ..parallel.slices import ONCE, Cut
from .apply import SAME, is_pointwise, name_of, shape_of
from .products import Share, WeightProduct, product_of

ATTENTION = torch.ops.spec_compile.attention.default
REDUCTIONS = {"amax", "amin", "any", "mean", "softmax", "_softmax", "sum"}
"""ATen ops over the dimensions of their second argument."""
LINEAR_OPS = (SAME - {"copy_"}) | {
    "expand", "index", "permute", "reshape", "slice", "squeeze", "sum", "transpose", "unsqueeze", "view",
}  # fmt: skip
"""ATen ops of one tensor that may as well be done before partial sums are added up."""
SHAPES = {"flatten", "reshape", "unflatten", "view"}
"""ATen ops that change only the shape."""

ALL = -1
"""Every size of a list."""
BY_EXPERTS = Cut(0, 0)
"""In place of the cut of a first product's outputs: each rank has all outputs of some experts."""


@dataclass(frozen=True)
class Placement:
    """Where a value lies that is not the same on all ranks.

    dim: the dimension that is cut, in `parts` of `blocks` stretches, see `Cut`; None: every rank has a partial sum.
    of_experts: instead, a rank has its experts' first products.
    weights: the nodes that multiply by the weights whose cut has this placement as a consequence.
    """

    dim: int | None
    parts: int
    blocks: int
    weights: frozenset[fx.Node]
    of_experts: bool = False


class MisfitError(Exception):
    """A value cannot be computed from parts. weights: the nodes whose weights have to stay whole."""

    def __init__(self, node: fx.Node, weights: frozenset[fx.Node]):
        super().__init__(f"{node.name} ({node.target})")
        self.weights = weights


@dataclass
class ShardPlan:
    """The changes in a graph so that every rank computes its parts.

    placements: where nodes lie that are not the same on all ranks.
    shares: how the weights of products are cut.
    cuts: how other parameters that a node reads are cut, by (node, parameter).
    sizes: smaller sizes in a node's list of sizes, by the index in it (or `ALL`).
    reduced: partial sums, and the users that need them added up.
    """

    placements: dict[fx.Node, Placement] = field(default_factory=dict)
    shares: dict[fx.Node, Share] = field(default_factory=dict)
    cuts: dict[tuple[fx.Node, fx.Node], Cut] = field(default_factory=dict)
    sizes: dict[fx.Node, dict[int, int]] = field(default_factory=dict)
    reduced: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)


def derive(graph: fx.Graph, columns: dict[fx.Node, Cut], size: int) -> ShardPlan:
    """The plan for a graph in which the products `columns` compute a part of their outputs.

    columns: node -> the cut of its output's last dimension. size: ranks. MisfitError if there is no such plan.
    """
    plan = ShardPlan()
    for node in graph.nodes:
        if node.op == "call_function":
            _place(plan, node, columns, size)
        elif node.op == "output":
            for source in node.all_input_nodes:
                _whole(plan, source, node)
    return plan


def _place(plan: ShardPlan, node: fx.Node, columns: dict[fx.Node, Cut], size: int) -> None:
    """Derive the placement of a node from its inputs' placements."""
    product = product_of(node)
    if product is not None:
        placement = _multiplied(plan, product, columns.get(node), size)
    elif any(_is_of_experts(plan, source) for source in node.all_input_nodes):
        placement = _of_experts(plan, node)
    else:
        placement = _of_partial_sums(plan, node)
        inputs = {source: plan.placements[source] for source in node.all_input_nodes if _is_cut(plan, source)}
        if inputs:
            weights = frozenset().union(*(each.weights for each in inputs.values()))
            try:
                placement = _cut(plan, node, inputs, size)
            except _NoRule:
                raise MisfitError(node, weights) from None
            placement = placement and replace(placement, weights=weights)
    if placement is not None:
        plan.placements[node] = placement


class _NoRule(Exception):
    """No rule says how a node treats its inputs' parts."""


def _is_cut(plan: ShardPlan, node: fx.Node) -> bool:
    return node in plan.placements and plan.placements[node].dim is not None


def _is_of_experts(plan: ShardPlan, node: fx.Node) -> bool:
    return node in plan.placements and plan.placements[node].of_experts


def _is_partial(plan: ShardPlan, node) -> bool:
    return node in plan.placements and plan.placements[node].dim is None and not _is_of_experts(plan, node)


def _whole(plan: ShardPlan, source: fx.Node, user: fx.Node) -> None:
    """A user needs a value that is the same on all ranks."""
    if _is_cut(plan, source) or _is_of_experts(plan, source):
        raise MisfitError(user, plan.placements[source].weights)
    if _is_partial(plan, source) and user not in plan.reduced.setdefault(source, []):
        plan.reduced[source].append(user)


def _multiplied(plan: ShardPlan, product: WeightProduct, cut: Cut | None, size: int) -> Placement | None:
    """A product of parts of its input is a partial sum; one by a part of the outputs is a part of them."""
    node, source = product.node, product.node.args[0]
    for other in node.all_input_nodes:
        if other is not source:
            _whole(plan, other, node)
    if _is_of_experts(plan, source) or cut is BY_EXPERTS:
        return _by_experts(plan, product, size)
    if _is_cut(plan, source):
        placement = plan.placements[source]
        fits = placement.dim == len(shape_of(source)) - 1 and placement.parts == size and placement.blocks == 1
        if not fits or cut is not None:
            raise MisfitError(node, placement.weights | {node})
        plan.shares[node] = Share(product, True, size)
        if product.bias is not None:
            plan.cuts[node, product.bias] = ONCE
        return Placement(None, size, 1, placement.weights | {node})
    _whole(plan, source, node)
    if cut is None:
        return None
    blocks = cut.blocks * product.blocks
    plan.shares[node] = Share(product, False, cut.parts, blocks)
    if product.bias is not None:
        plan.cuts[node, product.bias] = cut._replace(dim=len(shape_of(product.bias)) - 1, blocks=blocks)
    return Placement(len(shape_of(node)) - 1, cut.parts, cut.blocks, frozenset({node}))


def _by_experts(plan: ShardPlan, product: WeightProduct, size: int) -> Placement:
    """The products of a rank's own experts; the second ones are a partial sum."""
    node, source = product.node, product.node.args[0]
    before = plan.placements.get(source)
    if before is None or not before.of_experts:
        _whole(plan, source, node)
    plan.shares[node] = Share(product, False, size, by_experts=True)
    if product.bias is not None:
        plan.cuts[node, product.bias] = Cut(0, size)
    if node.target is experts.UP:
        return Placement(None, size, 1, frozenset({node}), of_experts=True)
    return Placement(None, size, 1, frozenset({node}) if before is None else before.weights | {node})


def _of_experts(plan: ShardPlan, node: fx.Node) -> Placement:
    """Elementwise ops between the products of experts, and changes of shape."""
    sources = [plan.placements[source] for source in node.all_input_nodes if source in plan.placements]
    weights = frozenset().union(*(each.weights for each in sources))
    if not all(each.of_experts for each in sources) or not (is_pointwise(node) or name_of(node) in SHAPES):
        raise MisfitError(node, weights)
    return replace(sources[0], weights=weights)


def _of_partial_sums(plan: ShardPlan, node: fx.Node) -> Placement | None:
    """A value that is linear in partial sums is a partial sum itself; anything else needs them added up.

    Partial sums that several nodes read are added up at once, because one of them may need that.
    """
    sources = [source for source in node.all_input_nodes if _is_partial(plan, source)]
    if not sources:
        return None
    first, name = plan.placements[sources[0]], name_of(node)
    tensors = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]
    is_linear = len(sources) == 1 and (
        (name in LINEAR_OPS and node.args[0] is sources[0])
        or (name == "mul" and not any(_is_cut(plan, each) for each in tensors))
        or (name == "div" and node.args[0] is sources[0])
    )
    is_sum = name == "add" and len(node.args) == 2 and not node.kwargs and set(node.args) == set(sources)
    if (is_linear or is_sum) and all(len(source.users) == 1 for source in sources):
        return replace(first, weights=frozenset().union(*(plan.placements[each].weights for each in sources)))
    for source in sources:
        _whole(plan, source, node)
    return None


def _cut(plan: ShardPlan, node: fx.Node, inputs: dict[fx.Node, Placement], size: int) -> Placement | None:
    """The placement of a node some of whose inputs are cut; _NoRule if it cannot be computed from their parts."""
    name, first = name_of(node), next(iter(inputs.values()))
    if node.target is ATTENTION:
        return _attended(plan, node, inputs, size)
    if node.target is operator.getitem:
        return first
    if is_pointwise(node) or name == "cat":
        return _aligned(plan, node, inputs)
    rule = RULES.get(name)
    if rule is None or list(inputs) != [node.args[0]]:
        raise _NoRule
    return rule(plan, node, first)


def _attended(plan: ShardPlan, node: fx.Node, inputs: dict[fx.Node, Placement], size: int) -> Placement:
    """Attention of a rank's heads. Sinks and slopes belong to its query heads; one key-value head is everyone's."""
    call = arguments_of(node)
    q, k, v = (call[name] for name in ("q", "k", "v"))
    wanted = {q: size} | dict.fromkeys((k, v), min(shape_of(k)[1], size))
    if {each: (placement.dim, placement.parts, placement.blocks) for each, placement in inputs.items()} != {
        each: (1, parts, 1) for each, parts in wanted.items() if parts > 1
    }:
        raise _NoRule
    for vector in filter(None, (call["sinks"], call["slopes"])):
        if vector.op != "get_attr":
            raise _NoRule
        plan.cuts[node, vector] = Cut(0, size)
    return replace(inputs[q], dim=2)


def _aligned(plan: ShardPlan, node: fx.Node, inputs: dict[fx.Node, Placement]) -> Placement:
    """Elementwise ops, whose inputs are broadcast, and cat: all inputs that are cut are cut alike."""
    rank = len(shape_of(node))
    ends = {
        (placement.dim - len(shape_of(source)), placement.parts, placement.blocks)
        for source, placement in inputs.items()
    }
    if len(ends) > 1 or (name_of(node) == "cat" and node.args[1] % rank == next(iter(ends))[0] + rank):
        raise _NoRule
    end, parts, _ = next(iter(ends))
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if source in inputs or not isinstance(value, torch.Tensor) or value.dim() < -end or value.shape[end] == 1:
            continue
        if name_of(source) != "expand" or shape_of(source.args[0])[end] != 1 or set(source.users) != {node}:
            raise _NoRule
        plan.sizes.setdefault(source, {})[value.dim() + end] = value.shape[end] // parts
    return replace(next(iter(inputs.values())), dim=rank + end)


def _reshaped(plan: ShardPlan, node: fx.Node, placement: Placement) -> Placement:
    """The cut dimension keeps the numbers before it; where it is taken apart, its first part is cut."""
    before, after, sizes = shape_of(node.args[0]), shape_of(node), node.args[1]
    ahead = torch.Size(before[: placement.dim]).numel()
    for dim in range(len(after)):
        if placement.blocks == 1 and torch.Size(after[:dim]).numel() == ahead and after[dim] != 1:
            if not isinstance(after[dim], int) or after[dim] % placement.parts:
                break
            if sizes[dim] != -1:
                plan.sizes.setdefault(node, {})[dim] = after[dim] // placement.parts
            return replace(placement, dim=dim)
    raise _NoRule


def _created(plan: ShardPlan, node: fx.Node, placement: Placement) -> Placement:
    """A new tensor, as large as the one that is cut."""
    if (
        len(shape_of(node)) != len(shape_of(node.args[0]))
        or node.args[1][placement.dim] != shape_of(node.args[0])[placement.dim]
    ):
        raise _NoRule
    plan.sizes.setdefault(node, {})[placement.dim] = shape_of(node)[placement.dim] // placement.parts
    return placement


def _expanded(plan: ShardPlan, node: fx.Node, placement: Placement) -> Placement:
    dim = placement.dim + len(shape_of(node)) - len(shape_of(node.args[0]))
    if node.args[1][dim] != -1:
        plan.sizes.setdefault(node, {})[dim] = shape_of(node)[dim] // placement.parts
    return replace(placement, dim=dim)


def _transposed(plan: ShardPlan, node: fx.Node, placement: Placement) -> Placement:
    rank = len(shape_of(node))
    a, b = (dim % rank for dim in node.args[1:3])
    return replace(placement, dim={a: b, b: a}.get(placement.dim, placement.dim))


def _permuted(plan: ShardPlan, node: fx.Node, placement: Placement) -> Placement:
    rank = len(shape_of(node))
    return replace(placement, dim=[dim % rank for dim in node.args[1]].index(placement.dim))


def _unsqueezed(plan: ShardPlan, node: fx.Node, placement: Placement) -> Placement:
    return replace(placement, dim=placement.dim + (node.args[1] % len(shape_of(node)) <= placement.dim))


def _within_parts(plan: ShardPlan, node: fx.Node, placement: Placement) -> Placement:
    """Ops along another dimension than the one that is cut."""
    dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    rank = len(shape_of(node.args[0]))
    if placement.dim in {dim % rank for dim in dims}:
        raise _NoRule
    lost = rank - len(shape_of(node))
    return replace(placement, dim=placement.dim - (lost and sum(dim % rank < placement.dim for dim in dims)))


def _sliced(plan: ShardPlan, node: fx.Node, placement: Placement) -> Placement:
    if placement.dim == (node.args[1] if len(node.args) > 1 else 0) % len(shape_of(node)):
        raise _NoRule
    return placement


def _divided(plan: ShardPlan, node: fx.Node, placement: Placement) -> Placement:
    """Ops that take a tensor apart, along the cut dimension only into its blocks."""
    pieces, rank = node.meta["val"], len(shape_of(node.args[0]))
    if (node.args[2] if len(node.args) > 2 else 0) % rank != placement.dim:
        return placement
    sizes = {piece.shape[placement.dim] for piece in pieces}
    if len(pieces) != placement.blocks or len(sizes) > 1:
        raise _NoRule
    if name_of(node) != "chunk":
        plan.sizes.setdefault(node, {})[ALL] = sizes.pop() // placement.parts
    return replace(placement, blocks=1)


RULES: dict[str, Callable[[ShardPlan, fx.Node, Placement], Placement]] = {
    "reshape": _reshaped, "view": _reshaped, "expand": _expanded, "transpose": _transposed, "permute": _permuted,
    "new_empty": _created, "new_zeros": _created, "unsqueeze": _unsqueezed, "slice": _sliced,
    "chunk": _divided, "split": _divided, "split_with_sizes": _divided,
    **dict.fromkeys(REDUCTIONS, _within_parts),
}  # fmt: skip
"""By the name of an ATen op whose first argument is cut."""
