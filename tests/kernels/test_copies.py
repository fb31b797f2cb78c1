"""The launches that copy: accepted paths, blocks and rows of all caches, and outcomes on their way to the host."""

import pytest
import torch
from attention_cases import FP8, bits, paths
from places import places

from spec_compile.kernels import copies
from spec_compile.kernels.copies import BlockCopies, RowCopies, publish


@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 16, 33, 64])
def test_an_accepted_path_moves_into_place(place, nodes):
    """In caches of any dtypes: keys and values of 8 bits, and their scales, too."""
    device, dtype = place
    path, count = paths(5, nodes)
    lengths = torch.tensor([0, 3, 11, 36, 100 - nodes])
    shapes = [(5, heads, 100, size) for heads, size in ((2, 16), (2, 24), (1, 192), (3, 80))]
    caches = [torch.full(shape, torch.nan).to(dtype) for shape in shapes]
    for cache in caches:
        for row, length in enumerate(lengths.tolist()):
            cache[row, :, : length + nodes] = torch.randn(cache.shape[1], length + nodes, cache.shape[3])
    rounded = [(torch.randn(5, 2, 100, 16) * 9).to(FP8), torch.randn(5, 2, 100, 2)]
    for group in (caches, rounded):
        moved = [cache.to(device).clone() for cache in group]
        copies.launch(moved, lengths.to(device), path.to(device), count.to(device))
        twin = [cache.clone() for cache in group]
        torch.ops.spec_compile.compact(twin, lengths, path, count)
        for cache, plain, after in zip(group, twin, moved):
            expected = cache.clone()
            for row, length in enumerate(lengths.tolist()):
                for i in range(int(count[row])):
                    expected[row, :, length + i] = expected[row, :, length + int(path[row, i])]
            assert torch.equal(bits(after), bits(expected)) and torch.equal(bits(plain), bits(expected))


def test_the_operator_of_paths():
    path, count = paths(3, 7)
    caches = [torch.randn(3, 2, 20, 8), torch.randn(3, 1, 20, 4)]
    torch.library.opcheck(copies.compact, (caches, torch.tensor([1, 2, 3]), path, count))


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


@pytest.mark.parametrize("slots, shapes", [(8, [(2, 32, 160), (2, 32, 3), (3, 40, 1)]), (1, [(1, 1, 1500), (1, 1, 7)])])
@pytest.mark.parametrize("place", places(torch.int16))
def test_blocks_leave_a_row_and_come_back(place, slots, shapes):
    device, dtype = place
    rows = [torch.randint(-99, 99, (3, *shape), dtype=dtype, device=device) for shape in shapes]
    copy, units = BlockCopies(rows, slots), sum(heads * slots * size for heads, _, size in shapes)
    count, first = (2, 1) if slots > 1 else (1, 0)
    packed = torch.zeros(count, units + 5, dtype=dtype, device=device)  # a block may have more memory than it needs
    copy(packed, 2, first, to_row=False)
    begin, end = first * slots, (first + count) * slots
    blocks = [row[2, :, begin:end].unflatten(1, (count, slots)).transpose(0, 1).flatten(1) for row in rows]
    assert torch.equal(packed, torch.cat([*blocks, torch.zeros_like(packed[:, :5])], dim=1))

    expected = [row.clone() for row in rows]
    copy(packed + 1, 1, first, to_row=True)
    for row, each in zip(rows, expected):
        each[1, :, begin:end] = each[2, :, begin:end] + 1
        assert torch.equal(row, each)


@pytest.mark.parametrize("place", places(torch.float32))
@pytest.mark.parametrize("shape, first", [((1, 5), 0), ((3, 133), 0), ((8, 261), 0), ((1, 8), -1)])
def test_outcomes_go_round_the_slots(place, shape, first):
    """What is for nobody, of the number -1, disturbs nothing: it goes into a slot that no round has."""
    slots = torch.zeros(5, 1 + 8 * 261, dtype=torch.int64, pin_memory=place[0] == "cuda")
    turn = torch.full((1,), first, dtype=torch.int64, device=place[0])
    for number in range(11):
        outcome = torch.randint(-1, 1 << 40, shape)
        publish(outcome.to(place[0]), slots, turn)
        if place[0] == "cuda":
            torch.cuda.synchronize()
        slot = slots[4 if first else number % 4]
        assert (int(slot[0]), int(turn)) == ((0, -1) if first else (number + 1, number + 1))
        assert torch.equal(slot[1 : 1 + outcome.numel()], outcome.flatten())
    assert slots[:4].any() == (first == 0)
