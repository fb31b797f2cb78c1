"""AWQ with 4 bits, in the layout that checkpoints publish (gptqmodel's kernel in plain PyTorch keeps it)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from . import pack_gpu
from .codes import (
    Packed,
    Place,
    WeightLayout,
    class_path,
    grouped,
    packed_nibbles,
    require,
    require_scale,
    unpacked_nibbles,
)
from .gptq import LIBRARY, require_4_bits, require_words

CLASSES = {f"{LIBRARY}torch_awq.{name}" for name in ("AwqTorchLinear", "AwqTorchQuantLinear")}
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of a word has output 0, 1, ... 7."""


@dataclass(frozen=True)
class Awq(WeightLayout):
    """codes [I, O / 8] int32 and zeros [I / group, O / 8] int32, eight outputs a word, interleaved; scales
    [I / group, O] float16."""

    group: int
    merges = False

    def outputs(self, parts: Sequence[Tensor], inputs: int) -> int:
        return parts[0].shape[1] * 8

    def weight(self, parts: Sequence[Tensor], inputs: int) -> Tensor:
        codes, zeros, scales = parts
        weight = _outputs_in_order(codes).to(scales.dtype).unflatten(0, (-1, self.group))
        return weight.sub_(_outputs_in_order(zeros)[:, None]).mul_(scales[:, None]).flatten(0, 1).T

    def for_few_rows(self, parts: Sequence[Tensor], inputs: int) -> tuple[WeightLayout, list[Tensor]] | None:
        codes, zeros, scales = parts
        return pack_gpu.pack(_outputs_in_order(codes).T, _outputs_in_order(zeros).int(), scales)

    def restored(self, index: int, packed: WeightLayout, parts: Sequence[Tensor], inputs: int) -> Tensor | None:
        if index == 0:
            return _outputs_interleaved(packed.codes(parts, inputs).T)
        return packed.scales(parts, inputs) if index == 2 else None

    def places(self, parts: Sequence[Tensor]) -> list[Place]:
        groups = grouped(parts[2], 0, self.group)
        return [Place((1, 8), (0, 1)), Place((1, 8), groups), Place((1, 1), groups)]

    def of_inputs(self, size: int) -> "Awq":
        return Awq(min(self.group, size))


def _outputs_in_order(words: Tensor) -> Tensor:
    """words [R, C] int32 -> [R, 8 * C] uint8."""
    return unpacked_nibbles(words).unflatten(1, (-1, 8))[:, :, list(ORDER)].flatten(1)


def _outputs_interleaved(codes: Tensor) -> Tensor:
    """The inverse of `_outputs_in_order`."""
    return packed_nibbles(codes.unflatten(1, (-1, 8))[:, :, [ORDER.index(place) for place in range(8)]].flatten(1))


LAYOUTS = (Awq,)


def read(module: nn.Module) -> Packed | None:
    """A gptqmodel layer of AWQ for PyTorch."""
    if class_path(module) not in CLASSES:
        require(
            not class_path(module).startswith(LIBRARY) or "awq" not in class_path(module),
            "has repacked its weights for a kernel; load it with quantization_config=AwqConfig(bits=4, "
            'backend="torch_awq")',
        )
        return None
    inputs, outputs = module.in_features, module.out_features
    require_4_bits(module)
    groups = module.scales.shape[0]
    require(inputs % groups == 0 and outputs % 8 == 0, f"has {inputs} inputs in {groups} groups, {outputs} outputs")
    require_words(module, (inputs, outputs // 8))
    require(tuple(module.qzeros.shape) == (groups, outputs // 8), "has zeros of another shape")
    require_scale("scales", module.scales, (groups, outputs))
    parts = {name: getattr(module, name) for name in ("qweight", "qzeros", "scales")}
    return Packed(Awq(inputs // groups), parts, module.bias, inputs)
