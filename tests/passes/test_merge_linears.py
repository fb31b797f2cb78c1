"""merge_linears: linears of one input are one, and both sides see changes of weights."""

import copy

import pytest
import torch
from torch import nn
from toy_graphs import LINEAR, Rewritten, Toy, example, toy, trace

from spec_compile import passes
from spec_compile.graph import attribute, calls
from spec_compile.passes import Settings
from spec_compile.passes.linears import merge_linears


class Parallel(nn.Module):
    """Linear layers side by side: `groups` of (input number, biased) each."""

    def __init__(self, *layers, sizes=(6, 4, 2, 8)):
        super().__init__()
        self.inputs = [place for place, _ in layers]
        self.layers = nn.ModuleList(nn.Linear(5, size, bias=bias) for (_, bias), size in zip(layers, sizes))

    def forward(self, x, y):
        return tuple(layer((x, y)[place]) for place, layer in zip(self.inputs, self.layers))


@pytest.mark.parametrize(
    "layers, left",
    [
        ([(0, False)], 1),
        ([(0, False), (0, False)], 1),
        ([(0, True), (0, True), (0, True)], 1),
        ([(0, False), (1, False), (0, False), (1, False)], 2),
        ([(0, True), (0, False), (0, True), (0, False)], 2),
    ],
)
def test_merge_linears_of_one_input_and_kind(layers, left):
    model = Parallel(*layers)
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    want = model(x, y)
    names = {name: value.clone() for name, value in model.state_dict().items()}
    result = Rewritten(trace(model, x, y), merge_linears)
    assert result.count(LINEAR) == (len(layers), left), str(result)
    result.close(x, y)
    assert all(torch.equal(a, b) for a, b in zip(model(x, y), want)), "the model's own outputs changed"
    assert list(model.state_dict()) == list(names)
    assert all(torch.equal(value, names[name]) for name, value in model.state_dict().items())


def test_qkv_and_gate_up_of_a_model_are_merged_once():
    model, graph = toy(dict(bias=True), {})
    first = Rewritten(graph, merge_linears)
    assert first.count(LINEAR) == (2 * 7 + 1, 2 * 4 + 1), str(first)
    assert first.log.summary == "merged 10 linear layers into 4"
    first.close(*example(3, 11))
    block, pointers = model.layers[0], {name: p.data_ptr() for name, p in model.named_parameters()}
    for group in ((block.q, block.k, block.v), (block.gate, block.up)):
        storages = {part.weight.untyped_storage().data_ptr(): part.weight.untyped_storage() for part in group}
        assert [held.nbytes() for held in storages.values()] == [sum(part.weight.nbytes for part in group)]
    for _ in range(2):
        again = passes.run(graph, Settings(), [merge_linears])
        assert {name: p.data_ptr() for name, p in model.named_parameters()} == pointers
        for a, b in zip(calls(first.gm, LINEAR), calls(again.gm, LINEAR), strict=True):
            for x, y in zip(a.args[1:], b.args[1:], strict=True):
                assert attribute(first.gm, x.target).data_ptr() == attribute(again.gm, y.target).data_ptr()
    off = Rewritten(graph, merge_linears, merge_linears=False)
    assert off.count(LINEAR) == (15, 15) and off.log.summary == "off", str(off)


class Shared(nn.Module):
    """Two linear layers of one input, and a weight that something else uses too."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.a, self.b, self.head = (nn.Linear(5, 5, bias=False) for _ in range(3))
        if how == "tied":
            self.b.weight = self.a.weight
        if how == "table":
            self.table = nn.Embedding(5, 5)
            self.a.weight = self.table.weight
        if how == "subclass":
            self.b.weight = nn.Parameter(self.b.weight.detach().as_subclass(type("Wrapped", (torch.Tensor,), {})))

    def forward(self, x, y):
        z = self.a(x) + (self.head(x) if self.how == "output head" else self.b(x))
        if self.how == "twice":
            return z + self.a(y)
        if self.how == "read":
            return z + self.a.weight.sum()
        if self.how == "table":
            return z + self.table(torch.tensor([3]))
        return z + y


@pytest.mark.parametrize("how", ["tied", "twice", "read", "table", "subclass", "output head"])
def test_merge_linears_leaves_weights_alone_that_are_more_than_layers(how):
    model = Shared(how)
    pointers = [p.data_ptr() for p in model.parameters()]
    result = Rewritten(trace(model, *torch.randn(2, 3, 5)), merge_linears)
    assert result.count(LINEAR)[0] == result.count(LINEAR)[1], str(result)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    result.same(*torch.randn(2, 3, 5))


@pytest.mark.parametrize("side", ["parameter", "merged"])
def test_merged_weights_are_updated_from_both_sides(side):
    model = Parallel((0, True), (0, True))
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    result = Rewritten(trace(model, x, y), merge_linears)
    before = result.gm(x, y)
    with torch.no_grad():
        if side == "parameter":
            model.layers[1].weight.mul_(3)
            model.layers[1].bias.add_(1)
        else:
            for node in calls(result.gm, LINEAR):
                attribute(result.gm, node.args[1].target)[6:].mul_(3)
                attribute(result.gm, node.args[2].target)[6:].add_(1)
    after, own = result.gm(x, y), model(x, y)
    assert torch.equal(before[0], after[0]), str(result)
    assert not torch.equal(before[1], after[1]), str(result)
    for a, b in zip(after, own):
        torch.testing.assert_close(a, b)


def test_a_model_with_merged_weights_can_be_copied_and_reloaded():
    model, graph = toy(dict(bias=True))
    want = {name: value.clone() for name, value in model.state_dict().items()}
    passes.run(graph, Settings(), [merge_linears])
    twin = copy.deepcopy(model)
    other = Toy(dict(bias=True))
    other.load_state_dict(model.state_dict())
    for again in (twin, other):
        assert all(torch.equal(value, want[name]) for name, value in again.state_dict().items())
    with torch.no_grad():
        twin.layers[0].q.weight.zero_()
    assert torch.equal(model.layers[0].q.weight, want["layers.0.q.weight"])


def test_a_model_with_merged_weights_is_saved_whole(tmp_path, captured):
    model, graph = captured("qwen2")
    passes.run(graph, Settings(), [merge_linears])
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    own = model.state_dict()
    assert own.keys() == again.state_dict().keys()
    assert all(torch.equal(value, own[name]) for name, value in again.state_dict().items())
    weights = {p.data_ptr(): p.nbytes for p in model.parameters()}
    assert (tmp_path / "model.safetensors").stat().st_size < 1.1 * sum(weights.values()) + 10_000
