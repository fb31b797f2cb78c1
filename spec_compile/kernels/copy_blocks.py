"""Copy consecutive blocks of slots between a row of every cache and packed memory, all of them in one launch.

    packed[n] = the slots (first + n) * slots to (first + n + 1) * slots - 1 of every cache, one cache after the other

A block of 64 slots of two caches with 2 heads of 16 units each takes 2 * (2 * 64 * 16) = 4,096 units.

Import this module only where Triton is installed.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

STRIDE = 1024
"""Units that a program copies."""


class BlockCopies:
    """Copies between rows of `tensors` and packed blocks.

    tensors: [B, Hkv, S, D] each, contiguous, of integers of one dtype, the unit. Their addresses must not change.
    slots: of a block, in each of them.
    """

    def __init__(self, tensors: list[Tensor], slots: int):
        parts = [tensor.shape[1] * slots * tensor.shape[3] for tensor in tensors]
        begins = [sum(parts[:number]) for number in range(len(parts))]
        table = [
            (tensor.data_ptr(), tensor.shape[1], tensor.shape[2], tensor.shape[3], begin)
            for tensor, begin in zip(tensors, begins)
        ]
        self._table = torch.tensor(table, dtype=torch.int64, device=tensors[0].device)
        self._slots, self._heads = slots, max(tensor.shape[1] for tensor in tensors)
        self._longest = slots * max(tensor.shape[3] for tensor in tensors)

    def __call__(self, packed: Tensor, row: int, first: int, to_row: bool) -> None:
        """Copy the blocks of a row from block `first` on.

        packed: [n, units], contiguous, of the unit; on the device. to_row: True from `packed` to the row, False from
        the row to `packed`.
        """
        grid = len(packed), len(self._table) * self._heads, triton.cdiv(self._longest, STRIDE)
        _copy_blocks[grid](
            packed, self._table, packed.shape[1], row, first, self._heads, SLOTS=self._slots, TO_ROW=to_row,
            STRIDE=STRIDE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["units", "row", "first", "most_heads"])
def _copy_blocks(
    packed,  # [n, units]
    table,  # [caches, 5] int64: address, heads, slots of a row, units of a slot, first unit in a packed block
    units, row, first, most_heads, SLOTS: tl.constexpr, TO_ROW: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """One program for a block, a head of a cache and STRIDE of its units. Grid (n, caches * Hkv, units / STRIDE)."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1) % most_heads
    table += tl.program_id(1) // most_heads * 5
    heads, slots, size = tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    if head >= heads:
        return
    unit = tl.program_id(2) * STRIDE + tl.arange(0, STRIDE)
    mask = unit < SLOTS * size
    in_row = tl.load(table).to(packed.dtype) + ((row * heads + head) * slots + (first + block) * SLOTS) * size + unit
    in_block = packed + block * units + tl.load(table + 4) + head * SLOTS * size + unit
    if TO_ROW:
        tl.store(in_row, tl.load(in_block, mask=mask), mask=mask)
    else:
        tl.store(in_block, tl.load(in_row, mask=mask), mask=mask)
