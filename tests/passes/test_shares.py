"""Shares of quantised weights: together they mean the whole layer, and cuts inside a group are refused by name."""

from types import SimpleNamespace

import models
import pytest
import quantised_checkpoints as checkpoints
import torch
from captures import capture
from packed_layers import DRAWN
from torch import fx

from spec_compile import UnsupportedModelError, load_mxfp4, passes
from spec_compile.graph import calls
from spec_compile.kernels import experts
from spec_compile.kernels.linear import QUANTISED
from spec_compile.parallel.slices import Slices
from spec_compile.passes.products import Share, check, product_of
from spec_compile.passes.products import share_of as product_share_of
from spec_compile.passes.shard import shard
from spec_compile.passes.tidy import tidy
from spec_compile.quantised.compressed_tensors import PerTensor
from spec_compile.quantised.rows import W4A8

SIZE = 1024


def graph_of(layout, parts, inputs):
    """A graph of one quantised layer, and its node."""
    graph, module = fx.Graph(), torch.nn.Module()
    x, nodes = graph.placeholder("x"), []
    x.meta["val"] = torch.empty(3, inputs, device="meta")
    for number, part in enumerate(parts):
        module.register_buffer(f"part{number}", part)
        nodes.append(graph.get_attr(f"part{number}"))
        nodes[-1].meta["val"] = part.to("meta")
    node = graph.call_function(QUANTISED, (x, nodes, None, layout.kind))
    node.meta["nn_module_stack"] = {"layer": ("model.down_proj", None)}
    node.meta["val"] = torch.empty(3, layout.outputs(parts, inputs), device="meta")
    graph.output(node)
    return SimpleNamespace(gm=fx.GraphModule(module, graph)), node


def share_of(layout, parts, inputs, by_inputs, rank, size, slices=None, blocks=1):
    """A rank's layout and parts."""
    graph, node = graph_of(layout, parts, inputs)
    share = Share(product_of(node), by_inputs, size, blocks)
    check(graph, [share], [1, 2, 4], size)
    return product_share_of(graph, share, slices or Slices(rank, size))


@pytest.mark.parametrize("repacked", [False, True], ids=["library", "kernel"])
@pytest.mark.parametrize("name", DRAWN)
def test_shares_are_the_whole_layer(name, repacked):
    torch.manual_seed(0)
    layout, parts = DRAWN[name](SIZE, SIZE)
    if isinstance(layout, W4A8):
        parts[1] = parts[1].bfloat16()  # as the kernel for rows that come rounded reads them
    if repacked and layout.packing is None and not isinstance(layout, PerTensor):  # as a layer holds it on a GPU
        layout, parts = layout.for_few_rows(parts, SIZE)
    whole = layout.weight(parts, SIZE)
    for by_inputs in (False, True):
        for size in (2, 8):
            inputs = SIZE // size if by_inputs else SIZE
            each = [share_of(layout, parts, SIZE, by_inputs, rank, size) for rank in range(size)]
            weights = [share.weight([part.data for part in own], inputs) for share, own in each]
            assert torch.equal(torch.cat(weights, dim=int(by_inputs)).float(), whole.float()), (by_inputs, size)
            assert {layout.packing is None for layout, _ in each} == {layout.packing is None}


@pytest.mark.parametrize(
    ("name", "shape", "by_inputs", "size", "text"),
    [
        ("fp8", (256, 384), True, 2, "384 inputs in groups of 128, which 2 ranks cannot share out; run"),
        ("fp8", (384, 256), False, 2, "384 outputs in groups of 128"),
        ("fp8", (512, 512), True, 8, "in groups of 128, which 8 ranks cannot share out; start 2 or 4 ranks"),
        ("ct128", (256, 384), True, 2, "in groups of 128"),
        ("awq", (256, 192), True, 2, "in groups of 64"),
        ("awq", (72, 256), False, 2, "72 outputs in groups of 8"),
        ("gptq", (256, 128), True, 32, "in groups of 8"),
        ("nvfp4", (256, 48), True, 2, "in groups of 16"),
        ("table", (256, 96), False, 2, "blocks of 64 weights, in which a row of 96 inputs ends"),
    ],
)
def test_groups_that_would_be_cut(name, shape, by_inputs, size, text):
    outputs, inputs = shape
    layout, parts = DRAWN[name](outputs, inputs)
    with pytest.raises(UnsupportedModelError, match="^tensor_parallel: model.down_proj has .*" + text):
        share_of(layout, parts, inputs, by_inputs, 0, size)


@pytest.mark.parametrize("name", ["ct fp8", "ct128", "table"])
def test_changed_weights_are_cut_anew(name):
    layout, parts = DRAWN[name](64, 512)
    if name != "ct fp8":
        layout, parts = layout.for_few_rows(parts, 512)
    slices = Slices(1, 2)
    share, own = share_of(layout, parts, 512, True, 1, 2, slices)
    parts[0].copy_(parts[0].flip(0))
    slices.refresh()
    weight = share.weight([part.data for part in own], 256)
    assert torch.equal(weight.float(), layout.weight(parts, 512)[:, 256:].float())


def formats(graph, size, option):
    """The formats of the products of experts of the first of several ranks."""
    ranks = SimpleNamespace(rank=0, size=size, name="nobody", slices=Slices(0, size))
    settings = passes.Settings(ranks=ranks, expert_parallel=option)
    gm = passes.run(graph, settings, [tidy, shard]).gm
    return [experts.format_of(node.args[-1]) for node in calls(gm, experts.UP) + calls(gm, experts.DOWN)]


def test_experts_are_shared_by_width_or_by_number():
    graph = capture(models.ADMITTED["qwen3_moe"]())
    for option, number in ((None, 0), (False, 0), (True, 4)):
        assert {(each.first, each.of) for each in formats(graph, 2, option)} == {(0, number)}
    with pytest.raises(UnsupportedModelError, match=r"^expert_parallel: 4 experts do not divide among 3 ranks"):
        formats(graph, 3, True)
    with pytest.raises(UnsupportedModelError, match=r"^expert_parallel: the model has no routed experts"):
        formats(capture(models.ADMITTED["llama"]()), 2, True)


def test_experts_whose_width_does_not_divide_are_shared_by_number(tmp_path):
    graph = capture(load_mxfp4(checkpoints.write_mxfp4(tmp_path), dtype=torch.float32).eval())
    assert {each.of for each in formats(graph, 2, None)} == {0}
    assert {each.of for each in formats(graph, 4, None)} == {4}
    with pytest.raises(UnsupportedModelError, match=r"experts .*has 64 inputs in groups of 32.*; start 2 ranks"):
        formats(graph, 4, False)
