"""Random layers of every quantised layout, as their libraries have them."""

import torch

from spec_compile.kernels.linear import quantised
from spec_compile.kernels.linear.quantised.awq import Awq
from spec_compile.kernels.linear.quantised.bitsandbytes import Table4
from spec_compile.kernels.linear.quantised.compressed_tensors import Int4Group, PerChannel, PerTensor
from spec_compile.kernels.linear.quantised.fp4 import Fp4
from spec_compile.kernels.linear.quantised.fp8_block import Fp8Block
from spec_compile.kernels.linear.quantised.gptq import Gptq
from spec_compile.kernels.linear.quantised.torchao import Float8Weight, Int8Weight, IntGroups
from spec_compile.kernels.linear.quantised.w4a8 import W4A8

FP8 = torch.float8_e4m3fn


def words(*shape):
    """Random words of eight nibbles."""
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int64).to(torch.int32)


def fp8_block(outputs, inputs):
    codes = (torch.randn(outputs, inputs) * 60).to(FP8)
    return Fp8Block(128, 128), [codes, torch.rand(-(-outputs // 128), -(-inputs // 128)) / 60 / inputs**0.5]


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


def gptq(outputs, inputs, group=128):
    scales = (torch.rand(inputs // group, outputs) / 4 / inputs**0.5).half()
    groups = (torch.arange(inputs) // group).int()
    return Gptq(1), [words(inputs // 8, outputs), words(inputs // group, outputs // 8), scales, groups]


def awq(outputs, inputs, group=64):
    scales = (torch.rand(inputs // group, outputs) / 4 / inputs**0.5).half()
    return Awq(group), [words(inputs, outputs // 8), words(inputs // group, outputs // 8), scales]


def static(dtype):
    def draw(outputs, inputs):
        codes = (torch.randn(outputs, inputs) * 40).clamp(-128, 127).to(dtype)
        return PerTensor(1), [codes, torch.rand(1) / 40 / inputs**0.5, torch.tensor([0.007])]

    return draw


def channels(layout, dtype):
    def draw(outputs, inputs):
        codes = (torch.randn(outputs, inputs) * 40).clamp(-128, 127).to(dtype)
        return layout, [codes, torch.rand(outputs, 1) / 40 / inputs**0.5]

    return draw


def int_groups(outputs, inputs):
    codes, zeros = (torch.randint(-8, 8, (outputs, inputs // size), dtype=torch.int8) for size in (1, 32))
    return IntGroups(32, 4), [codes, (torch.rand(zeros.shape) / 4 / inputs**0.5).bfloat16(), zeros]


def bitsandbytes(nested):
    def draw(outputs, inputs):
        blocks = outputs * inputs // 64
        codes, table = torch.randint(0, 256, (outputs * inputs // 2, 1), dtype=torch.uint8), torch.randn(16)
        if not nested:
            return Table4(64, 0), [codes, torch.rand(blocks) / inputs**0.5, table]
        scales = torch.randint(0, 256, (blocks,), dtype=torch.uint8)
        second = [torch.rand(()), torch.rand(-(-blocks // 256)) / inputs**0.5, torch.randn(256)]
        return Table4(64, 1), [codes, scales, table, *second]

    return draw


def fp4(group, divides):
    def draw(outputs, inputs):
        codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8)
        scales = torch.randint(118, 122, (outputs, inputs // group), dtype=torch.uint8)
        scales = (torch.rand(scales.shape) * 400).to(FP8) if group == 16 else scales
        return Fp4(group, divides), [codes, scales, torch.tensor([5000.0 if divides else 2e-4 if group == 16 else 1.0])]

    return draw


DRAWN = {
    "fp8": fp8_block, "ct fp8": channels(PerChannel(), FP8), "ct int8": channels(PerChannel(), torch.int8),
    "static fp8": static(FP8), "static int8": static(torch.int8),
    "ao int8": channels(Int8Weight(), torch.int8), "ao fp8": channels(Float8Weight(), FP8),
    "ct128": compressed(128), "ct32": compressed(32), "ct": compressed(None),
    "ct64 fp16": compressed(64, torch.float16), "ao int4": int_groups, "gptq": gptq, "awq": awq,
    "table": bitsandbytes(False), "nested": bitsandbytes(True), "nvfp4": fp4(16, 1), "modelopt fp4": fp4(16, 0),
    "mxfp4": fp4(32, 0), "w4a8": w4a8(128, 0, 1), "w4a8 32": w4a8(32, 0, 0), "w4a8 rows": w4a8(None, 0, 0),
    "w4a8 fp8": w4a8(128, 1, 1),
}  # fmt: skip
"""Name -> a function of outputs and inputs: a layout and the parts of a layer."""


def prepared(name, outputs, inputs, device="cpu"):
    """A layer as its library has it, and as the kernel reads it: layout and parts of both."""
    layout, parts = DRAWN[name](outputs, inputs)
    parts = [part.to(device) for part in parts]
    return (layout, parts), quantised.repacked(layout, parts, inputs)
