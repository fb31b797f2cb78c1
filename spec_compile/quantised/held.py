"""Layers that hold their weights only in the layout of the kernel for few rows, and make the library's on access.

`Restoring` replaces a layer's dictionaries of parameters and buffers. The layer's own forward, ``state_dict()``,
``copy.deepcopy`` and pickle find the library's tensors there, which live as long as they are used. Copies of the layer
hold the library's layout again.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from .bnb import Table4
from .codes import Packed, Place, WeightLayout, grouped
from .pack_cpu import DTYPES, NONE, POINT, CodeBlocks, CodeGroups, blocks, for_cpu, in_rows, is_of_cpu
from .pack_gpu import TableNibbles, Words
from .rows import W4A8, RoundedNibbles

PARTS = "spec_compile_words", "spec_compile_units"
"""The names of the buffers that have a layer's weights as the kernel reads them."""


class OneLayout:
    """A layer's former layout, from which its tensors are made again.

    source: the layer as it was read.
    packed, parts: the results of `WeightLayout.for_few_rows`.
    """

    def __init__(self, source: Packed, packed: WeightLayout, parts: list[Tensor]):
        self.source, self.packed, self.inputs = source.layout, packed, source.inputs
        self._owner, self._indices = source.owner, {}
        self.is_exact = False
        for index, (name, tensor) in enumerate(source.parts.items()):
            restored = source.layout.restored(index, packed, parts, source.inputs)
            if restored is not None:
                self._indices[name], is_equal = index, torch.equal(restored, tensor)
                self.is_exact = is_equal and (self.is_exact or index == 0)
        self.empty: dict[str, Tensor] = {}

    def replace(self, module: nn.Module, source: Packed, parts: list[Tensor]) -> None:
        """Let go of the library's tensors, which `source` has. parts: what is kept in their place."""
        empty = {name: source.parts[name].new_empty(0) for name in self._indices}
        if self._owner:
            shapes = {name: source.parts[name].to("meta") for name in self._indices}
            owner = module._parameters[self._owner]
            self._owned = self.source.refilled(owner, shapes)
            for name, value in vars(module).items():  # as a `Linear4bit` holds its parameter's state, too
                if value is not None and value is vars(owner).get(name):
                    vars(module)[name] = vars(self._owned).get(name, value)
            empty = {self._owner: parts[0].new_empty(0)}
        self._parameters, self._buffers = Restoring(module._parameters, self), Restoring(module._buffers, self)
        for name, tensor in empty.items():
            holder = self._holder(name)
            if holder is self._parameters:
                tensor = nn.Parameter(tensor, requires_grad=False)
            self.empty[name] = tensor
            dict.__setitem__(holder, name, tensor)
        module.__dict__.update(_parameters=self._parameters, _buffers=self._buffers)
        for name, part in zip(PARTS, parts):
            module.register_buffer(name, part.data, persistent=False)  # a view would keep its base in memory

    def is_empty(self, name: str) -> bool:
        """True if a parameter or buffer has to be made."""
        return name in self.empty and dict.get(self._holder(name), name) is self.empty[name]

    @property
    def parts(self) -> list[Tensor]:
        return [dict.__getitem__(self._buffers, name) for name in PARTS]

    @torch.no_grad()
    def restored(self, name: str) -> Tensor:
        """The library's tensor of that name."""
        if not self._owner:
            tensor = self.source.restored(self._indices[name], self.packed, self.parts, self.inputs)
            is_parameter = isinstance(self.empty[name], nn.Parameter)
            return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
        parts = self.parts
        tensors = {
            part: self.source.restored(index, self.packed, parts, self.inputs) for part, index in self._indices.items()
        }
        return self.source.refilled(self._owned, tensors)

    def fill(self) -> None:
        """Put the library's tensors back, before a state dict is loaded."""
        for name in self.empty:
            if self.is_empty(name):
                dict.__setitem__(self._holder(name), name, self.restored(name))

    @torch.no_grad()
    def take(self, source: Packed) -> None:
        """Take the values of the library's tensors over and let go of these, if they are of the same layout."""
        form = self.source == source.layout and for_kernel(
            self.source, list(source.parts.values()), self.inputs, is_of_cpu(self.packed)
        )
        if not form or [_form(part) for part in form[1]] != [_form(part) for part in self.parts]:
            return
        for old, new in zip(self.parts, form[1]):
            old.copy_(new)
        for name, empty in self.empty.items():
            dict.__setitem__(self._holder(name), name, empty)

    def _holder(self, name: str) -> dict:
        return self._parameters if dict.__contains__(self._parameters, name) else self._buffers


class Restoring(dict):
    """Parameters or buffers of a layer, of which those that are empty are made when they are read."""

    def __init__(self, tensors: dict, layer: OneLayout):
        super().__init__(tensors)
        self.layer = layer

    def __getitem__(self, name: str) -> Tensor | None:
        return self.layer.restored(name) if self.layer.is_empty(name) else super().__getitem__(name)

    def __setitem__(self, name: str, value: Tensor | None) -> None:
        if self.layer.is_empty(name) and isinstance(value, Tensor):
            current = self[name]
            if _form(value) == _form(current) and _equal(value.to(current.device), current):
                return  # as ``module.to(...)`` assigns it
        super().__setitem__(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def values(self):
        return (self[name] for name in self)

    def items(self):
        return ((name, self[name]) for name in self)

    def __deepcopy__(self, memo: dict) -> dict:
        # A tensor that was just made is no one else's: the memo would keep it for as long as the copying takes.
        return {
            name: copy.deepcopy(self[name], {} if self.layer.is_empty(name) else memo)
            for name in self
            if name not in PARTS
        }

    def __reduce_ex__(self, protocol: int) -> tuple:
        return dict, ({name: self[name] for name in self if name not in PARTS},)


def layer_of(module: nn.Module) -> OneLayout | None:
    """How the tensors of a module are made, if they are not there, but in the layout of the kernel."""
    parameters = module._parameters
    return parameters.layer if isinstance(parameters, Restoring) else None


def _form(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.dtype


def _equal(a: Tensor, b: Tensor) -> bool:
    """`torch.equal`, also of tensors that hold others, as torchao's, which need not have it."""
    if not hasattr(a, "__tensor_flatten__"):
        return torch.equal(a, b)
    names, settings = a.__tensor_flatten__()
    return (names, settings) == b.__tensor_flatten__() and all(_equal(getattr(a, n), getattr(b, n)) for n in names)


# Layers of which the kernel for few rows reads a copy in another layout, made once for all graphs.


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

    The first part of a copy has the record, `made_of`. It lives as long and holds the tensors whose addresses are keys.
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


# Quantised layers in layouts whose parts can be cut: a share of a layer is cut there and then packed as it was.


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
        share = Table4(layout.block, 0)
        return Rearranged(share.places(rows), lambda: rows, lambda cut, inputs: (share, _contiguous(cut)))
    if isinstance(layout, CodeBlocks):
        groups, rows = layout.rows(parts, inputs)
        places, unpack = groups.places(rows), lambda: layout.rows(parts, inputs)[1]
        return Rearranged(places, unpack, lambda cut, inputs: blocks(groups, *cut))
    if not isinstance(layout, Words if by_inputs else TableNibbles):
        return None
    # Words of a GPU are cut as codes and scales in rows, and become words again.
    scales, group = layout.scales(parts, inputs).T, min(layout.group, inputs)
    places = [Place((0, 1), (1, 1)), Place((0, 1), grouped(scales, 1, group))]

    def unpack() -> list[Tensor]:
        if isinstance(layout, RoundedNibbles):
            return [layout.codes(parts, inputs).to(torch.int8).sub_(8), scales]
        return in_rows(layout.unpack(parts, inputs), group)[1]

    def pack(cut: list[Tensor], inputs: int) -> tuple[WeightLayout, list[Tensor]]:
        if isinstance(layout, RoundedNibbles):
            share = W4A8(group, layout.fp8, 0).of_inputs(inputs)
        else:
            second = POINT if cut[1].shape[2] > 1 else NONE
            share = CodeGroups(4, group, second, DTYPES.index(cut[1].dtype), layout.table or 0)
        cut = _contiguous(cut)
        return share.for_few_rows(cut, inputs) or (share, cut)

    return Rearranged(places, unpack, pack)


def _contiguous(parts: list[Tensor]) -> list[Tensor]:
    return [part.contiguous() for part in parts]
