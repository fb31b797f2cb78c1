"""fuse_around: on a CPU additions, norms and gates join the products of bfloat16 that they stand around."""

import models
import pytest
import torch
from cpu_levels import NEEDS_KERNEL
from toy_graphs import prefix_then_chunk, rewritten

from spec_compile.graph import calls
from spec_compile.kernels.linear import around
from spec_compile.passes.cpu_products import chain_products, fuse_around

pytestmark = NEEDS_KERNEL


@pytest.mark.parametrize(
    "name, taps, gates, norms, sums",
    [
        ("llama", (), 2, 5, 4),
        ("llama", (1, -1), 2, 4, 3),  # the last norm's output is wanted by itself, too
        ("gemma", (), 0, 5, 4),  # its norms add one to their weights, and its gates are no silu
        ("olmo2", (), 2, 1, 1),  # norms stand between its products and the residual stream
        ("mixtral", (), 0, 3, 2),  # experts end at the stream, and begin there
    ],
)
def test_joined_products(name, taps, gates, norms, sums, narrow_or_best):
    """At a level where a library multiplies the weights, nothing joins."""
    gates, norms, sums = (count if narrow_or_best else 0 for count in (gates, norms, sums))
    graph = models.captured(models.ADMITTED[name]().bfloat16())
    without = [(fuse_around, chain_products), (chain_products,)]
    apart, result = (rewritten(graph, each, taps=taps) for each in without)
    (report,) = (report for report in result.log if report.name == "fuse_around")
    assert report.summary == f"{gates} gates, {norms} norms and {sums} additions joined to products"
    alone, added = (calls(result.gm, op) for op in (around.AROUND, around.ADD_AROUND))
    assert len(added) == sums and sum(node.args[-1] for node in (*alone, *added)) == gates
    assert (
        len(calls(apart.gm, torch.ops.aten.silu.default)) - len(calls(result.gm, torch.ops.aten.silu.default)) == gates
    )
    for want, got in zip(prefix_then_chunk(apart.gm, graph), prefix_then_chunk(result.gm, graph), strict=True):
        assert (got.float() - want.float()).norm() < 0.02 * want.float().norm()


def test_other_graphs_stay(narrow_or_best):
    for graph, settings in (
        (models.captured(models.ADMITTED["llama"]()), {}),  # float32
        (models.captured(models.ADMITTED["llama"]().half()), {}),
    ):
        assert not calls(rewritten(graph, **settings).gm, around.ADD_AROUND)
