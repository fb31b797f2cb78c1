"""Graphs as rows: what they compute stays the same, and rows name nothing but permitted operators."""

import json
import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from spec_compile.compile.serialise import check_rows, graph_of, name_of, rows_of, target_of
from spec_compile.kernels import (
    copies,  # noqa: F401, defines an operator
    linear,
)


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
        "higher_order.flex_attention",
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
        ["aten.neg.default", [{"graph": [["", [], {}]]}], {}],
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


@pytest.mark.parametrize("name", ["from_file", "set_.source_Tensor", "set_data", "resize_", "resize_as_", "_print"])
def test_operators_that_leave_the_graph_are_refused_everywhere(name):
    with pytest.raises(ValueError, match="operator: expected"):
        check_rows([["", [], {}], [f"aten.{name}" if "." in name else f"aten.{name}.default", [{"row": 0}], {}]])


CODE = 'x=__import__("os").environ.update(PLANTED="1")'


@pytest.mark.parametrize("name", [CODE, f"alpha={CODE}, beta", "a b", "class", "a.b", "", 'w"+open("x")+"', 3, "w\n"])
def test_names_that_would_become_code_are_refused(name):
    """fx writes names of arguments and tensors into Python code."""
    rows = [["", [], {}], ["aten.add.Tensor", [{"row": 0}, {"row": 0}], {name: 1}], ["output", [[{"row": 1}]], {}]]
    with pytest.raises(ValueError, match="row 1: expected"):
        graph_of(rows)
    root = torch.nn.Module()
    vars(root)["_parameters"][name] = torch.nn.Parameter(torch.ones(1))
    rows[1] = ["aten.add.Tensor", [{"row": 0}, {"tensor": name}], {}]
    if name != "a.b":
        with pytest.raises(ValueError, match="row 1: expected"):
            graph_of(rows, root)


ROW, WEIGHT = {"row": 0}, {"tensor": "w"}


@pytest.mark.parametrize(
    "rows",
    [
        [["aten.as_strided.default", [ROW, [9, 9], [1, 1]], {}]], [["aten.empty_strided.default", [[9], [1]], {}]],
        [["aten.randn.default", [[2]], {}]], [["prims.as_strided.default", [ROW, [9], [1], 0], {}]],
        [["aten.bernoulli.default", [ROW], {}]], [["aten.add.out", [ROW, ROW], {"out": WEIGHT}]],
        [["spec_compile.compact.default", [[WEIGHT], ROW, ROW, ROW], {}]],
        [["spec_compile.ngram_propose.default", [ROW, ROW, ROW, ROW, 4], {}]],
        [["aten.copy_.default", [WEIGHT, ROW], {}]], [["aten.mul_.Tensor", [], {"self": WEIGHT, "other": 0}]],
        [["aten.zero_.default", [WEIGHT], {}]],
        [["aten.view.default", [WEIGHT, [-1]], {}], ["aten.fill_.Scalar", [{"row": 1}, 0], {}]],
        [["aten.split.Tensor", [WEIGHT, 1], {}], ["_operator.getitem", [{"row": 1}, 0], {}],
         ["aten.copy_.default", [{"row": 2}, ROW], {}]],
        [["aten.einsum.default", ["i->i", [WEIGHT]], {}], ["aten.copy_.default", [{"row": 1}, ROW], {}]],
        [["aten.type_as.default", [WEIGHT, WEIGHT], {}], ["aten.copy_.default", [{"row": 1}, ROW], {}]],
        [["spec_compile.kernels.recurrence.advance_or_look", ["delta", [ROW], WEIGHT, [ROW], ROW, ROW], {}]],
        [["spec_compile.kernels.recurrence.advance_or_look", ["delta", [ROW]], {"state": WEIGHT, "stash": [ROW]}]],
        [["spec_compile.kernels.recurrence.advance_or_look", ["delta", [ROW]], {"state": ROW, "stash": [WEIGHT]}]],
        [["spec_compile.cpu_attention.default", [], {"q": ROW, "key_cache": ROW, "value_cache": WEIGHT}]],
    ],
    ids=lambda rows: rows[-1][0],
)  # fmt: skip
def test_graphs_of_models_write_to_inputs_and_new_tensors_only(rows):
    with pytest.raises(ValueError, match="operator: "):
        check_rows([["", [], {}], *rows])


def test_linear_layers_of_every_form_have_a_name():
    """Whatever form this processor takes, as "transposed" with AMX."""
    for op in linear.LINEARS:
        assert target_of(name_of(op)) is op


def test_what_models_write_is_permitted():
    check_rows(
        [
            ["", [], {}], ["aten.new_empty.default", [WEIGHT, [2, 3]], {}],
            ["aten.slice.Tensor", [{"row": 1}, 0, 0, 1], {}], ["aten.copy_.default", [{"row": 2}, WEIGHT], {}],
            ["aten.mul_.Tensor", [{"row": 3}, 2], {}],
            ["spec_compile.cpu_attention.default", [], {"q": WEIGHT, "key_cache": ROW, "value_cache": ROW}],
            ["aten.exp.default", [WEIGHT], {}], ["aten.scatter_.value", [{"row": 6}, 0, ROW, 1], {}],
        ]
    )  # fmt: skip
