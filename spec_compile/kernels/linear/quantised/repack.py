"""Layers of which the kernel for few rows reads a copy in another layout, made once for all graphs."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from torch import Tensor

from .blocks import for_cpu, is_of_cpu
from .layout import WeightLayout


@dataclass(eq=False)
class Repacked:
    """Parts in a layout that the kernel reads, on a CPU or a GPU, and the layer that they were made of: layout, parts,
    inputs."""

    layout: WeightLayout
    parts: list[Tensor]
    source: tuple[WeightLayout, list[Tensor], int]
    on_cpu: bool

    def update(self) -> None:
        """Raises ValueError if the layer's present values take another layout."""
        layout, parts = for_kernel(*self.source, self.on_cpu)
        if layout != self.layout:
            raise ValueError(
                f"quantised weights were changed, and their copy would be {layout.kind!r}, not {self.layout.kind!r}, "
                "because of other zero points, larger scales or another table; load the model again, then speculate()"
            )
        for old, new in zip(self.parts, parts):
            old.copy_(new)


_known: "WeakValueDictionary[tuple, Repacked]" = WeakValueDictionary()
"""By the addresses of the layer's parts."""


def for_kernel(
    layout: WeightLayout, parts: Sequence[Tensor], inputs: int, on_cpu: bool
) -> tuple[WeightLayout, list[Tensor]] | None:
    """A layout that the kernel for few rows of a CPU or a GPU reads, and parts in it; None: there is none."""
    return for_cpu(layout, parts, inputs) if on_cpu else layout.for_few_rows(parts, inputs)


def repacked(
    layout: WeightLayout, parts: Sequence[Tensor], inputs: int, on_cpu: bool = False
) -> tuple[WeightLayout, list[Tensor]] | None:
    """`for_kernel`, once for all graphs.

    Where the new parts are a copy, the first has it in `made_of`, which also keeps the layer's addresses in use.
    """
    is_read = is_of_cpu(layout) if on_cpu else layout.packing is not None
    if is_read and all(part.is_contiguous() for part in parts):
        return layout, list(parts)
    key = layout.kind, inputs, on_cpu, *((part.data_ptr(), part.stride()) for part in parts)
    known = _known.get(key)
    if known is None:
        form = for_kernel(layout, parts, inputs, on_cpu)
        if form is None:
            return None
        known = _known[key] = Repacked(*form, (layout, list(parts), inputs), on_cpu)
        known.parts[0].made_of = known
    return known.layout, known.parts


def update() -> None:
    """Copies have the present values of the layers that they were made of."""
    for known in list(_known.values()):
        known.update()
