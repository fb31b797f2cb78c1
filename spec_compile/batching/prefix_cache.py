"""Keys and values of earlier texts for new prompts: those in rows of the batch, and copies that outlive the rows."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from math import gcd
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from ..capture.weights import WeightValues
from ..runtime.round import PREFILL_SIZES, common_end
from ..runtime.runtime import PrefixBudget, Runtime
from .prefix_blocks import Block, BlockMemory, Copies, PrefixTree, RowBlocks, Tier
from .rows import CopySlots, Rows
from .sequence import BatchSequence

if TYPE_CHECKING:
    from .decoding import DecodeRows

Scope = bytes
"""See `BatchSequence.scope`."""
Key = bytes
"""The tokens of a block, in a first block after the scope."""

log = logging.getLogger("spec_compile")

LEAST = 16
"""A beginning of fewer tokens is computed again rather than copied. Other clients' texts begin like a prompt in
multiples of 16 tokens only, and figures are such multiples: whoever guesses a text, and watches what is copied, has to
guess 16 tokens at once."""
BLOCK = 64
"""Tokens of a block."""
TOKENS = np.dtype(np.int32)
"""The dtype of tokens in keys."""
PLACE_BYTES = 1 << 16
"""Bytes of a place for a model without attention, whose blocks of tokens have no contents."""
FEWEST = {"cpu": 1, "cuda": 4}
"""Shortest text worth keeping, and shortest prefix worth copying, in blocks. A GPU processes up to 256 tokens of a
prompt in about the time of one, in which it reads the weights."""
STAGED = 1 << 25
"""Bytes that are on their way between rows and the host of a GPU at most; more if the end of a text has more."""
LEAST_BRANCH = 256
"""Tokens that states at a branch save later prompts at least. One chunk more, which this prompt pays, costs less."""


def whole(tokens: Any) -> Any:
    """As many of some tokens as figures tell: a multiple of `LEAST`."""
    return tokens // LEAST * LEAST  # guard: figures-in-blocks


class RowTexts:
    """A text of up to `capacity` tokens for each of `rows` rows.

    lengths: tokens of each row's text, the last of which has no keys and values yet.
    scopes: see `BatchSequence.scope`.
    has_ended: True for rows whose text is complete, and whose states have seen all of it but the last token.
    """

    def __init__(self, rows: int, capacity: int, has_states: bool = False):
        """has_states: True if rows have states of recurrences, which exist only after the end of a text."""
        self._tokens = np.zeros((rows, capacity), dtype=np.int32)
        self.lengths = np.zeros(rows, dtype=np.int64)
        self._has_states = has_states
        self.scopes = [b""] * rows
        self._clients = [""] * rows
        """The owner of each row's text."""
        self.has_ended = np.zeros(rows, dtype=bool)
        self._counts = np.zeros(rows, dtype=bool)
        """True for rows whose keys and values belong to the text."""
        self.weights = 0
        """Counts how often the weights have changed."""

    def put(
        self, row: int, tokens: list[int] | None, scope: bytes = b"", client: str = "", goes_on: bool = True
    ) -> None:
        """The row has this text from now on; None: one that no prompt begins with.

        goes_on: False if keys and values after it are of no use to others.
        """
        self.scopes[row], self._clients[row] = scope, client
        self.lengths[row], self.has_ended[row], self._counts[row] = 0, False, tokens is not None
        self.extend(row, tokens or [])
        self._counts[row] &= goes_on

    def extend(self, row: int, tokens: list[int]) -> None:
        """The row's text goes on with these tokens."""
        if not self._counts[row]:
            return
        begin = self.lengths[row]
        self._tokens[row, begin : begin + len(tokens)] = tokens
        self.lengths[row] += len(tokens)

    def tokens(self, row: int) -> np.ndarray:
        """A row's text [n] int32; empty if its keys and values do not belong to it."""
        return self._tokens[row, : self.lengths[row]]

    def move(self, row: int, to: int) -> None:
        """A row's text is in another row now, and no longer in this one."""
        length = self.lengths[row]
        self._tokens[to, :length], self.lengths[to] = self._tokens[row, :length], length
        self._counts[to], self.scopes[to] = self._counts[row], self.scopes[row]
        self._clients[to] = self._clients[row]
        self.lengths[row] = 0
        self.has_ended[to] = False

    def forget(self) -> None:
        """The weights have changed: no keys and values count any more, until another text is put into a row."""
        self.lengths[:], self._counts[:] = 0, False
        self.weights += 1

    def longest_prefix(
        self, prompt: list[int], scope: bytes = b"", ahead: int = 0, client: str = ""
    ) -> tuple[int, int]:  # fmt: skip
        """The row of this scope whose text begins with most of the prompt, and with how many of its tokens: 0 if they
        are few.

        ahead: tokens after a slot's own that it may depend on, which must be the same, too, but may be the last ones of
            text and prompt.

        The last token of a text does not count, because it has no keys and values yet. With states a text counts only
        if the prompt begins with all of the rest.
        """
        width = min(len(prompt), int(self.lengths.max()))
        if width < LEAST:
            return 0, 0
        differs = self._tokens[:, :width] != np.asarray(prompt[:width], dtype=np.int32)
        alike = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        alike = np.minimum(np.minimum(alike, self.lengths) - ahead, self.lengths - 1)
        alike = np.where([own == scope for own in self.scopes], alike, 0)
        if not self._has_states:
            alike = np.where([own == client for own in self._clients], alike, whole(alike))
        else:
            alike = np.where(self.has_ended & (alike == self.lengths - 1), alike, 0)
        row = int(alike.argmax())
        return (row, int(alike[row])) if alike[row] >= LEAST else (0, 0)

    @property
    def used(self) -> int:
        return int(self.lengths.sum())


class PrefixStore:
    """Copies of slots of rows, in blocks of BLOCK tokens, under the tokens that they belong to.

    A text is kept when its request leaves its row. A prompt finds the longest chain of blocks that it begins with. Both
    copy bits, the target's and the draft's. Only whole blocks are kept: of a text of 200 tokens, whose last one has no
    keys and values, the first 192.

    Recurrences: a model can go on only from where its states are kept. So each text has an end, with the slots after
    its last whole block and the states: for 200 tokens the slots 192 to 198 and the states after 199 tokens. A prompt
    finds the longest of these texts that it begins with.

    Drafts: a slot may depend on tokens after it (`ahead`: one for a head, one a module for multi-token prediction), so
    a key has that many more. With a head, the first block's key has the tokens 0 to 64, the second one's 65 to 128.

    Scopes: the key of a first block begins with the scope (see `BatchSequence`), so texts of two scopes share no block.

    GPU: all copies run on a separate stream, which orders writes and reads of a place, and the host waits for none.
    Rounds wait for copies to a row. They wait for those out of a row only before they write to it.
    """

    def __init__(self, rows: Rows, budget: PrefixBudget, ahead: int = 0):
        """rows: have the texts that are kept. ahead: tokens after a slot's own that it may depend on."""
        self._device, self._ahead = rows.runtime.device, ahead
        # Blocks of all layers lie packed, in the widest integers that all their parts divide into.
        sizes = [tensor.shape[3] * tensor.itemsize for tensor in rows.cache_tensors()]
        sizes += [state[0].nbytes for state in rows.state_tensors()]
        self._unit = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[gcd(8, *sizes)]
        """Integers as which slots and states are copied: the largest of which all have a whole number."""
        self._parts: WeakKeyDictionary[Rows, tuple[RowBlocks, RowBlocks]] = WeakKeyDictionary()
        slots, states = self._parts_of(rows)
        units = slots.units or PLACE_BYTES // self._unit.itemsize
        self.block_bytes = units * self._unit.itemsize
        self.end_places = 1 + -(-states.units // units) if states.units else 0
        """Places of the end of a text; 0 without recurrences."""

        # Which blocks are kept, and their memory, with a buffer on the device for copies from and to the host.
        self._tree = PrefixTree(budget.device // self.block_bytes, budget.host // self.block_bytes)
        self._keeps = any(self._tree.room.values())
        self._fewest = FEWEST[self._device.type]
        self._most = max(1, STAGED // self.block_bytes, self.end_places)
        self._stream = torch.cuda.Stream(self._device) if rows.runtime.on_gpu else None
        with self._aside():
            room = self._tree.room
            self._memory = BlockMemory(room["device"], room["host"], units, self._unit, self._device)
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
        return self._tree.used[tier] * self.block_bytes

    def forget(self) -> None:
        """The weights have changed: no keys and values count any more."""
        self._tree.clear()

    def match(self, prompt: list[int], scope: Scope = b"") -> tuple[list[Block], int]:
        """The longest chain of blocks from which a prompt can go on, and the number of tokens in all blocks that it
        begins with: with recurrences, these may be more. The prompt's last token does not count, because it is the root
        of the first tree. scope: see `BatchSequence`."""
        self.asked += len(prompt) - 1
        if not self._keeps:
            return [], 0
        slots = len(prompt) - 1
        tokens = np.asarray(prompt[: slots + self._ahead], dtype=TOKENS)
        found = self._tree.match(self._keys(tokens, slots, scope))
        seen = len(found) * BLOCK
        if self.end_places:  # the most blocks after which a text goes on with an end, and that end
            longest = range(len(found), 0, -1)
            ends = ((n, self._tree.end(found[:n], self._key(tokens, n * BLOCK, (n + 1) * BLOCK))) for n in longest)
            found = next(([*found[:n], end] for n, end in ends if end), [])
        return found if self.length(found) >= self._fewest * BLOCK else [], seen

    def length(self, found: list[Block]) -> int:
        return sum(len(block.key) // TOKENS.itemsize if block.is_end else BLOCK for block in found)

    def copy(self, found: list[Block], rows: Rows, row: int) -> None:
        """Copy a chain of blocks to the first slots of a row, and the states after them."""
        slots, states = self._parts_of(rows)
        blocks = [block for block in found if not block.is_end]
        with self._aside():
            self._move([block.places[0] for block in blocks], slots, row, 0, to_row=True)
            for end in found[len(blocks) :]:
                staged = self._read(end.places)
                slots.copy(row, len(blocks), staged[:1], to_row=True)
                states.copy(row, 0, staged[1:].view(1, -1), to_row=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        for block in found:
            self.hits[self._tree.tier(block)] += whole(self.length([block]))

    def keep(self, rows: Rows, row: int, tokens: np.ndarray, slots: int, scope: Scope = b"") -> None:
        """Keep the text of a row, and its states, if it has any.

        tokens: [n] int32.
        slots: how many of them have keys and values; the states come after the same number.
        scope: see `BatchSequence`.
        """
        if not self._keeps or slots < self._fewest * BLOCK:
            return
        end = self._key(tokens, slots // BLOCK * BLOCK, slots) if self.end_places else None
        try:
            copies = self._tree.keep([*self._keys(tokens, slots, scope)], end, self.end_places)
            if any(copies):
                self._make(copies, rows, row, slots // BLOCK)
        except Exception:  # of the machine's memory: some blocks lack their contents, and requests go on
            self.forget()
            log.exception("a text could not be kept for later prompts")

    def _make(self, copies: Copies, rows: Rows, row: int, blocks: int) -> None:
        """Make the copies for a row's text of `blocks` whole blocks."""
        slots, states = self._parts_of(rows)
        with self._aside():
            # Older blocks move to host memory, before others take their places on the device.
            for begin in range(0, len(copies.demoted), self._most):
                sources, targets = zip(*copies.demoted[begin : begin + self._most])
                self._read([*sources])
                self._write([*targets])
            # Blocks that follow each other in the text are copied together: 0, 1, 2 and 5 in two runs.
            for _, run in groupby(enumerate(copies.written), lambda each: each[1][0] - each[0]):
                numbers, places = zip(*(each for _, each in run))
                self._move([*places], slots, row, numbers[0])
            if copies.end:
                slots.copy(row, blocks, self._staged[:1])
                states.copy(row, 0, self._staged[1 : self.end_places].view(1, -1))
                self._write(copies.end)
            if self._stream is not None:
                rows.reads[row] = self._stream.record_event()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On a GPU a context of the copies' stream, after all that is launched for rounds."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def _parts_of(self, rows: Rows) -> tuple[RowBlocks, RowBlocks]:
        """The slots of the caches in blocks, and the states in one block each row."""
        if rows not in self._parts:
            states = [state.view(len(state), 1, 1, -1) for state in rows.state_tensors()]
            slots = RowBlocks(rows.cache_tensors(), BLOCK, self._unit)
            self._parts[rows] = slots, RowBlocks(states, 1, self._unit)
        return self._parts[rows]

    def _move(self, places: list[int], slots: RowBlocks, row: int, first: int, to_row: bool = False) -> None:
        """Copy a row's blocks, from block `first` on, to these places, or from there to the row."""
        for part, packed in self._memory.pieces(places, self._most):
            is_far = packed.device.type != self._device.type
            staged = self._staged[: len(packed)] if is_far else packed
            if is_far and to_row:
                staged.copy_(packed, non_blocking=True)
            slots.copy(row, first + part.start, staged, to_row)
            if is_far and not to_row:
                packed.copy_(staged, non_blocking=True)

    def _read(self, places: Sequence[int]) -> Tensor:
        """Copies [n, units] on the device of the blocks at these places."""
        for part, packed in self._memory.pieces(places, self._most):
            self._staged[part].copy_(packed, non_blocking=True)
        return self._staged[: len(places)]

    def _write(self, places: Sequence[int]) -> None:
        """Copy the first staged blocks to these places."""
        for part, packed in self._memory.pieces(places, self._most):
            packed.copy_(self._staged[part], non_blocking=True)

    def _keys(self, tokens: np.ndarray, slots: int, scope: Scope = b"") -> Iterator[Key]:
        """The keys of the whole blocks among the first `slots` slots of a text [n] int32."""
        for begin in range(0, min(slots, len(tokens) - self._ahead) - BLOCK + 1, BLOCK):
            yield (b"" if begin else scope) + self._key(tokens, begin, begin + BLOCK)  # guard: adapter-kv

    def _key(self, tokens: np.ndarray, begin: int, end: int) -> Key:
        """The key of the slots from `begin` to `end` - 1 of a text [n] int32."""
        return tokens[begin + (self._ahead if begin else 0) : end + self._ahead].tobytes()


class PrefixIndex:
    """Finds what earlier requests have computed of a prompt, as long as the weights have not changed."""

    def __init__(self, runtime: Runtime, decoder: "DecodeRows", weights: WeightValues):
        """decoder: has the rows. weights: tell whether keys and values of earlier requests still hold."""
        self._runtime, self._decoder, self._weights = runtime, decoder, weights
        self.distrusts_weights = False
        """True if somebody may have changed weights in a way that torch does not count, because no round ran."""
        ahead, self._has_states = runtime.algorithm.ahead, bool(runtime.verify.recurrences)
        self._ahead = min(ahead, 1) if self._has_states else ahead  # states come after all tokens but the last
        self.store = PrefixStore(decoder, PrefixBudget.of(runtime), self._ahead)

    def _cut(self, tokens: int) -> int:
        """How many of the first `tokens` tokens of a text serve others: with fixed chunks, whole chunks."""
        runtime = self._runtime
        return common_end(tokens, PREFILL_SIZES[runtime.device.type]) if runtime.has_fixed_chunks else tokens

    def forget(self) -> None:
        """The weights have changed: keys and values of earlier requests are of no use."""
        self._decoder.texts.forget()
        self.store.forget()  # guard: prefixes-of-weights

    def keep(self, row: int) -> None:
        """Keep the text that a request has left in a row, for prompts that come when the row has another one."""
        texts = self._decoder.texts
        if not self._has_states or texts.has_ended[row]:  # or the states are of more tokens
            slots = self._cut(int(texts.lengths[row]) - 1)
            self.store.keep(self._decoder, row, texts.tokens(row), slots, texts.scopes[row])

    def keep_prompt(self, sequence: BatchSequence, rows: Rows, row: int, slots: int) -> None:
        """Keep the first `slots` tokens of a prompt in a row of `rows`, if the row has states, because these are about
        to go on with the answer, or with the rest of the prompt."""
        if self._has_states and not self._runtime.has_fixed_chunks and sequence.weights == self._decoder.texts.weights:
            self.store.keep(rows, row, np.asarray(sequence.prompt, dtype=TOKENS), slots, sequence.scope)

    def find(self, sequence: BatchSequence) -> tuple[int, int, CopySlots, int]:
        """The longest beginning of a prompt that need not be processed.

        Returns the row that has its keys and values, or 0; its tokens; what copies it; and the branch point, after
        which states are to be kept because earlier texts share that much, or 0.
        """
        prompt, scope, texts = sequence.prompt, sequence.scope, self._decoder.texts
        row, known, blocks, seen = 0, 0, list[Block](), 0
        if not (sequence.has_pictures or sequence.scores_prompt):  # or it needs all of its tokens processed
            # The last token is the root of the first tree, but a drafter's slot may depend on it.
            tokens = prompt[: len(prompt) - 1 + self._ahead]
            row, known = texts.longest_prefix(tokens, scope, self._ahead, sequence.request.client)
            blocks, seen = self.store.match(prompt, scope)

        # Nothing counts if the weights have changed since.
        is_sure = self.distrusts_weights and (known > 0 or bool(blocks))
        if self._weights.have_changed(is_sure):
            self.forget()
            row, known, blocks, seen = 0, 0, [], 0
        self.distrusts_weights &= not is_sure

        # Recurrences have states after all tokens but the last, from which nothing steps back.
        most = max(len(prompt) - (1 if self._has_states else self._runtime.algorithm.plan.fresh_tokens), 0)
        known = self._cut(min(known, most))
        copy = self.copy_row(row, known)
        if (kept := self._cut(min(self.store.length(blocks), most))) > known:
            row, known, copy = 0, kept, partial(self.store.copy, blocks)
        has_branch = self._has_states and known + LEAST_BRANCH <= seen < len(prompt) - 1
        return row, known, copy, seen if has_branch else 0

    def copy_row(self, row: int, known: int) -> CopySlots:
        """A function that copies the first slots of a row that decodes, or has decoded, to a row of other rows."""

        def copy(rows: Rows, to: int) -> None:
            if self._decoder.sequences[row] is not None:
                self._decoder.catch_up()
            self._decoder.copy_slots(row, to, known, rows)
            self.store.hits["row"] += whole(known)

        return copy
