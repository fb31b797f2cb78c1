"""What a part reads and returns, as data of another process."""

import json

import pytest
import torch
from torch import nn

from spec_compile.compile.part import Part


class Plain:
    """An object that is no module."""

    def __init__(self):
        self.table = torch.arange(3)


class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.plain = nn.Linear(3, 2), Plain()
        self.register_buffer("seen", torch.zeros(4))


SOURCES = [
    ("argument", (1, 2)),
    ("held", (0,), ("inner", "_parameters", "weight")),
    ("argument", (2,)),
    ("held", (0,), ("", "_buffers", "seen")),
    ("held", (0,), (".plain", "", "table")),
]
FORM = {
    "sources": SOURCES,
    "result": {"tuple": [{"result": 1}, {"list": [{"result": 0}, None, {"tuple": []}]}, True, 2, 0.5]},
}


def described(data):
    part = Part(None, None, "part", "")
    part.describe(data["sources"], data["result"])
    return part


def test_a_part_reads_the_same_after_json():
    owner = Owner()
    for each in map(described, (FORM, json.loads(json.dumps(FORM)))):
        assert each.sources == SOURCES
        arguments = (owner, [None, None, "a"], "b")
        owner.seen = torch.zeros(4)
        holders = each.holders(arguments)
        expected = ["a", owner.inner.weight, "b", owner.seen, owner.plain.table]
        assert all(got is want for got, want in zip(each.read(arguments, holders), expected, strict=True))
        owner.seen = torch.ones(4)
        assert each.read(arguments, holders)[3] is owner.seen
        assert each.write(["x", "y"]) == ("y", ["x", None, ()], True, 2, 0.5)


@pytest.mark.parametrize(
    "data",
    [
        dict(sources=None),
        dict(sources=[["argument"]]),
        dict(sources=[["argument", ["__class__"]]]),
        dict(sources=[["argument", [0], ["", "", "x"]]]),
        dict(sources=[["held", [0]]]),
        dict(sources=[["held", [0], ["", "", 7]]]),
        dict(sources=[["held", [0], ["", "x"]]]),
        dict(sources=[["other", [0]]]),
        dict(result={"result": "0] or exit("}),
        dict(result="exit()"),
        dict(result={"tuple": [{"unknown": 0}]}),
    ],
)
def test_other_data_is_refused(data):
    with pytest.raises(ValueError):
        described(json.loads(json.dumps(FORM | data)))
