"""fuse_rotary, fuse_qk_norms, fuse_norms: graphs of 16 bits that verify on a GPU; the ops' plain meanings run here."""

import copy
import dataclasses
from collections import Counter

import models
import pytest
import torch
from captures import capture
from torch import nn
from toy_graphs import (
    HIDDEN,
    SIZE,
    VOCAB,
    Block,
    Rewritten,
    aten,
    example,
    prefix_then_chunk,
    rewritten,
    trace,
    with_table,
)

from spec_compile import kernels, passes
from spec_compile.compile.regions import cut
from spec_compile.graph import calls
from spec_compile.kernels import attention, ops
from spec_compile.passes import Settings
from spec_compile.passes.fuse_attention import fuse_qk_norms, fuse_rotary
from spec_compile.passes.fuse_norms import fuse_norms
from spec_compile.passes.tidy import tidy
from spec_compile.tree import ancestry

JOINED = (fuse_rotary, fuse_qk_norms, fuse_norms)


@pytest.mark.sweep("llama-2-5-4 gemma3-4-17-8")
@pytest.mark.parametrize(
    "name, turned, norms, sums",
    [
        ("llama", 2, 5, 4),
        ("qwen2", 2, 5, 4),
        ("qwen3", 2, 5, 4),  # besides the norms of queries and keys
        ("gemma3", 4, 17, 8),
        ("smollm3", 1, 5, 4),  # one layer without rotation
        ("granite", 2, 5, 4),
        ("mixtral", 2, 5, 4),
        ("gemma", 2, 5, 4),
        ("gemma2", 4, 17, 8),
        ("olmo2", 0, 9, 1),  # rotates in float32
        ("gpt_oss", 4, 9, 8),  # half by half
        ("phi3", 0, 5, 4),  # rotates a part
        ("glm4", 0, 9, 4),  # interleaved
        ("deepseek_v3", 0, 13, 6),
        ("starcoder2", 2, 0, 0),  # LayerNorm
        ("gpt2", 0, 0, 0),
    ],
)
def test_rotary_and_fused_norms_of_real_architectures(half_on_gpu, name, turned, norms, sums):
    """Bit for bit the same logits, hidden states and caches, also when cut into regions."""
    graph = half_on_gpu(name)
    wanted = dict(taps=tuple(range(len(graph.layers) + 1)))
    plain, ours = rewritten(graph, JOINED, **wanted), rewritten(graph, **wanted)
    own = torch.ops.spec_compile
    nodes = calls(ours.gm, own.tree_attention.default)
    assert sum("cos" in node.kwargs for node in nodes) == turned
    normed = sum("q_norm" in node.kwargs for node in nodes)
    assert normed == (turned if name in ("qwen3", "gemma3") else 0)
    counts = [len(calls(ours.gm, op.default)) for op in (own.add_rms_norm, own.rms_norm)]
    assert counts == [sums, norms - sums]
    roots = [len(calls(each.gm, aten.rsqrt.default)) for each in (plain, ours)]
    assert roots[0] - roots[1] == norms + 2 * normed
    want = prefix_then_chunk(plain.gm, graph)
    for function in (ours.gm, cut(ours)):
        for got, expected in zip(prefix_then_chunk(function, graph), want, strict=True):
            assert torch.equal(got, expected), ours.gm.print_readable(print_output=False)


def test_rotary_and_fused_norms_leave_other_graphs_alone(half_on_gpu, monkeypatch, captured):
    graph = captured("llama")[1]
    assert Counter(calls_of(rewritten(graph))) == Counter(calls_of(rewritten(graph, JOINED)))
    monkeypatch.undo()
    graph = capture(models.ADMITTED["qwen3"]().to(torch.bfloat16))
    plain, ours = rewritten(graph, JOINED), rewritten(graph)
    if attention.BACKENDS[ours.backend].takes:  # the kernel of a CPU rotates, and norms nothing
        nodes = attention.attention_calls(ours)
        assert all("cos" in node.kwargs and "q_norm" not in node.kwargs for node in nodes)
        for got, expected in zip(prefix_then_chunk(ours.gm, graph), prefix_then_chunk(plain.gm, graph), strict=True):
            assert (got.float() - expected.float()).norm() < 0.02 * expected.float().norm()
    else:
        assert Counter(calls_of(ours)) == Counter(calls_of(plain))


def calls_of(graph):
    return [str(node.target) for node in calls(graph.gm)]


def half(x, negative=0):
    """transformers' rotate_half, with the wrong half negated at 1 and none at 2."""
    a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat([[-b, a], [b, -a], [b, a]][negative], -1)


def by_halves(turn):
    """A rotation ``turn(x1, x2, cos, sin)`` of halves, as gpt-oss has it, with angles for a half."""

    def whole(x, cos, sin):
        return torch.cat(turn(*x.chunk(2, -1), cos, sin), -1)

    whole.angles = SIZE // 2
    return whole


TURNS = {  # of queries and keys x by cos and sin [B, 1, T, D], and those of them that are Llama's
    "llama": (lambda x, cos, sin: x * cos + half(x) * sin, True),
    "the wrong half negated": (lambda x, cos, sin: x * cos + half(x, 1) * sin, False),
    "none negated": (lambda x, cos, sin: x * cos + half(x, 2) * sin, False),
    "halves of another": (lambda x, cos, sin: x * cos + half(x * 2) * sin, False),
    "one angle": (lambda x, cos, sin: x * cos[..., :1] + half(x) * sin[..., :1], False),
    "a difference": (lambda x, cos, sin: x * cos - half(x) * sin, False),
    "uneven": (lambda x, cos, sin: x * cos + torch.cat([-x[..., 1:], x[..., :1]], -1) * sin, False),
    "a part": (lambda x, cos, sin: torch.cat([x[..., :2] * cos[..., :2] + half(x[..., :2]) * sin[..., :2],
                                              x[..., 2:]], -1), False),
    "half by half": (by_halves(lambda a, b, cos, sin: (a * cos - b * sin, b * cos + a * sin)), True),
    "half by half, backwards": (by_halves(lambda a, b, cos, sin: (a * cos + b * sin, b * cos - a * sin)), False),
    "half by half, one twice": (by_halves(lambda a, b, cos, sin: (a * cos - b * sin, a * cos + b * sin)), False),
    "half by half, swapped": (by_halves(lambda a, b, cos, sin: (b * cos - a * sin, a * cos + b * sin)), False),
    "half by half, one angle": (by_halves(lambda a, b, c, s: (a * c - b * s[..., :1], b * c + a * s[..., :1])), False),
}  # fmt: skip


class Turning(nn.Module):
    """One layer whose queries and keys turn in a way; `keys`: the keys in another, or by other angles."""

    def __init__(self, turn, keys=None, shift=0.0):
        super().__init__()
        self.turn, self.keys, self.shift, self.block = turn, keys or turn, shift, Block(0)
        self.embed, self.head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids, positions):
        x = self.embed(ids)
        q, k, v = (f(x).unflatten(2, (-1, SIZE)).transpose(1, 2) for f in (self.block.q, self.block.k, self.block.v))
        angle = positions[..., None] * torch.tensor([1.0, 0.1, 1.0, 0.1][: getattr(self.turn, "angles", SIZE)])
        angles = [(a.cos().to(x.dtype)[:, None], a.sin().to(x.dtype)[:, None]) for a in (angle, angle + self.shift)]
        q, k = self.turn(q, *angles[0]), self.keys(k, *angles[self.shift != 0])
        return self.head(self.block.o(ops.attention(q, k, v, None, 0.5, None, None, 0).flatten(2)))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("turn, fits", TURNS.values(), ids=TURNS)
def test_rotary_takes_rotations_by_halves_only(half_on_gpu, turn, fits):
    graph = half_graph(Turning(turn))
    plain, ours = rewritten(graph, [fuse_rotary]), rewritten(graph)
    (node,) = calls(ours.gm, torch.ops.spec_compile.tree_attention.default)
    assert ("cos" in node.kwargs) == fits
    for got, want in zip(prefix_then_chunk(ours.gm, graph), prefix_then_chunk(plain.gm, graph), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("other", [dict(keys=lambda x, cos, sin: x), dict(shift=1.0)])
def test_rotary_wants_queries_and_keys_turned_alike(half_on_gpu, other):
    graph = half_graph(Turning(TURNS["llama"][0], **other))
    (node,) = calls(rewritten(graph).gm, torch.ops.spec_compile.tree_attention.default)
    assert "cos" not in node.kwargs


NORMS = {  # of x by a weight, and the offset with which `rms_norm` does the same, or None
    "rounded first": (lambda x, w: w * scaled(x).to(x.dtype), None),
    "rounded last": (lambda x, w: (w * scaled(x)).to(x.dtype), 0.0),
    "of a float32 weight": (lambda x, w: (scaled(x) * w.float()).to(x.dtype), 0.0),
    "shifted": (lambda x, w: (scaled(x) * (1.0 + w.float())).type_as(x), 1.0),
}
OTHERS = {
    "no weight": lambda x, w: scaled(x).to(x.dtype),
    "the root of another": lambda x, w: w * (x.float() * (scaled(x * 2) / (x * 2).float())).to(x.dtype),
    "of 16 bits": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)),
    "over rows": lambda x, w: w * scaled(x, dim=1).to(x.dtype),
    "fourth powers": lambda x, w: w * scaled(x, power=4).to(x.dtype),
    "another weight": lambda x, w: (w * 2) * scaled(x).to(x.dtype),
    "a single weight": lambda x, w: w[:1] * scaled(x).to(x.dtype),
}


def scaled(x, dim=-1, power=2):
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(power).mean(dim, keepdim=True) + 1e-3)


def half_graph(model):
    """The graph of a model, which becomes one of bfloat16."""
    model = model.to(torch.bfloat16).eval()
    return dataclasses.replace(trace(model, *example(2, 7), dynamic=True), dtype=torch.bfloat16)


def fused(norm):
    """What the pass makes of a `Normed`, and its norms without and with an addition."""
    result = Rewritten(passes.run(half_graph(norm), Settings(), [tidy]), fuse_norms)
    own = torch.ops.spec_compile
    with torch.no_grad():
        result.same(*example(3, 5))
    return result, *(calls(result.gm, op.default) for op in (own.rms_norm, own.add_rms_norm))


class Normed(nn.Module):
    """A norm, and a second after an addition, whose sum is also read later."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.embed = norm, nn.Embedding(VOCAB, HIDDEN)
        self.first, self.second = (nn.Parameter(torch.randn(HIDDEN)) for _ in range(2))

    def forward(self, ids, positions):
        x = self.embed(ids)
        x = x + self.norm(x, self.first)
        return self.norm(x, self.second) * 2 + x


@pytest.mark.parametrize("norm", [*NORMS, *OTHERS])
def test_fused_norms_takes_norms_only(half_on_gpu, norm):
    how, offset = NORMS.get(norm) or (OTHERS[norm], None)
    result, norms, sums = fused(Normed(how))
    assert len(norms) == len(sums) == (norm in NORMS), str(result)
    assert all(node.args[-2:] == (1e-3, offset) for node in norms + sums), str(result)


ROUNDED_FIRST = NORMS["rounded first"][0]
AROUND = {
    "a sum of other sizes": lambda x, w: ROUNDED_FIRST(x + x[:1], w),
    "a difference": lambda x, w: ROUNDED_FIRST(torch.add(x, x, alpha=-0.5), w),
}


@pytest.mark.parametrize("norm", AROUND)
def test_norms_of_other_sums_are_fused_without_them(half_on_gpu, norm):
    result, norms, sums = fused(Normed(AROUND[norm]))
    assert (len(norms), len(sums)) == (2, 0), str(result)


def test_norms_may_share_a_weight(half_on_gpu):
    model = Normed(ROUNDED_FIRST)
    model.second = model.first
    result, norms, sums = fused(model)
    assert len(norms) == len(sums) == 1, str(result)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "olmo2", "mixtral", "starcoder2", "gemma3"])
@pytest.mark.parametrize("nodes", [1, 16, 64])
def test_rotary_and_fused_norms_on_a_gpu(name, nodes):
    """The kernels are as close to float32 as the same graph without them."""
    kernels.load(torch.device("cuda"))
    model = models.ADMITTED[name]().to("cuda", torch.bfloat16)
    graph, exact = capture(model), capture(copy.deepcopy(model).float())
    ids = torch.randint(3, graph.vocab_size, (2, nodes), device="cuda")
    ancestors, depth = ancestry(torch.arange(-1, nodes - 1, device="cuda").expand(2, -1))
    lengths = torch.tensor([40, 7], device="cuda")
    held = [
        torch.randn(2, layer.kv_heads, 128, size, dtype=graph.dtype, device="cuda")
        for layer in graph.layers
        for size in (layer.key_dim, layer.value_dim)
    ]
    outs = []
    for each, without in ((exact, ()), (graph, JOINED), (graph, ())):
        cache = [part.to(each.dtype, copy=True) for part in held]
        with torch.no_grad():
            gm = rewritten(each, without).gm
            outs.append([*gm(ids, lengths[:, None] + depth, lengths, ancestors, with_table(cache), 128), *cache])
    for want, plain, got in zip(*outs, strict=True):
        errors = [(out.float() - want).norm().item() / want.norm().item() for out in (plain, got)]
        assert errors[1] < 1.5 * errors[0] + 1e-3
