"""Blocks of GGUF files mean what the format says, in the kernel's layout."""

import pytest
import torch

from spec_compile.kernels.linear.quantised import gguf
from spec_compile.kernels.linear.quantised.layout import UnreadError

OUTPUTS, BLOCKS = 24, 3


def rows(scale):
    """Blocks whose code of input i is a function of row, block and i; and the numbers that they mean."""
    codes = torch.arange(OUTPUTS * BLOCKS * 32).view(OUTPUTS, BLOCKS, 32).mul(7).remainder(16)
    scales = torch.full((OUTPUTS, BLOCKS, 1), scale, dtype=torch.float16)
    scales[1, 2] *= -3
    packed = (codes[:, :, :16] | codes[:, :, 16:] << 4).to(torch.uint8)
    return torch.cat([scales.view(torch.uint8), packed], dim=2).flatten(1), ((codes - 8) * scales.float()).flatten(1)


def test_q4_0():
    data, numbers = rows(0.0371)
    packed = gguf.q4_0(data)
    assert packed.inputs == 96 and torch.equal(packed.weight(), numbers)
    order = torch.randperm(OUTPUTS, generator=torch.Generator().manual_seed(0))
    assert torch.equal(gguf.in_order(packed, order).weight(), numbers[order])


def test_matrices_that_are_not_read():
    with pytest.raises(UnreadError, match="has scales that are not finite"):
        gguf.q4_0(rows(float("inf"))[0])
    with pytest.raises(UnreadError, match="has 8 outputs, expected 16 or more"):
        gguf.q4_0(rows(1.0)[0][:8])
