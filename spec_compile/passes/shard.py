"""shard: every rank of tensor parallelism computes its heads, its part of each MLP and expert, and its logits.

Which weights may be cut follows from the graph: weights whose products feed attention, or feed a product through
nothing but elementwise ops (Megatron-LM, arXiv:1909.08053, section 3). `placements.derive` follows the parts through
the graph and says where partial sums meet; a weight whose parts would not fit what follows stays whole.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from ..errors import UnsupportedModelError
from ..graph import ModelGraph, attribute, calls, owner
from ..kernels import all_reduce, experts  # noqa: F401  registers the ops
from ..kernels.linear import head_products
from ..kernels.ops import arguments_of
from ..parallel.slices import Cut, whole
from .apply import comes_after, is_pointwise, name_of, shape_of
from .placements import ALL, ATTENTION, BY_EXPERTS, MisfitError, ShardPlan, derive
from .products import Share, WeightProduct, check, product_of, rounds_rows, set_weights, share_of, why_not

aten = torch.ops.aten
ops = torch.ops.spec_compile


@comes_after("tidy")
def shard(graph: ModelGraph, settings) -> str:
    """Cut the weights of attention, MLPs, experts and the output head; add up partial sums and gather logits.

    UnsupportedModelError if heads or widths do not divide among the ranks, or if no layer can be cut.
    """
    ranks = settings.ranks
    if ranks.size == 1:
        return "one process"
    # Products whose outputs are cut: by heads, by the width of an MLP, or by the numbers of experts.
    attending, widths = _attending(graph, ranks.size), _feeding(graph)
    mixtures = by_experts(graph, settings.expert_parallel, ranks.size)
    widths = {node: width for node, width in widths.items() if node not in mixtures}
    fits = _check_sizes(graph, widths, ranks.size)
    columns = attending | {node: Cut(-1, ranks.size, _blocks(node)) for node in widths}
    columns |= dict.fromkeys(mixtures, BY_EXPERTS)
    # Columns whose consequences do not fit stay whole. Then nothing may be left.
    plan = _fitting_plan(graph, columns, ranks.size)
    if not columns:
        raise UnsupportedModelError(
            "tensor_parallel: no layer of the model can be shared out, because attention and MLPs are not made of "
            "linear layers as in Llama; run it in one process, tensor_parallel=None"
        )
    before = graph.layers
    check(graph, plan.shares.values(), [size for size in range(1, ranks.size) if fits(size)], ranks.size)
    # Rewrite the graph, and tell what each rank attends to.
    _cut_weights(graph, plan, ranks)
    _reduce(graph, plan, ranks)
    gathered = _cut_head(graph, ranks)
    _gather_others(graph)
    graph.layers = tuple(
        replace(layer, heads=shape_of(call["q"])[1], kv_heads=shape_of(call["k"])[1])
        for layer, call in zip(graph.layers, map(arguments_of, calls(graph.gm, ATTENTION)))
    )
    return _summary(graph, plan, before, ranks) + gathered


def _attending(graph: ModelGraph, size: int) -> dict[fx.Node, Cut]:
    """The products that feed queries, keys and values, with the cut of their outputs by heads."""
    cuts: dict[fx.Node, Cut] = {}
    for call in map(arguments_of, calls(graph.gm, ATTENTION)):
        kv_parts = min(shape_of(call["k"])[1], size)
        for name, parts in (("q", size), ("k", kv_parts), ("v", kv_parts)):
            products = _sources(call[name], lambda each: True) if parts > 1 else None
            cuts |= {product.node: Cut(-1, parts) for product in products or ()}
    return cuts


def _feeding(graph: ModelGraph) -> dict[fx.Node, int]:
    """The products from which elementwise ops make the input of another product, with that input's width."""
    widths = {}
    for node in calls(graph.gm):
        if product_of(node) is not None:
            for product in _sources(node.args[0], _keeps_columns) or ():
                widths[product.node] = shape_of(node.args[0])[-1]
    return widths


def by_experts(graph: ModelGraph, option: bool | None, size: int) -> set[fx.Node]:
    """The first products of the mixtures that ranks share out by the numbers of their experts, not by their width.

    option: ``expert_parallel``; None: those whose width, or the groups of whose weights, do not divide.
    UnsupportedModelError if the option is True, and there are no experts or they do not divide.
    """
    found: set[fx.Node] = set()
    counts: set[int] = set()
    for down in filter(None, map(product_of, calls(graph.gm, experts.DOWN))):
        sources = _sources(down.node.args[0], lambda node: True) or []
        ups = [product for product in sources if product.node.target is experts.UP]
        counts.add(count := shape_of(down.parts[0])[0])
        both = [Share(down, True, size), *(Share(up, False, size, up.blocks) for up in ups)]
        fits = not any(why_not(graph, share) for share in both)
        if option or (option is None and not fits and count % size == 0):
            found |= {up.node for up in ups}
    if option and (not counts or any(count % size for count in counts)):
        problem = f"{', '.join(map(str, sorted(counts)))} experts do not divide among {size} ranks"
        raise UnsupportedModelError(
            f"expert_parallel: {problem if counts else 'the model has no routed experts'}; leave it out"
        )
    return found


def _keeps_columns(node: fx.Node) -> bool:
    """True if a column of a node's result depends on one column of its inputs, or on one of each of their halves."""
    return is_pointwise(node) or name_of(node) in ("chunk", "split", "split_with_sizes", "getitem")


def _sources(node: fx.Node, passes_through) -> list[WeightProduct] | None:
    """The products that a value is computed from, by ops that `passes_through` accepts; None if there is another."""
    products, seen, todo = {}, set(), [node]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        product = product_of(node) if node.op == "call_function" else None
        if product is not None:
            products[node] = product
        elif node.op == "call_function" and passes_through(node):
            todo += [each for each in node.all_input_nodes if not isinstance(each.meta.get("val"), torch.SymInt)]
        elif not passes_through(node):
            return None
    return [*products.values()]


def _blocks(node: fx.Node) -> int:
    """Into how many equal blocks what follows a product takes its outputs apart, as of gate and up."""
    users = [user for user in node.users if name_of(user) in ("chunk", "split", "split_with_sizes")]
    return len(users[0].meta["val"]) if len(users) == 1 == len(node.users) else 1


def _check_sizes(graph: ModelGraph, widths: dict[fx.Node, int], size: int) -> Callable[[int], bool]:
    """A function that tells if heads and the widths of MLPs divide among a number of ranks; UnsupportedModelError,
    naming numbers that would fit, if they do not among `size`."""

    def fits(ranks: int) -> bool:
        heads = all(
            layer.heads % ranks == 0 and (layer.kv_heads % ranks == 0 or ranks % layer.kv_heads == 0)
            for layer in graph.layers
        )
        return heads and all(width % ranks == 0 for width in widths.values())

    if not fits(size):
        layer = graph.layers[0]
        fitting = [ranks for ranks in range(1, layer.heads + 1) if fits(ranks)]
        raise UnsupportedModelError(
            f"tensor_parallel: {layer.heads} query and {layer.kv_heads} key-value heads and MLPs of "
            f"{', '.join(map(str, sorted(set(widths.values()))))} do not divide among {size} ranks; start one of "
            f"{', '.join(map(str, fitting))}"
        )
    return fits


def _fitting_plan(graph: ModelGraph, columns: dict[fx.Node, Cut], size: int) -> ShardPlan:
    """The plan with as many of `columns` as fit; the others are taken out of it."""
    while True:
        try:
            return derive(graph.gm.graph, columns, size)
        except MisfitError as misfit:
            for node in misfit.weights & columns.keys():
                del columns[node]


def _cut_weights(graph: ModelGraph, plan: ShardPlan, ranks) -> None:
    """Put this rank's parts in the place of weights, and the parts' sizes in the place of sizes."""
    # Weights of products, then other parameters.
    for share in plan.shares.values():
        layout, tensors = share_of(graph, share, ranks.slices)
        node, first = share.product.node, share.product.parts[0]
        parts = [_put(graph, node, first, tensor, number) for number, tensor in enumerate(tensors)]
        set_weights(share.product, layout, parts)
    for (node, weight), cut in plan.cuts.items():
        _replace_weight(graph, node, weight, cut, ranks)
    # Sizes that ops were given as numbers.
    for node, sizes in plan.sizes.items():
        arguments = node.args[1]
        for index, value in sizes.items():
            if index == ALL:
                arguments = [value] * len(arguments) if isinstance(arguments, list) else value
            else:
                arguments = [*arguments[:index], value, *arguments[index + 1 :]]
        node.args = (node.args[0], arguments, *node.args[2:])
    # The values that fake tensors describe.
    for node, placement in plan.placements.items():
        if placement.dim is not None:
            _shrink(node, placement.dim, placement.parts)
    for node, sizes in plan.sizes.items():
        if node not in plan.placements:  # an expansion of what all ranks have
            for index, value in sizes.items():
                _shrink(node, index, shape_of(node)[index] // value)
    for share in plan.shares.values():
        if share.by_inputs:
            _round_over_ranks(graph, share.product, ranks)


def _replace_weight(graph: ModelGraph, node: fx.Node, weight: fx.Node, cut: Cut, ranks) -> None:
    """Let a node read this rank's part of a parameter."""
    part = ranks.slices.part(attribute(graph.gm, weight.target), cut)
    node.replace_input_with(weight, _put(graph, node, weight, part))


def _put(graph: ModelGraph, node: fx.Node, weight: fx.Node, part: Tensor, number: int = 0) -> fx.Node:
    """A node ahead of `node` that reads this rank's part of a parameter, or part `number` of its quantised layer."""
    name = f"part_{weight.target.replace('.', '_')}" + (f"_{number}" if number else "")
    _register(graph.gm, name, part)
    with graph.gm.graph.inserting_before(node):
        fresh = graph.gm.graph.get_attr(name)
    fresh.meta = {**weight.meta, "val": weight.meta["val"].new_empty(part.shape, dtype=part.dtype)}
    return fresh


def _round_over_ranks(graph: ModelGraph, product: WeightProduct, ranks) -> None:
    """Round the inputs of a product, of which each rank has some, if its format rounds them with a scale for a row."""
    dtype = rounds_rows(product)
    if dtype is None:
        return
    x = product.node.args[0]
    with graph.gm.graph.inserting_before(product.node):
        rounded = graph.gm.graph.call_function(ops.rounded_over_ranks.default, (x, dtype, ranks.name))
    rounded.meta = dict(x.meta)
    product.node.replace_input_with(x, rounded)


def _register(gm: fx.GraphModule, name: str, tensor: Tensor) -> None:
    if isinstance(tensor, nn.Parameter):
        gm.register_parameter(name, tensor)
    else:
        gm.register_buffer(name, tensor, persistent=False)


def _gather_others(graph: ModelGraph) -> None:
    """Put the whole tensor in the place of every DTensor that is still read."""
    for node in [node for node in graph.gm.graph.nodes if node.op == "get_attr"]:
        if not node.users:
            graph.gm.graph.erase_node(node)
        elif isinstance(tensor := attribute(graph.gm, node.target), DTensor):
            name = f"whole_{node.target.replace('.', '_')}"
            _register(graph.gm, name, whole(tensor, keep=True))
            node.target = name


def _shrink(node: fx.Node, dim: int, parts: int) -> None:
    """Tell what follows of the smaller size of a value."""
    value = node.meta["val"]
    tensors = value if isinstance(value, (list, tuple)) else [value]
    shrunk = [each.narrow(dim, 0, each.shape[dim] // parts) for each in tensors]
    node.meta["val"] = shrunk if tensors is value else shrunk[0]


def _reduce(graph: ModelGraph, plan: ShardPlan, ranks) -> None:
    """Add up partial sums before the first op that needs them whole."""
    for node, users in plan.reduced.items():
        if not users:
            continue
        with graph.gm.graph.inserting_after(node):
            total = graph.gm.graph.call_function(ops.all_reduce.default, (node, ranks.name))
        total.meta = dict(node.meta)
        for user in users:
            user.replace_input_with(node, total)


def _cut_head(graph: ModelGraph, ranks) -> str:
    """Let the output head compute this rank's logits, and gather all ranks' logits after it."""
    heads = head_products(graph) if graph.head_weight else []
    for head in heads:
        vocab = shape_of(head)[-1]
        users = list(head.users)
        cut = Cut(0, ranks.size)
        biases = [node for node in head.args[2:] if node is not None]
        for weight in (head.args[1], *biases):
            _replace_weight(graph, head, weight, cut, ranks)
        graph.head_weight = head.args[1].target
        with graph.gm.graph.inserting_after(head):
            logits = graph.gm.graph.call_function(ops.all_gather.default, (head, ranks.size, ranks.name))
        logits.meta = dict(head.meta)
        if vocab % ranks.size:
            with graph.gm.graph.inserting_after(logits):
                logits = graph.gm.graph.call_function(aten.slice.Tensor, (logits, -1, 0, vocab))
            logits.meta = dict(head.meta)
        for user in users:
            user.replace_input_with(head, logits)
    return "; logits gathered" if heads else ""


def _summary(graph: ModelGraph, plan: ShardPlan, before: tuple, ranks) -> str:
    """A sentence on the parts that a rank has, and the weights that stay whole."""
    was, now = before[0], graph.layers[0]
    sums = len(calls(graph.gm, ops.all_reduce.default))
    uncut = Counter(
        owner(node).rpartition(".")[2]
        for node in calls(graph.gm)
        if (product := product_of(node)) is not None and not product.parts[0].target.startswith("part_")
    )
    stays = ", ".join(f"{name} ({count})" for name, count in uncut.items()) or "nothing"
    counts = {shape_of(share.product.parts[0])[0] for share in plan.shares.values() if share.by_experts}
    mixtures = "".join(f"{count // ranks.size} of {count} experts; " for count in sorted(counts))
    return (
        f"rank {ranks.rank} of {ranks.size} has {now.heads} of {was.heads} query and {now.kv_heads} of {was.kv_heads} "
        f"key-value heads; {mixtures}{sums} sums a forward; whole on each rank: {stays}"
    )
