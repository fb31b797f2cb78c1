"""Weights that are rounded at load: each number is the nearest one of its format."""

import pytest
import torch

from spec_compile.quantised import rounded

FP8 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
NUMBERS = {"fp8": FP8[FP8.isfinite()], "int8": torch.arange(-127.0, 128), "int4": torch.arange(-8.0, 8)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", rounded.FORMATS)
def test_weights_are_rounded_to_the_nearest_number(name, dtype, monkeypatch):
    monkeypatch.setattr(rounded, "WEIGHTS", 96 * 5)  # 5 rows at a time
    weight = torch.randn(13, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[4] = 0
    packed = rounded.FORMATS[name](weight)
    group = 32 if name == "int4" else 96
    scales = packed.parts["scales"].float().repeat_interleave(group, 1)
    least = (weight.float()[..., None] - NUMBERS[name] * scales[..., None]).abs().amin(dim=-1)
    assert packed.inputs == 96 and packed.layout.outputs([*packed.parts.values()], 96) == 13
    rounding = 0 if dtype == torch.float32 else weight.float().abs() / 128  # of weights of 4 bits, to their own dtype
    assert ((packed.weight().float() - weight.float()).abs() <= least + rounding + 1e-6).all()
    assert 0 < least.max() < (0.7 if name == "int4" else 0.3)


def test_the_largest_number_of_4_bits_is_exact():
    few = torch.tensor([[4.0, -2.0, 1.0, 0.0] + [0.0] * 28, [-4.0, 3.5, 1.0, 0.0] + [0.0] * 28])
    packed = rounded.int4(few, 32)
    assert torch.equal(packed.weight(), few) and packed.parts["scales"].flatten().tolist() == [-0.5, 0.5]


def test_inputs_that_no_group_divides():
    assert rounded.int4(torch.randn(8, 40)) is None
    assert rounded.int4(torch.randn(8, 192)).layout.group == 64
    assert rounded.int4(torch.randn(8, 192), 96).layout.group == 96
