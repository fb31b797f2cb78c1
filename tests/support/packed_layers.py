"""Random quantised layers of every format that is read: ``DRAWN[name](outputs, inputs)`` -> its layout and parts."""

from functools import partial

import torch
from torch import nn

from spec_compile import quantised
from spec_compile.capture.quantised import QuantisedLinear
from spec_compile.quantised import Packed
from spec_compile.quantised.awq import Awq
from spec_compile.quantised.bnb import Table4
from spec_compile.quantised.compressed_tensors import Int4Group, PerChannel, PerTensor
from spec_compile.quantised.fp4 import Fp4, Fp4Both
from spec_compile.quantised.fp8 import Fp8Block
from spec_compile.quantised.gptq import Gptq
from spec_compile.quantised.pack_cpu import MINIMUM, NONE, CodeGroups, numbers_of
from spec_compile.quantised.rows import W4A8
from spec_compile.quantised.torchao import Float8Weight, Int8Weight, IntGroups

FP8 = torch.float8_e4m3fn


def words(*shape):
    """Random words of eight nibbles."""
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int64).to(torch.int32)


def fp8_block(outputs, inputs, block=128):
    codes = (torch.randn(outputs, inputs) * 60).to(FP8)
    return Fp8Block(block, block), [codes, torch.rand(-(-outputs // block), -(-inputs // block)) / 60 / inputs**0.5]


def compressed(group, dtype=torch.bfloat16):
    def draw(outputs, inputs):
        scales = torch.rand(outputs, inputs // (group or inputs)) / 4 / inputs**0.5
        return Int4Group(group or inputs), [words(outputs, inputs // 8), scales.to(dtype)]

    return draw


def w4a8(group, fp8, packed):
    def draw(outputs, inputs):
        codes = words(outputs, inputs // 8) if packed else torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8)
        scales = torch.rand(outputs, inputs // (group or inputs)) / 4 / inputs**0.5
        return W4A8(group or inputs, fp8, packed), [codes, scales]

    return draw


def gptq(outputs, inputs, group=128, by_activation=False):
    scales = (torch.rand(inputs // group, outputs) / 4 / inputs**0.5).half()
    groups = (torch.arange(inputs) // group).int()
    groups = groups.flip(0).roll(5) if by_activation else groups
    return Gptq(1), [words(inputs // 8, outputs), words(inputs // group, outputs // 8), scales, groups]


def awq(outputs, inputs, group=64):
    scales = (torch.rand(inputs // group, outputs) / 4 / inputs**0.5).half()
    return Awq(group), [words(inputs, outputs // 8), words(inputs // group, outputs // 8), scales]


def in_bytes(layout, dtype, static=False):
    """A scale for each output; static: one for all, and one of activations."""

    def draw(outputs, inputs):
        codes = (torch.randn(outputs, inputs) * 40).clamp(-128, 127).to(dtype)
        scales = torch.rand((1,) if static else (outputs, 1)) / 40 / inputs**0.5
        return layout, [codes, scales, *([torch.tensor([0.007])] if static else [])]

    return draw


def int_groups(outputs, inputs, group=32):
    codes, zeros = (torch.randint(-8, 8, (outputs, inputs // size), dtype=torch.int8) for size in (1, group))
    return IntGroups(group, 4), [codes, (torch.rand(zeros.shape) / 4 / inputs**0.5).bfloat16(), zeros]


def bitsandbytes(nested, block=64):
    def draw(outputs, inputs):
        blocks = outputs * inputs // block
        codes, table = torch.randint(0, 256, (outputs * inputs // 2, 1), dtype=torch.uint8), torch.randn(16)
        if not nested:
            return Table4(block, 0), [codes, torch.rand(blocks) / inputs**0.5, table]
        scales = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
        second = [torch.rand(()), torch.rand(-(-blocks // 256)) / inputs**0.5, torch.randn(256)]
        return Table4(block, 1), [codes, scales, table, *second]

    return draw


def fp4(group, divides, both=False):
    """both: activations are rounded, too."""

    def draw(outputs, inputs):
        codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
        scales = torch.randint(118, 122, (outputs, inputs // group), dtype=torch.uint8)
        scales = (torch.rand(scales.shape) * 400).to(FP8) if group != 32 else scales
        parts = [codes, scales, torch.tensor([5000.0 if divides else 2e-4 if group != 32 else 1.0])]
        return (Fp4Both if both else Fp4)(group, divides), [*parts, torch.tensor([500.0])] if both else parts

    return draw


def groups(width, second):
    """As GGUF's Q8_0 and Q4_1."""

    def draw(outputs, inputs):
        codes = torch.randint(-128, 128, (outputs, inputs)) if width == 8 else torch.randint(0, 16, (outputs, inputs))
        units = torch.rand(outputs, inputs // 32, 1 if second == NONE else 2) / 4 / inputs**0.5
        units[:, :, 1:] *= -9.3
        numbers = 0 if width == 8 else numbers_of(torch.arange(16))
        return CodeGroups(width, 32, second, 0, numbers), [codes.to(torch.int8), units.half()]

    return draw


DRAWN = {
    "fp8": fp8_block, "ct fp8": in_bytes(PerChannel(), FP8), "ct int8": in_bytes(PerChannel(), torch.int8),
    "static fp8": in_bytes(PerTensor(1), FP8, True), "static int8": in_bytes(PerTensor(1), torch.int8, True),
    "ao int8": in_bytes(Int8Weight(), torch.int8), "ao fp8": in_bytes(Float8Weight(), FP8),
    "ct128": compressed(128), "ct32": compressed(32), "ct": compressed(None),
    "ct64 fp16": compressed(64, torch.float16), "ao int4": int_groups, "gptq": gptq, "awq": awq,
    "table": bitsandbytes(False), "nested": bitsandbytes(True), "nvfp4": fp4(16, 1), "modelopt fp4": fp4(16, 0),
    "mxfp4": fp4(32, 0), "w4a8": w4a8(128, 0, 1), "w4a8 32": w4a8(32, 0, 0), "w4a8 rows": w4a8(None, 0, 0),
    "w4a8 fp8": w4a8(128, 1, 1), "come rounded": in_bytes(PerChannel(rounded=1), FP8),
}  # fmt: skip
OF_CPU = {"q8_0": groups(8, NONE), "q4_1": groups(4, MINIMUM)}  # layouts that only the kernel of a CPU reads
TINY = {
    "fp8": partial(fp8_block, block=8), "ct fp8": DRAWN["ct fp8"], "ct int8": DRAWN["ct int8"],
    "static fp8": DRAWN["static fp8"], "ao int8": DRAWN["ao int8"], "ao fp8": DRAWN["ao fp8"], "ct": compressed(8),
    "ct rows": compressed(None), "ao int4": partial(int_groups, group=8), "gptq": partial(gptq, group=8),
    "gptq by activation": partial(gptq, group=8, by_activation=True), "awq": partial(awq, group=8),
    "table": bitsandbytes(False, 8), "nested": bitsandbytes(True, 8), "nvfp4": fp4(8, 1), "nvfp4 both": fp4(8, 1, True),
    "w4a8": w4a8(8, 0, 1), "w4a8 bytes": w4a8(8, 0, 0), "w4a8 fp8": w4a8(8, 1, 1),
}  # fmt: skip
"""The same with groups of 8, for layers of tiny models."""


def prepared(name, outputs, inputs, device="cpu", on_cpu=False):
    """A layer as its library has it, and as the kernel reads it, on a GPU or a CPU: layout and parts of both."""
    layout, parts = {**DRAWN, **OF_CPU}[name](outputs, inputs)
    parts = [part.to(device) for part in parts]
    return (layout, parts), quantised.repacked(layout, parts, inputs, on_cpu)


def packed(model, name, drawn=TINY):
    """`model` with random layers of a format in place of its linear layers, whose scales have the model's dtype.

    The output head stays, and so do layers whose sizes are no multiples of 8, or whose weight another module reads.
    """
    torch.manual_seed(0)
    for path, layer in list(model.named_modules()):
        is_linear = isinstance(layer, nn.Linear) and layer is not model.get_output_embeddings()
        if is_linear and not any(size % 8 for size in layer.weight.shape) and not path.endswith("dt_proj"):
            layout, parts = drawn[name](layer.out_features, layer.in_features)
            if isinstance(layout, (PerChannel, PerTensor, W4A8)):
                parts[1:] = [part.to(model.dtype) for part in parts[1:]]
            parts = {f"part{number}": part for number, part in enumerate(parts)}
            parent, _, child = path.rpartition(".")
            fresh = QuantisedLinear(Packed(layout, parts, layer.bias, layer.in_features))
            setattr(model.get_submodule(parent), child, fresh)
    return model
