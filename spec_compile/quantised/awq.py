"""AWQ with 4 bits, in the layout that checkpoints publish (gptqmodel's kernel in plain PyTorch keeps it)."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from .codes import (
    Codes,
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
from .formats import Format, Stored
from .gptq import LIBRARY, require_4_bits, require_field, require_words

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

    def unpack(self, parts: Sequence[Tensor], inputs: int) -> Codes:
        codes, zeros, scales = parts
        return Codes(_outputs_in_order(codes).T, scales, _outputs_in_order(zeros).int())

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
    return _packed(module.qweight, module.qzeros, module.scales)._replace(bias=module.bias)


def _packed(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Packed:
    (inputs, words), groups = qweight.shape, len(scales)
    require(tuple(qzeros.shape) == (groups, words), "has zeros of another shape")
    require_scale("scales", scales, (groups, 8 * words))
    return Packed(Awq(inputs // groups), {"qweight": qweight, "qzeros": qzeros, "scales": scales}, None, inputs)


def _of_file(tensors: dict[str, Tensor], config: dict) -> Packed:
    require_field(config, "bits", 4)
    require_field(config, "version", "gemm", default="gemm")
    return _packed(**tensors)


FORMAT = Format(
    read,
    {"awq": (Stored(
        ".qweight", (".qzeros", ".scales"), (),
        lambda shapes, take: (8 * shapes["qweight"][1], shapes["qweight"][0]), _of_file,
    ),)},
)  # fmt: skip
