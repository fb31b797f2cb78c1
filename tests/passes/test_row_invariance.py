"""Which parts of a verify graph may have other bits beside other rows: by real architectures, and on toy graphs."""

import dataclasses

import models
import pytest
import torch
from captures import capture
from torch import fx, nn

import spec_compile
from spec_compile import UnsupportedModelError, passes
from spec_compile.cache import Cache
from spec_compile.graph import ModelGraph, calls
from spec_compile.kernels import experts, linear
from spec_compile.kernels.attention import Use
from spec_compile.kernels.card import Card
from spec_compile.passes import Settings
from spec_compile.passes.row_invariance import require_kernels_of_experts, require_same_bits, variant_parts
from spec_compile.tools import explain

aten = torch.ops.aten


SLOW = ["qwen3_next", "qwen3_5_moe", "olmo_hybrid", "bamba", "granitemoehybrid", "lfm2_moe", "lfm3"]
REDUCED = {
    "qwen3_5": (1, 1, 0, 0), "qwen3_next": (1, 1, 0, 0), "qwen3_5_moe": (1, 1, 0, 0), "olmo_hybrid": (1, 1, 0, 0),
    "bamba": (1, 0, 0, 0), "granitemoehybrid": (1, 0, 0, 0), "nemotron_h": (1, 0, 2, 1), "lfm2_moe": (0, 0, 1, 0),
}  # fmt: skip
"""Norms with gates, pairs of L2 norms, sums of routers, and products in float32 of a model's graph."""


@pytest.fixture
def half_on_gpu(half_on_gpu, monkeypatch):
    """A function: name of a tiny model -> its verify graph in bfloat16, which passes take for one on a GPU."""
    for module in (linear.skinny_gemm, experts.launch):
        monkeypatch.setattr(module, "why_not_on", lambda *_: None)
    monkeypatch.setattr(linear, "FORMS", (dataclasses.replace(linear.SKINNY_GEMM, device="cpu"),))

    def rewrite(architecture, **use):
        graph = capture((models.ADMITTED | models.HYBRIDS)[architecture]().to(torch.bfloat16))
        return passes.run(graph, Settings(attention=Use(**use)))

    return rewrite


def test_a_graph_of_experts_compiles_for_any_number_of_nodes(half_on_gpu, monkeypatch):
    graph = half_on_gpu("mixtral")
    monkeypatch.setattr(ModelGraph, "device", torch.device("cpu"))
    compiled, cache = torch.compile(graph.gm, backend="eager", fullgraph=True, dynamic=True), Cache(graph, 1, 128)
    for nodes in (37, 5):
        ids, positions = torch.randint(3, models.VOCAB, (1, nodes)), 20 + torch.arange(nodes)[None]
        ancestors = (2 << torch.arange(nodes))[None] - 1
        for tensor in (ids, positions, ancestors):
            torch._dynamo.mark_dynamic(tensor, 1)
        arguments = ids, positions, torch.tensor([20]), ancestors, cache.argument, 128
        with torch.no_grad():
            torch.testing.assert_close(compiled(*arguments), graph.gm(*arguments))


@pytest.mark.sweep("llama gpt_oss lfm2")
@pytest.mark.parametrize(
    "name",
    ["llama", "qwen3", "gemma2", "mistral", "olmo2", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "lfm2",
     "falcon_h1", "qwen3_5", "nemotron_h", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)],
)  # fmt: skip
def test_kernels_of_ours_compute_all_of_these(half_on_gpu, name):
    graph, prompts = half_on_gpu(name), half_on_gpu(name, role="prefill")
    assert variant_parts(graph) == variant_parts(prompts) == []
    require_same_bits("request", {"verify": graph, "prefill": prompts})
    gated, pairs, sums, products = REDUCED.get(name, (0, 0, 0, 0))
    ops = torch.ops.spec_compile
    fused = ops.gated_rms_norm, ops.l2_norms, ops.row_sum, ops.linear_float32
    assert [len(calls(graph.gm, op.default)) for op in fused] == [gated, pairs, sums, products]
    left = [node for op in (aten.mean.dim, aten.sum.dim_IntList) for node in calls(graph.gm, op)]
    assert not any(node.meta["val"].is_floating_point() for node in left)


@pytest.mark.sweep("gpt2-parts0 cohere-parts1")
@pytest.mark.parametrize(
    "name, parts",
    [
        ("gpt2", ["transformer.h.0-1.ln_1: op layer_norm", "transformer.h.0-1.attn.c_attn: product by addmm",
                  "transformer.ln_f: op layer_norm"]),
        ("cohere", ["model.layers.0-1.input_layernorm: op mean", "model.norm: op mean"]),
        ("deepseek_v3", ["model.layers.0-2.self_attn.kv_b_proj: product 24 -> 112 (24 inputs are no multiple of 16)"]),
    ],
)  # fmt: skip
def test_what_no_kernel_of_ours_computes_is_named(half_on_gpu, name, parts):
    graph = half_on_gpu(name)
    said = variant_parts(graph)
    assert set(parts) <= set(said)
    with pytest.raises(UnsupportedModelError, match="exact: 'bits' cannot be kept") as error:
        require_same_bits("bits", {"verify": graph})
    assert all(part in str(error.value) for part in said)


def test_experts_and_layers_without_a_kernel_are_named(half_on_gpu, monkeypatch):
    monkeypatch.setattr(experts.launch, "why_not_on", lambda *_: "there is none")
    assert variant_parts(half_on_gpu("mixtral")) == ["model.layers.0-1.mlp.experts: experts (there is none)"]
    monkeypatch.setattr(linear, "FORMS", ())
    said = variant_parts(half_on_gpu("llama"))
    assert "model.layers.0-1.mlp.down_proj: product 96 -> 64 (library product)" in said
    assert all("product" in part for part in said)


def test_experts_without_a_kernel_are_refused_before_a_graph_is_captured(half_on_gpu, monkeypatch):
    """Quantised ones on a T4; those of 16 bits have a kernel there."""
    graph, t4 = half_on_gpu("mixtral"), Card("T4", (7, 5), 40, 65_536)
    monkeypatch.undo()
    monkeypatch.setattr(ModelGraph, "device", property(lambda graph: torch.device("cuda")))
    for module in (experts.launch, linear.skinny_gemm):
        monkeypatch.setattr(module, "card_of", lambda device: t4)
    monkeypatch.setattr(linear.skinny_gemm, "why_not_on", lambda device: "Triton uses no tensor cores")
    require_kernels_of_experts(graph)
    layout = experts.format_of(calls(graph.gm, experts.UP)[0].args[-1])
    monkeypatch.setattr(experts, "format_of", lambda text: dataclasses.replace(layout, block=128))
    with pytest.raises(UnsupportedModelError, match=r"experts .*mlp.experts, because its weights are quantised, and"):
        require_kernels_of_experts(graph)


@pytest.mark.parametrize("capability, lines", [((7, 5), 7), ((8, 6), 4), ((9, 0), 0)])
def test_explain_says_what_a_gpu_lacks(monkeypatch, capability, lines):
    monkeypatch.setattr(explain, "card_of", lambda device: Card("some GPU", capability, 40, 65_536))
    monkeypatch.setattr(explain, "launches_early", lambda device: capability >= (9, 0))
    said = explain._card(torch.device("cuda"))
    assert len(said) == lines and explain._card(torch.device("cpu")) == []
    number = ".".join(map(str, capability))
    assert not said or said[0] == f"some GPU (compute capability {number}) lacks"


def test_other_attention_of_prompts_is_named_by_those_who_ask_for_requests(half_on_gpu):
    graphs = {
        "verify": half_on_gpu("llama"),
        "prefill": half_on_gpu("llama", role="prefill", name="sdpa", captured=False),
    }
    require_same_bits("bits", graphs)
    with pytest.raises(UnsupportedModelError, match=r"exact: 'request' cannot be kept.*: attention by sdpa"):
        require_same_bits("request", graphs)
    assert explain._bits(*map(variant_parts, graphs.values())) == [
        "same bits whatever is drafted: yes",
        "same bits in any chunk, batch or prefix: not promised, because of",
        "  model.layers.0-1.self_attn: attention by sdpa",
    ]


def toy(function, *shapes, dtype=torch.bfloat16):
    """A graph of one op over inputs of these shapes."""
    graph, inputs = fx.Graph(), [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    nodes = [graph.placeholder(f"x{n}") for n in range(len(inputs))]
    for node, value in zip(nodes, inputs):
        node.meta["val"] = value
    target, *others = function
    out = graph.call_function(target, (*nodes, *others))
    out.meta["val"] = target(*inputs, *others)
    graph.output((out,))
    return ModelGraph(fx.GraphModule(nn.Module(), graph), (), 8, 8, torch.bfloat16, None, "")


@pytest.mark.parametrize(
    "function, shapes, dtype, reason",
    [
        ((aten.silu.default,), [(2, 3)], torch.bfloat16, None),
        ((aten.transpose.int, 0, 1), [(2, 3)], torch.bfloat16, None),
        ((aten.topk.default, 2), [(2, 3)], torch.bfloat16, None),
        ((aten.argmax.default, -1), [(2, 3)], torch.bfloat16, None),
        ((aten.cumsum.default, 0), [(2,)], torch.int64, None),  # integers are exact in any order
        ((aten.cumsum.default, 0), [(2,)], torch.float32, "op cumsum"),
        ((aten.mean.dim, [-1]), [(2, 3)], torch.float32, "op mean"),
        ((aten.bmm.default,), [(1, 4, 1), (1, 1, 5)], torch.float32, None),  # rotary's frequencies by positions
        ((aten.bmm.default,), [(1, 4, 2), (1, 2, 5)], torch.float32, "product by bmm"),
        ((aten.mm.default,), [(4, 2), (2, 5)], torch.bfloat16, "product by mm"),
    ],
)
def test_ops(monkeypatch, function, shapes, dtype, reason):
    monkeypatch.setattr(ModelGraph, "device", property(lambda graph: torch.device("cuda")))
    assert variant_parts(toy(function, *shapes, dtype=dtype)) == ([f"the model: {reason}"] if reason else [])


def test_nothing_is_promised_on_a_cpu_or_in_float32():
    fast = spec_compile.speculate(models.ADMITTED["llama"](), compile=False)
    (said,) = variant_parts(fast.speculation.engine.runtime.verify)
    assert said.startswith("float32 on a CPU")
    said = f"same bits whatever is drafted: not promised, because of\n  {said}\n"
    assert f"{said}same bits in any chunk, batch or prefix: not promised either\n" in fast.speculation.explain()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_refused_on_a_cpu_before_any_work(monkeypatch, dtype):
    monkeypatch.setattr("spec_compile.api.capture", lambda model: pytest.fail("work has started"))
    with pytest.raises(
        UnsupportedModelError, match=r"exact: bits are promised in bfloat16 and float16 on a GPU of comp"
    ):
        spec_compile.speculate(models.ADMITTED["llama"]().to(dtype), exact="bits", compile=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_bits_on_a_gpu():
    model = models.ADMITTED["llama"]().to("cuda", torch.bfloat16)
    for exact in ("bits", "request"):
        said = spec_compile.speculate(model, exact=exact, compile=False).speculation.explain()
        assert "same bits whatever is drafted: yes\nsame bits in any chunk, batch or prefix: yes\n" in said
    with pytest.raises(UnsupportedModelError, match=r"model.layers.0-1.self_attn: attention by sdpa"):
        spec_compile.speculate(model, exact="bits", compile=False, attention_backend={"verify": "sdpa"})
    with pytest.raises(UnsupportedModelError, match=r"'request'.*model.layers.0-1.self_attn: attention by sdpa"):
        spec_compile.speculate(model, exact="request", compile=False, attention_backend={"prefill": "sdpa"})
    with pytest.raises(UnsupportedModelError, match="bits are promised in bfloat16"):
        spec_compile.speculate(models.ADMITTED["llama"]().cuda(), exact="bits")
    with pytest.raises(UnsupportedModelError, match="op layer_norm"):
        spec_compile.speculate(models.ADMITTED["gpt2"]().to("cuda", torch.bfloat16), exact="bits")
