"""fuse_cpu_products: on a CPU additions, norms and gates join the products of bfloat16, and these one another."""

import operator

import models
import pytest
import torch
from cpu_levels import NEEDS_KERNEL
from toy_graphs import prefix_then_chunk, rewritten

from spec_compile import speculate
from spec_compile.graph import calls
from spec_compile.kernels.linear import PRODUCTS, cpu_gemm
from spec_compile.kernels.linear.cpu_products import CPU_PRODUCTS, products_of
from spec_compile.passes import Settings, cpu_products
from spec_compile.passes.cpu_products import fuse_cpu_products

pytestmark = NEEDS_KERNEL


def products_in(graph):
    """The products of each call of the op."""
    return [products_of(*node.args) for node in calls(graph.gm, CPU_PRODUCTS)]


def chains_of(graph):
    """The numbers of products of all chains."""
    counts = (len(products) for products in products_in(graph))
    return [count for count in counts if count > 1]


@pytest.mark.parametrize(
    "name, taps, joined, chains",
    [
        ("llama", (), (2, 5, 4), [4, 4]),  # the last one ends with the output head
        ("llama", (1,), (2, 5, 4), [4, 4]),  # the stream after the first layer, wanted by itself, too, is a result
        ("llama", (1, -1), (2, 4, 3), [4, 3]),  # and here the last norm's output
        ("gemma", (), (0, 5, 4), [2, 2, 2, 2]),  # its norms add one to their weights, and its gates are no silu
        ("qwen2", (), (2, 5, 4), [4, 4]),  # with biases
        ("olmo2", (), (2, 1, 1), []),  # norms stand between its products and the residual stream
        ("mixtral", (), (0, 3, 2), []),  # experts end at the stream, and begin there
    ],
)
def test_joined_products(name, taps, joined, chains, first_or_best, monkeypatch):
    """Chains have the bits of the products that they replace."""
    gates, norms, sums = joined
    graph = models.captured(models.ADMITTED[name]().bfloat16())
    without, result = (rewritten(graph, passes, taps=taps) for passes in ((fuse_cpu_products,), ()))
    (report,) = (report for report in result.log if report.name == "fuse_cpu_products")
    assert report.summary == (
        f"{gates} gates, {norms} norms and {sums} additions joined to products; {sum(chains)} products follow one "
        f"another in {len(chains)} chains"
    )
    assert sorted(chains_of(result)) == sorted(chains)
    lost = [len(calls(each.gm, torch.ops.aten.silu.default)) for each in (without, result)]
    assert lost[0] - lost[1] == gates
    monkeypatch.setattr(cpu_products, "_chain_from", lambda graph, node: None)
    apart = rewritten(graph, taps=taps)
    runs = [prefix_then_chunk(each.gm, graph) for each in (without, apart, result)]
    for plain, single, got in zip(*runs, strict=True):
        assert torch.equal(got, single) and (got.float() - plain.float()).norm() < 0.02 * plain.float().norm()


@pytest.mark.parametrize("is_later, chains", [(False, [2, 2, 4]), (True, [3, 4])])
def test_a_stream_that_others_read(is_later, chains, monkeypatch):
    """A chain ends before it would come after readers of its stream, or hide that from them."""
    monkeypatch.setattr(cpu_gemm, "SUPPORTED", False)  # with AMX a library multiplies
    with monkeypatch.context() as patch:
        patch.setattr(cpu_products, "_chain_from", lambda graph, node: None)
        graph = rewritten(models.captured(models.ADMITTED["llama"]().bfloat16()))
    added = next(node for node in calls(graph.gm, CPU_PRODUCTS) if node.args[1] is not None)
    stream = next(node for node in added.users if node.args[1] == 0)
    products = [node for node in graph.gm.graph.nodes if node.target in PRODUCTS]
    with graph.gm.graph.inserting_after(products[products.index(added) + 1] if is_later else stream):
        other = graph.gm.graph.call_function(torch.ops.aten.neg.default, (stream,))
    (output,) = graph.gm.graph.find_nodes(op="output")
    output.args = ((*output.args[0], other),)
    fuse_cpu_products(graph, Settings())
    graph.gm.graph.lint()
    assert chains_of(graph) == chains
    assert other.args[0].target is operator.getitem and other.args[0].args[0].target == CPU_PRODUCTS


def test_quantised_layers(first_or_best):
    """Of blocks of 64 outputs, so that they are merged. The kernel multiplies codes at every level."""
    sizes = dict(models.BASE, num_attention_heads=1, num_key_value_heads=1, head_dim=64, intermediate_size=128)
    model = models.build("LlamaConfig", "LlamaForCausalLM", sizes).bfloat16()
    fast = speculate(model, weights="int8", compile=False)
    runtime = fast.speculation.engine.runtime
    for graph, chains in ((runtime.verify, [4, 4]), (runtime.prefill, [4])):  # of the last layer keys and values
        kinds = [product.kind for products in products_in(graph) for product in products]
        assert chains_of(graph) == chains and all(kinds)
        rest = [node for node in calls(graph.gm) if node.target in PRODUCTS and node.target != CPU_PRODUCTS]
        rest += [products for products in products_in(graph) if len(products) == 1]
        assert len(rest) == 1  # q, k and v of the first layer


def test_other_graphs_stay():
    for dtype in (torch.float32, torch.float16):
        graph = models.captured(models.ADMITTED["llama"]().to(dtype))
        assert not calls(rewritten(graph).gm, CPU_PRODUCTS)
