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
        self._views: dict[int, tuple[Tensor, list[Tensor]]] = {}
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
        """The sums of each tensor's bits, as integers of 64 bits."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for number, slot in enumerate(self._slots):
            if slot.storage is not None and not slot.storage.is_meta:
                sums = [part.sum(dtype=torch.int64) for part in self._parts(number, slot.storage)]
                by_device.setdefault(slot.storage.device, []).extend(sums)
        return [number for sums in by_device.values() for number in torch.stack(sums).tolist()]

    def _parts(self, number: int, storage: Tensor) -> list[Tensor]:
        """`_parts_of` the memory of a slot. Views are kept, because making them takes longer than a sum."""
        viewed, parts = self._views.get(number, (None, []))
        if viewed is not storage:
            parts = _parts_of(storage)
            if parts[0].data_ptr() == storage.data_ptr():  # not a copy, whose values would stay as they are
                self._views[number] = storage, parts
        return parts


def _parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensor's memory, read as integers of 64 bits, because torch adds those fastest, and the bytes that are left,
    if there are some."""
    memory = tensor.contiguous().view(-1).view(torch.uint8)
    if memory.data_ptr() % 8 or memory.storage_offset() % 8:
        memory = memory.clone()
    whole = memory.numel() // 8 * 8
    return [memory[:whole].view(torch.int64), *([memory[whole:]] if whole < memory.numel() else [])]
