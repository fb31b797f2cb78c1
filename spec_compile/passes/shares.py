"""Shares of weights: the parts of a product's parameters by which one rank multiplies, whatever the weights' format."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from ..errors import UnsupportedModelError
from ..graph import ModelGraph, attribute, owner
from ..kernels.experts import ExpertFormat
from ..parallel.slices import Cut, Slices
from ..quantised.codes import Place, WeightLayout
from ..quantised.held import Rearranged, rearranged
from .products import Layout, WeightProduct


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
    lacks = [(share, reason) for share in shares if (reason := lack(graph, share)) is not None]
    if not lacks:
        return
    share, reason = lacks[0]
    fitting = [
        str(ranks) for ranks in fewer
        if ranks > 1 and not any(lack(graph, share._replace(parts=min(share.parts, ranks))) for share in shares)
    ]  # fmt: skip
    advice = f"start {' or '.join(fitting)} ranks" if fitting else "run it in one process"
    more = f" (and {len(lacks) - 1} more layers)" if len(lacks) > 1 else ""
    raise UnsupportedModelError(
        f"tensor_parallel: {owner(share.product.node)}{more} {reason}; {advice}, or load a checkpoint in 16 bits"
    )


def lack(graph: ModelGraph, share: Share) -> str | None:
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
        assert isinstance(fresh, Rearranged)  # `lack` has said so
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
    return layout.rearranged(parts, by_inputs) if isinstance(layout, ExpertFormat) else None
