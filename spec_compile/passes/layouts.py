"""Layouts: how each value of a graph lies on the ranks of tensor parallelism, derived from how its weights are cut."""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ..kernels.ops import arguments_of
from ..parallel.slices import ONCE, Cut
from .products import SAME, Product, is_pointwise, name_of, product_of, shape_of

ATTENTION = torch.ops.spec_compile.attention.default
REDUCTIONS = {"amax", "amin", "any", "mean", "softmax", "_softmax", "sum"}
"""ATen ops over the dimensions of their second argument."""
LINEAR_OPS = (SAME - {"copy_"}) | {
    "expand", "index", "permute", "reshape", "slice", "squeeze", "sum", "transpose", "unsqueeze", "view",
}  # fmt: skip
"""ATen ops of one tensor that may as well be done before partial sums are added up."""

ALL = -1
"""Every size of a list."""


@dataclass(frozen=True)
class Layout:
    """Of a value that is not the same on all ranks.

    dim: the dimension that is cut, in `parts` of `blocks` stretches, see `Cut`; None: every rank has a partial sum.
    weights: the nodes that multiply by weights, because of whose cut the value lies so.
    """

    dim: int | None
    parts: int
    blocks: int
    weights: frozenset[fx.Node]


class MisfitError(Exception):
    """A value cannot be computed from parts. weights: the nodes whose weights have to stay whole."""

    def __init__(self, node: fx.Node, weights: frozenset[fx.Node]):
        super().__init__(f"{node.name} ({node.target})")
        self.weights = weights


@dataclass
class Plan:
    """What has to be changed in a graph so that every rank computes its parts.

    layouts: of nodes that are not the same on all ranks. cuts: of the parameters that a node reads. sizes: arguments of
    a node's list of sizes that become smaller: index in it (or `ALL`) -> size. reduced: partial sums and the
    users that need them added up.
    """

    layouts: dict[fx.Node, Layout] = field(default_factory=dict)
    cuts: dict[tuple[fx.Node, fx.Node], Cut] = field(default_factory=dict)
    sizes: dict[fx.Node, dict[int, int]] = field(default_factory=dict)
    reduced: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)


def derive(graph: fx.Graph, columns: dict[fx.Node, Cut], size: int) -> Plan:
    """The plan for a graph in which the products `columns` compute a part of their outputs.

    columns: node -> the cut of its output's last dimension. size: ranks. MisfitError if there is no such plan.
    """
    plan = Plan()
    for node in graph.nodes:
        if node.op == "call_function":
            _place(plan, node, columns, size)
        elif node.op == "output":
            for source in node.all_input_nodes:
                _whole(plan, source, node)
    return plan


def _place(plan: Plan, node: fx.Node, columns: dict[fx.Node, Cut], size: int) -> None:
    """Find the layout of a node from those of its inputs."""
    product = product_of(node)
    if product is not None:
        layout = _multiplied(plan, product, columns.get(node), size)
    else:
        layout = _of_partial_sums(plan, node)
        inputs = {source: plan.layouts[source] for source in node.all_input_nodes if _is_cut(plan, source)}
        if inputs:
            weights = frozenset().union(*(each.weights for each in inputs.values()))
            try:
                layout = _cut(plan, node, inputs, size)
            except _NoRule:
                raise MisfitError(node, weights) from None
            layout = layout and replace(layout, weights=weights)
    if layout is not None:
        plan.layouts[node] = layout


class _NoRule(Exception):
    """No rule says how a node treats its inputs' parts."""


def _is_cut(plan: Plan, node: fx.Node) -> bool:
    return node in plan.layouts and plan.layouts[node].dim is not None


def _is_partial(plan: Plan, node) -> bool:
    return node in plan.layouts and plan.layouts[node].dim is None


def _whole(plan: Plan, source: fx.Node, user: fx.Node) -> None:
    """A user needs a value that is the same on all ranks."""
    if _is_cut(plan, source):
        raise MisfitError(user, plan.layouts[source].weights)
    if _is_partial(plan, source) and user not in plan.reduced.setdefault(source, []):
        plan.reduced[source].append(user)


def _multiplied(plan: Plan, product: Product, cut: Cut | None, size: int) -> Layout | None:
    """A product of parts of its input is a partial sum; one by a part of the outputs is a part of them."""
    node, source = product.node, product.node.args[0]
    for other in node.all_input_nodes:
        if other is not source:
            _whole(plan, other, node)
    if _is_cut(plan, source):
        layout = plan.layouts[source]
        fits = layout.dim == len(shape_of(source)) - 1 and layout.parts == size and layout.blocks == 1
        if not fits or cut is not None:
            raise MisfitError(node, layout.weights | {node})
        plan.cuts[node, product.weight] = Cut(product.dims[0], size)
        if product.bias is not None:
            plan.cuts[node, product.bias] = ONCE
        return Layout(None, size, 1, layout.weights | {node})
    _whole(plan, source, node)
    if cut is None:
        return None
    blocks = cut.blocks * product.blocks
    plan.cuts[node, product.weight] = cut._replace(dim=product.dims[1], blocks=blocks)
    if product.bias is not None:
        plan.cuts[node, product.bias] = cut._replace(dim=len(shape_of(product.bias)) - 1, blocks=blocks)
    return Layout(len(shape_of(node)) - 1, cut.parts, cut.blocks, frozenset({node}))


def _of_partial_sums(plan: Plan, node: fx.Node) -> Layout | None:
    """What is linear in partial sums is a partial sum itself; anything else needs them added up.

    Partial sums that several nodes read are added up at once, because one of them may need that.
    """
    sources = [source for source in node.all_input_nodes if _is_partial(plan, source)]
    if not sources:
        return None
    first, name = plan.layouts[sources[0]], name_of(node)
    tensors = [each for each in node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]
    is_linear = len(sources) == 1 and (
        (name in LINEAR_OPS and node.args[0] is sources[0])
        or (name == "mul" and not any(_is_cut(plan, each) for each in tensors))
        or (name == "div" and node.args[0] is sources[0])
    )
    is_sum = name == "add" and len(node.args) == 2 and not node.kwargs and set(node.args) == set(sources)
    if (is_linear or is_sum) and all(len(source.users) == 1 for source in sources):
        return replace(first, weights=frozenset().union(*(plan.layouts[each].weights for each in sources)))
    for source in sources:
        _whole(plan, source, node)
    return None


def _cut(plan: Plan, node: fx.Node, inputs: dict[fx.Node, Layout], size: int) -> Layout | None:
    """The layout of a node some of whose inputs are cut; _NoRule if it cannot be computed from their parts."""
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


def _attended(plan: Plan, node: fx.Node, inputs: dict[fx.Node, Layout], size: int) -> Layout:
    """Attention of a rank's heads. Sinks and slopes are those of its query heads; one key-value head is everyone's."""
    call = arguments_of(node)
    q, k, v = (call[name] for name in ("q", "k", "v"))
    wanted = {q: size} | dict.fromkeys((k, v), min(shape_of(k)[1], size))
    if {each: (layout.dim, layout.parts, layout.blocks) for each, layout in inputs.items()} != {
        each: (1, parts, 1) for each, parts in wanted.items() if parts > 1
    }:
        raise _NoRule
    for vector in filter(None, (call["sinks"], call["slopes"])):
        if vector.op != "get_attr":
            raise _NoRule
        plan.cuts[node, vector] = Cut(0, size)
    return replace(inputs[q], dim=2)


def _aligned(plan: Plan, node: fx.Node, inputs: dict[fx.Node, Layout]) -> Layout:
    """Of elementwise ops, whose inputs are broadcast, and of cat: all that are cut are cut alike."""
    rank = len(shape_of(node))
    ends = {(layout.dim - len(shape_of(source)), layout.parts, layout.blocks) for source, layout in inputs.items()}
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


def _reshaped(plan: Plan, node: fx.Node, layout: Layout) -> Layout:
    """The cut dimension keeps the numbers before it; where it is taken apart, its first part is cut."""
    before, after, sizes = shape_of(node.args[0]), shape_of(node), node.args[1]
    ahead = torch.Size(before[: layout.dim]).numel()
    for dim in range(len(after)):
        if layout.blocks == 1 and torch.Size(after[:dim]).numel() == ahead and after[dim] != 1:
            if not isinstance(after[dim], int) or after[dim] % layout.parts:
                break
            if sizes[dim] != -1:
                plan.sizes.setdefault(node, {})[dim] = after[dim] // layout.parts
            return replace(layout, dim=dim)
    raise _NoRule


def _created(plan: Plan, node: fx.Node, layout: Layout) -> Layout:
    """Of a new tensor as large as the one that is cut."""
    if (
        len(shape_of(node)) != len(shape_of(node.args[0]))
        or node.args[1][layout.dim] != shape_of(node.args[0])[layout.dim]
    ):
        raise _NoRule
    plan.sizes.setdefault(node, {})[layout.dim] = shape_of(node)[layout.dim] // layout.parts
    return layout


def _expanded(plan: Plan, node: fx.Node, layout: Layout) -> Layout:
    dim = layout.dim + len(shape_of(node)) - len(shape_of(node.args[0]))
    if node.args[1][dim] != -1:
        plan.sizes.setdefault(node, {})[dim] = shape_of(node)[dim] // layout.parts
    return replace(layout, dim=dim)


def _transposed(plan: Plan, node: fx.Node, layout: Layout) -> Layout:
    rank = len(shape_of(node))
    a, b = (dim % rank for dim in node.args[1:3])
    return replace(layout, dim={a: b, b: a}.get(layout.dim, layout.dim))


def _permuted(plan: Plan, node: fx.Node, layout: Layout) -> Layout:
    rank = len(shape_of(node))
    return replace(layout, dim=[dim % rank for dim in node.args[1]].index(layout.dim))


def _unsqueezed(plan: Plan, node: fx.Node, layout: Layout) -> Layout:
    return replace(layout, dim=layout.dim + (node.args[1] % len(shape_of(node)) <= layout.dim))


def _within_parts(plan: Plan, node: fx.Node, layout: Layout) -> Layout:
    """Of ops along another dimension than the one that is cut."""
    dims = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]]
    rank = len(shape_of(node.args[0]))
    if layout.dim in {dim % rank for dim in dims}:
        raise _NoRule
    lost = rank - len(shape_of(node))
    return replace(layout, dim=layout.dim - (lost and sum(dim % rank < layout.dim for dim in dims)))


def _sliced(plan: Plan, node: fx.Node, layout: Layout) -> Layout:
    if layout.dim == (node.args[1] if len(node.args) > 1 else 0) % len(shape_of(node)):
        raise _NoRule
    return layout


def _divided(plan: Plan, node: fx.Node, layout: Layout) -> Layout:
    """Of ops that take a tensor apart; along the cut dimension only into its blocks."""
    pieces, rank = node.meta["val"], len(shape_of(node.args[0]))
    if (node.args[2] if len(node.args) > 2 else 0) % rank != layout.dim:
        return layout
    sizes = {piece.shape[layout.dim] for piece in pieces}
    if len(pieces) != layout.blocks or len(sizes) > 1:
        raise _NoRule
    if name_of(node) != "chunk":
        plan.sizes.setdefault(node, {})[ALL] = sizes.pop() // layout.parts
    return replace(layout, blocks=1)


RULES: dict[str, Callable[[Plan, fx.Node, Layout], Layout]] = {
    "reshape": _reshaped, "view": _reshaped, "expand": _expanded, "transpose": _transposed, "permute": _permuted,
    "new_empty": _created, "new_zeros": _created, "unsqueeze": _unsqueezed, "slice": _sliced,
    "chunk": _divided, "split": _divided, "split_with_sizes": _divided,
    **dict.fromkeys(REDUCTIONS, _within_parts),
}  # fmt: skip
"""By the name of an ATen op whose first argument is cut."""
