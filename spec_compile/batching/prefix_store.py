"""`PrefixStore`: keys and values of earlier requests' texts, which outlive the rows in which they were computed."""

import logging
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
from .prefix_tree import Block, Copies, PrefixTree, Tier
from .row_blocks import RowBlocks
from .texts import whole

log = logging.getLogger("spec_compile")

BLOCK = 64
"""Tokens of a block."""
TOKENS = np.dtype(np.int32)
"""The dtype of tokens in keys."""
PLACE_BYTES = 1 << 16
"""Bytes of a place for a model without attention, whose blocks of tokens have no contents."""
FEWEST = {"cpu": 1, "cuda": 4}
"""Blocks of a text that is kept, and of a beginning that is copied, at least. A GPU processes up to 256 tokens of a
prompt in about the time of one, in which it reads the weights."""
STAGED = 1 << 25
"""Bytes that are on their way between rows and the host of a GPU at most, but at least those of an end of a text."""


class PrefixStore:
    """Copies of the slots of rows, in blocks of BLOCK tokens, and the tokens that they belong to.

    A text is kept when its request leaves its row. A prompt finds the longest chain of blocks that it begins with. Both
    copy bits, the target's and the draft's. Only whole blocks are kept: of a text of 200 tokens, whose last one has no
    keys and values, the first 192.

    A model with recurrences can go on only from where its states are kept. So such a text has an end, which has the
    states and the slots after its last whole block: that of a text of 200 tokens has the slots 192 to 198 and the
    states after 199 tokens. A prompt finds the longest of these texts that it begins with.

    The slot of a draft may depend on tokens after it: that of a head on one, that of several modules of multi-token
    prediction on as many as there are modules. The key of a block has so many more tokens. With a head, that of the
    second block has the tokens 65 to 128, and that of the first has 0 to 64.

    On a GPU all copies run on a stream of their own, which orders writes and reads of a place, and the host waits for
    none. Rounds wait for the copies to a row. They do not wait for those out of a row until they are to write to it.

    Keys and values depend on the adapter of the row, and some requests share theirs with few others. So the key of a
    first block begins with the scope (see `Job`), and texts of two scopes share no block.
    """

    def __init__(self, lanes: Lanes, budget: PrefixBudget, ahead: int = 0):
        """lanes: the rows of texts that are kept. ahead: tokens after a slot's own that it may depend on."""
        self._device, self._ahead = lanes.runtime.device, ahead
        self._unit = unit_of(lanes)
        self._parts: WeakKeyDictionary[Lanes, tuple[RowBlocks, RowBlocks]] = WeakKeyDictionary()
        slots, states = self._parts_of(lanes)
        units = slots.units or PLACE_BYTES // self._unit.itemsize
        self.block_bytes = units * self._unit.itemsize
        self.end_places = 1 + -(-states.units // units) if states.units else 0
        """Places of the end of a text; 0 without recurrences."""
        self._tree = PrefixTree(budget.device // self.block_bytes, budget.host // self.block_bytes)
        self._keeps = any(self._tree.room.values())
        self._fewest = FEWEST[self._device.type]
        self._most = max(1, STAGED // self.block_bytes, self.end_places)
        self._stream = torch.cuda.Stream(self._device) if lanes.runtime.on_gpu else None
        with self._aside():
            self._memory = BlockMemory(*self._tree.room.values(), units, self._unit, self._device)
            staged = self._most if self._keeps else 0
            self._staged = torch.empty(staged, units, dtype=self._unit, device=self._device)
        self.hits: Counter[str] = Counter()
        """Tokens of prompts that were copied, each time in multiples of `LEAST`, by the place that they came from:
        "row", "device" or "host"."""
        self.asked = 0
        """Tokens of prompts for which keys and values of earlier texts were looked for."""

    @property
    def evicted(self) -> int:
        """Places of blocks that were dropped because there was no room."""
        return self._tree.evicted

    def bytes(self, tier: Tier) -> int:
        """Bytes of the blocks of a tier."""
        return self._tree.used(tier) * self.block_bytes

    def forget(self) -> None:
        """The weights have changed: no keys and values count any more."""
        self._tree.clear()

    def match(self, prompt: list[int], scope: bytes = b"") -> tuple[list[Block], int]:
        """The longest chain of blocks from which a prompt can go on, and the number of tokens in all blocks that it
        begins with: with recurrences, these may be more. The prompt's last token does not count, because it is the root
        of the first tree. scope: see `Job`."""
        self.asked += len(prompt) - 1
        if not self._keeps:
            return [], 0
        slots = len(prompt) - 1
        tokens = np.asarray(prompt[: slots + self._ahead], dtype=TOKENS)
        found = self._tree.match(self._keys(tokens, slots, scope))
        seen = len(found) * BLOCK
        if self.end_places:
            found = self._until_end(found, tokens)
        return found if self.length(found) >= self._fewest * BLOCK else [], seen

    def length(self, found: list[Block]) -> int:
        """Tokens of a chain of blocks."""
        return sum(len(block.key) // TOKENS.itemsize if block.is_end else BLOCK for block in found)

    def copy(self, found: list[Block], lanes: Lanes, row: int) -> None:
        """Copy a chain of blocks to the first slots of a row, and the states after them."""
        slots, states = self._parts_of(lanes)
        blocks = [block for block in found if not block.is_end]
        with self._aside():
            for part, packed in self._memory.pieces([block.places[0] for block in blocks], self._most):
                slots.unpack(self._fetch(packed), row, part.start)
            for end in found[len(blocks) :]:
                staged = self._read(end.places)
                slots.unpack(staged[:1], row, len(blocks))
                states.unpack(staged[1:].view(1, -1), row, 0)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for block in found:
            self.hits[self._tree.tier(block)] += whole(self.length([block]))

    def keep(self, lanes: Lanes, row: int, tokens: np.ndarray, slots: int, scope: bytes = b"") -> None:
        """Keep the text of a row, and its states, if it has any.

        tokens: [n] int32. slots: of them that have keys and values; the states are those after so many. scope: see
        `Job`.
        """
        if not self._keeps or slots < self._fewest * BLOCK:
            return
        end = self._key(tokens, slots // BLOCK * BLOCK, slots) if self.end_places else None
        try:
            copies = self._tree.keep([*self._keys(tokens, slots, scope)], end, self.end_places)
            if any(copies):
                self._make(copies, lanes, row, slots // BLOCK)
        except Exception:  # of the machine's memory: some blocks lack their contents, and requests go on
            self.forget()
            log.exception("a text could not be kept for later prompts")

    def _make(self, copies: Copies, lanes: Lanes, row: int, blocks: int) -> None:
        """Make the copies for a text of a row that has so many whole blocks."""
        slots, states = self._parts_of(lanes)
        with self._aside():
            for begin in range(0, len(copies.demoted), self._most):
                sources, targets = zip(*copies.demoted[begin : begin + self._most])
                self._read([*sources])
                self._write([*targets])
            for first, places in self._runs(copies.written):
                for part, packed in self._memory.pieces(places, self._most):
                    staged = packed if self._is_near(packed) else self._staged[: len(packed)]
                    slots.pack(row, first + part.start, staged)
                    if staged is not packed:
                        packed.copy_(staged, non_blocking=True)
            if copies.end:
                slots.pack(row, blocks, self._staged[:1])
                states.pack(row, 0, self._staged[1 : self.end_places].view(1, -1))
                self._write(copies.end)
            if self._stream is not None:
                lanes.read_until(row, self._stream.record_event())

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On a GPU a context of the copies' stream, after all that is launched for rounds."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _parts_of(self, lanes: Lanes) -> tuple[RowBlocks, RowBlocks]:
        """The slots of the caches in blocks, and the states in one block each row."""
        if lanes not in self._parts:
            states = [state.view(len(state), 1, 1, -1) for state in lanes.state_tensors()]
            slots = RowBlocks(lanes.cache_tensors(), BLOCK, self._unit)
            self._parts[lanes] = slots, RowBlocks(states, 1, self._unit)
        return self._parts[lanes]

    def _is_near(self, packed: Tensor) -> bool:
        """True if blocks are on the device of the rows."""
        return packed.device.type == self._device.type

    def _fetch(self, packed: Tensor) -> Tensor:
        """Blocks [n, units], on the device."""
        if self._is_near(packed):
            return packed
        return self._staged[: len(packed)].copy_(packed, non_blocking=True)

    def _read(self, places: Sequence[int]) -> Tensor:
        """Copies [n, units] on the device of the blocks at these places."""
        for part, packed in self._memory.pieces(places, self._most):
            self._staged[part].copy_(packed, non_blocking=True)
        return self._staged[: len(places)]

    def _write(self, places: Sequence[int]) -> None:
        """Copy the first staged blocks to these places."""
        for part, packed in self._memory.pieces(places, self._most):
            packed.copy_(self._staged[part], non_blocking=True)

    def _until_end(self, found: list[Block], tokens: np.ndarray) -> list[Block]:
        """The most of the blocks that a text [n] int32 begins with after which it goes on with an end, and that end; []
        if there is none."""
        for count in range(len(found), 0, -1):
            if end := self._tree.end(found[:count], self._key(tokens, count * BLOCK, (count + 1) * BLOCK)):
                return [*found[:count], end]
        return []

    def _keys(self, tokens: np.ndarray, slots: int, scope: bytes = b"") -> Iterator[bytes]:
        """The keys of the whole blocks among the first `slots` slots of a text [n] int32. scope: see `Job`."""
        for begin in range(0, min(slots, len(tokens) - self._ahead) - BLOCK + 1, BLOCK):
            yield (b"" if begin else scope) + self._key(tokens, begin, begin + BLOCK)  # guard: adapter-kv

    def _key(self, tokens: np.ndarray, begin: int, end: int) -> bytes:
        """The key of the slots from `begin` to `end` - 1 of a text [n] int32."""
        return tokens[begin + (self._ahead if begin else 0) : end + self._ahead].tobytes()

    def _runs(self, written: list[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
        """(number of the first block, places) for consecutive blocks of a text.

        written: the number of each block in its text, ascending, and its place. The blocks 0, 1, 2 and 5 give runs of 3
        and 1 blocks.
        """
        run: list[int] = []
        for index, (number, place) in enumerate(written):
            run.append(place)
            if [n for n, _ in written[index + 1 : index + 2]] != [number + 1]:
                yield number + 1 - len(run), run
                run = []


def unit_of(lanes: Lanes) -> torch.dtype:
    """Integers as which slots and states are copied: the largest of which all have a whole number."""
    sizes = [tensor.shape[3] * tensor.itemsize for tensor in lanes.cache_tensors()]
    sizes += [state[0].nbytes for state in lanes.state_tensors()]
    return {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[gcd(8, *sizes)]
