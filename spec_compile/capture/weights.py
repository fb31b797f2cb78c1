"""The memory that the graphs read, because captured graphs hold its addresses.

`SharedWeights` copies new weights into it. `WeightValues` notices other values, as after a training step.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..inventory import held
from ..quantised import update
from .experts import library_tensors
from .quantised import packed_layers

AGAIN = "call speculate() again"


@dataclass
class Slot:
    """A parameter or buffer of a module, as it was at speculate().

    path: its full name.
    holder, name: the module's dictionary that has it, and its name there.
    tensor: the object that the graphs hold.
    storage: a view of the memory that the graphs read; None for a tensor subclass, whose memory is not known.
    borrowed: True for a draft's slot that holds the target's own tensor.
    """

    path: str
    holder: dict[str, Tensor | None]
    name: str
    tensor: Tensor
    storage: Tensor | None
    borrowed: bool = False

    @property
    def current(self) -> Tensor | None:
        """The tensor that the module has there now."""
        return dict.get(self.holder, self.name)

    @property
    def key(self) -> tuple:
        """A key that slots of one tied weight share."""
        return (id(self.tensor),) if self.storage is None else _layout(self.storage)

    @property
    def moved(self) -> bool:
        """True if the module computes with other memory than the graphs."""
        current = self.current
        if self.storage is None or not isinstance(current, Tensor):
            return current is not self.tensor
        return type(current.data) is not Tensor or _layout(current) != _layout(self.storage)

    @property
    def misfit(self) -> str | None:
        """The reason why the values that the module has now cannot be taken over, or None."""
        current = self.current
        if not isinstance(current, Tensor):
            return "is gone"
        if self.storage is None or type(current.data) is not Tensor:
            return f"is a {type(current.data).__name__}, whose memory cannot be shared,"
        if current.is_meta:
            return "is on the meta device, without values,"
        if not self.storage.numel():
            return "was replaced, though its layer holds its weights in the layout of a kernel,"
        was, now = _description(self.storage), _description(current)
        return None if was == now else f"was {was} at speculate() and is {now} now"


class SharedWeights:
    """The slots of a target and of its draft, and `take_over`, which brings the graphs' memory up to date."""

    def __init__(self, target: nn.Module, draft: nn.Module | None = None, others: Iterable[nn.Module] = ()):
        """others: modules of the target whose tensors the graphs do not read."""
        self._target = target
        self._layouts = self._read_layouts()
        unread = {id(holder) for part in others for holder in (part._parameters, part._buffers)}
        self.slots = [slot for slot in _slots(target, "") if id(slot.holder) not in unread]
        keys = {slot.key for slot in self.slots}
        for slot in _slots(draft, "draft.") if draft is not None else ():
            slot.borrowed = slot.key in keys
            self.slots.append(slot)

    def take_over(self) -> None:
        """Copy the values of tensors that were moved or replaced into the graphs' memory, and make them views of it.

        ValueError, before anything is copied, if one has another shape, dtype or device, has no values or is tied to
        other weights than before, or if a quantised layer has another layout.
        """
        # Refuse before anything is copied.
        if self._read_layouts() != self._layouts:
            raise ValueError(f"the layout of quantised layers, or what cannot be copied, has changed; {AGAIN}")
        moved = [slot for slot in self.slots if slot.moved and not (slot.borrowed and slot.current is slot.tensor)]
        for slot in moved:
            if slot.misfit:
                raise ValueError(f"{slot.path} {slot.misfit}; {AGAIN}")
        self._check_ties(moved)
        # Copy each tied weight once.
        sources = {slot.key: slot.current.detach() for slot in moved}
        targets = {slot.key: slot.storage for slot in moved}
        memory = {slot.storage.untyped_storage().data_ptr() for slot in self.slots if slot.storage is not None}
        for key, source in sources.items():
            if source.untyped_storage().data_ptr() in memory:  # another weight's: the copies might overwrite it
                sources[key] = source.clone()
        for key, source in sources.items():
            targets[key].copy_(source)
        self._share()
        update()

    def _read_layouts(self) -> dict[str, tuple]:
        """The layout of each quantised layer, by path, with the addresses of parts that are in no slot."""
        layouts = {}
        for path, packed in packed_layers(self._target).items():
            part = self._target.get_submodule(path)
            slots = {*part._parameters, *part._buffers}
            addresses = [tensor.data_ptr() for name, tensor in packed.parts.items() if name not in slots]
            layouts[path] = packed.layout.kind, addresses
        layouts["experts"] = tuple(map(id, library_tensors(self._target)))
        return layouts

    def _share(self) -> None:
        """Make the tensors of the modules and of the graphs views of the graphs' memory."""
        ordinary: dict[int, Tensor] = {}
        for slot in self.slots:
            current = slot.current
            if slot.storage is None or (slot.borrowed and current is slot.tensor):
                continue
            if current.is_inference():  # such a tensor cannot be made a view: another takes its place
                other = nn.Parameter if isinstance(current, nn.Parameter) else torch.Tensor.requires_grad_
                other = ordinary.setdefault(id(current), other(slot.storage.detach(), current.requires_grad))
                slot.holder[slot.name] = current = other
            for tensor in (slot.tensor, current):
                if _layout(tensor) != _layout(slot.storage):
                    tensor.data = slot.storage

    def _check_ties(self, moved: list[Slot]) -> None:
        """ValueError if tensors that were one hold different values now, or if one stands where another stood."""
        slots = {id(slot.tensor): slot for slot in self.slots}
        slots |= {id(slot.current): slot for slot in self.slots if not slot.moved}
        for slot in moved:
            other = slots.setdefault(id(slot.current), slot)
            if other.key != slot.key:
                raise ValueError(f"{slot.path} became the tensor of {other.path} after speculate(); {AGAIN}")
        groups: dict[tuple, list[Slot]] = {slot.key: [] for slot in moved}
        for slot in self.slots:
            if slot.key in groups and not (slot.borrowed and slot.current is slot.tensor):
                groups[slot.key].append(slot)
        for first, *others in groups.values():
            for slot in others:
                if _layout(slot.current) != _layout(first.current) and not torch.equal(slot.current, first.current):
                    raise ValueError(
                        f"{first.path} and {slot.path} were one tensor at speculate() and hold different values now; "
                        f"tie them again (model.tie_weights()), or {AGAIN}"
                    )


def _slots(module: nn.Module, prefix: str) -> Iterable[Slot]:
    for each in held(module, prefix):
        yield Slot(*each, each.tensor.detach() if type(each.tensor.data) is Tensor else None)


def _layout(tensor: Tensor) -> tuple:
    """A key that tensors of the same numbers in memory share."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _description(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}".removeprefix("torch.")


# Values that change in place.


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
