"""Products of few rows on a CPU against the plain meaning, at every level of instructions that the CPU has."""

import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from cpu_levels import NEEDS_KERNEL
from packed_layers import DRAWN, OF_CPU, prepared
from torch.nn import functional as F

from spec_compile import quantised
from spec_compile.kernels import cpu as cpu_level
from spec_compile.kernels.launching import plain_kernels
from spec_compile.kernels.linear import cpu_gemm
from spec_compile.kernels.linear.cpu_gemm import LEVELS, NUMBERS, cpu_linear, form_of, multiply, why_not
from spec_compile.quantised.rounded import int4, int8

pytestmark = NEEDS_KERNEL
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
COUNTS = 65, 64, 24, 23, 17, 16, 13, 7, 6, 5, 4, 3, 2, 1
"""Numbers of rows around the sizes of tiles, panels and chunks."""
READ = [name for name in (*DRAWN, *OF_CPU) if not name.startswith("w4a8")]
ROUNDED = ("fp8", "ct fp8", "ct int8", "static fp8", "static int8")
"""Layouts in rows whose plain meaning rounds products of codes and scales, which the kernel does not. With activations
of bfloat16 and groups of codes, or instructions for BF16, it does so in no layout."""


def same_for_all_rows(form, x, weight, scales, bias, level):
    """The product of all rows, whose bits are those of any first rows."""
    out = multiply(form, x, weight, scales, bias, level)
    for rows in COUNTS:
        assert torch.equal(multiply(form, x[:rows], weight, scales, bias, level), out[:rows]), rows
    return out


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("outputs, inputs", [(1, 1), (37, 77), (24, 576), (50, 1504)])
def test_numbers(dtype, outputs, inputs, level):
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((65, inputs), (outputs, inputs), (outputs,)))
    for b in (None, bias):
        got = same_for_all_rows(NUMBERS[dtype], x, weight, None, b, level)
        want = F.linear(x.double(), weight.double(), None if b is None else b.double())
        torch.testing.assert_close(got, want.to(dtype), rtol=1e-5 if dtype == FLOAT32 else 8e-3, atol=1e-4)


@pytest.mark.parametrize("outputs, inputs", [(136, 384), (40, 640), (24, 1280)])
@pytest.mark.parametrize("name", READ)
def test_layouts(name, outputs, inputs, level):
    torch.manual_seed(1)
    layout, parts = prepared(name, outputs, inputs, on_cpu=True)[1]
    for dtype in (FLOAT32, BFLOAT16):
        assert why_not(layout, parts, dtype) is None
        x, bias = torch.randn(65, inputs).to(dtype), torch.randn(outputs).to(dtype)
        got = same_for_all_rows(form_of(layout, parts[0].dtype), x, *parts, bias, level)
        want = layout.product(x, parts, bias)
        error = (got.float() - want.float()).norm() / want.float().norm()
        rounded = name in ROUNDED or layout.of_cpu or "BF16" in LEVELS[level]
        assert error < (1e-6 if dtype == FLOAT32 else 5e-3 if rounded else 2e-4), error


@pytest.mark.parametrize("rows", [1, 9])
def test_sums_of_integers_are_exact(rows, level):
    form, scales = form_of(quantised.layout_of("PerChannel 1"), torch.int8), torch.ones(6, 1)  # the last is x's
    for inputs in (64, 100, 4100):
        x, weight = (torch.randint(-128, 128, shape) for shape in ((rows, inputs), (5, inputs)))
        x[0], weight[0] = -128, -128
        got = multiply(form, x.float(), weight.to(torch.int8), scales, None, level)
        assert torch.equal(got, (x.double() @ weight.double().T).float())


@pytest.mark.parametrize("rounded", [int4, int8])
def test_whole_activations_are_exact(rounded, level):
    """In bfloat16, if no number of a row is below a 128th of its largest. A row with NaN or infinity becomes NaN."""
    x = torch.randint(-127, 128, (9, 576)).bfloat16() * 2.0 ** torch.randint(-100, 100, (9, 1))
    x[1], x[2, 5], x[3, 500] = 0, torch.nan, -torch.inf
    weight = torch.randint(-8, 8, (40, 576)).float()
    weight[:, ::64] = -8 if rounded is int4 else 127  # so that scales are 1
    packed = rounded(weight)
    layout, parts = quantised.for_kernel(packed.layout, [*packed.parts.values()], 576, True)
    got = multiply(form_of(layout, torch.int32), x.bfloat16(), *parts, None, level)
    want = (x.double() @ weight.double().T).bfloat16()
    assert torch.equal(got[:2], want[:2]) and torch.equal(got[4:], want[4:]) and got[2:4].isnan().all()


@pytest.mark.parametrize("rounded", [int4, int8])
def test_small_activations_beside_a_large_one(rounded, level):
    """Those of bfloat16 are rounded by at most a 32,768th of the largest."""
    x, packed = torch.randn(7, 640).bfloat16(), rounded(torch.randn(72, 640))
    x[:, 100] *= 1000
    layout, parts = quantised.for_kernel(packed.layout, [*packed.parts.values()], 640, True)
    got, weight = multiply(form_of(layout, torch.int32), x, *parts, None, level).double(), packed.weight().double()
    want, largest = x.double() @ weight.T, x.double().abs().amax(1, keepdim=True)
    bound = 2**-8 * want.abs() + 2**-15 * largest * weight.abs().sum(1)
    assert ((got - want).abs() <= bound).all()


@pytest.mark.parametrize("group", [32, 64, 128])
def test_groups_that_end_within_a_block(group, level):
    """Of scales in every dtype, those of float32 with a table."""
    for dtype in (FLOAT32, BFLOAT16, torch.float16):
        x, packed = torch.randn(7, 9 * group), int4(torch.randn(40, 9 * group).to(dtype), group)
        layout, parts = quantised.for_kernel(packed.layout, [*packed.parts.values()], 9 * group, True)
        got = multiply(form_of(layout, parts[0].dtype), x, *parts, None, level)
        torch.testing.assert_close(got, F.linear(x, packed.weight().float()), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("largest", [0.1, 8.0])
def test_symmetric_4_bits_have_one_layout(largest):
    """Whatever their scales, so that layers of one input can be merged."""
    packed = int4((largest * torch.randn(40, 576)).bfloat16())
    layout, _ = quantised.for_kernel(packed.layout, [*packed.parts.values()], 576, True)
    assert layout.kind == "CodeBlocks 4 64 0 1 0"


def test_every_code_of_fp8(level):
    """Subnormal numbers and NaN too."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    form = form_of(quantised.layout_of("Float8Weight"), codes.dtype)
    for dtype in (FLOAT32, BFLOAT16):
        got = multiply(form, torch.ones(1, 1, dtype=dtype), codes.view(-1, 1), torch.ones(256, 1), None, level)
        torch.testing.assert_close(got[0], codes.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_activations_of_zeros_and_of_nan(dtype, level):
    for kind, codes in (
        ("PerChannel 0", torch.int8),
        ("PerChannel 0", torch.float8_e4m3fn),
        ("Fp8Block 128 128", None),
    ):
        weight = torch.ones(3, 128).to(codes or torch.float8_e4m3fn)
        form = form_of(quantised.layout_of(kind), weight.dtype)
        x = torch.zeros(2, 128, dtype=dtype)
        x[1, 7] = torch.nan
        got = multiply(form, x, weight, torch.ones(3 if codes else 1, 1), None, level)
        assert torch.equal(got[0], torch.zeros(3, dtype=dtype)) and got[1].isnan().all(), got


def test_threads_give_the_same_bits(level):
    x, weight = torch.randn(9, 64), torch.randn(500, 64)
    packed = int8(weight)
    layout, parts = quantised.for_kernel(packed.layout, [*packed.parts.values()], 64, True)
    calls = [
        (NUMBERS[FLOAT32], x, weight, None, None),
        (form_of(packed.layout, torch.int8), x, *packed.parts.values(), None),
        (form_of(layout, torch.int32), x, *parts, None),
        (form_of(layout, torch.int32), x.bfloat16(), *parts, None),
    ]
    one = [multiply(*call, level) for call in calls]
    torch.set_num_threads(2)
    try:
        assert all(torch.equal(multiply(*call, level), want) for call, want in zip(calls, one))
    finally:
        torch.set_num_threads(1)


def test_the_op_takes_the_kernel(level):
    """A layer on a CPU, whatever its rows are; `plain_kernels` and unrounded activations keep the plain meaning."""
    packed = int8(torch.randn(24, 64))
    parts, x = [*packed.parts.values()], torch.randn(2, 3, 64)
    run = torch.ops.spec_compile.quantised_linear.default
    with mock.patch.object(cpu_gemm, "multiply", wraps=multiply) as kernel:
        got = run(x, parts, None, packed.layout.kind)
        run(torch.randn(300, 64), parts, None, packed.layout.kind)
        assert kernel.call_count == 2
        with plain_kernels():
            torch.testing.assert_close(run(x, parts, None, packed.layout.kind), got)
        with quantised.unrounded_activations():
            run(x, parts, None, packed.layout.kind)
        run(x.half(), parts, None, packed.layout.kind)
        assert kernel.call_count == 2
    assert got.shape == (2, 3, 24)


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 64, 65])
def test_cpu_linear_is_linear(rows, level):
    """By the kernel up to `MOST_ROWS`, and by a library with more."""
    for dtype in (FLOAT32, BFLOAT16):
        x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, 1, 96), (50, 96), (50,)))
        turned, last = x.transpose(0, 1).expand(2, -1, -1), torch.randn(96, 50).to(dtype).t()
        for given in ((x, weight), (x, weight, bias), (turned, weight), (x, last)):
            want = F.linear(*(each.double() for each in given)).to(dtype)
            torch.testing.assert_close(cpu_linear(*given), want, rtol=8e-3, atol=1e-4)
        with mock.patch.object(cpu_gemm, "multiply", wraps=multiply) as kernel:
            first = cpu_linear(x, weight)[0]
        assert kernel.call_count == (rows <= cpu_gemm.MOST_ROWS[dtype][level])
        assert not kernel.called or torch.equal(cpu_linear(x[:1], weight)[0], first)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 40])
def test_transposed_linear_is_linear(rows):
    x, weight, bias = torch.randn(rows, 1, 24), torch.randn(10, 24), torch.randn(10)
    for b in (None, bias):
        torch.testing.assert_close(cpu_gemm.transposed_linear(x, weight, b), F.linear(x, weight, b))


def test_a_cpu_without_the_kernel_keeps_the_plain_meaning(monkeypatch):
    packed, x = int8(torch.randn(24, 64)), torch.randn(3, 64)
    parts = [*packed.parts.values()]
    want = packed.layout.product(x, parts, None)
    monkeypatch.setattr(cpu_gemm, "BEST", 0)
    assert why_not(packed.layout, parts, FLOAT32) == "SPEC_COMPILE_CPU_LEVEL allows no AVX2"
    assert torch.equal(torch.ops.spec_compile.quantised_linear(x, parts, None, packed.layout.kind), want)
    assert torch.equal(cpu_linear(x, torch.eye(64)), x)


def test_a_lower_level_by_the_environment(monkeypatch):
    """A name of no level, or of one that the CPU lacks, is refused."""
    present = True, True, True, False, False
    for name, highest in (("", cpu_level.AMX), ("plain", 0), ("avx2", 1), ("avx512", 2)):
        monkeypatch.setenv(cpu_level.VARIABLE, name)
        assert cpu_level.chosen(present) == highest
    for name, message in (
        ("sse", "expected one of plain, avx2, .*'sse'"),
        ("amx", "has plain, avx2, avx512, not 'amx'"),
    ):
        monkeypatch.setenv(cpu_level.VARIABLE, name)
        with pytest.raises(ValueError, match=f"SPEC_COMPILE_CPU_LEVEL: .*{message}"):
            cpu_level.chosen(present)


@pytest.mark.slow
@pytest.mark.parametrize("place, name", [(0, "plain"), (1, "avx2")])
def test_every_kernel_takes_the_level_of_the_environment(place, name):
    code = "from spec_compile.kernels.attention import cpu_attention as attention; "
    code += "from spec_compile.kernels.linear import cpu_gemm; "
    code += "print(cpu_gemm.BEST, attention.BEST, cpu_gemm.SUPPORTED)"
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, capture_output=True, text=True, check=True, env={**os.environ, cpu_level.VARIABLE: name})
    assert done.stdout.split() == [str(place), str(place), "False"]


def test_groups_without_a_kernel_are_named():
    packed = int4(torch.randn(32, 96), 48)
    parts = [*packed.parts.values()]
    assert quantised.for_kernel(packed.layout, parts, 96, True) is None
    assert why_not(packed.layout, parts, FLOAT32) == "no kernel reads its layout, of groups of 48 inputs"


@pytest.mark.parametrize("name", ["ct128", "ct", "ct64 fp16", "ao int4", "gptq", "table", "nvfp4", "ao int8", *OF_CPU])
def test_blocks_mean_the_layer(name):
    """To the last bit, with outputs that end within a block, and after cuts and merges of blocks."""
    (layout, parts), (blocks, ours) = prepared(name, 136, 384, on_cpu=True)
    want = layout.weight(parts, 384)
    assert blocks.of_cpu and blocks.outputs(ours, 384) == 136 and torch.equal(blocks.weight(ours, 384), want)
    first, last = blocks.cut(ours, 0, 64), blocks.cut(ours, 64, 136)
    assert torch.equal(blocks.weight(last, 384), want[64:])
    merged = [torch.cat(pair) for pair in zip(first, last)]
    assert all(map(torch.equal, merged, ours))
    again = quantised.for_kernel(blocks, ours, 384, False)
    assert (again is None) == (name in ("ao int8", *OF_CPU))
    if again is not None:
        assert torch.equal(again[0].weight(again[1], 384), want)


@pytest.mark.parametrize("kind", ["Fp8Block 128 128", "Int8Weight"])
def test_a_bias_of_float32_keeps_the_dtype_of_rows(kind):
    """Also where no kernel serves them, as rows of float16."""
    weight = torch.randn(24, 128).to(torch.int8 if kind == "Int8Weight" else torch.float8_e4m3fn)
    scales = torch.ones(24, 1) if kind == "Int8Weight" else torch.ones(1, 1)
    x, bias = torch.randn(2, 128).half(), torch.randn(24)
    got = torch.ops.spec_compile.quantised_linear(x, [weight, scales], bias, kind)
    bare = torch.ops.spec_compile.quantised_linear(x, [weight, scales], None, kind)
    assert torch.equal(got, (bare + bias).half())
