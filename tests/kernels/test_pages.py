"""Caches in pages in plain PyTorch: a row reads and writes through its table what a contiguous one has."""

import pytest
import torch
from attention_cases import FP8, bits

from spec_compile.kernels import ops

TABLE = torch.tensor([[4, 2, 6], [1, 5, 0]], dtype=torch.int32)
"""Of two rows, the second of which has two pages."""


def rows_of(pool):
    return pool[TABLE.long()].transpose(1, 2).flatten(2, 3).clone()


@pytest.mark.parametrize("dtype", [torch.float32, FP8])
def test_rows_read_and_write_through_their_table(dtype):
    pools = [torch.randn(7, 3, 64, size).to(dtype) for size in (16, 5)]
    for pool in pools:  # the scratch page is read as zeros
        pool[0] = 0
    scales = torch.rand(7, 3, 64, 2) if dtype == FP8 else None
    rows, row_scales = [rows_of(pool) for pool in pools], None if scales is None else rows_of(scales)
    k, v = (torch.randn(2, 3, 9, size) * 99 for size in (16, 5))
    lengths = torch.tensor([120, 63])
    ops.append_block(*pools, scales, k, v, lengths, TABLE)
    ops.append_block(*rows, row_scales, k, v, lengths)
    for slots in (1, 64, 70, 192):
        got = ops.as_read(*pools, scales, slots, torch.float32, TABLE)
        want = ops.as_read(*rows, row_scales, slots, torch.float32, TABLE[:, :1])
        assert all(map(torch.equal, map(bits, got), map(bits, want)))


def test_pages_are_packed():
    pools = [torch.randint(-99, 99, shape, dtype=torch.int16) for shape in ((7, 2, 64, 16), (7, 1, 64, 2))]
    before = [pool.clone() for pool in pools]
    packed = torch.zeros(2, 2 * 64 * 16 + 64 * 2 + 3, dtype=torch.int16)  # it may have more memory than it needs
    ops.pack_pages(pools, packed, torch.tensor([2, 4]), to_pages=False)
    want = torch.cat([old[[2, 4]].flatten(1) for old in before], dim=1)
    assert torch.equal(packed[:, :-3], want) and not packed[:, -3:].any()
    ops.pack_pages(pools, packed, torch.tensor([0, 6]), to_pages=True)
    for pool, old in zip(pools, before):
        assert torch.equal(pool, old[[2, 1, 2, 3, 4, 5, 4]])
