"""RMSNorm with the addition before it against transformers' own modules.

Without a GPU the kernel runs in Triton's interpreter, in float32; ``pytest -m gpu`` runs it on a CUDA device.
"""

import pytest
import torch
from counters import all_zero
from places import places
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from spec_compile.kernels import norms as kernel

ops = torch.ops.spec_compile
PLACES = places(torch.float32, torch.bfloat16, torch.float16)
FORMS = {LlamaRMSNorm: None, GemmaRMSNorm: 1.0, Olmo2RMSNorm: 0.0}
"""A module of each form, and its offset."""
STEPS = {torch.float32: 16, torch.bfloat16: 2, torch.float16: 2}
"""Numbers of the dtype by which a result may be off, for the order of a sum and a root."""


@pytest.fixture(params=FORMS, ids=lambda form: form.__name__)
def form(request):
    return request.param


def draw(place, shape):
    """x, residual and weight; what is large is large in whole columns, as in a residual stream."""
    device, dtype = place
    scale = torch.randn(shape[-1]).exp()
    return [t.to(device, dtype) for t in (torch.randn(shape) * scale, torch.randn(shape), torch.randn(shape[-1]))]


def expected(form, x, weight, eps):
    module = form(x.shape[-1], eps).to(x.device, x.dtype)
    module.weight.data.copy_(weight)
    with torch.no_grad():
        return module(x)


def compare(got, want):
    info = torch.finfo(want.dtype)
    assert got.dtype == want.dtype and got.shape == want.shape and got.is_contiguous()
    tolerance = dict(rtol=STEPS[want.dtype] * info.eps, atol=info.tiny)
    torch.testing.assert_close(got, want, **tolerance)
    if want.dtype != torch.float32 and want.numel() > 1000:
        assert (got == want).float().mean() > 0.98  # it rounds where the module does


def check(form, x, residual, weight, eps=1e-5):
    total, normed = kernel.launch_norm(x, residual, weight, eps, FORMS[form])
    assert torch.equal(total, x + residual)
    compare(normed, expected(form, x + residual, weight, eps))
    nothing, normed = kernel.launch_norm(x, None, weight, eps, FORMS[form])
    assert nothing is None
    compare(normed, expected(form, x, weight, eps))


@pytest.mark.sweep(5)
@pytest.mark.parametrize("rows", [1, 2, 16, 64])
@pytest.mark.parametrize("size", [1, 64, 65, 576, 1000, 4096, 5120, 16384])
def test_shapes(place, form, rows, size):
    check(form, *draw(place, (rows, size)))


@pytest.mark.parametrize("shape, factor", [((2, 3, 5, 64), 1), ((0, 64), 1), ((3, 64), 0)])
def test_leading_dimensions_no_rows_and_zeros(place, form, shape, factor):
    x, residual, weight = draw(place, shape)
    check(form, x * factor, residual * factor, weight)


@pytest.mark.parametrize("size", [64, 72, 33])
def test_strides(place, form, size):
    """Rows of a wider matrix among NaN, as a split of a merged product gives them, and columns that lie apart."""
    x, residual, weight = draw(place, (6, size))
    wide = torch.full((6, 3 * size), torch.nan, dtype=x.dtype, device=x.device)
    wide[:, size : 2 * size] = x
    check(form, wide[:, size : 2 * size], residual.t().contiguous().t(), weight)


@pytest.mark.parametrize("eps", [1e-12, 1e-3, 10.0])
def test_eps_of_small_rows(place, form, eps):
    x, residual, weight = draw(place, (4, 256))
    check(form, x * 2**-8, residual * 2**-8, weight, eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ops_on_a_cpu(form, dtype):
    """The operators' plain meaning has the modules' own bits."""
    x, residual, weight = draw(("cpu", dtype), (2, 5, 48))
    total, normed = ops.add_rms_norm(x, residual, weight, 1e-6, FORMS[form])
    assert torch.equal(total, x + residual) and torch.equal(normed, expected(form, total, weight, 1e-6))
    assert torch.equal(ops.rms_norm(x, weight, 1e-6, FORMS[form]), expected(form, x, weight, 1e-6))
    if dtype != torch.float32:
        return
    torch.library.opcheck(kernel.add_rms_norm, (x.transpose(0, 1), residual.transpose(0, 1), weight, 1e-6, FORMS[form]))
    torch.library.opcheck(kernel.rms_norm, (x.transpose(0, 1), weight, 1e-6, FORMS[form]))


@pytest.mark.parametrize("run", [ops.add_rms_norm, kernel.launch_norm])
def test_operands_that_do_not_fit(run):
    x, residual, weight = draw(("cpu", torch.float32), (3, 8))
    for named, (given, scale) in {
        r"residual: expected torch.float32 \[3, 8\]": (residual[:2], weight),
        r"residual.*got torch.float16": (residual.half(), weight),
        r"weight: expected torch.float32 \[8\]": (residual, weight[:7]),
        r"weight.*got torch.float16": (residual, weight.half()),
    }.items():
        with pytest.raises(ValueError, match=named):
            run(x, given, scale, 1e-6, None)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
def test_chain_in_a_graph(rows):
    """Products and norms, each launched before the one ahead is done, with ordinary kernels in between now and then,
    in a graph that is replayed on new input: the numbers and bits of the same kernels one at a time."""
    sizes = [(6144, 1024), (1024, 6144), (2048, 1024), (1024, 2048)]
    weights = [draw(("cuda", torch.bfloat16), shape)[0] / shape[1] ** 0.5 for shape in sizes]
    scales = [torch.rand(1024, device="cuda", dtype=torch.bfloat16) + 0.5 for _ in range(2)]
    x = torch.empty(rows, 1024, device="cuda", dtype=torch.bfloat16)

    def run(after=lambda: None):
        stream, outs = x, []
        normed = ops.rms_norm(x, scales[0], 1e-5, None)
        for layer in range(12):
            for wide, narrow, scale in zip(weights[::2], weights[1::2], scales):
                after()
                y = ops.product(normed, wide)
                after()
                y = ops.product(y + 1 if layer % 3 == 0 else y, narrow)
                after()
                stream, normed = ops.add_rms_norm(y, stream, scale, 1e-5, None)
                outs += [stream, normed]
        return outs

    x.normal_()
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    for _ in range(30):
        x.normal_()
        alone = run(torch.cuda.synchronize)
        for _ in range(3):
            graph.replay()
        assert [i for i, (a, b) in enumerate(zip(alone, outs)) if not torch.equal(a, b)] == []
    assert all_zero()
