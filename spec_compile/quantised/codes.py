"""`WeightLayout`: how a format keeps the weights of a linear layer, and what they mean in plain PyTorch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WEIGHTS = 1 << 23
"""Weights that are made numbers at a time."""
LAYOUTS: dict[str, type["WeightLayout"]] = {}
"""All classes of layouts by name; a new class adds itself."""


class UnreadError(ValueError):
    """A layer is of a class that is read, but not as it is; the message ends a sentence about the layer."""


class Place(NamedTuple):
    """Where a part has the outputs and the inputs of its layer: a dimension, and how many of them an index there stands
    for. None: it has no such dimension, so every share of the layer needs all of it.

    Words [O, I / 8] of eight inputs are ``Place((0, 1), (1, 8))``, and a factor for all weights is ``Place()``.
    """

    outputs: tuple[int, int] | None = None
    inputs: tuple[int, int] | None = None


def grouped(scales: Tensor, dim: int, group: int) -> tuple[int, int] | None:
    """`Place.inputs` of scales with one for each `group` inputs along a dimension; None if one serves all inputs."""
    return (dim, group) if scales.shape[dim] > 1 else None


class Codes(NamedTuple):
    """Weights of 4 bits in the one form between all formats and the packing for kernels.

    codes: [O, I] uint8 of 0 to 15.
    scales: [G, O], one for each I / G inputs.
    zeros: [G, O] or one for all. A weight is (code - zero) * scale, each step rounded to the dtype of the scales.
    table: [16] float32; with one, a weight is the number of its code times its scale, in float32.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | int = 8
    table: Tensor | None = None

    def weight(self) -> Tensor:
        """The weight [O, I]."""
        codes, scales, zeros, table = self
        numbers = codes.to(scales.dtype) if table is None else table[codes.int()]
        groups = numbers.unflatten(1, (len(scales), -1))
        if table is None:
            groups.sub_(zeros if isinstance(zeros, int) else zeros.T[:, :, None])
        return groups.mul_(scales.T[:, :, None]).flatten(1)


@dataclass(frozen=True)
class WeightLayout:
    """A layout of parts: the tensors of a layer, in order. Fields are integers, which are constants of a graph.

    I inputs, O outputs.
    merges: True if layers of one input can be merged, because every part has a dimension of outputs.
    dims: that dimension of each part.
    bits: bits of a weight, if the kernel for few rows reads the layout.
    of_cpu: True if only the kernel of a CPU reads it, so that it has no `packing`.
    """

    merges: ClassVar[bool] = True
    dims: ClassVar[tuple[int, ...]] = 0, 0, 0
    bits: ClassVar[int] = 8
    of_cpu: ClassVar[bool] = False

    def __init_subclass__(cls):
        LAYOUTS[cls.__name__] = cls

    @property
    def kind(self) -> str:
        """The text from which `quantised.layout_of` makes this layout again."""
        return " ".join(map(str, (type(self).__name__, *astuple(self))))

    @property
    def step(self) -> int:
        """Layers are merged if the outputs of all but the last are a multiple of this."""
        return 1

    @property
    def packing(self) -> tuple[str, int] | None:
        """How the kernel for few rows reads the parts, weights and scales: the name of a format there, and its group.
        None: not at all."""
        return None

    @property
    def table(self) -> int | None:
        """The bits of 16 numbers, float32, the first the lowest, if that kernel reads codes that stand for them."""
        return None

    def row_dtype(self, weight: Tensor) -> torch.dtype | None:
        """To what activations are rounded by row before they are multiplied by `weight`, the first part; None: they are
        not."""
        return None

    def constant_scale(self, parts: Sequence[Tensor]) -> Tensor | None:
        """The scale [1] with which all rows of activations are rounded; None: there is none, or each has its own."""
        return None

    @property
    def norms_after(self) -> bool:
        """True if activations may be divided by their root mean square after the product: the scales with which they
        are rounded follow it."""
        return True

    def supports(self, dtype: torch.dtype) -> bool:
        """True if that kernel takes activations of a dtype of 16 bits."""
        return True

    def unpack(self, parts: Sequence[Tensor], inputs: int) -> Codes | None:
        """The weights before they are packed for a kernel; None: the layout's weights have no such form, or products
        with it need more than them."""
        return None

    def for_few_rows(self, parts: Sequence[Tensor], inputs: int) -> tuple["WeightLayout", list[Tensor]] | None:
        """New parts with the same meaning, in a layout that has a `packing`; None: there is no such layout."""
        from .pack_gpu import pack  # which imports this module

        codes = self.unpack(parts, inputs)
        return None if codes is None else pack(codes)

    def fits(self, layers: list[list[Tensor]]) -> bool:
        """True if layers with these parts can be merged, provided that `step` allows it."""
        return True

    def restored(self, index: int, packed: "WeightLayout", parts: Sequence[Tensor], inputs: int) -> Tensor | None:
        """One of the layer's parts, by the layout and parts that `for_few_rows` has made of them; None: these do not
        have it."""
        return None

    def refilled(self, owner: nn.Parameter, parts: dict[str, Tensor]) -> nn.Parameter:
        """A parameter like `owner`, see `Packed`, with these of its parts, in formats whose parts have an owner."""
        raise NotImplementedError

    def cut(self, parts: Sequence[Tensor], begin: int, end: int) -> list[Tensor] | None:
        """The parts of the outputs begin .. end, where `begin` is a multiple of `step` and 8; None: they cannot be
        cut."""
        cuts = []
        for part, (place, _) in zip(parts, self.places(parts)):
            if place is not None:
                dim, step = place
                part = part.narrow(dim, begin // step, -(-end // step) - begin // step)
            cuts.append(part)
        return cuts

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        """Where each part has the outputs and the inputs."""
        raise NotImplementedError

    def of_inputs(self, size: int) -> "WeightLayout":
        """The layout of a share with `size` of the inputs. If activations are rounded with a scale for each row, which
        depends on all inputs, the share's come rounded."""
        return self

    def outputs(self, parts: Sequence[Tensor], inputs: int) -> int:
        """O of a layer with this number of inputs."""
        return parts[0].shape[0]

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        """The weight [O, I], rounded as the format defines it."""
        codes = self.unpack(parts, inputs)
        assert codes is not None, f"{type(self).__name__} has neither `weight` nor `unpack`"
        return codes.weight()

    def product(self, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """The layer: x [..., I] -> [..., O]. Formats that round activations override this."""
        return self.unrounded(x, parts, bias)

    def unrounded(self, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        """The layer without rounding of activations, the reference of checks in float32."""
        return self.multiplied(x, parts, bias, F.linear)

    def multiplied(self, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None, linear: Callable) -> Tensor:
        """``linear(x, weight, bias)`` with x as it is."""

        def multiply(parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
            return linear(x, self.weight(parts, x.shape[-1]).to(x.dtype), bias)

        return self.by_outputs(x, parts, bias, multiply)

    def by_outputs(self, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None, multiply: Callable) -> Tensor:
        """``multiply(parts, bias)``, [..., O] of x's dtype, for a few outputs at a time, because the weights of a large
        layer take much memory as numbers."""
        outputs, inputs = self.outputs(parts, x.shape[-1]), x.shape[-1]
        step = max(WEIGHTS // inputs, 256) // math.lcm(self.step, 8) * math.lcm(self.step, 8)
        if outputs <= step or self.cut(parts, 0, 0) is None:
            return multiply(parts, bias).to(x.dtype)
        out = x.new_empty(*x.shape[:-1], outputs)
        for begin in range(0, outputs, step):
            end = min(begin + step, outputs)
            out[..., begin:end] = multiply(self.cut(parts, begin, end), None if bias is None else bias[begin:end])
        return out


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` in x's dtype, which on a CPU is summed in float64.

    The last bit of a sum can move the codes of the next layer by a sixteenth, and on a CPU the order of summation
    depends on the number of rows. In float64 all orders give the same but for one sum in a billion.
    """
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)


def unpacked_nibbles(words: Tensor) -> Tensor:
    """words [R, C] int32 -> [R, 8 * C] uint8, the four lowest bits of each word first."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], dim=2).flatten(1)


def packed_nibbles(codes: Tensor) -> Tensor:
    """The inverse of `unpacked_nibbles`."""
    return (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int32)


class Packed(NamedTuple):
    """A layer as a format's ``read(module)`` returns it.

    parts: by name, in the layout's order. owner: the parameter inside which they are; "": they are the module's own.
    """

    layout: WeightLayout
    parts: dict[str, Tensor]
    bias: Tensor | None
    inputs: int
    owner: str = ""

    def weight(self) -> Tensor:
        """The weight [O, I], rounded as the format defines it."""
        return self.layout.weight([*self.parts.values()], self.inputs)

    def to(self, device: torch.device) -> "Packed":
        """The same layer on a device."""
        return self._replace(parts={name: part.to(device) for name, part in self.parts.items()})


def class_path(module: nn.Module) -> str:
    """The class of a module as ``package.module.Class``, to be compared with classes that need not be importable."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def require(condition: bool, problem: str) -> None:
    """UnreadError unless the condition holds."""
    if not condition:
        raise UnreadError(problem)


def require_scale(name: str, scale: Tensor, shape: tuple[int, ...]) -> None:
    """UnreadError unless a scale has this shape and is finite."""
    require(tuple(scale.shape) == shape, f"has {name} of shape {list(scale.shape)}, expected {list(shape)}")
    require(bool(scale.float().isfinite().all()), f"has {name} with values that are not finite")
