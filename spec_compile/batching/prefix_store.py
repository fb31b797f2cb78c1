"""`PrefixStore`: keys and values of earlier requests' texts, which outlive the rows in which they were computed."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import gcd
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ..runtime.prefix_budget import PrefixBudget
from .block_memory import BlockMemory
from .lanes import Lanes
from .prefix_tree import Block, PrefixTree, Tier
from .row_blocks import RowBlocks

BLOCK = 64
"""Tokens of a block."""
FEWEST = {"cpu": 1, "cuda": 4}
"""Blocks of a text that is kept, and of a beginning that is copied, at least. A GPU processes up to 256 tokens of a
prompt in about the time of one, in which it reads the weights."""
STAGED = 1 << 25
"""Bytes that are on their way between rows and blocks at most, but at least those of a block."""


class PrefixStore:
    """Copies of the slots of rows, in blocks of BLOCK tokens, and the tokens that they belong to.

    A text is kept when its request leaves its row. A prompt finds the longest chain of blocks that it begins with. Both
    copy bits, the target's and the draft's. Only whole blocks are kept: of a text of 200 tokens, whose last one has no
    keys and values, the first 192.

    The slot of a draft may depend on the token after it, as that of a head does. With such a draft the key of a block
    has one more token: that of the second block has the tokens 65 to 128, and that of the first has 0 to 64.

    On a GPU all copies run on a stream of their own, which orders writes and reads of a place, and the host waits for
    none. Rounds wait for the copies to a row. They do not wait for those out of a row until they are to write to it.

    Keys and values depend on the adapter of the row. So the key of a first block begins with the adapter's version (see
    `Loaded`), and texts of two adapters share no block.
    """

    def __init__(self, lanes: Lanes, budget: PrefixBudget, sees_next: bool = False):
        """lanes: the rows of texts that are kept. sees_next: True if a slot may depend on the token after it."""
        self._device, self._sees_next = lanes.runtime.device, int(sees_next)
        self._unit = unit_of(lanes)
        self._rows: WeakKeyDictionary[Lanes, RowBlocks] = WeakKeyDictionary()
        units = self._rows_of(lanes).units or 1  # nothing is kept of a model without attention
        self.block_bytes = units * self._unit.itemsize
        self._tree = PrefixTree(budget.device // self.block_bytes, budget.host // self.block_bytes)
        self._fewest = FEWEST[self._device.type]
        self._most = max(1, STAGED // self.block_bytes)
        self._stream = torch.cuda.Stream(self._device) if lanes.runtime.on_gpu else None
        with self._aside():
            self._memory = BlockMemory(*self._tree.room.values(), units, self._unit, self._device)
            self._staged = torch.empty(self._most, units, dtype=self._unit, device=self._device)
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
        return self._tree.used(tier) * self.block_bytes

    def forget(self) -> None:
        """The weights have changed: no keys and values count any more."""
        self._tree.clear()

    def match(self, prompt: list[int], adapter: int = 0) -> list[Block]:
        """The longest chain of blocks with which a prompt begins. Its last token does not count, because it is the root
        of the first tree. adapter: the version of the prompt's own."""
        self.asked += len(prompt) - 1
        chain = self._tree.match(self._keys(np.asarray(prompt[:-1], dtype=np.int32), len(prompt) - 1, adapter))
        return chain if len(chain) >= self._fewest else []

    def copy(self, chain: list[Block], lanes: Lanes, row: int) -> None:
        """Copy the blocks to the first slots of a row."""
        with self._aside():
            for begin in range(0, len(chain), self._most):
                places = [block.places[0] for block in chain[begin : begin + self._most]]
                self._rows_of(lanes).unpack(self._read(places), row, begin)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self.hits.update({tier: BLOCK * count for tier, count in Counter(map(self._tree.tier, chain)).items()})

    def keep(self, lanes: Lanes, row: int, tokens: np.ndarray, slots: int, adapter: int = 0) -> None:
        """Keep the text of a row. tokens: [n] int32. slots: of them that have keys and values. adapter: the version of
        the row's own."""
        if slots < self._fewest * BLOCK:
            return
        try:
            copies = self._tree.keep([*self._keys(tokens, slots, adapter)])
            if not copies.demoted and not copies.written:
                return
            with self._aside():
                for begin in range(0, len(copies.demoted), self._most):
                    sources, targets = zip(*copies.demoted[begin : begin + self._most])
                    self._write(targets, self._read(sources))
                for first, places in self._runs(copies.written):
                    staged = self._staged[: len(places)]
                    self._rows_of(lanes).pack(row, first, staged)
                    self._write(places, staged)
                if self._stream is not None:
                    lanes.read_until(row, self._stream.record_event())
        except BaseException:
            self.forget()  # some blocks lack their contents
            raise

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On a GPU a context of the copies' stream, after all that is launched for rounds."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _rows_of(self, lanes: Lanes) -> RowBlocks:
        if lanes not in self._rows:
            self._rows[lanes] = RowBlocks(lanes.cache_tensors(), BLOCK, self._unit)
        return self._rows[lanes]

    def _read(self, places: Sequence[int]) -> Tensor:
        """The blocks at these places, staged on the device [n, units]."""
        for part, blocks in self._memory.pieces(places):
            self._staged[part].copy_(blocks, non_blocking=True)
        return self._staged[: len(places)]

    def _write(self, places: Sequence[int], staged: Tensor) -> None:
        for part, blocks in self._memory.pieces(places):
            blocks.copy_(staged[part], non_blocking=True)

    def _keys(self, tokens: np.ndarray, slots: int, adapter: int) -> Iterator[bytes]:
        """The keys of the whole blocks among the first `slots` slots of a text [n] int32. adapter: its version"""
        last = self._sees_next
        for number in range(max(min(slots, len(tokens) - last), 0) // BLOCK):
            begin = b"" if number else adapter.to_bytes(8)
            yield begin + tokens[number * BLOCK + (last if number else 0) : (number + 1) * BLOCK + last].tobytes()

    def _runs(self, written: list[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
        """(number of the first block, places) for consecutive blocks of a text, `self._most` at most.

        written: the number of each block in its text, ascending, and its place. With most = 2, the blocks 0, 1, 2 and 5
        give runs of 2, 1 and 1 blocks.
        """
        run: list[int] = []
        for index, (number, place) in enumerate(written):
            run.append(place)
            if len(run) == self._most or [n for n, _ in written[index + 1 : index + 2]] != [number + 1]:
                yield number + 1 - len(run), run
                run = []


def unit_of(lanes: Lanes) -> torch.dtype:
    """Integers as which slots are copied in blocks: the largest that the slots of all caches are made of."""
    sizes = [tensor.shape[3] * tensor.itemsize for tensor in lanes.cache_tensors()]
    return {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[gcd(8, *sizes)]
