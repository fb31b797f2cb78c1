"""`RowBlocks`: copies between the slots of a row and blocks that each lie in one piece."""

from functools import cached_property
from math import prod

import torch
from torch import Tensor


class RowBlocks:
    """Blocks of `slots` consecutive slots of a row, in all of its caches or states at once.

    A packed block has one tensor's part after the other, [Hkv, slots, units] each. Two caches of 2 heads with 16 units
    a slot give 4,096 units for 64 slots.
    """

    def __init__(self, tensors: list[Tensor], slots: int, unit: torch.dtype):
        """tensors: [B, Hkv, S, D] each, contiguous, whose addresses stay. unit: integers as which they are copied, of
        which the last dimension has a whole number."""
        self._tensors, self._slots = [tensor.view(unit) for tensor in tensors], slots
        self._shapes = [(tensor.shape[1], slots, tensor.shape[3]) for tensor in self._tensors]
        self.units = sum(map(prod, self._shapes))
        """Units of a packed block."""

    def pack(self, row: int, first: int, packed: Tensor) -> None:
        """Copy blocks of a row, from block `first` on, to `packed` [n, units or more]."""
        self._copy(row, first, packed, to_row=False)

    def unpack(self, packed: Tensor, row: int, first: int) -> None:
        """Copy `packed` [n, units or more] to the blocks of a row from block `first` on."""
        self._copy(row, first, packed, to_row=True)

    def _copy(self, row: int, first: int, packed: Tensor, to_row: bool) -> None:
        if not self._tensors:
            return  # a model without attention
        if packed.is_cuda:
            self._kernel(packed, row, first, to_row)
            return
        blocks = packed[:, : self.units].split([*map(prod, self._shapes)], dim=1)
        blocks = [block.unflatten(1, shape) for block, shape in zip(blocks, self._shapes)]
        views = self.views(row, first, len(packed))
        torch._foreach_copy_(*((views, blocks) if to_row else (blocks, views)))

    def views(self, row: int, first: int, count: int) -> list[Tensor]:
        """Views [count, Hkv, slots, units] of `count` blocks of a row, from block `first` on, in each tensor. With 64
        slots, two blocks from block 3 on are the slots 192 to 319."""
        begin, end = first * self._slots, (first + count) * self._slots
        rows = (tensor[row, :, begin:end] for tensor in self._tensors)
        return [slots.unflatten(1, (count, self._slots)).transpose(0, 1) for slots in rows]

    @cached_property
    def _kernel(self):
        from ..kernels.copies import BlockCopies  # needs Triton

        return BlockCopies(self._tensors, self._slots)
