"""`PrefixStore`: keys and values of earlier requests' texts, which outlive the rows in which they were computed."""

from collections import Counter
from collections.abc import Iterator
from math import gcd, prod

import numpy as np
import torch
from torch import Tensor

from ..runtime.prefix_budget import PrefixBudget
from .block_memory import make_memory
from .lanes import Lanes
from .prefix_tree import Block, Place, PrefixTree, Tier

BLOCK = 64
"""Tokens of a block."""
STAGED = 1 << 27
"""Bytes that are on their way between rows and blocks at most, but at least those of a block."""


class PrefixStore:
    """Copies of the slots of rows, in blocks of BLOCK tokens, and the tokens that they belong to.

    A text is kept when its request leaves its row. A prompt finds the longest chain of blocks that it begins with. Both
    copy bits, the target's and the draft's. Only whole blocks are kept: of a text of 200 tokens, whose last one has no
    keys and values, the first 192.

    The slot of a draft may depend on the token after it, as that of a head does. With such a draft the key of a block
    has one more token: that of the second block has the tokens 65 to 128, and that of the first has 0 to 64.
    """

    def __init__(self, lanes: Lanes, budget: PrefixBudget, sees_next: bool = False):
        """lanes: the rows of texts that are kept. sees_next: True if a slot may depend on the token after it."""
        self._lanes, self._sees_next = lanes, int(sees_next)
        self._shapes = [view.shape[1:] for view in blocks_of(lanes, 0, 0, 1)]
        """The shape of a block in every cache, [Hkv, BLOCK, units]."""
        self._unit = unit_of(lanes)
        self._units = sum(map(prod, self._shapes)) or 1  # nothing is kept of a model without attention
        self.block_bytes = self._units * self._unit.itemsize
        self._tree = PrefixTree(budget.device // self.block_bytes, budget.host // self.block_bytes)
        self._memories = {
            tier: make_memory(blocks, self._units, self._unit, lanes.runtime.device, is_host=tier == "host")
            for tier, blocks in self._tree.room.items()
        }
        self._most = max(1, STAGED // self.block_bytes)
        self.hits: Counter[str] = Counter()
        """Tokens of prompts that were copied, by the place that they came from: "row", "device" or "host"."""
        self.asked = 0
        """Tokens of prompts for which keys and values of earlier texts were looked for."""

    @property
    def evicted(self) -> int:
        """Blocks that were dropped because there was no room."""
        return self._tree.evicted

    def bytes(self, tier: Tier) -> int:
        """Bytes of the blocks of a tier."""
        return self._tree.count(tier) * self.block_bytes

    def forget(self) -> None:
        """The weights have changed: no keys and values count any more."""
        self._tree.clear()

    def match(self, prompt: list[int]) -> list[Block]:
        """The longest chain of blocks with which a prompt begins. Its last token does not count, because it is the root
        of the first tree."""
        self.asked += len(prompt) - 1
        return self._tree.match(self._keys(np.asarray(prompt[:-1], dtype=np.int32), len(prompt) - 1))

    def copy(self, chain: list[Block], lanes: Lanes, row: int) -> None:
        """Copy the blocks to the first slots of a row."""
        for first, tier, places in self._runs([(number, block.place) for number, block in enumerate(chain)]):
            staged = self._memories[tier].read(places)
            torch._foreach_copy_(blocks_of(lanes, row, first, len(places)), self._views(staged))
            self.hits[tier] += len(places) * BLOCK

    def keep(self, row: int, tokens: np.ndarray, slots: int) -> None:
        """Keep the text of a row. tokens: [n] int32. slots: of them that have keys and values."""
        try:
            copies = self._tree.keep(self._keys(tokens, slots))
            for begin in range(0, len(copies.demoted), self._most):
                sources, targets = zip(*copies.demoted[begin : begin + self._most])
                self._memories["host"].write(targets, self._memories["device"].read(sources))
            for first, tier, places in self._runs(copies.written):
                staged = torch.empty(len(places), self._units, dtype=self._unit, device=self._lanes.runtime.device)
                torch._foreach_copy_(self._views(staged), blocks_of(self._lanes, row, first, len(places)))
                self._memories[tier].write(places, staged)
        except BaseException:
            self.forget()  # some blocks lack their contents
            raise

    def _keys(self, tokens: np.ndarray, slots: int) -> list[bytes]:
        """The keys of the whole blocks among the first `slots` slots of a text [n] int32."""
        last = self._sees_next
        blocks = max(min(slots, len(tokens) - last), 0) // BLOCK
        begins = [number * BLOCK + (last if number else 0) for number in range(blocks)]
        return [tokens[begin : (number + 1) * BLOCK + last].tobytes() for number, begin in enumerate(begins)]

    def _views(self, staged: Tensor) -> list[Tensor]:
        """The parts [n, Hkv, BLOCK, units] of blocks [n, units], for every cache."""
        parts = staged.split([prod(shape) for shape in self._shapes], dim=1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, self._shapes)]

    def _runs(self, places: list[tuple[int, Place]]) -> Iterator[tuple[int, Tier, list[int]]]:
        """(number of the first block, tier, places) for consecutive blocks of one tier, `self._most` at most.

        places: the number of each block in its text, ascending, and its place. With most = 2, blocks 0, 1, 2 and 5 on
        the device give runs of 2, 1 and 1 blocks.
        """
        run: list[int] = []
        for index, (number, (tier, place)) in enumerate(places):
            run.append(place)
            follows = places[index + 1 : index + 2]
            if len(run) == self._most or [(n, next_place.tier) for n, next_place in follows] != [(number + 1, tier)]:
                yield number + 1 - len(run), tier, run
                run = []


def unit_of(lanes: Lanes) -> torch.dtype:
    """Integers as which slots are copied in blocks: the largest that the slots of all caches are made of."""
    sizes = [tensor.shape[3] * tensor.itemsize for tensor in lanes.cache_tensors()]
    return {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[gcd(8, *sizes)]


def blocks_of(lanes: Lanes, row: int, first: int, count: int) -> list[Tensor]:
    """Views [count, Hkv, BLOCK, units] of `count` blocks in a row of every cache, from block `first` on. Two from
    block 3 on are the slots 192 to 319."""
    slots, unit = slice(first * BLOCK, (first + count) * BLOCK), unit_of(lanes)
    rows = (tensor[row].view(unit)[:, slots] for tensor in lanes.cache_tensors())
    return [slots.unflatten(1, (count, BLOCK)).transpose(0, 1) for slots in rows]
