"""GPTQ with 4 bits, in the layout that checkpoints publish (gptqmodel's kernel in plain PyTorch keeps it)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .codes import (
    Codes,
    Packed,
    Place,
    WeightLayout,
    class_path,
    packed_nibbles,
    require,
    require_scale,
    unpacked_nibbles,
)
from .formats import Format, Stored

LIBRARY = "gptqmodel.nn_modules.qlinear."
CLASSES = {f"{LIBRARY}torch.{name}" for name in ("TorchLinear", "TorchQuantLinear")}


@dataclass(frozen=True)
class Gptq(WeightLayout):
    """codes [I / 8, O] int32, eight inputs a word, the first in the lowest bits; zeros [G, O / 8] int32, eight outputs
    a word; scales [G, O] float16; groups [I] int32, the group of each input. offset: what is added to zeros."""

    offset: int
    merges = False

    def outputs(self, parts: Sequence[Tensor], inputs: int) -> int:
        return parts[0].shape[1]

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        codes, zeros, scales, groups = parts
        zeros = (unpacked_nibbles(zeros) + self.offset).to(scales.dtype).T.contiguous()
        weight, groups = unpacked_nibbles(codes.T).to(scales.dtype), groups.long()
        return weight.sub_(zeros[:, groups]).mul_(scales.T[:, groups])

    def unpack(self, parts: Sequence[Tensor], inputs: int) -> Codes | None:
        codes, zeros, scales, groups = parts
        first, last = int(groups[0]), int(groups[-1])
        group, rest = divmod(inputs, max(last - first + 1, 1))
        in_order = torch.arange(inputs, device=groups.device) // max(group, 1) + first
        if rest or not torch.equal(groups.long(), in_order):
            return None  # an order of activations
        zeros = unpacked_nibbles(zeros[first : last + 1]).int() + self.offset
        return Codes(unpacked_nibbles(codes.T), scales[first : last + 1], zeros)

    def restored(self, index: int, packed: WeightLayout, parts: Sequence[Tensor], inputs: int) -> Tensor | None:
        if index == 0:
            return packed_nibbles(packed.codes(parts, inputs)).T.contiguous()
        return packed.scales(parts, inputs) if index == 2 else None

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        """A share of the inputs keeps the scales and zeros of all groups, because its groups may be any of them."""
        return [Place((1, 1), (0, 8)), Place((1, 8)), Place((1, 1)), Place(inputs=(0, 1))]


def read(module: nn.Module) -> Packed | None:
    """A gptqmodel layer for PyTorch."""
    if class_path(module) not in CLASSES:
        require(
            not class_path(module).startswith(LIBRARY) or "awq" in class_path(module),
            "has repacked its weights for a kernel; load it with quantization_config=GPTQConfig(bits=4, "
            'backend="gptq_torch")',
        )
        return None
    inputs, outputs = module.in_features, module.out_features
    require_4_bits(module)
    rotates = getattr(module, "online_full_had", False) or getattr(module, "online_partial_had", False)
    require(not rotates, "rotates its input")
    require(inputs % 8 == 0 and outputs % 8 == 0, f"has {inputs} inputs and {outputs} outputs, no multiples of 8")
    require_words(module, (inputs // 8, outputs))
    parts = {name: getattr(module, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    return _packed(parts, 2 - module.qzero_format())._replace(bias=module.bias)


def _packed(parts: dict[str, Tensor], offset: int) -> Packed:
    words, zeros, scales, order = parts.values()
    inputs, outputs, groups = 8 * words.shape[0], words.shape[1], zeros.shape[0]
    require_scale("scales", scales, (groups, outputs))
    require(tuple(order.shape) == (inputs,), "has an order of activations of another shape")
    require(0 <= int(order.min()) and int(order.max()) < groups, "has groups without a scale")
    return Packed(Gptq(offset), parts, None, inputs)


def _of_file(tensors: dict[str, Tensor], config: dict) -> Packed:
    require_field(config, "bits", 4)
    require_field(config, "checkpoint_format", "gptq", "gptq_v2", default="gptq")
    parts = {name: tensors[name] for name in ("qweight", "qzeros", "scales")}
    inputs = 8 * len(parts["qweight"])
    in_order = torch.arange(inputs, dtype=torch.int32) // max(inputs // len(parts["scales"]), 1)
    parts["g_idx"] = tensors.get("g_idx", in_order)
    offset = int(config.get("checkpoint_format", "gptq") == "gptq")  # whose zeros are stored less 1  # guard: gptq-zero
    return _packed(parts, offset)


FORMAT = Format(
    read,
    {"gptq": (Stored(
        ".qweight", (".qzeros", ".scales"), (".g_idx",),
        lambda shapes, take: (shapes["qweight"][1], 8 * shapes["qweight"][0]), _of_file,
    ),)},
)  # fmt: skip


# Requirements that GPTQ and AWQ share.


def require_4_bits(module: nn.Module) -> None:
    """UnreadError unless the layer is plain and of 4 bits."""
    require(module.bits == 4, f"has {module.bits} bits, where 4 are read")
    require(not getattr(module, "adapter", None), "has an adapter inside")


def require_words(module: nn.Module, shape: tuple[int, int]) -> None:
    """UnreadError unless the packed weights are int32 of this shape."""
    words = module.qweight
    require(tuple(words.shape) == shape, "has packed weights of another shape")
    require(words.dtype == torch.int32, f"has packed weights of {words.dtype}, expected torch.int32")


def require_field(config: dict, name: str, *values, default=None) -> None:
    """UnreadError unless a field of a file's config has one of these values."""
    value = config.get(name, default)
    require(value in values, f"has {name} {value!r}, where {' and '.join(map(repr, values))} are read")
