"""Graphs as rows: what they compute stays the same, and rows name nothing but permitted operators."""

import json
import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from spec_compile.artefacts.graphs import graph_of, name_of, rows_of, target_of
from spec_compile.kernels import compact  # noqa: F401, defines an operator


def computed(x, y):
    parts = torch.split(x, [2, x.shape[1] - 2], dim=1)
    masked = x.masked_fill(y[:, None] > 3, float("-inf")).to(torch.float64)
    extremes = torch.full((2,), float("inf"), dtype=torch.float16, device=x.device)
    return [parts[1] * 2.5, masked.amax(0), torch.cat([y, y.flip(0)]), extremes]


def test_rows_compute_the_same_after_a_journey_as_text():
    x, y = torch.randn(5, 7), torch.randint(0, 6, (5,))
    gm = make_fx(computed)(x, y)
    rows = json.loads(json.dumps(rows_of(gm)))
    again = graph_of(rows)
    x, y = torch.randn(5, 7), torch.randint(0, 6, (5,))
    for got, want in zip(again(x, y), computed(x, y), strict=True):
        assert torch.equal(got, want) and got.dtype == want.dtype
    assert rows_of(again) == rows


def test_names_of_operators():
    for target in (torch.ops.aten.add.Tensor, torch.ops.spec_compile.compact.default, torch.sym_max, math.floor):
        assert target_of(name_of(target)) is target
    with pytest.raises(TypeError, match="function of sizes"):
        name_of(torch.load)


@pytest.mark.parametrize(
    "name",
    [
        "torch.load", "math.sin", "_operator.call", "_operator.methodcaller", "os.system", "profiler._x.default",
        "aten.add", "aten.nothing.default", "aten.add.nothing", "aten.__class__.default", "aten", ".", "output.x",
    ],
)  # fmt: skip
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="operator: expected"):
        graph_of([["", [], {}], [name, [{"row": 0}], {}], ["output", [[{"row": 1}]], {}]])


@pytest.mark.parametrize(
    "row",
    [
        ["aten.neg.default", [{"row": 1}], {}], ["aten.neg.default", [{"row": "0"}], {}], ["aten.neg.default"], 7, None,
        ["aten.neg.default", [{"dtype": "load"}], {}], ["aten.neg.default", [{"dtype": "nothing"}], {}],
        ["aten.neg.default", [{"device": "nowhere"}], {}], ["aten.neg.default", 3, {}], ["aten.neg.default", [], []],
        ["aten.neg.default", [{"layout": "float32"}], {}], ["aten.neg.default", [{}], {}],
    ],
    ids=str,
)  # fmt: skip
def test_rows_of_another_form_are_refused(row):
    with pytest.raises(ValueError, match="row 1: expected"):
        graph_of([["", [], {}], row, ["output", [[{"row": 1}]], {}]])


def test_graphs_that_hold_tensors_are_refused():
    number = torch.ones(3)
    gm = make_fx(lambda x: [x + number])(torch.ones(3))
    with pytest.raises(TypeError, match="expected an input or a call"):
        rows_of(gm)
