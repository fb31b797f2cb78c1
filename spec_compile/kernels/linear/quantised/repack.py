"""Layers of which the kernel for few rows reads a copy in another layout, made once for all graphs."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from torch import Tensor

from .layout import WeightLayout


@dataclass(eq=False)
class Repacked:
    """Parts in a layout that the kernel reads, and the layer that they were made of: layout, parts, inputs."""

    layout: WeightLayout
    parts: list[Tensor]
    source: tuple[WeightLayout, list[Tensor], int]

    def update(self) -> None:
        """Raises ValueError if the layer's present values take another layout."""
        source, parts, inputs = self.source
        layout, parts = source.for_few_rows(parts, inputs)
        if layout != self.layout:
            raise ValueError(
                f"quantised weights were changed, and their copy would be {layout.kind!r}, not {self.layout.kind!r}, "
                "because of other zero points, larger scales or another table; load the model again, then speculate()"
            )
        for old, new in zip(self.parts, parts):
            old.copy_(new)


_known: "WeakValueDictionary[tuple, Repacked]" = WeakValueDictionary()
"""By the addresses of the layer's parts."""


def repacked(layout: WeightLayout, parts: Sequence[Tensor], inputs: int) -> tuple[WeightLayout, list[Tensor]] | None:
    """A layout that the kernel for few rows reads, and the layer's parts in it; None if there is none.

    Where the new parts are a copy, the first has it in `made_of`, which also keeps the layer's addresses in use.
    """
    if layout.packing is not None and all(part.is_contiguous() for part in parts):
        return layout, list(parts)
    key = layout.kind, inputs, *((part.data_ptr(), part.stride()) for part in parts)
    known = _known.get(key)
    if known is None:
        form = layout.for_few_rows(parts, inputs)
        if form is None:
            return None
        known = _known[key] = Repacked(*form, (layout, list(parts), inputs))
        known.parts[0].made_of = known
    return known.layout, known.parts


def update() -> None:
    """Copies have the present values of the layers that they were made of."""
    for known in list(_known.values()):
        known.update()
