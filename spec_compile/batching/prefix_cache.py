"""Keys and values of earlier texts for new prompts: pages of the pool that stay for them, and copies on the host."""

import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cache import PAGE
from ..capture.weights import WeightValues
from ..errors import log
from ..runtime.round import PREFILL_SIZES, common_end
from ..runtime.runtime import PrefixBudget, Runtime
from .pages import Pages, pages_of
from .prefix_copies import PageCopies
from .rows import Rows
from .sequence import BatchSequence

if TYPE_CHECKING:
    from .decoding import DecodeRows

TIERS = "device", "host"
Key = bytes
"""Tokens of a page, or a scope; see `PrefixCache`."""


LEAST = 16
"""A beginning of fewer tokens is computed again rather than copied. Other clients' texts begin like a prompt in
multiples of 16 tokens only, and figures are such multiples: whoever guesses a text, and watches what is copied, has to
guess 16 tokens at once."""
TOKENS = np.dtype(np.int32)
FEWEST = {"cpu": PAGE, "cuda": 4 * PAGE}
"""Tokens of the shortest text worth fetching from the host, and whose states are worth keeping. A GPU processes 256
tokens of a prompt in about the time of one, in which it reads the weights."""
LEAST_BRANCH = 256
"""Tokens that states at a branch save later prompts at least, for one chunk more of this one."""
COMPARED = 16
"""The newest texts after the same whole pages that are compared with a prompt, token by token."""


def whole(tokens: Any) -> Any:
    """As many of some tokens as figures tell: a multiple of `LEAST`."""
    return tokens // LEAST * LEAST  # guard: figures-in-blocks


@dataclass(eq=False, repr=False, slots=True)
class Block:
    """A kept page of a text, which comes after another block or begins a text.

    parent: the block before it, or the scope of the text that it begins. client: whose text brought it.
    key: its tokens. tokens: how many of its slots count, PAGE or fewer.
    page: its page of the pool; 0 for none. place: where its page lies in host memory, or None.
    states: where its states lie in host memory, if it has any.
    """

    parent: "Key | Block"
    key: Key
    tokens: int
    client: str
    page: int = 0
    place: int | None = None
    states: Sequence[int] = ()


@dataclass
class Known:
    """The beginning of a text that need not be processed.

    blocks: have it. tokens: its first tokens whose keys and values are known.
    seen: tokens of all pages that the text begins with, which may be more: with recurrences it goes on from states.
    partial: the page with the last of `tokens`, whose copy the text has; None if only whole pages are known.
    states: copies the states after `tokens` to a row of some rows; None without recurrences.
    branch: tokens after which states are to be kept, because earlier texts share that much; 0 for none.
    """

    blocks: list[Block] = field(default_factory=list)
    tokens: int = 0
    seen: int = 0
    partial: int | None = None
    states: Callable[[Rows, int], None] | None = None
    branch: int = 0


class PrefixCache:
    """Finds what earlier requests have computed of a text, as long as the weights have not changed.

    Each page of a text is a block, found by its tokens and the block before it, so texts that begin alike share blocks.
    With pages of 2 tokens the texts [1 2 3 4 5] and [1 2 8 9] have the blocks [1 2], [3 4] and [5] after it, and [8 9].
    A key is the tokens themselves, and a text's first block comes after its scope, so different texts never meet. The
    last page of a text is a block, too, of which fewer slots count; a prompt that goes on in it, or leaves a text
    within a page, has a copy of that page.

    Blocks cost nothing: their pages are free for rows, which take the oldest ones last (see `Pages`). On a GPU, a page
    that a later text has begun with is copied to host memory then, as far as there is room, and fetched when it is
    needed again.

    Recurrences: a model can go on only from where its states are kept, in host memory. So each text has an end, with
    its last page and the states: a text of 200 tokens the slots 192 to 198 and the states after 199 tokens. A prompt
    finds the longest of these texts that it begins with.

    Drafts: a slot may depend on tokens after it (`ahead`: one for a head, one a module for multi-token prediction), so
    a key has that many more. With a head, the first page's key has the tokens 0 to 64, the second one's 65 to 128.
    """

    def __init__(self, runtime: Runtime, rows: "DecodeRows", weights: WeightValues, pages: Pages):
        """rows: have the pool that the pages are of. weights: tell whether earlier keys and values still hold."""
        self._runtime, self._rows, self._weights, self._pages = runtime, rows, weights, pages
        self.distrusts_weights = False
        """True if somebody may have changed weights in a way that torch does not count, because no round ran."""
        self._changes = 0
        """Counts how often the weights have changed."""
        ahead, self._has_states = runtime.algorithm.ahead, bool(runtime.verify.recurrences)
        self._ahead = min(ahead, 1) if self._has_states else ahead  # states come after all tokens but the last
        self._keeps_states = self._has_states and not runtime.has_fixed_chunks and runtime.options.ranks.size == 1
        self._fewest = FEWEST[runtime.device.type]
        budget = PrefixBudget.of(runtime)
        self._copies = PageCopies(rows, budget.host)
        self.page_bytes = self._copies.page_bytes
        self._blocks: dict[tuple[Key | Block, Key], Block] = {}
        self._after: dict[Key | Block, dict[Block, None]] = {}
        """The blocks after another one, or at the beginnings of a scope's texts, the newest last."""
        self._far: OrderedDict[Block, None] = OrderedDict()
        """The blocks in host memory, the oldest first."""
        # No circle of references, in which the pool would outlive the batch.
        pages.keeps, pages.lose = budget.device != 0, partial(PrefixCache._lose, weakref.proxy(self))
        self.counts: Counter[str] = Counter()
        """Tokens that were known, of each page in multiples of `LEAST`, by where it was, "device" or "host"; "asked":
        tokens that were looked for; "evicted": blocks that were dropped because there was no room."""

    def bytes(self, tier: str) -> int:
        """Bytes of pages and states that only prefixes use."""
        return (self._pages.spare if tier == "device" else self._copies.memory.used) * self.page_bytes

    def forget(self) -> None:
        """Keys and values of earlier requests are of no use: the weights have changed, say."""
        for block in [*self._blocks.values()]:  # guard: prefixes-of-weights
            self._drop(block)
        self._changes += 1

    # --- finding

    def admit(self, sequence: BatchSequence, count: int) -> Known | None:
        """Give a text its first `count` pages, of which kept ones may be the first; None if too few are free.

        A text has 5 pages: 3 are whole pages of an earlier one, and 10 tokens of the fourth are known. Then two pages
        are new, and the first of these begins with a copy.
        """
        # All of it is processed if its logits are told, or if states after its answer differ from a prompt's.
        text, is_clamped = sequence.keys, self._runtime.verify.clamps_prompts and bool(sequence.tokens)
        known = Known()
        if text is not None and not sequence.needs_scores and not is_clamped:
            known = self._find(text, sequence.scope, sequence.request.client)
        if (own := sequence.request.process) is not None and not own.begins(known.tokens):
            known = Known()

        # Nothing counts if the weights have changed since.
        is_sure = self.distrusts_weights and known.tokens > 0
        if self._weights.have_changed(is_sure):
            self.forget()
            known = Known()
        self.distrusts_weights &= not is_sure
        sequence.weights, seen = self._changes, known.seen

        taken = self._take(sequence, known, count)
        if taken is not None:
            self.counts["asked"] += sequence.length + 1
            if self._keeps_states and taken.tokens + LEAST_BRANCH <= seen < sequence.length:
                taken.branch = seen
        return taken

    def _find(self, text: list[int], scope: Key, client: str) -> Known:
        """The blocks with which a text can go on. Its last token is the root of the first tree."""
        slots = len(text) - 1
        tokens = np.asarray(text[: slots + self._ahead], dtype=TOKENS)
        chain = list[Block]()
        for key in self._keys(tokens, slots):
            block = self._blocks.get((chain[-1] if chain else scope, key))
            if block is None:
                break
            chain.append(block)
        seen = len(chain) * PAGE

        # With states, the last end of a text with which this one begins.
        while self._has_states:
            rest = self._key(tokens, len(chain) * PAGE, min((len(chain) + 1) * PAGE, slots))
            ends = (block for block in self._newest(chain, scope) if block.tokens < PAGE)
            end = max((each for each in ends if rest.startswith(each.key)), key=lambda e: e.tokens, default=None)
            if end is not None:
                return Known([*chain, end], len(chain) * PAGE + end.tokens, seen)
            if not chain:
                return Known(seen=seen)
            chain.pop()

        # Some tokens of one more page.
        rest = self._key(tokens, seen, seen + PAGE)
        alike = {block: self._alike(block, rest, seen, client) for block in self._newest(chain, scope)}
        block = max(alike, key=alike.__getitem__, default=None)
        more = 0 if block is None else alike[block]
        most = max(len(text) - self._runtime.algorithm.plan.fresh_tokens, 0)
        count = self._cut(min(seen + more, most))
        blocks = [*chain, *([block] if block else [])][: pages_of(count)]
        return Known(blocks, count) if count >= LEAST else Known()

    def _newest(self, chain: list[Block], scope: Key) -> Iterator[Block]:
        """The newest blocks after a chain."""
        after = self._after.get(chain[-1] if chain else scope, {})
        return islice(reversed(after), COMPARED)

    def _alike(self, block: Block, rest: Key, begin: int, client: str) -> int:
        """The first slots of a block from slot `begin` of its text on that serve a text that goes on with `rest`."""
        own, other = np.frombuffer(block.key, dtype=TOKENS), np.frombuffer(rest, dtype=TOKENS)
        width = min(len(own), len(other))
        differs = own[:width] != other[:width]
        alike = max((int(differs.argmax()) if differs.any() else width) - (0 if begin else self._ahead), 0)
        return alike if block.client == client else whole(alike)

    def _take(self, sequence: BatchSequence, known: Known, count: int) -> Known | None:
        """Give a sequence `count` pages, the first ones with what is known of it; None if too few are free."""
        pages, blocks, tokens = self._pages, known.blocks, known.tokens
        whole_blocks = blocks[: tokens // PAGE]
        shared = [block.page for block in whole_blocks if block.page]
        last = [blocks[-1].page] if tokens % PAGE and blocks[-1].page else []

        # Known pages have one user more, so that nobody else is given them.
        pages.share([*shared, *last])
        if pages.free < count - len(shared):
            pages.release([*shared, *last])
            if not last:
                return None
            # Without room for a copy, whole pages may serve.
            fewer = Known() if self._has_states else Known(whole_blocks, len(whole_blocks) * PAGE)
            return self._take(sequence, fewer, count)
        new = pages.take(count - len(shared))
        sequence.pages = [*(block.page or new.pop(0) for block in whole_blocks), *new]

        # Contents come from the host or from another page.
        hits = Counter[str]()
        for number, block in enumerate(blocks):
            hits["device" if block.page else "host"] += whole(min(tokens - number * PAGE, PAGE))
        try:
            self._fetch(blocks, sequence.pages, tokens)
            if last:
                self._rows.copy_page(last[0], sequence.pages[tokens // PAGE])
            if blocks and self._has_states:
                known.states = partial(self._copies.restore, self._copies.load_states(blocks[-1].states))
            self._save([block for block in blocks if block.tokens == PAGE and tokens >= self._fewest])
        except Exception:  # of the machine's memory: nothing is known
            log.exception("a text could not be brought back from host memory")
            self.forget()
            pages.release([*sequence.pages, *last])
            sequence.pages, sequence.weights = [], self._changes
            return self._take(sequence, Known(), count)
        pages.release(last)  # what is launched later may write to it
        self.counts += hits
        known.partial = last[0] if last else None
        return known

    def _fetch(self, blocks: list[Block], pages: list[int], tokens: int) -> None:
        """Copy the blocks of a text that only the host has to the text's pages. A block is kept there if the first
        `tokens` tokens fill the page; the text goes on in the other."""
        far = {number: block for number, block in enumerate(blocks) if block.tokens and not block.page}
        if not far:
            return
        with self._copies.aside():
            places = [block.place for block in far.values() if block.place is not None]
            self._copies.pages([pages[number] for number in far], places, to_pages=True)
        self._copies.wait()
        for number, block in far.items():
            self._far.move_to_end(block)
            if number < tokens // PAGE:
                self._hold(block, pages[number])

    # --- keeping

    def keep(self, sequence: BatchSequence, slots: int, rows: Rows) -> None:
        """Keep the pages of a sequence, and its states, if there are any.

        slots: how many of its tokens have keys and values. rows: have its row, and its states after `slots` tokens,
        if it is there or has left as a whole.
        """
        runtime, sequence.kept, text = self._runtime, slots, sequence.keys
        if sequence.weights != self._changes or text is None:
            return
        if runtime.has_fixed_chunks:  # only keys and values from chunks serve others, and no states after them
            slots = 0 if sequence.scores_prompt else self._cut(min(slots, len(sequence.prompt) - 1))
        if self._has_states:
            # With clamped prompts the states of an answer differ from the states of a prompt.
            is_whole = sequence.is_whole and not runtime.verify.clamps_prompts
            is_there = sequence in rows.sequences or is_whole
            if not (self._keeps_states and is_there) or slots < self._fewest:
                return
        try:
            # Whole pages.
            tokens, client = np.asarray(text, dtype=TOKENS), sequence.request.client
            parent: Key | Block = sequence.scope
            begin = 0
            for number, key in enumerate(self._keys(tokens, slots)):
                parent = self._block(parent, key, PAGE, client)
                begin += PAGE
                if not parent.page:
                    self._hold(parent, sequence.pages[number])

            # The last page, of which fewer slots count, and the states after it.
            end = min(slots, len(tokens) - self._ahead)
            if self._has_states or begin < end < begin + PAGE:
                block = self._block(parent, self._key(tokens, begin, end), end - begin, client)
                if not block.page and block.tokens:
                    self._hold(block, sequence.pages[begin // PAGE])
                if self._has_states and not block.states:
                    self._save_end(block, rows, sequence.row)
        except Exception:  # of the machine's memory: requests go on
            self.forget()
            log.exception("a text could not be kept for later prompts")

    def _block(self, parent: Key | Block, key: Key, tokens: int, client: str) -> Block:
        """The block with this key, a new one if there is none. It becomes the newest one after its parent."""
        if (block := self._blocks.get((parent, key))) is None:
            block = self._blocks[parent, key] = Block(parent, key, tokens, client)
        after = self._after.setdefault(parent, {})
        after.pop(block, None)
        after[block] = None
        return block

    def _hold(self, block: Block, page: int) -> None:
        """A block is in this page, which is in use. Without states, ends of texts that it goes on from are dropped."""
        for other in [] if self._has_states else [*self._pages.kept.get(page, [])]:
            if other.parent == block.parent and block.key.startswith(other.key):
                self._drop(other)
        block.page = page
        self._pages.kept.setdefault(page, []).append(block)

    # --- host memory

    def _save(self, blocks: list[Block]) -> None:
        """On a GPU, copy whole pages to host memory that are not there yet, as far as there is room."""
        for block in blocks:
            if block.place is not None:
                self._far.move_to_end(block)
        new = [block for block in blocks if block.place is None and block.page] if self._runtime.on_gpu else []
        places = self._make_room(len(new))
        for block, place in zip(new, places):
            block.place = place
            self._far[block] = None
        if places:
            with self._copies.aside():
                self._copies.pages([block.page for block in new[: len(places)]], places, to_pages=False)

    def _save_end(self, block: Block, rows: Rows, row: int) -> None:
        """Copy the states of a row to host memory, as those after a block; without room it is dropped."""
        places = self._make_room(self._copies.state_places)
        if len(places) < self._copies.state_places:
            self._copies.memory.give(places)
            return self._drop(block)
        block.states = places
        self._far[block] = None
        self._copies.save_states(rows, row, places)

    def _make_room(self, count: int) -> list[int]:
        """Up to `count` places in host memory, for which the oldest blocks leave it."""
        memory = self._copies.memory
        while memory.free < min(count, memory.ready):
            block = next(iter(self._far))
            self._leave_host(block)
            if not block.page or (self._has_states and block.tokens < PAGE):
                self._drop(block)
                self.counts["evicted"] += 1
        return memory.take(min(count, memory.free))

    def _leave_host(self, block: Block) -> None:
        if block in self._far:
            del self._far[block]
            self._copies.memory.give([*([] if block.place is None else [block.place]), *block.states])
            block.place, block.states = None, ()

    # --- giving up

    def _lose(self, blocks: Sequence[Block]) -> None:
        """The pages of these blocks are about to be written. Blocks that are nowhere else are dropped."""
        self._copies.wait()  # for copies of them
        for block in blocks:
            block.page = 0
            if block.place is None:
                self._drop(block)
                self.counts["evicted"] += 1

    def _drop(self, block: Block) -> None:
        """Drop a block. The blocks after it are found no more; they are dropped when their pages are lost."""
        self._leave_host(block)
        self._blocks.pop((block.parent, block.key), None)
        after = self._after.get(block.parent, {})
        after.pop(block, None)
        if not after:
            self._after.pop(block.parent, None)
        if block.page:
            self._pages.drop(block.page, block)
            block.page = 0

    # --- keys

    def _cut(self, tokens: int) -> int:
        """How many of the first `tokens` tokens of a text serve others: with fixed chunks, whole chunks."""
        runtime = self._runtime
        return common_end(tokens, PREFILL_SIZES[runtime.device.type]) if runtime.has_fixed_chunks else tokens

    def _keys(self, tokens: np.ndarray, slots: int) -> Iterator[Key]:
        """The keys of the whole pages among the first `slots` slots of a text [n] int32."""
        for begin in range(0, min(slots, len(tokens) - self._ahead) - PAGE + 1, PAGE):
            yield self._key(tokens, begin, begin + PAGE)

    def _key(self, tokens: np.ndarray, begin: int, end: int) -> Key:
        """The key of the slots from `begin` to `end` - 1 of a text [n] int32."""
        return tokens[begin + (self._ahead if begin else 0) : end + self._ahead].tobytes()
