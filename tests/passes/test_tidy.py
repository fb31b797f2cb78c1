"""tidy: what it erases and what it keeps."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from toy_graphs import Rewritten, aten, example, toy, trace

from spec_compile import passes
from spec_compile.graph import calls
from spec_compile.passes import Settings
from spec_compile.passes.tidy import tidy


class Casts(nn.Module):
    def __init__(self, *steps):
        super().__init__()
        self.steps = steps

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x * 2


@pytest.mark.parametrize(
    "name, step, target, left",
    [
        ("same dtype", lambda x: x.to(torch.float32), aten.to.dtype, 0),
        ("same device", lambda x: x.to("cpu", torch.float32), aten.to.device, 0),
        ("float() of a float", lambda x: x.float(), aten.to.dtype, 0),
        ("to half and back", lambda x: x.half().float(), aten.to.dtype, 2),
        ("to double", lambda x: x.double(), aten.to.dtype, 1),
        ("to integers", lambda x: x.to(torch.int64), aten.to.dtype, 1),
        ("dropout of inference", lambda x: F.dropout(x, 0.5, False), aten.dropout.default, 0),
        ("dropout of training", lambda x: F.dropout(x, 1.0, True), aten.dropout.default, 1),
        ("detach", lambda x: x.detach(), aten.detach.default, 0),
        ("alias", lambda x: aten.alias(x), aten.alias.default, 0),
    ],
)  # fmt: skip
def test_tidy_erases_what_changes_nothing_only(name, step, target, left):
    x = torch.randn(3, 5)
    result = Rewritten(trace(Casts(step), x), tidy)
    assert result.count(target)[0] == max(left, 1), f"the trace has no such call\n{result}"
    assert Counter(n.target for n in calls(result.gm)) == Counter([aten.mul.Tensor] + [target] * left), str(result)
    result.same(x)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x + torch.tensor([1.0, 2.0]).add_(1),
        lambda x: x.to(torch.float32, copy=True).add_(1) + x,
    ],
    ids=["a constant", "a copy"],
)
def test_tidy_keeps_copies_that_are_written_to(step):
    """What is written in place must stay a copy: neither an input nor a constant of the model may change."""
    x = torch.ones(2)
    want = Casts(step)(x)
    result = Rewritten(trace(Casts(step), x), tidy)
    for _ in range(2):
        assert torch.equal(result.gm(x)[0], want), str(result)
    assert torch.equal(x, torch.ones(2)), str(result)


def test_tidy_finds_all_there_is_to_erase_at_once():
    _, graph = toy({})
    result = Rewritten(graph, tidy)
    assert result.log.summary.startswith(f"erased {result.log.nodes_before - result.log.nodes_after} "), str(result)
    assert Rewritten(result.after, tidy).log.summary.startswith("erased 0 ")
    result.same(*example(3, 9))


WRITES = {
    "what an op has made": (lambda x: (x * 2).div_(3), 0),
    "read before": (lambda x: (y := x.exp(), y.sum(), y.div_(y.sum()))[2], 0),
    "one of several results": (lambda x: x.topk(1)[0].div_(3), 0),
    "an input": (lambda x: x.div_(3), 1),
    "a view": (lambda x: (y := x * 2, y[:1].div_(3), y)[2], 1),
    "seen by a view": (lambda x: (y := x * 2, y[:1], y.div_(3))[1], 1),
    "read after": (lambda x: (y := x * 2, y.div_(3), y + 1)[2], 0),  # the trace reads the result then
    "rounded to its dtype": (lambda x: (x * 2).half().div_(torch.ones(2)).float(), 1),
}
"""Ops that write to their input, and how many of them must keep doing so."""


@pytest.mark.parametrize("name", WRITES)
def test_writing_that_nobody_sees_becomes_pure(name):
    step, left = WRITES[name]
    result = Rewritten(trace(Casts(step), torch.ones(2)), tidy)
    x = torch.rand(2) + 1
    assert torch.equal(result.before.gm(x.clone())[0], result.gm(x.clone())[0]), str(result)
    assert len([node for node in calls(result.gm) if node.target is aten.div_.Tensor]) == left, str(result)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_number_on_another_device_is_made_on_that_of_the_graph(monkeypatch, device):
    """A CUDA graph could not copy it; meta stands for a GPU."""

    def fill(x):
        x = x.clone()
        x[x > 1] = 0.5
        return x

    graph = trace(Casts(fill), torch.ones(2))
    monkeypatch.setattr(type(graph), "device", torch.device(device))
    gm = passes.run(graph, Settings(), [tidy]).gm
    copies, made = calls(gm, aten.lift_fresh_copy.default), calls(gm, aten.full.default)
    if device == "cpu":
        assert len(copies) == 1 and not made
    else:
        assert not copies and made[0].args == ([], 0.5)
        assert made[0].kwargs == {"dtype": torch.float32, "device": torch.device("meta")}
