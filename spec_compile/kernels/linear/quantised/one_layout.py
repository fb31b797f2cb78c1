"""Layers that hold their weights only in the layout of the kernel for few rows, and make the library's on access.

`Restoring` replaces a layer's dictionaries of parameters and buffers. The layer's own forward, ``state_dict()``,
``copy.deepcopy`` and pickle find the library's tensors there, which live as long as they are used. Copies of the layer
hold the library's layout again.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import is_of_cpu
from .layout import Packed, WeightLayout
from .repack import for_kernel

PARTS = "spec_compile_words", "spec_compile_units"
"""The names of the buffers that have a layer's weights as the kernel reads them."""


class OneLayout:
    """A layer's former layout, from which its tensors are made again.

    source: the layer as it was read.
    packed, parts: the results of `WeightLayout.for_few_rows`.
    refilled: makes an owner of parts anew, see `Packed`.
    """

    def __init__(self, source: Packed, packed: WeightLayout, parts: list[Tensor], refilled: Callable | None):
        self.source, self.packed, self.inputs, self._refilled = source.layout, packed, source.inputs, refilled
        self._owner, self._indices = source.owner, {}
        self.is_exact = False
        for index, (name, tensor) in enumerate(source.parts.items()):
            restored = source.layout.restored(index, packed, parts, source.inputs)
            if restored is not None:
                self._indices[name], is_equal = index, torch.equal(restored, tensor)
                self.is_exact = is_equal and (self.is_exact or index == 0)
        self.empty: dict[str, Tensor] = {}

    def replace(self, module: nn.Module, source: Packed, parts: list[Tensor]) -> None:
        """Let go of the library's tensors, those of `source`. parts: what is kept in their place."""
        empty = {name: source.parts[name].new_empty(0) for name in self._indices}
        if self._owner:
            shapes = {name: source.parts[name].to("meta") for name in self._indices}
            owner = module._parameters[self._owner]
            self._owned = self._refilled(owner, shapes)
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
        return self._refilled(self._owned, tensors)

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
