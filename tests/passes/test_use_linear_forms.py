"""use_linear_forms: forms of products of few rows on a CPU."""

import pytest
import torch
from cpu_levels import NEEDS_KERNEL
from toy_graphs import LINEAR, Rewritten, example, toy

from spec_compile.kernels.linear import cpu_gemm
from spec_compile.kernels.linear.cpu_gemm import cpu_linear, transposed_linear
from spec_compile.passes.linears import use_linear_forms


@NEEDS_KERNEL
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("amx", [False, True])
def test_few_rows_take_their_form(dtype, bias, amx, first_or_best, monkeypatch):
    """Where the kernel is faster than a library. AMX has another form, for bfloat16."""
    monkeypatch.setattr(cpu_gemm, "SUPPORTED", amx)
    _, graph = toy(dict(bias=bias), dict(bias=bias))
    graph.gm.to(dtype)
    result, is_transposed = Rewritten(graph, use_linear_forms), amx and dtype == torch.bfloat16
    (before, left), (_, changed) = (
        result.count(LINEAR),
        result.count(transposed_linear if is_transposed else cpu_linear),
    )
    served = is_transposed or cpu_gemm.MOST_ROWS[dtype][first_or_best] > 0
    assert (left, changed) == ((0, before) if served else (before, 0)) and before > 0, result
    for length in (2, 4, 5, 9) if dtype == torch.float32 else ():
        result.close(*example(2, length))


def test_few_rows_leave_other_dtypes_alone():
    _, graph = toy({})
    graph.gm.to(torch.float16)
    result = Rewritten(graph, use_linear_forms)
    assert result.count(LINEAR)[0] == result.count(LINEAR)[1] > 0, result
