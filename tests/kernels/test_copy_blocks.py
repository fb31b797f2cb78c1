"""The copies between a row of every cache and packed blocks."""

import pytest
import torch
from places import places

from spec_compile.kernels.copies import BlockCopies


@pytest.mark.parametrize("slots, shapes", [(8, [(2, 32, 160), (2, 32, 3), (3, 40, 1)]), (1, [(1, 1, 1500), (1, 1, 7)])])
@pytest.mark.parametrize("place", places(torch.int16))
def test_blocks_leave_a_row_and_come_back(place, slots, shapes):
    device, dtype = place
    rows = [torch.randint(-99, 99, (3, *shape), dtype=dtype, device=device) for shape in shapes]
    copies, units = BlockCopies(rows, slots), sum(heads * slots * size for heads, _, size in shapes)
    count, first = (2, 1) if slots > 1 else (1, 0)
    packed = torch.zeros(count, units + 5, dtype=dtype, device=device)  # a block may have more memory than it needs
    copies(packed, 2, first, to_row=False)
    begin, end = first * slots, (first + count) * slots
    blocks = [row[2, :, begin:end].unflatten(1, (count, slots)).transpose(0, 1).flatten(1) for row in rows]
    assert torch.equal(packed, torch.cat([*blocks, torch.zeros_like(packed[:, :5])], dim=1))

    expected = [row.clone() for row in rows]
    copies(packed + 1, 1, first, to_row=True)
    for row, each in zip(rows, expected):
        each[1, :, begin:end] = each[2, :, begin:end] + 1
        assert torch.equal(row, each)
