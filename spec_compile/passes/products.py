"""Products of a captured graph with its parameters, and the shares of their weights that one rank multiplies by."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, fx

from .. import quantised
from ..errors import UnsupportedModelError
from ..graph import ModelGraph, attribute, owner
from ..kernels import experts
from ..kernels.linear import QUANTISED
from ..kernels.ops import arguments_of
from ..parallel.slices import Cut, Slices
from ..quantised.codes import Place, WeightLayout
from ..quantised.held import Rearranged, rearranged
from .apply import replace_node

aten = torch.ops.aten


class PlainWeight:
    """The layout of a linear layer's weight [O, I] that is not quantised, as `WeightLayout`."""

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        return [Place((0, 1), (1, 1))]

    def of_inputs(self, size: int) -> "PlainWeight":
        return self


Layout: TypeAlias = PlainWeight | WeightLayout | experts.ExpertFormat
"""`PlainWeight`, or a `WeightLayout` or `ExpertFormat` of quantised weights: all say where parts can be cut."""


class WeightProduct(NamedTuple):
    """A node that multiplies by parameters.

    parts: the parameters that are its weights; one, unless they are quantised.
    layout: the parts'.
    sizes: its outputs and inputs.
    blocks: equal stretches of the outputs, such as gate and up, from each of which a column of the result is made.
    """

    node: fx.Node
    parts: list[fx.Node]
    bias: fx.Node | None
    layout: Layout
    sizes: tuple[int, int]
    blocks: int = 1


def product_of(node: fx.Node) -> WeightProduct | None:
    """The product with parameters that a node is: a linear layer, quantised or not, or one of the two of experts."""
    if node.target is aten.linear.default and node.args[1].op == "get_attr":
        bias, sizes = node.args[2] if len(node.args) > 2 else None, tuple(node.args[1].meta["val"].shape)
        return WeightProduct(node, [node.args[1]], bias, PlainWeight(), sizes)
    if node.target is QUANTISED:
        x, parts, bias, kind = arguments_of(node).values()
        sizes = node.meta["val"].shape[-1], x.meta["val"].shape[-1]
        return WeightProduct(node, parts, bias, quantised.layout_of(kind), sizes)
    if node.target in (experts.UP, experts.DOWN):
        kind, parts = experts.format_of(node.args[-1]), experts.parts_of(node)
        blocks = 1 if kind.gate == "none" or kind.interleaved else 2
        sizes = kind.sizes([part.meta["val"] for part in parts])
        weights = parts[:-1] if kind.biased else parts
        return WeightProduct(node, weights, kind.bias(parts), kind, sizes, blocks)
    return None


def rounds_rows(product: WeightProduct) -> torch.dtype | None:
    """To what a product rounds its inputs, if it does so with a scale for each row that depends on all of them."""
    layout, vals = product.layout, [part.meta["val"] for part in product.parts]
    if not isinstance(layout, WeightLayout) or layout.constant_scale(vals) is not None:
        return None
    return layout.row_dtype(vals[0])


def set_weights(product: WeightProduct, layout: Layout, parts: list[fx.Node]) -> None:
    """Let the node of a product multiply by other parts, in another layout."""
    node = product.node
    if node.target is QUANTISED:
        node.args = (node.args[0], parts, product.bias, layout.kind)
    elif node.target in (experts.UP, experts.DOWN):
        bias = [] if product.bias is None else [product.bias]
        node.args = (*node.args[:-2], [*parts, *bias], layout.text)
    else:
        node.update_arg(1, parts[0])


def output_sizes(products: list[fx.Node]) -> list[int]:
    return [node.meta["val"].shape[-1] for node in products]


def put_product(graph: fx.Graph, group: list[fx.Node], op: Callable, arguments: tuple) -> None:
    """Put one product, ``op(*arguments)``, and a split of its outputs in place of a group of products."""
    first = group[0]
    with graph.inserting_before(first):
        product = graph.call_function(op, arguments)
        product.meta = {key: first.meta[key] for key in ("nn_module_stack",) if key in first.meta}
        split = graph.call_function(aten.split_with_sizes.default, (product, output_sizes(group), -1))
    for place, node in enumerate(group):
        with graph.inserting_before(node):
            part = graph.call_function(operator.getitem, (split, place))
        replace_node(node, part)


# Shares of weights, whatever the weights' format.


class Share(NamedTuple):
    """How the ranks share out a product: by its inputs or by its outputs, in `parts` parts of `blocks` blocks, see
    `Cut`; or a mixture's product by the numbers of its experts."""

    product: WeightProduct
    by_inputs: bool
    parts: int
    blocks: int = 1
    by_experts: bool = False


def check(graph: ModelGraph, shares: Iterable[Share], fewer: list[int], size: int) -> None:
    """UnsupportedModelError if a cut would go through numbers that share a scale or a word.

    fewer: numbers of ranks, below `size`, among which heads and widths divide.
    size: ranks.
    """
    shares = list(shares)
    refused = [(share, reason) for share in shares if (reason := why_not(graph, share)) is not None]
    if not refused:
        return
    share, reason = refused[0]
    fitting = [
        str(ranks) for ranks in fewer
        if ranks > 1 and not any(why_not(graph, share._replace(parts=min(share.parts, ranks))) for share in shares)
    ]  # fmt: skip
    advice = f"start {' or '.join(fitting)} ranks" if fitting else "run it in one process"
    more = f" (and {len(refused) - 1} more layers)" if len(refused) > 1 else ""
    raise UnsupportedModelError(
        f"tensor_parallel: {owner(share.product.node)}{more} {reason}; {advice}, or load a checkpoint in 16 bits"
    )


def why_not(graph: ModelGraph, share: Share) -> str | None:
    """The reason why a product cannot be shared so, the end of a sentence about its layer; None: it can."""
    product, parts = share.product, _tensors(graph, share.product)
    if share.by_experts:
        return None
    total = product.sizes[share.by_inputs]
    other = _rearranged(product, parts, share.by_inputs)
    if isinstance(other, str):
        return other
    places = product.layout.places(parts) if other is None else other.places
    steps = [place[share.by_inputs][1] for place in places if place[share.by_inputs] is not None]
    if total % (share.parts * share.blocks) == 0 and all(
        total // share.parts // share.blocks % step == 0 for step in steps
    ):
        return None
    what = "inputs" if share.by_inputs else "outputs"
    return f"has {total // share.blocks} {what} in groups of {max(steps)}, which {share.parts} ranks cannot share out"


def share_of(graph: ModelGraph, share: Share, slices: Slices) -> tuple[Layout, list[Tensor]]:
    """The layout and the parts of this rank's share of a product's weights."""
    product, parts = share.product, _tensors(graph, share.product)
    if share.by_experts:
        held = len(parts[0]) // share.parts
        layout = replace(product.layout, first=slices.rank * held, of=len(parts[0]))
        return layout, [slices.part(part, Cut(0, share.parts)) for part in parts]
    inputs = product.sizes[1] // (share.parts if share.by_inputs else 1)
    other = _rearranged(product, parts, share.by_inputs)
    if other is None:
        layout = product.layout.of_inputs(inputs) if share.by_inputs else product.layout
        return layout, _taken(share, product.layout.places(parts), parts, slices.part)

    def make() -> tuple:
        fresh = _rearranged(product, parts, share.by_inputs)
        assert isinstance(fresh, Rearranged)  # `why_not` has said so
        return fresh.pack(_taken(share, fresh.places, fresh.unpack(), slices.take), inputs)

    return slices.made((product.layout, *share[1:], *map(id, parts)), parts, make)


def _taken(share: Share, places: list[Place], parts: Sequence[Tensor], take: Callable) -> list[Tensor]:
    """``take(part, cut)`` of each part, or the part if every share needs all of it."""
    where = [place[share.by_inputs] for place in places]
    return [part if at is None else take(part, Cut(at[0], share.parts, share.blocks)) for part, at in zip(parts, where)]


def _tensors(graph: ModelGraph, product: WeightProduct) -> list[Tensor]:
    return [attribute(graph.gm, part.target) for part in product.parts]


def _rearranged(product: WeightProduct, parts: Sequence[Tensor], by_inputs: bool) -> Rearranged | str | None:
    layout = product.layout
    if isinstance(layout, WeightLayout):
        return rearranged(layout, parts, product.sizes[1], by_inputs)
    return layout.rearranged(parts, by_inputs) if isinstance(layout, experts.ExpertFormat) else None
