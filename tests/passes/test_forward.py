"""Forwards that Dynamo has traced: lowering, the passes on toy graphs, and weights that stay the module's."""

import re
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import transformers
from forwards import Linears, Recorder, With, repeated, run
from torch import nn
from torch.nn import functional as F

from spec_compile import backend, kernels
from spec_compile.backend import spec
from spec_compile.compat import TORCH
from spec_compile.graph import calls
from spec_compile.kernels import linear
from spec_compile.kernels.attention.grouped import plain
from spec_compile.passes.forward import ForwardGraph, use_grouped_attention
from spec_compile.passes.linears import merge_linears
from spec_compile.passes.tidy import tidy

aten = torch.ops.aten
LINEAR = aten.linear.default
pytestmark = pytest.mark.usefixtures("new_compilations")


# lowering


class Writing(Linears):
    """Linear layers with another forward."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def to_the_input(net, x):
    q = net.q(x)
    x.add_(1)  # the second layer reads another x
    return q * 2, net.k(x) + net.v(x).sum()


def to_a_view(net, x):
    q = net.q(y := x[:1])
    x.mul_(2)
    return q, net.k(y)


def to_its_own(net, x):
    q = net.q(y := x * 2)
    y.relu_()
    return q, net.k(y)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Writing(to_the_input), "linear.* reads an input that the forward writes to"),
        (Writing(to_a_view), "linear.* reads an input that the forward writes to"),
        (Writing(to_its_own), "relu_ writes to a value that the forward made"),
        (With(lambda x: x + torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8])), "it holds a constant"),
        (lambda x: x + 1, "it has no parameters"),
    ],
    ids=["an input", "a view", "its own", "a constant", "no parameters"],
)
def test_forwards_that_are_not_lowered_go_to_inductor(module, reason, interpreted):
    x = torch.randn(2, 8)
    want = module(x.clone())
    torch.testing.assert_close(run(module, spec, x.clone()), want)
    ((report,),) = backend.reports()
    assert report.name == "lower" and re.search(f"goes to Inductor as it is: {reason}", report.summary)


def test_numbers_that_vary_are_not_lowered(interpreted):
    step = torch.compile(lambda x, factor, linear: linear(x) * factor, backend=spec)
    linear = nn.Linear(8, 8)
    with torch.no_grad():
        for factor in (0.5, 0.25):
            torch.testing.assert_close(step(torch.ones(2, 8), factor, linear), linear(torch.ones(2, 8)) * factor)
    assert backend.reports()[-1][0].summary == "goes to Inductor as it is: numbers that it takes vary"


def test_constants_of_one_number_or_none_are_made_by_the_graph():
    def toy(x):
        return torch.cat([torch.tensor([]), x * torch.tensor(2.5), x + torch.tensor(3)])

    recorder, x = Recorder(tidy), torch.randn(4)
    torch.testing.assert_close(run(With(toy), recorder, x), toy(x))


def test_a_cache_and_a_counter_may_be_written():
    """As transformers' static cache does; and what is read after a write is what was written."""

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k = nn.Linear(8, 32), nn.Linear(8, 16)

        def forward(self, x, cache, count, mask):
            cache.index_copy_(2, torch.arange(1) + count, self.k(x).view(1, 2, 1, 8))
            count.add_(1)
            keys = repeated(cache, 2)
            return F.scaled_dot_product_attention(self.q(x).view(1, 4, 1, 8), keys, keys, mask)

    module, recorder = Cached(), Recorder(use_grouped_attention)
    step = torch.compile(module, backend=recorder)
    states = [[torch.zeros(1, 2, 6, 8), torch.tensor(1)] for _ in range(2)]
    with torch.no_grad():
        for place in range(1, 5):
            x, mask = torch.randn(1, 8), (torch.arange(6) <= place).view(1, 1, 1, 6)
            want, got = (call(x, *state, mask) for call, state in zip((module, step), states))
            torch.testing.assert_close(got, want)
        torch.testing.assert_close(states[0], states[1])
    assert recorder.counts(plain) == (0, 1)


# passes, on toy graphs


@pytest.mark.parametrize("bias", [False, True])
def test_layers_of_one_input_are_merged(bias):
    """Two modules of one compiled graph keep their weights."""
    recorder, x = Recorder(merge_linears), torch.randn(2, 3, 8)
    steps = [(module, module(x), torch.compile(module, backend=recorder)) for module in (Linears(bias), Linears(bias))]
    for module, want, step in [*steps, *steps]:
        with torch.no_grad():
            torch.testing.assert_close(step(x), want)
        assert module.q.weight.untyped_storage().data_ptr() == module.v.weight.untyped_storage().data_ptr()
    before, after = recorder.counts(LINEAR)
    assert before * 4 == after * 5 and recorder.counts(aten.split_with_sizes.default) == (0, after // 4)


def test_joined_weights_never_go_stale():
    module, x = Linears(True), torch.randn(2, 8)
    step = torch.compile(module, backend=Recorder(merge_linears))

    changes = (
        lambda: None,
        lambda: module.q.weight.mul_(3),
        lambda: module.v.load_state_dict({"weight": torch.randn(4, 8), "bias": torch.randn(4)}),
        lambda: module.v.load_state_dict({"weight": torch.randn(4, 8), "bias": torch.randn(4)}, assign=True),
        lambda: setattr(module.q, "weight", nn.Parameter(torch.randn(8, 8))),
        lambda: setattr(module.q.bias, "data", torch.randn(8)),
    )
    for change in changes:
        with torch.no_grad():
            change()
            torch.testing.assert_close(step(x), module(x))


def test_parameters_joined_in_inference_mode_can_still_be_trained():
    module, x, recorder = Linears(), torch.randn(2, 8), Recorder(merge_linears)
    with torch.inference_mode():
        torch.compile(module, backend=recorder)(x)
    assert recorder.counts(LINEAR) == (5, 4)
    module(x)[0].sum().backward()
    assert module.q.weight.grad is not None and not module.q.weight.is_inference()


def test_plain_tensors_are_not_merged():
    weights, recorder, x = [torch.randn(4, 8), torch.randn(4, 8)], Recorder(merge_linears), torch.randn(2, 8)
    run(With(lambda x, a, b: F.linear(x, a) + F.linear(x, b)), recorder, x, *weights)
    assert recorder.counts(LINEAR) == (2, 2)


def attend(q, k, v, mask):
    n = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(q, repeated(k, n), repeated(v, n), attn_mask=mask, scale=0.3)


def qkv(batch=2, heads=6, kv_heads=2, tokens=1, slots=9, size=8, value_size=8):
    shapes = (heads, tokens, size), (kv_heads, slots, size), (kv_heads, slots, value_size)
    return [torch.randn(batch, *shape) for shape in shapes]


@pytest.mark.parametrize("mask", [None, (2, 1, 1, 9), (1, 1, 4, 9), (2, 6, 4, 9), (2, 1, 4, 9)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_grouped_attention_reads_keys_once(mask, kind):
    tokens = 4 if mask is None else mask[2]
    q, k, v = qkv(tokens=tokens, value_size=5)
    if mask is not None:
        mask = torch.rand(mask)
        mask = (mask > 0.3) | (torch.arange(9) == 0) if kind == "bool" else mask.log()
    recorder = Recorder(use_grouped_attention)
    torch.testing.assert_close(run(With(attend), recorder, q, k, v, mask), attend(q, k, v, mask))
    assert recorder.counts(plain) == (0, 1) and recorder.counts(aten.expand.default) == (2, 0)


def test_grouped_attention_with_symbolic_slots_and_repeat_interleave():
    def toy(q, k, v, mask):
        k, v = k.repeat_interleave(3, 1), torch.repeat_interleave(v, 3, dim=1)
        return F.scaled_dot_product_attention(q, k, v, mask)

    for function in (toy, attend):
        recorder = Recorder(use_grouped_attention)
        step = torch.compile(With(function), backend=recorder)
        for slots in (9, 12):
            q, k, v = qkv(slots=slots)
            mask = torch.rand(2, 1, 1, slots) > 0.2
            for x, dim in ((k, 2), (v, 2), (mask, 3)):
                torch._dynamo.mark_dynamic(x, dim)
            with torch.no_grad():
                torch.testing.assert_close(step(q, k, v, mask), function(q, k, v, mask))
        assert len(recorder.after) == 1 and recorder.counts(plain) == (0, 1)


def test_grouped_attention_leaves_alone_what_it_must():
    def written(q, k, v, mask):
        n = q.shape[1] // k.shape[1]
        keys, values = repeated(k, n), repeated(v, n)
        k.zero_()  # the repeated copy keeps the old keys
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)

    def causal(q, k, v, mask):
        return F.scaled_dot_product_attention(q, repeated(k, 3), repeated(v, 3), is_causal=True)

    def wrong_order(q, k, v, mask):  # heads 0 1 0 1 0 1, not 0 0 0 1 1 1
        return F.scaled_dot_product_attention(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1))

    def other_place(q, k, v, mask):
        k, v = (x[:, None].expand(2, 3, 2, 9, 8).reshape(2, 6, 9, 8) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v)

    for function in (written, causal, wrong_order, other_place):
        q, k, v = qkv()
        recorder, want = Recorder(use_grouped_attention), function(q, k.clone(), v, None)
        torch.testing.assert_close(run(With(function), recorder, q, k.clone(), v, None), want)
        assert recorder.before == recorder.after
    recorder = Recorder(use_grouped_attention)
    run(With(attend), recorder, *qkv(tokens=65), None)
    assert recorder.before == recorder.after


class Layer(nn.Module):
    """The steps of a decoder layer that products of few rows take: norms, a gate, additions to the stream."""

    def __init__(self, size=32):
        super().__init__()
        self.norms = nn.ModuleList(transformers.models.llama.modeling_llama.LlamaRMSNorm(size) for _ in range(3))
        self.first, self.gate, self.up, self.down, self.head = (
            nn.Linear(a, b, bias=False) for a, b in ((size, size), (size, 48), (size, 48), (48, size), (size, 64))
        )

    def forward(self, x):
        x = x + self.first(self.norms[0](x))
        y = self.norms[1](x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head(self.norms[2](x)[:, slice(-1, None), :])


def test_few_rows_on_a_gpu_merge_what_stands_around_products(monkeypatch, interpreted):
    """The graph that a GPU gets, computed by the ops' meaning in plain PyTorch."""
    pytest.importorskip("spec_compile.kernels.norms", exc_type=ImportError)
    monkeypatch.setattr(ForwardGraph, "device", property(lambda graph: torch.device("cuda")))
    monkeypatch.setattr(linear, "FORMS", (replace(linear.SKINNY_GEMM, device="cpu"),))
    monkeypatch.setattr(kernels, "load", lambda device: None)
    module, x = Layer().bfloat16(), torch.randn(2, 1, 32).bfloat16()
    got = run(module, spec, x)
    torch.testing.assert_close(got, module(x), rtol=0.05, atol=0.05)
    ops = torch.ops.spec_compile
    names = [node.target for node in calls(interpreted[0]) if "spec_compile" in str(node.target)]
    stream, product = ops.product_to_stream.default, ops.product.default
    assert names == [ops.rms_norm.default, stream, product, stream, product]
    run(module, spec, torch.randn(1, 65, 32).bfloat16())
    assert LINEAR in [node.target for node in calls(interpreted[1])]  # many rows keep PyTorch's products


def test_inductor_does_not_write_down_what_arguments_were_computed_from():
    """Before torch 2.13 that took minutes for an op which comes first in the eighth layer."""
    from torch._inductor import ir

    if TORCH >= (2, 13):
        pytest.skip("this torch describes ops only if its log wants it")

    def attends(x):
        q = x.view(1, 4, 1, 4)
        return torch.ops.spec_compile.grouped_attention(q, q[:, :2], q[:, :2], None, None)

    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), With(attends))
    written_down = patch.object(ir.MutableBox, "__str__", side_effect=AssertionError("written down"))
    with written_down, torch._inductor.config.patch(force_disable_caches=True):
        run(module, spec, torch.randn(1, 16))
