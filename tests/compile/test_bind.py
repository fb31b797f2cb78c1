"""Model graphs as data: bound again, they are the graphs that passes made, over the model's own tensors."""

import functools
import json

import models
import pytest
import torch
from torch import nn
from toy_graphs import add_to_eps

from spec_compile import UnsupportedModelError, passes
from spec_compile.compile.regions import cut, describe
from spec_compile.compile.serialise import NoRecipe, bound, data_of
from spec_compile.compile.start import quick_check
from spec_compile.graph import ModelGraph, attribute
from spec_compile.inventory import held
from spec_compile.kernels.attention import Use
from spec_compile.passes.row_invariance import variant_parts

NAMES = ["llama", "gemma2", "phi", "gpt2", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "mamba2", "falcon_h1"]
DTYPES = [torch.float32, torch.bfloat16]
ZOO = {**models.ADMITTED, **models.HYBRIDS}


def rewritten(model, role, taps=(1,)):
    return passes.run(models.captured(model), passes.Settings(taps=taps, attention=Use(role=role)))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("role", ["verify", "prefill"])
@pytest.mark.parametrize("name", NAMES)
def test_graphs_are_the_same_after_a_journey_as_text(name, role):
    model = ZOO[name]()
    graph = rewritten(model, role)
    data = data_of(graph, held(model))
    again = bound(json.loads(json.dumps(data)), held(model))
    assert data_of(again, held(model)) == data
    for field in vars(graph).keys() - {"gm", "log"}:
        assert getattr(again, field) == getattr(graph, field), field
    reports = [
        [(each.name, each.summary, each.nodes_before, each.nodes_after) for each in g.log] for g in (again, graph)
    ]
    assert reports[0] == reports[1] and variant_parts(again) == variant_parts(graph)
    assert describe(again) == describe(graph)  # so engines of both share compiled code
    assert len(cut(again).regions) == len(cut(graph).regions)
    own = {each.tensor.untyped_storage().data_ptr() for each in held(model)}
    for node in again.gm.graph.nodes:
        if node.op == "get_attr":
            assert attribute(again.gm, node.target).untyped_storage().data_ptr() in own


# the quick check of such graphs


@functools.cache
def checked(name, dtype):
    """A model, and its graphs of both roles."""
    model = ZOO[name]().to(dtype)
    return model, rewritten(model, "prefill", ()), rewritten(model, "verify", ())


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "qwen3_moe", "qwen3_next", "mamba2", "lfm2"])
def test_right_graphs_pass_the_quick_check(name, dtype):
    quick_check(*checked(name, dtype))


def other_eps(graph):
    add_to_eps(graph.gm, 0.1)


def other_mask(graph):
    text = graph.gm.forward
    graph.gm.forward = lambda ids, positions, lengths, ancestors, *rest: text(ids, positions, lengths, None, *rest)


@pytest.mark.parametrize(
    "place, change, dtype",
    [(1, other_eps, DTYPES[0]), *((2, other_eps, dtype) for dtype in DTYPES), (2, other_mask, DTYPES[0])],
)
def test_wrong_graphs_do_not(place, change, dtype):
    parts = [*checked("llama", dtype)]
    parts[place] = parts[place].copy()
    change(parts[place])
    with pytest.raises(UnsupportedModelError, match="an artefact differs"):
        quick_check(*parts)


# weights


def test_weights_are_joined_in_another_model():
    """Bound to other weights, a graph reads these, joined anew, and the model's tensors become views of them."""
    first, second = models.ADMITTED["llama"](), models.ADMITTED["llama"]()
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    weights = [each.tensor.clone() for each in held(second)]
    graph = bound(data_of(rewritten(first, "verify"), held(first)), held(second))
    merged = next(name for name, _ in graph.gm.named_buffers() if name.startswith("merged_linear"))
    layer = second.model.layers[0].self_attn
    parts = [part.weight for part in (layer.q_proj, layer.k_proj, layer.v_proj)]
    assert torch.equal(attribute(graph.gm, merged), torch.cat(parts))
    assert attribute(graph.gm, merged).data_ptr() == parts[0].data_ptr()
    assert all(torch.equal(each.tensor, was) for each, was in zip(held(second), weights))


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.ones(3)), factor

    def forward(self, x):
        return [x * self.weight * self.factor]


def graph_over(model):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    product = graph.call_function(torch.ops.aten.mul.Tensor, (x, graph.get_attr("weight")))
    graph.output([graph.call_function(torch.ops.aten.mul.Tensor, (product, graph.get_attr("factor")))])
    gm = torch.fx.GraphModule({"weight": model.weight, "factor": model.factor}, graph)
    return ModelGraph(gm, (), 3, 3, torch.float32, None, "")


def test_small_constants_are_stored_and_parts_of_weights_are_not():
    model, other = Scaled(torch.tensor([2.0, 0.5, -1.0])), Scaled(None)
    again = bound(json.loads(json.dumps(data_of(graph_over(model), held(model)))), held(other))
    assert torch.equal(again.gm(torch.ones(3))[0], torch.tensor([2.0, 0.5, -1.0]))
    for factor in (torch.ones(5000), model.weight.detach()[:1]):
        model.factor = factor
        with pytest.raises(NoRecipe, match="read factor"):
            data_of(graph_over(model), held(model))
