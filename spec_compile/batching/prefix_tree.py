"""`PrefixTree`: the blocks of earlier texts that are kept, and their places on the device and in host memory."""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Tier = Literal["device", "host"]


class Place(NamedTuple):
    """Place `number` in the memory of a tier."""

    tier: Tier
    number: int


@dataclass(eq=False, repr=False)
class Block:
    """A block of tokens after the blocks above it.

    parent: the block before it; None for the root of the tree, which has no tokens. key: of its tokens. place: of its
    keys and values; None for the root, and for a block that is about to be written.
    """

    parent: "Block | None" = None
    key: bytes = b""
    place: Place | None = None
    children: dict[bytes, "Block"] = field(default_factory=dict)


class Copies(NamedTuple):
    """The copies that `PrefixTree.keep` asks for, in this order.

    demoted: pairs of a place on the device and one in host memory, from the one to the other. written: pairs of the
    number of a block in its text and its place.
    """

    demoted: list[tuple[int, int]]
    written: list[tuple[int, Place]]


class PrefixTree:
    """The newest blocks lie on the device, the next ones in host memory, and older ones are dropped.

    A text renews all of its blocks, the first one last. So a block is always newer than those after it, and no block is
    dropped before its children. With room for 2 blocks on the device and 1 in host memory, the text [a, b, c] leaves a
    and b on the device and c in host memory. After the text [a, d], a and d are on the device, b is in host memory, and
    c is gone.

    A key is the tokens of the block themselves, not a hash of them, so different texts never meet.
    """

    def __init__(self, device: int, host: int):
        """device, host: blocks for which there is room."""
        self.room: dict[Tier, int] = {"device": device, "host": host}
        self.evicted = 0
        """Blocks that were dropped, since this was made."""
        self.clear()

    def clear(self) -> None:
        """Drop all blocks; they do not count as evicted."""
        self._root = Block()
        self._kept: dict[Tier, OrderedDict[Block, None]] = {tier: OrderedDict() for tier in self.room}
        """The oldest blocks first."""
        self._free = {tier: [*range(room)][::-1] for tier, room in self.room.items()}

    def count(self, tier: Tier) -> int:
        """Blocks of a tier."""
        return len(self._kept[tier])

    def match(self, keys: list[bytes]) -> list[Block]:
        """The kept blocks with which a text of these blocks begins."""
        block, chain = self._root, []
        for key in keys:
            child = block.children.get(key)
            if child is None:
                break
            chain.append(block := child)
        return chain

    def keep(self, keys: list[bytes]) -> Copies:
        """Keep the blocks of a text, as far as there is room, as the newest ones. The caller has to make the copies."""
        device, host = self._kept["device"], self._kept["host"]
        chain = self._chain(keys[: sum(self.room.values())])
        for block in reversed(chain):
            if block.place is not None:
                del self._kept[block.place.tier][block]
            device[block] = None
        aged = [device.popitem(last=False)[0] for _ in range(len(device) - self.room["device"])]
        host |= dict.fromkeys(aged)
        for _ in range(len(host) - self.room["host"]):
            self._drop(host.popitem(last=False)[0])
        for block in chain:
            if block in device and block.place is not None and block.place.tier == "host":
                self._leave(block)  # it is written anew
        demoted = []
        for block in aged:
            if block in host and block.place is not None and block.place.tier == "device":
                before = block.place.number
                self._leave(block)
                demoted.append((before, self._enter(block, "host").number))
        written = [
            (number, self._enter(block, "device" if block in device else "host"))
            for number, block in enumerate(chain)
            if block.place is None
        ]
        return Copies(demoted, written)

    def _chain(self, keys: list[bytes]) -> list[Block]:
        """The blocks of a text, those that are not kept yet without a place."""
        chain = self.match(keys)
        for key in keys[len(chain) :]:
            parent = chain[-1] if chain else self._root
            parent.children[key] = block = Block(parent, key)
            chain.append(block)
        return chain

    def _drop(self, block: Block) -> None:
        """A block without children is in no tier any more."""
        if block.place is not None:
            self._leave(block)
        assert block.parent is not None and not block.children
        del block.parent.children[block.key]
        self.evicted += 1

    def _enter(self, block: Block, tier: Tier) -> Place:
        block.place = Place(tier, self._free[tier].pop())
        return block.place

    def _leave(self, block: Block) -> None:
        assert block.place is not None
        self._free[block.place.tier].append(block.place.number)
        block.place = None
