"""`PrefixTree`: the blocks of earlier texts that are kept, and their places on the device and in host memory."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Tier = Literal["device", "host"]


@dataclass(eq=False, repr=False, slots=True)
class Block:
    """A block of tokens after the blocks above it, or the end of a text.

    parent: the block before it; None for the root of the tree, which has no tokens. key: of its tokens. size: places
    that it takes: 1, or more for the end of a text. places: of its contents; empty for the root, and for a block that
    is about to be written.
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
        self._used: dict[Tier, int] = dict.fromkeys(self.room, 0)
        """Places that the blocks of a tier take."""
        self._free: dict[Tier, list[int]] = {"device": [*range(device)][::-1], "host": [*range(device, places)][::-1]}

    def used(self, tier: Tier) -> int:
        """Places of a tier that are in use."""
        return self._used[tier]

    def tier(self, block: Block) -> Tier:
        """The tier of a block that is kept."""
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
        chain = self._chain(keys[:room], end, end_size)
        for block in reversed(chain):
            if block.places:
                self._remove(block, self.tier(block))
            self._add(block, "device")
        aged = self._pop_beyond_room("device")
        for block in aged:
            self._add(block, "host")
        for block in self._pop_beyond_room("host"):
            self._drop(block)
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

    def _chain(self, keys: list[bytes], end: bytes | None, end_size: int) -> list[Block]:
        """The blocks of a text and its end, those that are not kept yet without places."""
        chain = self.match(keys)
        for key in keys[len(chain) :]:
            chain.append(self._child(chain, key, 1))
        if end is not None:
            children = (chain[-1] if chain else self._root).children
            chain.append(children.get(end) or self._child(chain, end, end_size))
        return chain

    def _child(self, chain: list[Block], key: bytes, size: int) -> Block:
        parent = chain[-1] if chain else self._root
        parent.children[key] = block = Block(parent, key, size)
        return block

    def _add(self, block: Block, tier: Tier) -> None:
        """The block is the newest one of a tier."""
        self._kept[tier][block] = None
        self._used[tier] += block.size

    def _remove(self, block: Block, tier: Tier) -> None:
        del self._kept[tier][block]
        self._used[tier] -= block.size

    def _pop_beyond_room(self, tier: Tier) -> list[Block]:
        """Take the oldest blocks out of a tier until the others have room."""
        popped = []
        while self._used[tier] > self.room[tier]:
            popped.append(next(iter(self._kept[tier])))
            self._remove(popped[-1], tier)
        return popped

    def _drop(self, block: Block) -> None:
        """A block without children is in no tier any more."""
        if block.places:
            self._leave(block)
        assert block.parent is not None and not block.children
        del block.parent.children[block.key]
        self.evicted += block.size

    def _enter(self, block: Block, tier: Tier) -> Sequence[int]:
        free = self._free[tier]
        block.places = free[-block.size :][::-1]
        del free[-block.size :]
        return block.places

    def _leave(self, block: Block) -> None:
        self._free[self.tier(block)] += block.places[::-1]
        block.places = ()
