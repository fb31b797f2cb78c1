"""Blocks of earlier texts: which are kept and where (`PrefixTree`), their memory, and copies between it and rows."""

from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, repeat
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from ..cache import zero_pages

if TYPE_CHECKING:
    from ..kernels.copies import BlockCopies

SLAB = 1 << 28
"""Bytes of host memory that are taken at once, or more if a block has more."""
Tier = Literal["device", "host"]


@dataclass(eq=False, repr=False, slots=True)
class Block:
    """A block of tokens after the blocks above it, or the end of a text.

    parent: the block before it; None for the root of the tree, which has no tokens.
    key: its tokens.
    size: places that it takes: 1, or more for the end of a text.
    places: where its contents are; empty for the root, and for a block that is about to be written.
    """

    parent: "Block | None" = None
    key: bytes = b""
    size: int = 1
    places: Sequence[int] = ()
    children: dict[bytes, "Block"] = field(default_factory=dict)

    @property
    def is_end(self) -> bool:
        return self.size > 1


class Copies(NamedTuple):
    """The copies that `PrefixTree.keep` asks for, in this order.

    demoted: pairs of a place on the device and one in host memory, from the one to the other. written: pairs of the
    number of a block in its text and its place. end: the places of the text's end, if it is written.
    """

    demoted: list[tuple[int, int]]
    written: list[tuple[int, int]]
    end: Sequence[int]


class PrefixTree:
    """The newest blocks lie on the device, the next ones in host memory, and older ones are dropped.

    A text renews all of its blocks, the first one last. So a block is always newer than those after it, and no block is
    dropped before its children. With room for 2 blocks on the device and 1 in host memory, the text [a, b, c] leaves a
    and b on the device and c in host memory. After the text [a, d], a and d are on the device, b is in host memory, and
    c is gone.

    Places below `device` are on the device, those from there on in host memory: with room for 2 and 1 blocks, 2 is the
    place in host memory.

    A key is the tokens of the block themselves, not a hash of them, so different texts never meet.
    """

    def __init__(self, device: int, host: int):
        """device, host: places that there are."""
        self.room: dict[Tier, int] = {"device": device, "host": host}
        self.evicted = 0
        """Places of blocks that were dropped, since this was made."""
        self.clear()

    def clear(self) -> None:
        """Drop all blocks; they do not count as evicted."""
        device, places = self.room["device"], sum(self.room.values())
        self._root = Block()
        self._kept: dict[Tier, OrderedDict[Block, None]] = {tier: OrderedDict() for tier in self.room}
        """The oldest blocks first."""
        self.used: dict[Tier, int] = dict.fromkeys(self.room, 0)
        """Places of a tier that are in use."""
        self._free: dict[Tier, list[int]] = {"device": [*range(device)][::-1], "host": [*range(device, places)][::-1]}

    def tier(self, block: Block) -> Tier:
        return "device" if block.places[0] < self.room["device"] else "host"

    def match(self, keys: Iterable[bytes]) -> list[Block]:
        """The kept blocks with which a text of these blocks begins."""
        block, chain = self._root, []
        for key in keys:
            child = block.children.get(key)
            if child is None:
                break
            chain.append(block := child)
        return chain

    def end(self, chain: list[Block], rest: bytes) -> Block | None:
        """The longest end of a text after these blocks whose key begins the key `rest`."""
        children = (chain[-1] if chain else self._root).children.values()
        return max((b for b in children if b.is_end and rest.startswith(b.key)), key=lambda b: len(b.key), default=None)

    def keep(self, keys: list[bytes], end: bytes | None = None, end_size: int = 0) -> Copies:
        """Keep the blocks of a text, as far as there is room, as the newest ones. The caller has to make the copies.

        end: the key of the text's end, which takes `end_size` places; None keeps only blocks. Nothing is kept if there
        is no room for all blocks and the end.
        """
        room = sum(self.room.values())
        if end is not None and len(keys) + end_size > room:
            return Copies([], [], ())

        # The blocks of the text, of which new ones have no places yet, become the newest.
        chain = self.match(keys[:room])
        added = [(key, 1) for key in keys[len(chain) : room]] + ([(end, end_size)] if end is not None else [])
        for key, size in added:
            parent = chain[-1] if chain else self._root
            chain.append(parent.children.get(key) or parent.children.setdefault(key, Block(parent, key, size)))
        for block in reversed(chain):
            if block.places:
                self._remove(block, self.tier(block))
            self._add(block, "device")

        # The oldest ones move on to host memory, and from there out of the tree.
        aged = self._pop_beyond_room("device")
        for block in aged:
            self._add(block, "host")
        for block in self._pop_beyond_room("host"):
            if block.places:
                self._leave(block)
            assert block.parent is not None and not block.children
            del block.parent.children[block.key]
            self.evicted += block.size

        # Blocks get their places: first those that are given back are free again.
        device, host = self._kept["device"], self._kept["host"]
        for block in chain:
            if block in device and block.places and self.tier(block) == "host":
                self._leave(block)  # it is written anew
        demoted: list[tuple[int, int]] = []
        for block in aged:
            if block in host and block.places and self.tier(block) == "device":
                before = block.places
                self._leave(block)
                demoted += zip(before, self._enter(block, "host"))
        written: list[tuple[int, int]] = []
        end_places: Sequence[int] = ()
        for number, block in enumerate(chain):
            if not block.places and (block in device or block in host):
                places = self._enter(block, "device" if block in device else "host")
                if block.is_end:
                    end_places = places
                else:
                    written.append((number, places[0]))
        return Copies(demoted, written, end_places)

    def _add(self, block: Block, tier: Tier) -> None:
        self._kept[tier][block] = None
        self.used[tier] += block.size

    def _remove(self, block: Block, tier: Tier) -> None:
        del self._kept[tier][block]
        self.used[tier] -= block.size

    def _pop_beyond_room(self, tier: Tier) -> list[Block]:
        """Take the oldest blocks out of a tier until the others have room."""
        popped = []
        while self.used[tier] > self.room[tier]:
            popped.append(next(iter(self._kept[tier])))
            self._remove(popped[-1], tier)
        return popped

    def _enter(self, block: Block, tier: Tier) -> Sequence[int]:
        free = self._free[tier]
        block.places = free[-block.size :][::-1]
        del free[-block.size :]
        return block.places

    def _leave(self, block: Block) -> None:
        self._free[self.tier(block)] += block.places[::-1]
        block.places = ()


class BlockMemory:
    """Blocks of `units` numbers each: places below `on_device` on the device, and `in_host` more in host memory.

    Host memory is taken in slabs, one ahead of the blocks that are used. A process with much memory that nothing has
    written to could not fork. The slabs of a GPU's host are pinned. Pinning 256 MB takes about 0.1 s, so a thread does
    it.
    """

    def __init__(self, on_device: int, in_host: int, units: int, unit: torch.dtype, device: torch.device):
        self._units, self._unit = units, unit
        self._is_pinned = device.type == "cuda"
        places = on_device + in_host
        at_once = on_device if self._is_pinned else 0
        blocks = zero_pages((at_once, units), unit, device) if at_once else torch.empty(0, units, dtype=unit)
        self._slabs: list[Callable[[], Tensor]] = [lambda: blocks]
        """Functions that give each slab [n, units]."""
        self._bounds = [0, *range(at_once, places, max(1, SLAB // (units * unit.itemsize))), places]
        """Slab i has the places from bounds[i] to bounds[i + 1] - 1."""
        self._begins = {*self._bounds}
        self._thread = ThreadPoolExecutor(1, "spec_compile pinned memory")
        self._take(2)

    def pieces(self, places: Sequence[int], most: int) -> Iterator[tuple[slice, Tensor]]:
        """As few views [n, units] as possible of the blocks at these places, of at most `most` blocks, each with its
        part of `places`.

        The places [3, 4, 9] give (0:2, blocks 3 and 4) and (2:3, block 9).
        """
        begin = 0
        for index, place in enumerate(places):
            is_followed = places[index + 1 : index + 2] == [place + 1] and place + 1 not in self._begins
            if is_followed and index + 1 - begin < most:
                continue
            slab = bisect(self._bounds, place) - 1
            self._take(slab + 2)
            first = places[begin] - self._bounds[slab]
            yield slice(begin, index + 1), self._slabs[slab]()[first : first + index + 1 - begin]
            begin = index + 1

    def _take(self, slabs: int) -> None:
        """Have the first slabs made: `slabs` of them, or all that there are."""
        for begin, end in [*pairwise(self._bounds)][len(self._slabs) : slabs]:
            shape = end - begin, self._units
            make: Callable[[], Tensor]
            if self._is_pinned:
                make = self._thread.submit(torch.empty, shape, dtype=self._unit, pin_memory=True).result
            else:
                make = repeat(zero_pages(shape, self._unit, torch.device("cpu"))).__next__
            self._slabs.append(make)


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

    def copy(self, row: int, first: int, packed: Tensor, to_row: bool = False) -> None:
        """Copy blocks of a row, from block `first` on, to `packed` [n, units or more], or from there to the row."""
        if not self._tensors:
            return  # a model without attention
        if packed.is_cuda:
            self._kernel(packed, row, first, to_row)
            return
        blocks = packed[:, : self.units].split([*map(prod, self._shapes)], dim=1)
        blocks = [block.unflatten(1, shape) for block, shape in zip(blocks, self._shapes)]
        # With 64 slots, two blocks from block 3 on are the slots 192 to 319.
        count, begin = len(packed), first * self._slots
        rows = (tensor[row, :, begin : begin + count * self._slots] for tensor in self._tensors)
        views = [slots.unflatten(1, (count, self._slots)).transpose(0, 1) for slots in rows]  # [count, Hkv, slots, D]
        torch._foreach_copy_(*((views, blocks) if to_row else (blocks, views)))

    @cached_property
    def _kernel(self) -> "BlockCopies":
        from ..kernels.copies import BlockCopies  # needs Triton

        return BlockCopies(self._tensors, self._slots)
