"""chain_products: on a CPU the products between two calls of attention are one op."""

import operator

import models
import pytest
import torch
from cpu_levels import NEEDS_KERNEL
from toy_graphs import prefix_then_chunk, rewritten

from spec_compile import speculate
from spec_compile.graph import calls
from spec_compile.kernels.linear import PRODUCTS, few_rows
from spec_compile.kernels.linear.around import ADD_AROUND
from spec_compile.kernels.linear.chain import CHAIN, links_of
from spec_compile.passes import Settings
from spec_compile.passes.cpu_products import chain_products

pytestmark = NEEDS_KERNEL


@pytest.mark.parametrize(
    "name, taps, chains",
    [
        ("llama", (), [4, 4]),  # the last one ends with the output head
        ("llama", (1,), [4, 4]),  # the stream after the first layer, which is wanted by itself, too, is a result
        ("llama", (-1,), [4, 3]),  # and here the last norm's output
        ("gemma", (), [2, 2, 2, 2]),  # its gates are no silu
        ("qwen2", (), [4, 4]),  # with biases
        ("olmo2", (), []),  # norms stand between its products and the stream
        ("mixtral", (), []),  # experts end at the stream, and begin there
    ],
)
def test_chains(name, taps, chains, narrow_or_best):
    """With the bits of the ops that they replace; none where a library multiplies the weights."""
    chains = chains if narrow_or_best else []
    graph = models.captured(models.ADMITTED[name]().bfloat16())
    apart, result = rewritten(graph, (chain_products,), taps=taps), rewritten(graph, taps=taps)
    found = [links_of(node.args[-1]) for node in calls(result.gm, CHAIN)]
    assert sorted(map(len, found)) == sorted(chains), [len(each) for each in found]
    (report,) = (report for report in result.log if report.name == "chain_products")
    assert report.summary == f"{sum(chains)} products in {len(chains)} chains"
    assert all(any(link.adds for link in links) for links in found)
    for want, got in zip(prefix_then_chunk(apart.gm, graph), prefix_then_chunk(result.gm, graph), strict=True):
        assert torch.equal(got, want)


@pytest.mark.skipif(few_rows.BEST < few_rows.WIDE, reason="needs a CPU with AVX-512")
@pytest.mark.parametrize("is_later, chains", [(False, [2, 2, 4]), (True, [3, 4])])
def test_a_stream_that_others_read(is_later, chains):
    """A chain ends before it would come after readers of its stream, or hide that from them."""
    graph = rewritten(models.captured(models.ADMITTED["llama"]().bfloat16()), (chain_products,))
    added = calls(graph.gm, ADD_AROUND)[0]
    stream = next(node for node in added.users if node.args[1] == 0)
    products = [node for node in graph.gm.graph.nodes if node.target in PRODUCTS]
    with graph.gm.graph.inserting_after(products[products.index(added) + 1] if is_later else stream):
        other = graph.gm.graph.call_function(torch.ops.aten.neg.default, (stream,))
    chain_products(graph, Settings())
    graph.gm.graph.lint()
    assert [len(links_of(node.args[-1])) for node in calls(graph.gm, CHAIN)] == chains
    assert other.args[0].target is operator.getitem and other.args[0].args[0].target == CHAIN


def test_quantised_layers(narrow_or_best):
    """Of blocks of 64 outputs, so that they are merged. The kernel multiplies codes at every level."""
    sizes = dict(models.BASE, num_attention_heads=1, num_key_value_heads=1, head_dim=64, intermediate_size=128)
    model = models.build("LlamaConfig", "LlamaForCausalLM", sizes).bfloat16()
    fast = speculate(model, weights="int8", compile=False)
    runtime = fast.speculation.engine.runtime
    for graph, chains in ((runtime.verify, [4, 4]), (runtime.prefill, [4])):  # of the last layer keys and values
        found = [links_of(node.args[-1]) for node in calls(graph.gm, CHAIN)]
        assert [len(links) for links in found] == chains and all(link.kind for links in found for link in links)
        rest = [node for node in calls(graph.gm) if node.target in PRODUCTS and node.target != CHAIN]
        assert len(rest) == 1  # q, k and v of the first layer


def test_other_graphs_stay():
    for dtype in (torch.float32, torch.float16):
        graph = models.captured(models.ADMITTED["llama"]().to(dtype))
        assert not calls(rewritten(graph).gm, CHAIN)
