"""fuse_residuals: additions to the residual stream join the products before them."""

import pytest
import torch
from toy_graphs import prefix_then_chunk, rewritten

from spec_compile.compile.regions import cut
from spec_compile.graph import calls
from spec_compile.kernels import all_reduce, experts, linear
from spec_compile.passes.fuse_norms import fuse_residuals
from spec_compile.passes.row_invariance import variant_parts


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "name, taps, joined, apart",
    [
        ("llama", (), 4, 0),
        ("llama", (1, -1), 4, 1),  # the last norm's output is wanted by itself, too
        ("qwen2", (), 4, 0),
        ("qwen3", (2,), 4, 0),
        ("gemma2", (), 0, 0),  # norms stand between its products and the residual stream
        ("gemma", (), 4, 0),
        ("mixtral", (), 2, 0),  # experts end at the stream, and do not begin there
        ("mixtral", (1,), 2, 0),
    ],
)
def test_fused_residuals(half_on_gpu, monkeypatch, name, taps, joined, apart):
    """Regions end behind them: the parts of what a product returns stay in its region."""
    monkeypatch.setattr(linear, "choose", lambda weight, few_rows: linear.SKINNY_GEMM)
    graph = half_on_gpu(name)
    apart_from_it = rewritten(graph, (fuse_residuals,), taps=taps)
    result = rewritten(graph, taps=taps)
    own = torch.ops.spec_compile
    sums = [len(calls(each.gm, own.add_rms_norm.default)) for each in (apart_from_it, result)]
    ends = [len(calls(result.gm, op)) for op in (linear.TO_STREAM, experts.TO_STREAM)]
    norms = len(calls(result.gm, own.rms_norm.default))
    assert sum(ends) == joined == sums[0] - sums[1] and ends[name == "mixtral"] == joined
    assert norms == apart + len(calls(apart_from_it.gm, own.rms_norm.default))
    gates = [node for node in calls(result.gm, linear.PRODUCT) if node.kwargs.get("gated")]
    assert all("squares" in node.kwargs for node in gates) or not ends[0]
    regions = cut(result)
    assert len(regions.regions) == len(graph.layers) + (2 if -1 in taps else 1)
    runs = [prefix_then_chunk(function, graph) for function in (apart_from_it.gm, result.gm, regions)]
    for want, got, same in zip(*runs, strict=True):
        errors = (got.float() - want.float()).norm(dim=-1).flatten().sort().values
        errors = errors[:-1] if name == "mixtral" else errors  # a token may go to other experts
        assert errors.norm() < 0.02 * want.float().norm() and torch.equal(got, same)
    first = prefix_then_chunk(lambda *arguments: regions(*arguments, rows=1), graph)
    for some, every in zip(first, runs[2], strict=True):
        assert torch.equal(some[:1], every[:1]) and len(some) in (1, 2)
    assert len(first[0]) == 1


def test_fused_residuals_of_ranks(half_on_gpu, monkeypatch):
    """A product that ranks sum before the addition takes the op that also sums; one that others read does not."""
    monkeypatch.setattr(linear, "choose", lambda weight, few_rows: linear.SKINNY_GEMM)
    monkeypatch.setattr(linear.skinny_gemm, "why_not_on", lambda device: None)
    monkeypatch.setattr(all_reduce, "sum_of_parts", lambda part, group_name: part + part)
    graph = half_on_gpu("llama")
    own, sums = torch.ops.spec_compile, []
    for name in ("o_proj", "down_proj"):
        for product in [node for node in linear.linear_layers(graph) if name in node.args[1].target]:
            with graph.gm.graph.inserting_after(product):
                sums.append(graph.gm.graph.call_function(own.all_reduce.default, (product, "ranks")))
            sums[-1].meta = dict(product.meta)
            product.replace_all_uses_with(sums[-1], lambda user: user is not sums[-1])
    plain, result = rewritten(graph, (fuse_residuals,)), rewritten(graph)
    ends = calls(result.gm, linear.TO_STREAM)
    assert [node.kwargs["group_name"] for node in ends] == ["ranks"] * len(sums) and len(sums) == 4
    assert not calls(result.gm, own.all_reduce.default)
    assert not [part for part in variant_parts(result) if "product" in part]
    for want, got in zip(prefix_then_chunk(plain.gm, graph), prefix_then_chunk(result.gm, graph), strict=True):
        assert (got.float() - want.float()).norm() < 0.02 * want.float().norm()
    for node in graph.gm.graph.find_nodes(op="output", target="output"):
        node.args = ((*node.args[0], sums[0].args[0]),)
    assert len(calls(rewritten(graph).gm, own.all_reduce.default)) == 1
