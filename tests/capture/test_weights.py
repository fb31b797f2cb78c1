"""Weights that hold other values are noticed, also if torch counts no write."""

import pytest
import torch
from torch import nn

from spec_compile.capture.weights import Slot, WeightValues

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TENSORS = {
    "odd bytes": lambda: torch.arange(13, dtype=torch.uint8),
    "fewer than eight bytes": lambda: torch.ones(3, dtype=torch.bfloat16),
    "words": lambda: torch.randn(6, 8),
    "strided": lambda: torch.randn(6, 8).T,
    "at an odd place": lambda: torch.randn(41, dtype=torch.float16)[1:],
    "one number": lambda: torch.tensor(2.0),
}


def slot_of(name, tensor):
    holder = {name: tensor}
    return Slot(name, holder, name, tensor, tensor.detach())


@pytest.mark.parametrize("device", DEVICES)
def test_every_byte_counts(device):
    tensors = {name: make().to(device) for name, make in TENSORS.items()}
    values = WeightValues(slot_of(*each) for each in tensors.items())
    for _ in range(2):
        assert not values.have_changed()
    for name, tensor in tensors.items():
        for place in (0, -1):
            tensor.data[(place,) * tensor.dim()] += 3
            assert not values.have_changed(is_sure=False), "torch does not count these writes"
            assert values.have_changed(), name
            assert not values.have_changed()


def test_a_counted_write_is_found_without_a_sum(monkeypatch):
    layer = nn.Linear(3, 3)
    values = WeightValues([slot_of("weight", layer.weight)])
    with torch.no_grad():
        layer.weight.add_(1)
    assert values.have_changed(is_sure=False)
    monkeypatch.setattr(values, "_sum_bits", lambda: pytest.fail("no write was counted"))
    assert not values.have_changed(is_sure=False)
