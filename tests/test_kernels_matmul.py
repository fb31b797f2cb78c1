"""Products of few rows against float64, and the ops against their plain-PyTorch meaning.

Without a GPU the kernel runs in Triton's interpreter, in float32; ``pytest -m gpu`` runs it on a CUDA device.
"""

import itertools

import pytest
import torch
from places import GPU, places, triton
from torch.nn import functional as F

from spec_compile.kernels import counters
from spec_compile.kernels.linear import small_m as kernel
from spec_compile.kernels.linear.plans import Plan

HOPPER = GPU and torch.cuda.get_device_capability() >= (9, 0)
PLACES = places(torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 3e-3}
ROWS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 48, 64]
PLANS = {  # of one tile for each program, less, and more; on tensor cores and without
    "split": Plan(32, 16, 13),
    "runs": Plan(16, 32, 3, stages=3),
    "whole": Plan(64, 16, 2, stages=5),
    "late": Plan(32, 32, 7, late=2, prefetch=3),
    "cores": Plan(8, 64, 9, dot=False),
    "cores runs": Plan(16, 32, 4, stages=2, dot=False, late=1),
}


@pytest.fixture(params=PLACES)
def place(request):
    """Device and dtype."""
    return request.param


def draw(place, rows, outputs, inputs):
    """x [rows, inputs], weight [outputs, inputs] of unit variance in the result, bias [outputs]."""
    device, dtype = place
    x, weight, bias = torch.randn(rows, inputs), torch.randn(outputs, inputs) / inputs**0.5, torch.randn(outputs)
    return [t.to(device, dtype) for t in (x, weight, bias)]


def launch(x, weight, bias, plan, gated=False):
    """The kernel's answer, checked to be whole and to leave its counters zero."""
    out = x.new_full((x.shape[0], weight.shape[0] // (2 if gated else 1)), torch.nan)
    kernel.launch(x, weight, bias, out, plan._replace(pdl=HOPPER), gated)
    assert counters.all_zero()
    return out


def error(out, x, weight, bias=None, gated=False):
    """Relative to the product in float64."""
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if gated:
        gate, up = expected.chunk(2, -1)
        expected = F.silu(gate) * up
    return ((out.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype, factor", [(torch.float32, 1.0001), (torch.float16, 1.01), (torch.bfloat16, 1.03)])
def test_the_tolerance_notices_a_wrong_factor(dtype, factor):
    x, weight, _ = draw(("cpu", dtype), 5, 72, 80)
    right = F.linear(x.double(), weight.double())
    assert error(right.to(dtype), x, weight) < TOLERANCE[dtype] < error((right * factor).to(dtype), x, weight)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("rows", ROWS)
def test_any_number_of_rows(place, rows, plan):
    if not plan.dot and rows > 4:
        pytest.skip("more rows take the tensor cores")
    x, weight, bias = draw(place, rows, 72, 80)
    assert error(launch(x, weight, bias, plan), x, weight, bias) < TOLERANCE[place[1]]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("outputs, inputs", [(1, 1), (3, 200), (65, 17), (33, 127), (130, 8), (64, 64), (7, 1000)])
def test_any_shape(place, outputs, inputs, plan):
    x, weight, bias = draw(place, 3, outputs, inputs)
    assert error(launch(x, weight, None, plan), x, weight) < TOLERANCE[place[1]]
    assert error(launch(x, weight, bias, plan), x, weight, bias) < TOLERANCE[place[1]]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("outputs, inputs", [(2, 16), (70, 48), (128, 100)])
def test_gated(place, outputs, inputs, plan):
    x, weight, _ = draw(place, 4, outputs, inputs)
    assert error(launch(x, weight, None, plan, gated=True), x, weight, gated=True) < 2 * TOLERANCE[place[1]]


def test_rows_apart(place):
    """Rows of a wider matrix, as a split of a merged product gives them."""
    x, weight, bias = draw(place, 5, 40, 64)
    wide = torch.full((5, 200), torch.nan, dtype=x.dtype, device=x.device)
    wide[:, 64:128] = x
    assert torch.equal(launch(wide[:, 64:128], weight, bias, PLANS["split"]), launch(x, weight, bias, PLANS["split"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ops_on_a_cpu(dtype):
    x, weight, bias = draw(("cpu", dtype), 6, 24, 16)
    for y in (x, x.view(2, 3, 16), x.t().contiguous().t(), x[:0]):
        assert torch.equal(torch.ops.spec_compile.small_m_matmul(y, weight, bias), F.linear(y, weight, bias))
        gate, up = F.linear(y, weight).chunk(2, -1)
        assert torch.equal(torch.ops.spec_compile.small_m_swiglu(y, weight), F.silu(gate) * up)
    torch.library.opcheck(kernel.small_m_matmul, (x.view(2, 3, 16), weight, bias))
    torch.library.opcheck(kernel.small_m_swiglu, (x.view(2, 3, 16), weight))


def test_plans_fit():
    """A plan for every shape of a model, with tiles that the kernel can cut."""
    for rows in (1, 2, 4, 8, 16, 32, 64):
        for outputs, inputs in [(4096, 4096), (4096, 14336), (128256, 2048), (1024, 3072), (5000, 776)]:
            plan = kernel.plan(rows, outputs, inputs)
            if plan is not None:
                width = max(16, triton.next_power_of_2(rows))
                assert 0 < plan.programs and (plan.dot or rows <= 4)
                shared = plan.stages * plan.block_k * 2 * (plan.block_o + (width if plan.dot else 0))
                assert shared <= 220 * 1024
    assert kernel.plan(65, 4096, 4096) is None and kernel.plan(1, 4096, 4095) is None


SHAPES = [(6144, 4096), (4096, 14336), (1024, 2048), (3072, 1000), (4095, 1024), (1024, 4100)]
LARGE = {  # of the size that models need; "op": the one that `plan` chooses
    "op": None,
    "parts": Plan(64, 128, 132, stages=5, late=1),
    "early": Plan(32, 256, 128, prefetch=4),
    "wide": Plan(128, 64, 264, warps=8, late=4, prefetch=2),
    "cores": Plan(8, 512, 512, dot=False),
    "no dependent launch": Plan(64, 128, 132, stages=5, pdl=False),
}


def multiplier(plan):
    """A function of x [..., I], weight and bias that multiplies by a plan."""
    if plan is None:
        return torch.ops.spec_compile.small_m_matmul

    def multiply(x, weight, bias):
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        how = plan._replace(pdl=HOPPER and plan.pdl)
        kernel.launch(x.view(-1, x.shape[-1]), weight, bias, out.view(-1, out.shape[-1]), how)
        return out

    return multiply


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [*ROWS, 65])
def test_op_on_a_gpu(rows, dtype):
    for outputs, inputs in SHAPES:
        x, weight, bias = draw(("cuda", dtype), rows, outputs, inputs)
        tolerance = {**TOLERANCE, torch.float32: 2e-3}[dtype]  # TF32 may be allowed
        tolerance *= 3 if kernel.plan(rows, outputs, inputs) is None else 1  # cuBLAS may add partial sums in 16 bits
        for b in (None, bias):
            assert error(kernel.small_m_matmul(x, weight, b), x, weight, b) < tolerance
        if outputs % 2 == 0:
            assert error(kernel.small_m_swiglu(x, weight), x, weight, gated=True) < 3 * tolerance


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("plan", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def test_same_results_every_time(rows, plan):
    if plan is not None and not plan.dot and rows > 4:
        pytest.skip("more rows take the tensor cores")
    multiply = multiplier(plan)
    for outputs, inputs in SHAPES[:3]:
        x, weight, bias = draw(("cuda", torch.bfloat16), rows, outputs, inputs)
        results = torch.stack([multiply(x, weight, bias) for _ in range(21)])
        assert error(results[0], x, weight, bias) < TOLERANCE[torch.bfloat16]
        different = [(i, (r - results[0]).abs().max().item()) for i, r in enumerate(results) if r.ne(results[0]).any()]
        assert not different


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("plan", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def test_chain_in_a_graph(rows, plan):
    """Each product reads what the one before it wrote, with small kernels in between or not; replayed on new input."""
    if plan is not None and not plan.dot and rows > 4:
        pytest.skip("more rows take the tensor cores")
    sizes = [1024, 4096, 512, 2048, 6144, 1024]
    weights = [draw(("cuda", torch.bfloat16), 1, o, i)[1] for i, o in itertools.pairwise(sizes)]
    scaled = [(place + repeat) % 3 == 0 for repeat in range(6) for place in range(5)]
    x = torch.empty(1, rows, sizes[0], dtype=torch.bfloat16, device="cuda")
    multiply = multiplier(plan)

    def run():
        y, outs = x, []
        for weight, scale in zip(weights * 6, scaled):
            y = multiply(y, weight, None)
            y = y * 1.5 - 0.5 * y if scale else y
            outs.append(y)
        return outs

    x.normal_()
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    for _ in range(20):
        x.normal_()
        graph.replay()
        for step, (y, out, weight) in enumerate(zip([x, *outs], outs, weights * 6)):
            assert error(out, y, weight) < 8e-3, f"step {step}"
        again = [out.clone() for out in outs]
        graph.replay()
        different = [i for i, (a, b) in enumerate(zip(again, outs)) if not torch.equal(a, b)]
        assert not different
