"""GPTQ with 4 bits, in the layout that checkpoints publish (gptqmodel's kernel in plain PyTorch keeps it)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import pack_gpu
from .codes import Packed, Place, WeightLayout, class_path, packed_nibbles, require, require_scale, unpacked_nibbles

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

    def for_few_rows(self, parts: Sequence[Tensor], inputs: int) -> tuple[WeightLayout, list[Tensor]] | None:
        codes, zeros, scales, groups = parts
        first, last = int(groups[0]), int(groups[-1])
        group, rest = divmod(inputs, last - first + 1)
        in_order = torch.arange(inputs, device=groups.device) // max(group, 1) + first
        if rest or not torch.equal(groups.long(), in_order):
            return None  # an order of activations
        zeros = unpacked_nibbles(zeros[first : last + 1]).int() + self.offset
        return pack_gpu.pack(unpacked_nibbles(codes.T), zeros, scales[first : last + 1])

    def restored(self, index: int, packed: WeightLayout, parts: Sequence[Tensor], inputs: int) -> Tensor | None:
        if index == 0:
            return packed_nibbles(packed.codes(parts, inputs)).T.contiguous()
        return packed.scales(parts, inputs) if index == 2 else None

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        """A share of the inputs keeps the scales and zeros of all groups, because its groups may be any of them."""
        return [Place((1, 1), (0, 8)), Place((1, 8)), Place((1, 1)), Place(inputs=(0, 1))]


LAYOUTS = (Gptq,)


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
    groups = module.qzeros.shape[0]
    require_scale("scales", module.scales, (groups, outputs))
    require(tuple(module.g_idx.shape) == (inputs,), "has an order of activations of another shape")
    require(0 <= int(module.g_idx.min()) and int(module.g_idx.max()) < groups, "has groups without a scale")
    parts = {name: getattr(module, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
    return Packed(Gptq(2 - module.qzero_format()), parts, module.bias, inputs)


# Requirements that gptqmodel's layers of GPTQ and of AWQ share.


def require_4_bits(module: nn.Module) -> None:
    """UnreadError unless the layer is plain and of 4 bits."""
    require(module.bits == 4, f"has {module.bits} bits, where 4 are read")
    require(not getattr(module, "adapter", None), "has an adapter inside")


def require_words(module: nn.Module, shape: tuple[int, int]) -> None:
    """UnreadError unless the packed weights are int32 of this shape."""
    words = module.qweight
    require(tuple(words.shape) == shape, "has packed weights of another shape")
    require(words.dtype == torch.int32, f"has packed weights of {words.dtype}, expected torch.int32")
