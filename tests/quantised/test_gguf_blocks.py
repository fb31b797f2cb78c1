"""Blocks of GGUF files mean what the format says, in rows and in the order of a CPU's kernel."""

import pytest
import torch

from spec_compile import quantised
from spec_compile.quantised import gguf
from spec_compile.quantised.codes import UnreadError
from spec_compile.quantised.pack_gpu import TableNibbles

OUTPUTS, BLOCKS = 24, 3


def drawn(kind, scale):
    """Rows of blocks whose code of input i is a function of row, block and i; and the numbers that they mean."""
    wide = kind == "Q8_0"
    codes = torch.arange(OUTPUTS * BLOCKS * 32).view(OUTPUTS, BLOCKS, 32).mul(7).remainder(256 if wide else 16)
    codes -= 128 if wide else 0
    units = torch.full((OUTPUTS, BLOCKS, 2 if kind == "Q4_1" else 1), scale, dtype=torch.float16)
    units[1, 2, 0] *= -3
    units[:, :, 1:] *= -7.7
    packed = (
        codes.to(torch.int8).view(torch.uint8) if wide else (codes[:, :, :16] | codes[:, :, 16:] << 4).to(torch.uint8)
    )
    numbers = (codes - 8 if kind == "Q4_0" else codes) * units[:, :, :1].float()
    numbers = numbers + units[:, :, 1:].float() if kind == "Q4_1" else numbers
    return torch.cat([units.view(torch.uint8), packed], dim=2).flatten(1), numbers.flatten(1)


@pytest.mark.parametrize("kind", gguf.FORMATS)
def test_blocks(kind):
    data, numbers = drawn(kind, 0.0371)
    packed = gguf.FORMATS[kind](data)
    parts = [*packed.parts.values()]
    assert packed.inputs == 96 and torch.equal(packed.weight(), numbers)
    layout, ours = quantised.for_kernel(packed.layout, parts, 96, on_cpu=True)
    assert layout.of_cpu and torch.equal(layout.weight(ours, 96), numbers)
    assert all(torch.equal(packed.layout.restored(index, layout, ours, 96), part) for index, part in enumerate(parts))
    of_gpu = quantised.for_kernel(packed.layout, parts, 96, on_cpu=False)
    assert (of_gpu is not None) == (kind in gguf.ON_GPU)
    if of_gpu is not None:
        assert isinstance(of_gpu[0], TableNibbles) and torch.equal(of_gpu[0].weight(of_gpu[1], 96), numbers)


@pytest.mark.parametrize("kind", gguf.FORMATS)
def test_matrices_that_are_not_read(kind):
    for scale in (float("inf"), float("nan")):
        with pytest.raises(UnreadError, match="has scales that are not finite"):
            gguf.FORMATS[kind](drawn(kind, scale)[0])
    if kind == "Q4_1":
        data = drawn(kind, 1.0)[0]
        data[3, 2:4] = torch.tensor([0, 0x7E], dtype=torch.uint8)  # a minimum that is no number
        with pytest.raises(UnreadError, match="has scales that are not finite"):
            gguf.q4_1(data)
