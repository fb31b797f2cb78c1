"""`WeightValues` notices that weights hold other values than before, as after a training step."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .weights import Slot


class WeightValues:
    """The values of the weights in `slots`, as they were when this was made or when `have_changed` last ran.

    torch counts the writes to a tensor, but not those through ``tensor.data`` and by other libraries. Only a sum over
    all bits shows these; it reads every weight once, as a round of decoding does.
    """

    def __init__(self, slots: Iterable[Slot]):
        self._slots = [*{slot.key: slot for slot in slots}.values()]
        self._writes, self._sums = self._count_writes(), self._sum_bits()

    def have_changed(self, is_sure: bool = True) -> bool:
        """True if any weight has been written to since the last call.

        is_sure: compare the bits, too, if no write was counted.
        """
        before, self._writes = self._writes, self._count_writes()
        has_changed = before != self._writes
        if has_changed or is_sure:
            sums, self._sums = self._sums, self._sum_bits()
            has_changed |= sums != self._sums
        return has_changed

    def _count_writes(self) -> list[int]:
        tensors = (slot.current for slot in self._slots)
        return [each._version for each in tensors if isinstance(each, Tensor) and not each.is_inference()]

    @torch.no_grad()
    def _sum_bits(self) -> list[int]:
        """The sum of each tensor's bits, as integers of 64 bits."""
        tensors = [slot.storage for slot in self._slots if slot.storage is not None and not slot.storage.is_meta]
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.device, []).append(_sum_of_bits(tensor))
        return [number for sums in by_device.values() for number in torch.stack(sums).tolist()]


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """The sum of the tensor's memory, read as integers of 64 bits, because torch adds those fastest, and of the bytes
    that are left."""
    memory = tensor.contiguous().view(-1).view(torch.uint8)
    if memory.data_ptr() % 8 or memory.storage_offset() % 8:
        memory = memory.clone()
    whole = memory.numel() // 8 * 8
    return memory[:whole].view(torch.int64).sum() + memory[whole:].sum(dtype=torch.int64)
