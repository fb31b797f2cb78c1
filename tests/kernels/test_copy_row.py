"""The copy of a row of every cache."""

import pytest
import torch
from places import places

from spec_compile.kernels.copies import RowCopies


@pytest.mark.parametrize("place", places(torch.bfloat16))
def test_a_row_is_copied_in_one_launch(place):
    device, dtype = place
    shapes = [(2, 16, dtype), (2, 16, dtype), (2, 2, torch.float32), (3, 5, torch.int8)]
    sources, targets = (
        [torch.randint(-9, 9, (rows, heads, slots, size), device=device).to(dtype) for heads, size, dtype in shapes]
        for rows, slots in ((3, 128), (5, 256))
    )
    expected = [target.clone() for target in targets]
    RowCopies(sources, targets)(2, 4, 70)
    for source, target, each in zip(sources, targets, expected):
        each[4, :, :70] = source[2, :, :70]
        assert torch.equal(target, each)
