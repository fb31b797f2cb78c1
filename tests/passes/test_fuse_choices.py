"""fuse_choices: choices of experts join the products before them."""

import pytest
import torch
from toy_graphs import prefix_then_chunk, rewritten

from spec_compile.graph import calls
from spec_compile.kernels import linear
from spec_compile.passes.fuse_choices import fuse_choices
from spec_compile.passes.row_invariance import variant_parts


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "name, joined",
    [("mixtral", 2), ("qwen3_moe", 2), ("gpt_oss", 4), ("deepseek_v3", 0), ("llama", 0)],  # the fourth has sigmoids
)
def test_fused_choices(half_on_gpu, monkeypatch, name, joined):
    monkeypatch.setattr(linear, "choose", lambda weight, few_rows: linear.SMALL_M)
    monkeypatch.setattr(linear.small_m, "lack_of_device", lambda device: None)
    graph = half_on_gpu(name)
    apart, result = rewritten(graph, (fuse_choices,)), rewritten(graph)
    route = torch.ops.spec_compile.route.default
    assert len(calls(result.gm, linear.TO_EXPERTS)) == len(calls(apart.gm, route)) == joined
    assert not calls(result.gm, route) and len(calls(apart.gm)) - len(calls(result.gm)) == joined
    assert not [part for part in variant_parts(result) if "product_to_experts" in part]
    for want, got in zip(prefix_then_chunk(apart.gm, graph), prefix_then_chunk(result.gm, graph), strict=True):
        assert torch.equal(got, want)


def test_logits_that_others_read_are_kept(half_on_gpu, monkeypatch):
    monkeypatch.setattr(linear, "choose", lambda weight, few_rows: linear.SMALL_M)
    graph = rewritten(half_on_gpu("mixtral"), (fuse_choices,))
    logits = calls(graph.gm, torch.ops.spec_compile.route.default)[0].args[0]
    for node in graph.gm.graph.find_nodes(op="output", target="output"):
        node.args = ((*node.args[0], logits),)
    assert fuse_choices(graph, None) == "1 choices of experts joined to the products before them"
    assert calls(graph.gm, linear.PRODUCT).count(logits) == 1
