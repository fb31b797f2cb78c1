"""The pairs of tokens and experts, sorted by their experts and cut into tiles.

    ids = [[5, 2], [2, 7]]: pairs 0 .. 3 of experts 5, 2, 2, 7; order = [1, 2, 0, 3]

Tiles have at most SIZE pairs of one expert. As many tiles as any choice of experts may need are there, because a
captured graph launches as many programs in every replay: if `first` pairs go to experts below e, the tiles of expert e
begin with number first // SIZE + e, and those that no pair fills have 0 pairs. All pairs may go to experts elsewhere.

    SIZE = 1 in the example: experts 0 .. 7 begin with tiles 0, 1, 2, 5, 6, 7, 9, 10; tiles 2, 3, 7 and 10 have a pair

Import this module only where Triton is installed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..primitives import let_next_kernel_begin, wait_for_kernel_before

FEW, MANY = 512, 4096
"""Pairs that a program looks through at a time."""


def sort_pairs(ids: Tensor, first: int, experts: int, size: int, early: bool) -> tuple[Tensor, Tensor]:
    """The pairs ids [T, k] int64 by expert -> their numbers [T * k] int32 and tiles [T * k // size + experts, 3] int32.

    Pairs of one expert stay in their order. A tile is its expert, where its pairs begin in the order, and how many it
    has. first, experts: the number of the first expert that is here, and how many are. size: the most pairs of a tile.
    early: as of `small_m.launch`.
    """
    order = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    tiles = order.new_empty(ids.numel() // size + experts, 3)
    sort_kernel[(experts,)](
        ids.contiguous(), order, tiles, ids.numel(), FIRST=first, SIZE=size,
        CHUNK=FEW if ids.numel() <= FEW else MANY, EARLY=early, num_warps=8, **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
    return order, tiles


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(
    ids_ptr, order_ptr, tiles_ptr, pairs, FIRST: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """`sort_pairs` of one expert a program, which looks through CHUNK pairs at a time. Grid (experts)."""
    if EARLY:
        wait_for_kernel_before()
        let_next_kernel_begin(0, 0)
    expert, pair = tl.program_id(0), tl.arange(0, CHUNK)

    # Count the pairs of experts below this one, and those of this one.
    below, own = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
    for begin in range(0, pairs, CHUNK):
        of_pair = tl.load(ids_ptr + begin + pair, mask=begin + pair < pairs, other=0x7FFFFFFF) - FIRST
        below += ((of_pair >= 0) & (of_pair < expert)).to(tl.int32)
        own += (of_pair == expert).to(tl.int32)
    first, count = tl.sum(below, 0), tl.sum(own, 0)

    # The tiles. The last expert has those that remain, because other pairs are of experts elsewhere.
    tile, end = first // SIZE + expert, (first + count) // SIZE + expert + 1
    end = tl.where(expert == tl.num_programs(0) - 1, pairs // SIZE + expert + 1, end)
    for begin in range(0, end - tile, CHUNK):
        done, at = (begin + pair) * SIZE, tiles_ptr + (tile + begin + pair) * 3
        mask = begin + pair < end - tile
        tl.store(at, pair * 0 + expert, mask=mask)
        tl.store(at + 1, first + done, mask=mask)
        tl.store(at + 2, tl.minimum(tl.maximum(count - done, 0), SIZE), mask=mask)

    # The order.
    for begin in range(0, pairs, CHUNK):
        same = tl.load(ids_ptr + begin + pair, mask=begin + pair < pairs, other=0x7FFFFFFF) - FIRST == expert
        tl.store(order_ptr + first + tl.cumsum(same.to(tl.int32), 0) - 1, begin + pair, mask=same)
        first += tl.sum(same.to(tl.int32), 0)
