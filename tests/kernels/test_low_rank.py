"""Low-rank additions: each row adds the product with its own two matrices."""

import pytest
import torch
from places import places
from torch.nn import functional as F

from spec_compile.kernels.linear import low_rank_kernel
from spec_compile.kernels.linear.low_rank import LowRank, add_low_rank

PLACES = places(torch.float32, torch.bfloat16)


def filled(dtype=torch.float32):
    """Entries 1 and 2 of ranks 3 and 5 in a layer from 13 to 7 features."""
    generator = torch.Generator().manual_seed(0)
    part = LowRank(3, 5, torch.empty(7, 13), dtype)
    pairs = [tuple(torch.randn(size, generator=generator) for size in ((r, 13), (7, r))) for r in (3, 5)]
    for entry, (down, up) in enumerate(pairs, 1):
        part.put(entry, down, up, 0.5 * entry)
    return part, pairs


@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_each_row_adds_its_own(tokens):
    part, pairs = filled()
    x, y = torch.randn(4, tokens, 13), torch.randn(4, tokens, 7)
    rows = torch.tensor([2, 0, 1, 2])
    result = add_low_rank(y, x, part.down, part.up, part.scale, rows)
    assert torch.equal(result[1], y[1])
    for row, entry in ((0, 2), (2, 1), (3, 2)):
        down, up = pairs[entry - 1]
        expected = y[row] + 0.5 * entry * F.linear(F.linear(x[row], down), up)
        torch.testing.assert_close(result[row], expected, atol=1e-5, rtol=1e-5)


def test_products_have_the_dtype_of_the_adapters():
    part, _ = filled()
    x, y = torch.randn(1, 2, 13).bfloat16(), torch.zeros(1, 2, 7).bfloat16()
    result = add_low_rank(y, x, part.down, part.up, part.scale, torch.tensor([1]))
    wide = add_low_rank(y.float(), x.float(), part.down, part.up, part.scale, torch.tensor([1]))
    assert torch.equal(result, wide.bfloat16())


def test_an_entry_is_replaced_whole():
    part, pairs = filled()
    down, up = pairs[0]
    part.put(2, down, up, 1.0)  # of a smaller rank than what was there
    rows, x = torch.tensor([2]), torch.randn(1, 1, 13)
    result = add_low_rank(torch.zeros(1, 1, 7), x, part.down, part.up, part.scale, rows)
    torch.testing.assert_close(result, F.linear(F.linear(x, down), up), atol=1e-5, rtol=1e-5)
    part.put(2, None, None, 0.0)
    assert not add_low_rank(torch.zeros(1, 1, 7), x, part.down, part.up, part.scale, rows).any()


@pytest.mark.sweep(2)  # on a CPU all adapters are wide
@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16], ids=["wide", "narrow"])
@pytest.mark.parametrize(("rank", "inputs", "outputs"), [(1, 13, 7), (5, 300, 70), (16, 520, 256), (64, 96, 300)])
def test_the_kernel(place, adapters, rank, inputs, outputs):
    """In the dtype of the adapters, whatever that of the layer, and the same bits for any number of tokens and rows."""
    device, dtype = place
    if device == "cpu":
        adapters = torch.float32
    part = LowRank(3, rank, torch.empty(outputs, inputs, device=device), adapters)
    for entry in (1, 2):
        part.put(entry, torch.randn(rank, inputs).div(inputs**0.5), torch.randn(outputs, rank), 0.5 * entry)
    rows = torch.tensor([2, 0, 1], device=device)
    x = torch.randn(3, 5, inputs, device=device).to(dtype)
    y = torch.randn(3, 5, 2 * outputs, device=device).to(dtype)[..., outputs:]  # as a part of a merged product
    tensors = part.down, part.up, part.scale
    got = low_rank_kernel.launch(y, x, *tensors, rows)
    want = add_low_rank(y, x, *tensors, rows)
    tolerance = 1e-5 if torch.bfloat16 not in (dtype, adapters) else 0.05
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert torch.equal(got[1], y[1]) and got.is_contiguous()
    one = low_rank_kernel.launch(y[2:, 3:4], x[2:, 3:4], *tensors, rows[2:])
    assert torch.equal(one[0, 0], got[2, 3])


def test_many_tokens_are_products_of_a_library(monkeypatch):
    monkeypatch.setattr(low_rank_kernel, "low_rank_kernel", None)
    part, _ = filled()
    x, y, rows = torch.randn(1, 129, 13), torch.randn(1, 129, 7), torch.tensor([2])
    tensors = y, x, part.down, part.up, part.scale, rows
    assert torch.equal(low_rank_kernel.launch(*tensors), add_low_rank(*tensors))
    assert torch.equal(torch.ops.spec_compile.add_low_rank(*tensors), add_low_rank(*tensors))
