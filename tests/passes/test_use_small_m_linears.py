"""use_small_m_linears: forms of products of few rows on a CPU."""

import pytest
import torch
from torch.nn import functional as F
from toy_graphs import LINEAR, Rewritten, example, toy

from spec_compile.kernels.linear import avx512, transposed
from spec_compile.kernels.linear.transposed import transposed_linear
from spec_compile.passes.use_small_m_linears import use_small_m_linears

needs_avx512 = pytest.mark.skipif(not avx512.SUPPORTED, reason="needs a CPU with AVX-512, and the package built")


@pytest.mark.sweep(3)
@needs_avx512
@pytest.mark.parametrize("length", [2, 4, 5, 9])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_of_float32_take_the_form_avx512(length, bias):
    _, graph = toy(dict(bias=bias), dict(bias=bias))
    result = Rewritten(graph, use_small_m_linears)
    (before, left), (_, changed) = result.count(LINEAR), result.count(avx512.avx512_linear)
    assert (left, changed) == (0, before) and before > 0, result
    result.close(*example(2, length))


@pytest.mark.sweep(3)
@needs_avx512
@pytest.mark.parametrize("rows", range(1, 18))
@pytest.mark.parametrize("inputs", [16, 48, 50])
@pytest.mark.parametrize("threads", [1, 2])
def test_avx512_linear_is_linear(rows, inputs, threads):
    torch.set_num_threads(threads)
    try:
        for outputs in (1, 3, 24, 101):
            x, weight, bias = torch.randn(rows, 1, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
            for b in (None, bias):
                torch.testing.assert_close(avx512.avx512_linear(x, weight, b), F.linear(x, weight, b))
            turned, last = x.transpose(0, 1).expand(2, -1, -1), torch.randn(inputs, outputs).t()
            torch.testing.assert_close(avx512.avx512_linear(turned, weight), F.linear(turned, weight))
            torch.testing.assert_close(avx512.avx512_linear(x, last), F.linear(x, last))
    finally:
        torch.set_num_threads(1)


@needs_avx512
def test_avx512_threads_give_the_same_bits():
    x, weight = torch.randn(5, 64), torch.randn(500, 64)
    one = avx512.avx512_linear(x, weight)
    torch.set_num_threads(2)
    try:
        assert torch.equal(avx512.avx512_linear(x, weight), one)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 40])
def test_transposed_linear_is_linear(rows):
    x, weight, bias = torch.randn(rows, 1, 24), torch.randn(10, 24), torch.randn(10)
    for b in (None, bias):
        torch.testing.assert_close(transposed_linear(x, weight, b), F.linear(x, weight, b))


@pytest.mark.skipif(not transposed.SUPPORTED, reason="needs a CPU with AMX")
def test_few_rows_of_bfloat16_take_the_form_transposed():
    _, graph = toy({})
    graph.gm.to(torch.bfloat16)
    result = Rewritten(graph, use_small_m_linears)
    (before, left), (_, changed) = result.count(LINEAR), result.count(transposed_linear)
    assert (left, changed) == (0, before) and before > 0, result


def test_few_rows_leave_other_dtypes_alone():
    _, graph = toy({})
    graph.gm.to(torch.float16)
    result = Rewritten(graph, use_small_m_linears)
    assert result.count(LINEAR)[0] == result.count(LINEAR)[1] > 0, result
