"""Norms of recurrences with their gates, L2 norms, and the sums of routers: kernels against transformers' modules, and
the passes that put them into a graph.

Without a GPU kernels run in Triton's interpreter, in float32; ``pytest -m gpu`` runs them on a CUDA device.
"""

import dataclasses

import pytest
import torch
from places import places
from torch import nn
from toy_graphs import HIDDEN, VOCAB, Rewritten, example, trace
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm, Qwen3NextRMSNormGated

from spec_compile import passes
from spec_compile.graph import calls
from spec_compile.kernels import norms, row_scan
from spec_compile.kernels.linear import float32
from spec_compile.passes import Settings
from spec_compile.passes.fuse_recurrent_norms import fuse_gated_norms
from spec_compile.passes.tidy import tidy

aten, ops = torch.ops.aten, torch.ops.spec_compile
PLACES = places(torch.float32, torch.bfloat16, torch.float16)


class SigmoidNorm(Qwen3NextRMSNormGated):
    """Kimi's norm: the weight in float32, and a sigmoid."""

    def forward(self, x, gate):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight.float() * wide * gate.float().sigmoid()).to(x.dtype)


FORMS = {
    "GDN": (lambda: Qwen3NextRMSNormGated(HIDDEN), (HIDDEN, "silu", False, True), False),
    "KDA": (lambda: SigmoidNorm(HIDDEN), (HIDDEN, "sigmoid", False, False), False),
    "SSD": (lambda: BambaRMSNormGated(HIDDEN, HIDDEN // 4), (HIDDEN // 4, "silu", True, False), True),
    "gate last": (lambda: FalconH1RMSNormGated(HIDDEN, n_groups=2), (HIDDEN // 2, "silu", False, False), True),
    "gate first": (
        lambda: FalconH1RMSNormGated(HIDDEN, n_groups=2, norm_before_gate=False),
        (HIDDEN // 2, "silu", True, False),
        True,
    ),
}  # fmt: skip
"""A module of `HIDDEN` entries; the size of a group, the activation, and where the op gates and rounds; whether the
model gives it float32."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape, size", [((3, 24), 24), ((2, 3, 96), 32), ((1, 1, 33), 11), ((2, 3, 2, 128), 128)])
def test_gated_norm(place, shape, size):
    """The kernel against the op's meaning; x and gate are slices of wider tensors, and a row alone has its bits."""
    device, dtype = place
    wide = torch.randn(*shape[:-1], 3 * shape[-1], device=device).to(dtype)
    x, gate = wide[..., : shape[-1]].float(), wide[..., shape[-1] : -shape[-1]]
    weight = torch.randn(shape[-1], device=device).to(dtype)
    for activation, gate_first, round_first in (
        ("silu", True, False),
        ("silu", False, True),
        ("sigmoid", False, False),
    ):
        options = weight, 1e-5, size, activation, gate_first, round_first
        for given in (x, x.to(dtype)):
            out = norms.launch_gated_norm(given, gate, *options)
            want = norms.gated_rms_norm(given.cpu(), gate.cpu(), weight.cpu(), *options[1:])
            assert out.dtype == dtype and out.shape == shape and out.is_contiguous()
            steps = 16 if dtype == torch.float32 else 3
            torch.testing.assert_close(out.cpu(), want, rtol=steps * torch.finfo(dtype).eps, atol=1e-6)
            alone = norms.launch_gated_norm(given[-1:, ...], gate[-1:, ...].contiguous(), *options)
            assert torch.equal(alone[0], out[-1])


@pytest.mark.parametrize("place", PLACES)
def test_gates_may_be_of_another_shape(place):
    """The output of every head is a row, and the gates of a token lie side by side in a product."""
    device, dtype = place
    x, product = (torch.randn(shape, device=device).to(dtype) for shape in ((2 * 3 * 4, 16), (2, 3, 100)))
    weight, gate = torch.randn(16, device=device).to(dtype), product[..., 20:84]
    both = [
        norms.launch_gated_norm(x, each, weight, 1e-6, 16, "silu", False, True) for each in (gate, gate.reshape(-1, 16))
    ]
    assert torch.equal(*both)
    with pytest.raises(ValueError, match=r"weight: expected \[16\], as x has, in groups of 5"):
        norms.launch_gated_norm(x, gate, weight, 1e-6, 5, "silu", False, True)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 5, 3, 24)])
def test_l2_norms(place, shape):
    device, dtype = place
    q, k = torch.randn(*shape[:2], 2 * shape[2] * shape[3], device=device).to(dtype).chunk(2, -1)
    q, k = (x.unflatten(-1, shape[2:]) for x in (q, k))
    q[0, 0, 0] = 0
    got, want = norms.launch_l2_norm(q, k, 1e-6, 0.25), norms.l2_norms(q.cpu(), k.cpu(), 1e-6, 0.25)
    for a, b in zip(got, want):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-7)
        assert a.shape == shape and a.dtype == torch.float32 and a.is_contiguous()
    for a, b in zip(norms.launch_l2_norm(q[-1:, -1:], k[-1:, -1:].contiguous(), 1e-6, 0.25), got):
        assert torch.equal(a[0, 0], b[-1, -1])
    with pytest.raises(ValueError, match="k: expected"):
        norms.launch_l2_norm(q, k[..., :-1], 1e-6, 1.0)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rows, inputs, outputs", [(1, 64, 8), (19, 200, 33), (3, 1000, 128)])
def test_linear_in_float32(place, rows, inputs, outputs):
    device, dtype = place
    x, weight = (torch.randn(n, inputs, device=device).to(dtype) for n in (rows, outputs))
    for each in {weight.dtype: weight, torch.float32: weight.float()}.values():
        out = float32.launch(x, each)
        torch.testing.assert_close(out.double(), x.double() @ each.double().t(), rtol=1e-4, atol=2e-4)
        if device == "cuda":
            assert torch.equal(float32.launch(x[-1:].clone(), each), out[-1:])
    assert float32.launch(x[None], weight).shape == (1, rows, outputs)


@pytest.mark.parametrize("place", PLACES)
def test_norms_of_heads(place):
    """Heads of a slice of a product, and of a token alone, wherever it lies."""
    device, dtype = place
    x = torch.randn(2, 3, 101, device=device).to(dtype)[..., 5:].unflatten(-1, (4, 24))
    weight = torch.randn(24, device=device).to(dtype)
    got = norms.launch_norm(x, None, weight, 1e-6, 1.0)[1]
    torch.testing.assert_close(got.cpu(), norms.rms_norm(x.cpu(), weight.cpu(), 1e-6, 1.0))
    assert torch.equal(norms.launch_norm(x[-1:, -1:], None, weight, 1e-6, 1.0)[1][0, 0], got[-1, -1])


@pytest.mark.parametrize("place", PLACES)
def test_short_sums(place):
    device, dtype = place
    x = torch.randn(5, 7, device=device).to(dtype)
    torch.testing.assert_close(row_scan.launch_sum(x), x.sum(-1))


class Gated(nn.Module):
    """A norm with a gate, between embeddings and logits."""

    def __init__(self, norm, wide):
        super().__init__()
        self.norm, self.wide = norm, wide
        self.embed, self.gate = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(VOCAB, 2 * HIDDEN)

    def forward(self, ids, positions):
        x, gate = self.embed(ids), self.gate(ids)[..., HIDDEN:]
        if self.wide:
            return self.norm(x.float(), gate).to(x.dtype)
        return self.norm(x.reshape(-1, HIDDEN), gate.reshape(-1, HIDDEN)).reshape(x.shape)


def fused(norm, wide=False):
    """What the pass makes of the graph of a norm."""
    model = Gated(None, wide).to(torch.bfloat16)
    model.norm = norm
    graph = dataclasses.replace(trace(model, *example(2, 7), dynamic=True), dtype=torch.bfloat16)
    return Rewritten(passes.run(graph, Settings(), [tidy]), fuse_gated_norms)


@pytest.mark.parametrize("form", FORMS)
def test_gated_norms_are_fused(half_on_gpu, form):
    make, options, wide = FORMS[form]
    norm = make()
    norm.weight.data.normal_()
    result = fused(norm.to(torch.bfloat16), wide)
    assert result.count(aten.mean.dim) == (1, 0) and result.count(ops.gated_rms_norm.default) == (0, 1), str(result)
    (node,) = calls(result.gm, ops.gated_rms_norm.default)
    assert node.args[3:] == (norm.variance_epsilon, *options)
    with torch.no_grad():
        result.same(*example(3, 5))


class Ungated(Qwen3NextRMSNorm):
    def forward(self, x, gate):
        return super().forward(x)


def with_gelu():
    norm = Qwen3NextRMSNormGated(HIDDEN)
    norm.activation = "gelu"
    return norm


OTHERS = {
    "no gate": lambda: Ungated(HIDDEN).to(torch.bfloat16),
    "another activation": lambda: with_gelu().to(torch.bfloat16),
    "a float32 weight": lambda: Qwen3NextRMSNormGated(HIDDEN),
}


@pytest.mark.parametrize("norm", OTHERS)
def test_other_norms_stay(half_on_gpu, norm):
    assert fused(OTHERS[norm]()).count(ops.gated_rms_norm.default) == (0, 0)
