"""compressed-tensors (llm-compressor's checkpoints): 8 bits with a scale for each output or for all, and 4 bits in
groups, integers (W4A16 and W4A8) or NVFP4.

A model of this library unpacks all its layers at its first own forward, in place. So layers are read before that.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..parallel.slices import whole
from .codes import Codes, Packed, Place, WeightLayout, grouped, packed_nibbles, require, require_scale, unpacked_nibbles
from .formats import Format, Stored, sized_as
from .fp4 import Fp4, Fp4Both, fp4_of_file
from .fp8 import EIGHT_BITS, FP8
from .rows import LARGEST, W4A8, RoundsRows
from .torchao import IntGroups

FORMS_OF_8_BITS = {"float-quantized", "int-quantized", "naive-quantized"}
NVFP4 = "nvfp4-pack-quantized"


@dataclass(frozen=True)
class PerChannel(RoundsRows):
    """weight [O, I] float8_e4m3fn or int8, scales [O, 1] of the model's dtype. Activations are rounded to the weights'
    type with a scale for each row, all in their own dtype, as the library does. static: their scale is instead a
    constant, which is the last of scales [O + 1, 1]. rounded: they come rounded, see `rounded_over_ranks`."""

    static: int = 0
    rounded: int = 0
    packing = "channels", 1

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        codes, scales = parts
        return codes.to(scales.dtype) * scales[: len(codes)]

    def row_dtype(self, weight: Tensor) -> torch.dtype | None:
        return None if self.rounded else weight.dtype

    @property
    def norms_after(self) -> bool:
        return not self.static  # guard: scale-before-norm

    def constant_scale(self, parts: Sequence[Tensor]) -> Tensor | None:
        return parts[1][-1] if self.static else None

    def of_inputs(self, size: int) -> "PerChannel":
        return self if self.static else replace(self, rounded=1)

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        return [Place((0, 1), (1, 1)), Place((0, 1))]


@dataclass(frozen=True)
class PerTensor(PerChannel):
    """`PerChannel` with weight [O, I], scales [O, 1] or one for all [1], and if static the activations' scale [1]."""

    merges = False
    packing = None

    def constant_scale(self, parts: Sequence[Tensor]) -> Tensor | None:
        return parts[2] if self.static else None

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        scales = Place() if parts[1].numel() == 1 else Place((0, 1))
        return [Place((0, 1), (1, 1)), scales, *([Place()] if self.static else [])]

    def for_few_rows(self, parts: Sequence[Tensor], inputs: int) -> tuple[WeightLayout, list[Tensor]]:
        weight, scales, *activations = parts
        scales = scales.view(-1, 1).expand(len(weight), 1)
        return PerChannel(self.static, self.rounded), [
            weight,
            torch.cat([scales, *(scale.view(1, 1) for scale in activations)]),
        ]

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        layout, parts = self.for_few_rows(parts, inputs)
        return layout.weight(parts, inputs)

    def product(self, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        layout, parts = self.for_few_rows(parts, x.shape[-1])
        return layout.product(x, parts, bias)


@dataclass(frozen=True)
class Int4Group(WeightLayout):
    """weight [O, I / 8] int32, eight values of 4 bits a word, the first in the lowest bits, each plus 8; scales
    [O, I / group] of the model's dtype."""

    group: int

    def unpack(self, parts: Sequence[Tensor], inputs: int) -> Codes:
        words, scales = parts
        return Codes(unpacked_nibbles(words), scales.T)

    def restored(self, index: int, packed: WeightLayout, parts: Sequence[Tensor], inputs: int) -> Tensor | None:
        return (
            packed_nibbles(packed.codes(parts, inputs)) if index == 0 else packed.scales(parts, inputs).T.contiguous()
        )

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        return [Place((0, 1), (1, 8)), Place((0, 1), grouped(parts[1], 1, self.group))]

    def of_inputs(self, size: int) -> "Int4Group":
        return Int4Group(min(self.group, size))


def read(module: nn.Module) -> Packed | None:
    """An `nn.Linear` with a ``quantization_scheme``, still compressed."""
    scheme = getattr(module, "quantization_scheme", None)
    if scheme is None:
        return None
    require(type(module) is nn.Linear, "quantises something besides linear layers (a cache, or activations)")
    status = getattr(module.quantization_status, "value", module.quantization_status)
    require(
        status == "compressed",
        "was unpacked by the model's own forward; load it again, and call speculate() before that",
    )
    require(scheme.output_activations is None, "quantises what it returns")
    form = getattr(scheme.format, "value", scheme.format)
    require(form in FORMS_OF_8_BITS or form in ("pack-quantized", NVFP4), f"is of the form {form!r}")
    if scheme.weights.num_bits == 4 and scheme.weights.type == "int" and scheme.input_activations is not None:
        return _w4a8(module, scheme, form)
    if form in FORMS_OF_8_BITS:
        return _eight_bits(module, scheme, form)
    return _nvfp4(module, scheme) if form == NVFP4 else _four_bits(module, scheme)


def _eight_bits(module: nn.Linear, scheme, form: str) -> Packed:
    weights, rows = scheme.weights, scheme.input_activations
    by_channel = weights.strategy == "channel"
    is_read = weights.symmetric and (by_channel or weights.strategy == "tensor")
    require(is_read, f"has weights of the strategy {weights.strategy!r}, or zero points")
    is_read = rows is not None and (rows.strategy, rows.dynamic) in (("token", True), ("tensor", False))
    require(
        is_read and rows.symmetric and (rows.num_bits, rows.type) == (weights.num_bits, weights.type),
        "does not round activations to the type of its weights, with a scale for each token or a constant one",
    )
    require(module.weight.dtype in LARGEST, f"has weights of {module.weight.dtype} in the form {form!r}")
    require_scale("weight_scale", module.weight_scale, (module.out_features, 1) if by_channel else (1,))
    parts = {"weight": module.weight, "weight_scale": module.weight_scale}
    if by_channel and rows.dynamic:
        return Packed(PerChannel(), parts, module.bias, module.in_features)
    if not rows.dynamic:
        require_scale("input_scale", module.input_scale, (1,))
        require(float(whole(module.input_scale)) > 0, "has an input_scale that is not above 0")
        parts["input_scale"] = module.input_scale
    return Packed(PerTensor(int(not rows.dynamic)), parts, module.bias, module.in_features)


def _four_bits(module: nn.Linear, scheme) -> Packed:
    weights = scheme.weights
    require(scheme.input_activations is None, f"rounds activations, with weights of {weights.num_bits} bits")
    group = _group_of(module, weights)
    parts = {"weight_packed": _words_of(module), "weight_scale": module.weight_scale}
    return Packed(Int4Group(group), parts, module.bias, module.in_features)


def _w4a8(module: nn.Linear, scheme, form: str) -> Packed:
    """4 bits, as words or a byte each, with activations of 8 bits."""
    rows, group = scheme.input_activations, _group_of(module, scheme.weights)
    is_read = (rows.num_bits, rows.strategy, rows.dynamic, rows.symmetric) == (8, "token", True, True)
    require(is_read, "does not round activations to 8 bits with a scale for each token")
    if form == "pack-quantized":
        name, codes = "weight_packed", _words_of(module)
    else:
        name, codes = "weight", module.weight
        require(codes.dtype == torch.int8, f"has weights of {codes.dtype}, expected torch.int8")
        require(int(codes.min()) >= -8 and int(codes.max()) <= 7, "has weights that are not of 4 bits")
    parts = {name: codes, "weight_scale": module.weight_scale}
    layout = W4A8(group, int(rows.type == "float"), int(form == "pack-quantized"))
    return Packed(layout, parts, module.bias, module.in_features)


def _group_of(module: nn.Linear, weights) -> int:
    """The inputs that share a scale of 4 bits; UnreadError unless the scheme is read and the scales fit."""
    outputs, inputs = module.out_features, module.in_features
    require(weights.num_bits == 4 and weights.symmetric, f"has {weights.num_bits} bits, or zero points")
    require(weights.strategy in ("group", "channel"), f"has weights of the strategy {weights.strategy!r}")
    group = weights.group_size if weights.strategy == "group" else inputs
    require(inputs % 8 == 0 and inputs % group == 0, f"has {inputs} inputs, no multiple of 8 and of its group {group}")
    require_scale("weight_scale", module.weight_scale, (outputs, inputs // group))
    return group


def _words_of(module: nn.Linear) -> Tensor:
    """The weights of 4 bits, eight in an int32 [O, I / 8]."""
    words = module.weight_packed
    require(tuple(words.shape) == (module.out_features, module.in_features // 8), "has packed weights of another shape")
    return words


def _nvfp4(module: nn.Linear, scheme) -> Packed:
    """NVFP4, or without rounded activations NVFP4A16: 4 bits with a scale in FP8 for each 16 inputs, over a scale for
    all."""
    outputs, inputs, group = module.out_features, module.in_features, 16
    require(inputs % group == 0, f"has {inputs} inputs, no multiple of {group}")
    codes, scales, divisor = module.weight_packed, module.weight_scale, module.weight_global_scale
    is_packed = codes.dtype == torch.uint8 and tuple(codes.shape) == (outputs, inputs // 2)
    require(is_packed, "has packed weights of another shape")
    require(scales.dtype == FP8, f"has scales of {scales.dtype}, expected {FP8}")
    require_scale("weight_scale", scales, (outputs, inputs // group))
    require_scale("weight_global_scale", divisor, (1,))
    parts = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": divisor}
    rows = scheme.input_activations
    if rows is None:
        return Packed(Fp4(group, 1), parts, module.bias, inputs)
    is_read = (rows.num_bits, rows.type, rows.group_size, rows.scale_dtype) == (4, "float", group, FP8)
    require(
        is_read and rows.dynamic == "local" and rows.symmetric,
        "does not round activations to NVFP4, with scales in FP8 for each 16 inputs that are computed on the fly",
    )
    divisor = module.input_global_scale
    require_scale("input_global_scale", divisor, (1,))
    require(float(whole(divisor)) > 0, "has an input_global_scale that is not above 0")
    parts["input_global_scale"] = divisor
    return Packed(Fp4Both(group, 1), parts, module.bias, inputs)


def _words_of_file(tensors: dict[str, Tensor], config: dict) -> Packed:
    """``pack-quantized``: 4 or 8 bits, each plus half of its range, the first in the low bits."""
    words, scales = tensors["weight_packed"], tensors["weight_scale"]
    outputs, inputs = tensors["weight_shape"].tolist()
    bits = 32 * words.shape[1] / inputs
    require(bits in (4, 8), f"has {bits:g} bits, where 4 and 8 are read")

    def unpacked(words: Tensor) -> Tensor:
        """words [R, C] int32 -> numbers [R, 32 / bits * C] int8 from minus half of the range."""
        codes = unpacked_nibbles(words) if bits == 4 else words.contiguous().view(torch.uint8)
        return (codes.short() - (1 << int(bits) - 1)).to(torch.int8)

    zeros = tensors.get("weight_zero_point")
    zeros = torch.zeros(scales.shape, dtype=torch.int8) if zeros is None else unpacked(zeros.T).T
    parts = {"codes": unpacked(words), "scales": scales, "zeros": zeros[:outputs].contiguous()}
    return Packed(IntGroups(inputs // scales.shape[1], int(bits)), parts, None, inputs)


def _fp4_of_file(tensors: dict[str, Tensor], config: dict) -> Packed:
    """NVFP4, whose global scale divides, or MXFP4, which has none."""
    divisor = tensors.get("weight_global_scale")
    return fp4_of_file(tensors["weight_packed"], tensors["weight_scale"], divisor, divides=divisor is not None)


FORMAT = Format(
    read,
    {"compressed-tensors": (
        Stored(
            ".weight_packed", (".weight_scale", ".weight_shape"), (".weight_zero_point",),
            lambda shapes, take: tuple(take("weight_shape").tolist()), _words_of_file,
        ),
        Stored(
            ".weight_packed", (".weight_scale",), (".weight_global_scale", ".input_global_scale"),
            sized_as("weight_packed", columns=2), _fp4_of_file,
        ),
        EIGHT_BITS,
    )},
)  # fmt: skip
