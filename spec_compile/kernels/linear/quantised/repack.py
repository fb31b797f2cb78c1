"""Layers of which the kernel for few rows reads a copy in another layout, made once for all graphs."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from torch import Tensor

from .layout import Layout


@dataclass(eq=False)
class Repacked:
    """Parts in a layout that the kernel reads, and the layers that they were made of: layout, parts of each, inputs."""

    layout: Layout
    parts: list[Tensor]
    source: tuple[Layout, list[list[Tensor]], int]

    def update(self) -> None:
        """Raises ValueError if the layers' present values take another layout."""
        layout, parts = _repacked(*self.source)
        if layout != self.layout:
            raise ValueError(
                f"quantised weights were changed, and their copy would be {layout.kind!r}, not {self.layout.kind!r}, "
                "because of other zero points, larger scales or another table; load the model again, then speculate()"
            )
        for old, new in zip(self.parts, parts):
            old.copy_(new)


_known: "WeakValueDictionary[tuple, Repacked]" = WeakValueDictionary()
"""By the addresses of the layers' parts."""


def repacked(layout: Layout, layers: Sequence[Sequence[Tensor]], inputs: int) -> tuple[Layout, list[Tensor]] | None:
    """A layout that the kernel for few rows reads, and its parts, in which the outputs of all layers lie one behind the
    other; None if it does not read such layers. layers: the parts of each in `layout`.

    Where the new parts are a copy, the first has it in `made_of`, which also keeps the layers' addresses in use.
    """
    if layout.packing is not None:
        return (layout, list(layers[0])) if len(layers) == 1 else None
    key = layout.kind, inputs, *(part.data_ptr() for parts in layers for part in parts)
    known = _known.get(key)
    if known is None:
        source = layout, [list(parts) for parts in layers], inputs
        form = _repacked(*source)
        if form is None:
            return None
        known = _known[key] = Repacked(*form, source)
        known.parts[0].made_of = known
    return known.layout, known.parts


def _repacked(layout: Layout, layers: list[list[Tensor]], inputs: int) -> tuple[Layout, list[Tensor]] | None:
    """`repacked` without a look at what is known."""
    forms = [layout.for_few_rows(parts, inputs) for parts in layers]
    if None in forms or len({form[0] for form in forms}) > 1:
        return None
    parts = forms[0][0].joined([form[1] for form in forms])
    return None if parts is None else (forms[0][0], parts)


def update() -> None:
    """Copies have the present values of the layers that they were made of."""
    for known in list(_known.values()):
        known.update()
