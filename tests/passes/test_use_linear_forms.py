"""use_linear_forms: forms of products of few rows on a CPU."""

import pytest
import torch
from cpu_levels import NEEDS_KERNEL
from toy_graphs import LINEAR, Rewritten, example, toy

from spec_compile.kernels.linear.cpu_gemm import SUPPORTED, cpu_linear, transposed_linear
from spec_compile.passes.linears import use_linear_forms


@pytest.mark.sweep(3)
@NEEDS_KERNEL
@pytest.mark.parametrize("length", [2, 4, 5, 9])
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_of_float32_take_their_form(length, bias, narrow_or_best):
    """Where the kernel is faster than a library."""
    _, graph = toy(dict(bias=bias), dict(bias=bias))
    result = Rewritten(graph, use_linear_forms)
    (before, left), (_, changed) = result.count(LINEAR), result.count(cpu_linear)
    assert (left, changed) == ((0, before) if narrow_or_best else (before, 0)) and before > 0, result
    result.close(*example(2, length))


@NEEDS_KERNEL
@pytest.mark.skipif(SUPPORTED, reason="AMX has a form of its own")
def test_few_rows_of_bfloat16_take_their_form(narrow_or_best):
    _, graph = toy({})
    graph.gm.to(torch.bfloat16)
    result = Rewritten(graph, use_linear_forms)
    (before, left), (_, changed) = result.count(LINEAR), result.count(cpu_linear)
    assert (left, changed) == ((0, before) if narrow_or_best else (before, 0)) and before > 0, result


@pytest.mark.skipif(not SUPPORTED, reason="needs a CPU with AMX")
def test_few_rows_of_bfloat16_take_the_form_transposed():
    _, graph = toy({})
    graph.gm.to(torch.bfloat16)
    result = Rewritten(graph, use_linear_forms)
    (before, left), (_, changed) = result.count(LINEAR), result.count(transposed_linear)
    assert (left, changed) == (0, before) and before > 0, result


def test_few_rows_leave_other_dtypes_alone():
    _, graph = toy({})
    graph.gm.to(torch.float16)
    result = Rewritten(graph, use_linear_forms)
    assert result.count(LINEAR)[0] == result.count(LINEAR)[1] > 0, result
