"""The memory of kept blocks against a plain list."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spec_compile.batching import prefix_blocks
from spec_compile.batching.prefix_blocks import BlockMemory

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@given(st.integers(0, 5), st.integers(0, 9), st.integers(1, 40), st.integers(1, 4), st.data())
def test_pieces_are_the_blocks(device, on_device, in_host, slab, most, data):
    """Slabs of a few blocks, as on a GPU; places in any order."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    before, prefix_blocks.SLAB = prefix_blocks.SLAB, slab
    try:
        memory = BlockMemory(on_device, in_host, 2, torch.int32, torch.device(device))
    finally:
        prefix_blocks.SLAB = before
    places = data.draw(st.permutations(range(on_device + in_host)))
    values = torch.arange(2 * len(places), dtype=torch.int32).view(-1, 2)
    for part, blocks in memory.pieces(places, most):
        assert len(blocks) <= most
        blocks.copy_(values[part])
    for place, value in zip(places, values):
        ((part, block),) = memory.pieces([place], most)
        assert part == slice(0, 1) and torch.equal(block[0].cpu(), value)
        assert block.is_cuda == (device == "cuda" and place < on_device)


def test_the_example_of_the_docstring():
    memory = BlockMemory(0, 12, 1, torch.int64, torch.device("cpu"))
    assert [(part, len(blocks)) for part, blocks in memory.pieces([3, 4, 9], 2)] == [(slice(0, 2), 2), (slice(2, 3), 1)]


def test_no_block_takes_no_memory():
    assert [*BlockMemory(0, 0, 4, torch.int8, torch.device("cpu")).pieces([], 1)] == []
