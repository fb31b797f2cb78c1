"""Quantised layers in layouts whose parts can be cut: a share of a layer is cut there and then packed as it was."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .bitsandbytes import Table4
from .blocks import CodeBlocks, blocks
from .layout import Place, WeightLayout
from .nibbles import Nibbles, TableNibbles
from .torchao import IntGroups
from .w4a8 import W4A8, RoundedNibbles


class Rearranged(NamedTuple):
    """A layer in an order in which its parts can be cut.

    places: where these parts have outputs and inputs.
    unpack: makes the parts.
    pack: makes a layout and its parts of cut parts; its second argument is how many inputs these have.
    """

    places: list[Place]
    unpack: Callable[[], list[Tensor]]
    pack: Callable[[list[Tensor], int], tuple]


def rearranged(layout: WeightLayout, parts: Sequence[Tensor], inputs: int, by_inputs: bool) -> Rearranged | str | None:
    """A layer whose parts cannot be cut as they are, along the inputs or the outputs, in an order in which they can.

    None: they can be cut as they are; a text, the end of a sentence about the layer: in no order.
    """
    if isinstance(layout, Table4) and parts[1].dim() == 1:
        rows = layout.by_row(parts, inputs)
        if rows is None:
            return f"has blocks of {layout.block} weights, in which a row of {inputs} inputs ends"
        return _rearranged(Table4(layout.block, 0), rows[1], lambda: rows, is_words=False)
    if isinstance(layout, TableNibbles):
        return _table(layout, parts, inputs)
    if isinstance(layout, CodeBlocks):
        groups, rows = layout.rows(parts, inputs)
        places, unpack = groups.places(rows), lambda: layout.rows(parts, inputs)[1]
        return Rearranged(places, unpack, lambda cut, inputs: blocks(groups, *cut))
    if not by_inputs or not isinstance(layout, (Nibbles, RoundedNibbles)):
        return None
    scales, group = layout.scales(parts, inputs), min(layout.group, inputs)

    def codes() -> Tensor:
        return layout.codes(parts, inputs).to(torch.int8).sub_(8)

    if isinstance(layout, RoundedNibbles):
        return _rearranged(W4A8(group, layout.fp8, 0), scales.T, lambda: [codes(), scales.T])
    zeros = layout.scales_and_zeros(parts[1])[1]
    zeros = torch.zeros_like(scales) if isinstance(zeros, int) else zeros[: len(scales)] - 8
    return _rearranged(IntGroups(group, 4), scales.T, lambda: [codes(), scales.T, zeros.to(torch.int8).T])


def _table(layout: TableNibbles, parts: Sequence[Tensor], inputs: int) -> Rearranged:
    scales = layout.scales(parts, inputs).T

    def unpack() -> list[Tensor]:
        codes = layout.codes(parts, inputs)
        return [codes[:, ::2] << 4 | codes[:, 1::2], scales, parts[1][0, :8].flatten()]

    return _rearranged(Table4(min(layout.group, inputs), 0), scales, unpack)


def _rearranged(
    layout: WeightLayout, scales: Tensor, unpack: Callable[[], list[Tensor]], is_words: bool = True
) -> Rearranged:  # fmt: skip
    """layout, scales: of the order in which the layer can be cut. is_words: it comes from `Words`, and goes there
    again."""

    def pack(cut: list[Tensor], inputs: int) -> tuple[WeightLayout, list[Tensor]]:
        share, cut = layout.of_inputs(inputs), [part.contiguous() for part in cut]
        form = share.for_few_rows(cut, inputs) if is_words else None
        return form or (share, cut)

    return Rearranged(layout.places([scales, scales]), unpack, pack)
