"""fuse_append: products that write keys and values into the cache."""

import pytest
import torch
from toy_graphs import aten, prefix_then_chunk, rewritten

from spec_compile import passes
from spec_compile.compile.regions import cut
from spec_compile.graph import calls
from spec_compile.kernels import linear
from spec_compile.kernels.attention import Use, attention_calls
from spec_compile.passes import Settings
from spec_compile.passes.fuse_attention import fuse_append


@pytest.fixture
def skinny_gemm(half_on_gpu, monkeypatch):
    """`half_on_gpu`, with products of the form "skinny_gemm"."""
    monkeypatch.setattr(linear, "choose", lambda weight, few_rows: linear.SKINNY_GEMM)
    return half_on_gpu


def summary_of(graph):
    return next(report.summary for report in graph.log if report.name == "fuse_append")


def appending(graph):
    """Products that append, attention calls that find the block in the cache, and attention calls."""
    attention = attention_calls(graph)
    products = len(calls(graph.gm, linear.TO_HEADS))
    return products, sum(node.kwargs["k"] is node.kwargs["v"] is None for node in attention), len(attention)


@pytest.mark.parametrize(
    "name, joined, layers",
    [
        ("llama", 2, 2),
        ("qwen2", 2, 2),  # has biases
        ("qwen3", 2, 2),  # norms queries and keys
        ("gemma2", 4, 4),
        ("mixtral", 2, 2),
        ("smollm3", 1, 2),  # one layer without rotation
        ("olmo2", 0, 2),  # rotates in float32
        ("phi3", 0, 2),  # one projection of the model's own
        ("gpt2", 0, 2),
    ],
)
def test_products_that_append(skinny_gemm, name, joined, layers):
    """Bit for bit the same, also when cut into regions."""
    graph = skinny_gemm(name)
    apart, ours = rewritten(graph, (fuse_append,)), rewritten(graph)
    assert appending(apart)[:2] == (0, 0) and appending(ours) == (joined, joined, layers)
    assert summary_of(ours).startswith(f"{joined} layers append")
    products = [sum(node.target in linear.PRODUCTS for node in calls(each.gm)) for each in (apart, ours)]
    assert products[0] == products[1]
    want = prefix_then_chunk(apart.gm, graph)
    for function in (ours.gm, cut(ours)):
        for got, expected in zip(prefix_then_chunk(function, graph), want, strict=True):
            assert torch.equal(got, expected), ours.gm.print_readable(print_output=False)


def test_drafts_and_other_attention_do_not_append_in_products(skinny_gemm, monkeypatch):
    graph = skinny_gemm("llama")
    assert appending(rewritten(graph, attention=Use(role="prefill")))[0] > 0
    assert appending(rewritten(graph, attention=Use(role="draft")))[0] == 0
    assert appending(rewritten(graph, attention=Use(name="sdpa")))[0] == 0
    monkeypatch.setattr(linear, "choose", lambda weight, few_rows: None)
    assert appending(rewritten(graph))[0] == 0


def test_only_products_that_nothing_else_reads_append(skinny_gemm):
    def read_twice(graph, settings):
        split = calls(graph.gm, aten.split_with_sizes.default)[0]
        output = next(node for node in graph.gm.graph.nodes if node.op == "output")
        output.args = ((*output.args[0], split.args[0]),)
        return "the first product is a result, too"

    steps = [*passes.PIPELINE]
    steps.insert(steps.index(fuse_append), read_twice)
    assert appending(passes.run(skinny_gemm("llama"), Settings(), steps))[0] == 1


def test_heads_that_products_cannot_append_are_named(skinny_gemm, monkeypatch):
    monkeypatch.setattr("spec_compile.kernels.linear.product_ops.MAX_HEAD", 8)
    graph = rewritten(skinny_gemm("qwen3"))
    assert appending(graph)[0] == 0
    assert summary_of(graph).endswith("; apart because of norms of heads of 16")
