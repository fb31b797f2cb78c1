"""Memory for blocks of keys and values: on the device of the rows, or in pinned pages of a GPU's host."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache import zero_pages

SLAB = 1 << 28
"""Bytes of pinned memory that are taken at once, but at least those of a block. Pinning takes time, so it is done when
blocks are first written."""


class BlockMemory:
    """`blocks` blocks of `units` numbers each, on the device of the rows. On a CPU they take memory when written."""

    def __init__(self, blocks: int, units: int, unit: torch.dtype, device: torch.device):
        self._device = device
        self._blocks = zero_pages((blocks, units), unit, device) if blocks else torch.empty(0, units, dtype=unit)

    def read(self, places: Sequence[int]) -> Tensor:
        """The blocks at these places, [n, units] on the device."""
        staged = torch.empty(len(places), *self._blocks.shape[1:], dtype=self._blocks.dtype, device=self._device)
        torch._foreach_copy_([*staged], [self._blocks[place] for place in places])
        return staged

    def write(self, places: Sequence[int], staged: Tensor) -> None:
        """Put blocks [n, units] on the device to these places."""
        torch._foreach_copy_([self._blocks[place] for place in places], [*staged])


class PinnedMemory:
    """The same, in the host memory of a GPU.

    Copies run on a stream of their own, so rounds go on meanwhile. The host never reads the blocks, and the stream
    orders writes and reads of a place.
    """

    def __init__(self, blocks: int, units: int, unit: torch.dtype, device: torch.device):
        self._units, self._unit, self._device = units, unit, device
        self._per_slab = min(max(1, SLAB // (units * unit.itemsize)), max(blocks, 1))
        self._slabs: dict[int, Tensor] = {}
        self._stream = torch.cuda.Stream(device)

    def read(self, places: Sequence[int]) -> Tensor:
        """See `BlockMemory`."""
        rounds = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            staged = torch.empty(len(places), self._units, dtype=self._unit, device=self._device)
            for place, block in zip(places, staged):
                block.copy_(self._block(place), non_blocking=True)
        rounds.wait_stream(self._stream)
        staged.record_stream(rounds)
        return staged

    def write(self, places: Sequence[int], staged: Tensor) -> None:
        """See `BlockMemory`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for place, block in zip(places, staged):
                self._block(place).copy_(block, non_blocking=True)
        staged.record_stream(self._stream)

    def _block(self, place: int) -> Tensor:
        """With 3 blocks a slab, place 7 is block 1 of slab 2."""
        slab, number = divmod(place, self._per_slab)
        if slab not in self._slabs:
            self._slabs[slab] = torch.empty(self._per_slab, self._units, dtype=self._unit, pin_memory=True)
        return self._slabs[slab][number]


def make_memory(blocks: int, units: int, unit: torch.dtype, device: torch.device, is_host: bool):
    """Memory for `blocks` blocks of rows on `device`. is_host: True for the host's memory."""
    kind = PinnedMemory if is_host and device.type == "cuda" else BlockMemory
    return kind(blocks, units, unit, device)
