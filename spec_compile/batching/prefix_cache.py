"""Keys and values of earlier texts for new prompts: pages of the pool that stay for them, and copies on the host."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ..cache import PAGE
from ..capture.weights import WeightValues
from ..runtime.round import PREFILL_SIZES, common_end
from ..runtime.runtime import PrefixBudget, Runtime
from .pages import Pages, pages_of
from .prefix_blocks import Node, PrefixTree, Tier
from .prefix_copies import PageCopies
from .rows import Rows
from .sequence import BatchSequence

if TYPE_CHECKING:
    from .decoding import DecodeRows

Scope = bytes
"""See `BatchSequence.scope`."""
Key = bytes
"""See `PrefixTree`."""

log = logging.getLogger("spec_compile")

LEAST = 16
"""A beginning of fewer tokens is computed again rather than copied. Other clients' texts begin like a prompt in
multiples of 16 tokens only, and figures are such multiples: whoever guesses a text, and watches what is copied, has to
guess 16 tokens at once."""
TOKENS = np.dtype(np.int32)
"""The dtype of tokens in keys."""
FEWEST = {"cpu": 1, "cuda": 4}
"""Shortest text worth copying to the host and back, and shortest one whose states are worth keeping, in pages. A GPU
processes up to 256 tokens of a prompt in about the time of one, in which it reads the weights."""
LEAST_BRANCH = 256
"""Tokens that states at a branch save later prompts at least. One chunk more, which this prompt pays, costs less."""


def whole(tokens: Any) -> Any:
    """As many of some tokens as figures tell: a multiple of `LEAST`."""
    return tokens // LEAST * LEAST  # guard: figures-in-blocks


@dataclass
class Known:
    """The beginning of a text that need not be processed.

    tokens: its first tokens whose keys and values are known.
    pages: whole pages of them, with one user more each, the caller.
    partial: a page, likewise, whose first tokens % PAGE slots are the last ones, to be copied; None if there are none.
    states: copies the states after these tokens to a row of some rows; None without recurrences.
    branch: tokens after which states are to be kept, because earlier texts share that much; 0 for none.
    hits: the tokens by the place that they were in, "device" or "host", each time in multiples of `LEAST`.
    """

    tokens: int = 0
    pages: list[int] = field(default_factory=list)
    partial: int | None = None
    states: Callable[[Rows, int], None] | None = None
    branch: int = 0
    hits: Counter[str] = field(default_factory=Counter)


class PrefixIndex:
    """Finds what earlier requests have computed of a text, as long as the weights have not changed.

    Whole pages of texts stay in a `PrefixTree`, and so does the last page, of which the slots so far count. A page that
    a row has in use costs nothing. The others take at most `prefix_cache_bytes`; older ones are copied to host memory,
    and copied back to a page when a prompt begins with them.

    Recurrences: a model can go on only from where its states are kept. So each text has an end, with its last page and
    the states: a text of 200 tokens the slots 192 to 198 and the states after 199 tokens. A prompt finds the longest of
    these texts that it begins with.

    Drafts: a slot may depend on tokens after it (`ahead`: one for a head, one a module for multi-token prediction), so
    a key has that many more. With a head, the first page's key has the tokens 0 to 64, the second one's 65 to 128.
    """

    def __init__(self, runtime: Runtime, rows: "DecodeRows", weights: WeightValues, pages: Pages):
        """rows: have the pool that the pages are of. weights: tell whether earlier keys and values still hold."""
        self._runtime, self._weights, self._pages = runtime, weights, pages
        self.distrusts_weights = False
        """True if somebody may have changed weights in a way that torch does not count, because no round ran."""
        self._changes = 0
        """Counts how often the weights have changed."""
        ahead, self._has_states = runtime.algorithm.ahead, bool(runtime.verify.recurrences)
        self._ahead = min(ahead, 1) if self._has_states else ahead  # states come after all tokens but the last
        self._fewest = FEWEST[runtime.device.type] * PAGE
        budget = PrefixBudget.of(runtime)
        self._copies = PageCopies(rows, budget.host)
        self.page_bytes = self._copies.page_bytes
        self._room = None if budget.device is None else budget.device // self.page_bytes
        """Pages that may be kept besides those that rows use."""
        self._tree = PrefixTree(pages, self._copies.places, 1 + self._copies.state_places)
        self.hits: Counter[str] = Counter()
        """Tokens that were known, by the place that they were in; see `Known`."""
        self.asked = 0
        """Tokens of texts for which earlier keys and values were looked for."""

    @property
    def evicted(self) -> int:
        """Places of pages that were dropped because there was no room."""
        return self._tree.evicted

    def bytes(self, tier: Tier) -> int:
        """Bytes of pages and states that only prefixes use."""
        if tier == "host":
            return self._tree.used * self.page_bytes
        return sum(map(self._spare_size, self._tree.near())) * self.page_bytes

    def forget(self) -> None:
        """The weights have changed: keys and values of earlier requests are of no use."""
        self._tree.clear()  # guard: prefixes-of-weights
        self._changes += 1

    # --- finding

    def find(self, sequence: BatchSequence) -> Known:
        """The longest beginning of a text that need not be processed. Its last token is the root of the first tree."""
        text, nodes, tokens, seen = sequence.text, list[Node](), 0, 0
        if not (sequence.has_pictures or sequence.needs_scores):  # or it needs all of its tokens processed
            nodes, tokens, seen = self._match(text, sequence.scope, sequence.request.client)

        # Nothing counts if the weights have changed since.
        is_sure = self.distrusts_weights and tokens > 0
        if self._weights.have_changed(is_sure):
            self.forget()
            nodes, tokens, seen = [], 0, 0
        self.distrusts_weights &= not is_sure
        sequence.weights = self._changes

        known = self._bring(nodes, tokens)
        if self._has_states and known.tokens + LEAST_BRANCH <= seen < len(text) - 1 and self._keeps_states:
            known.branch = seen
        self.trim()
        return known

    def begun(self, sequence: BatchSequence, known: Known) -> None:
        """A sequence that was let in goes on from what is known of its text."""
        self.asked += sequence.length
        self.hits += known.hits

    @property
    def _keeps_states(self) -> bool:
        return not self._runtime.has_fixed_chunks and self._runtime.options.ranks.size == 1

    def _match(self, text: list[int], scope: Scope, client: str) -> tuple[list[Node], int, int]:
        """The kept nodes with which a text can go on, their tokens, and the tokens in all pages that it begins with:
        with recurrences, these may be more."""
        slots = len(text) - 1
        tokens = np.asarray(text[: slots + self._ahead], dtype=TOKENS)
        chain = self._tree.match(scope, self._keys(tokens, slots))
        seen = len(chain) * PAGE
        if self._has_states:
            for count in range(len(chain), -1, -1):
                rest = self._key(tokens, count * PAGE, min((count + 1) * PAGE, slots))
                ends = (node for node in self._tree.after(scope, chain[:count]).values() if node.is_end)
                end = max((e for e in ends if rest.startswith(e.key)), key=lambda e: e.tokens, default=None)
                if end is not None:
                    known = count * PAGE + end.tokens
                    return ([*chain[:count], end], known, seen) if known >= self._fewest else ([], 0, seen)
            return [], 0, seen

        # Some tokens of one more page.
        begin = len(chain) * PAGE
        rest = self._key(tokens, begin, begin + PAGE)
        alike = {node: self._alike(node, rest, begin, client) for node in self._tree.after(scope, chain).values()}
        node = max(alike, key=alike.__getitem__, default=None)
        if node is not None and alike[node]:
            chain, begin = [*chain, node], begin + alike[node]
        known = self._cut(min(begin, max(len(text) - self._runtime.algorithm.plan.fresh_tokens, 0)))
        return (chain[: pages_of(known)], known, seen) if known >= LEAST else ([], 0, seen)

    def _alike(self, node: Node, rest: Key, begin: int, client: str) -> int:
        """The first slots of a node from slot `begin` of its text on that serve a text that goes on with the key
        `rest`."""
        if node.key[: TOKENS.itemsize] != rest[: TOKENS.itemsize]:
            return 0
        own, other = np.frombuffer(node.key, dtype=TOKENS), np.frombuffer(rest, dtype=TOKENS)
        width = min(len(own), len(other))
        differs = own[:width] != other[:width]
        alike = int(differs.argmax()) if differs.any() else width
        alike = max(alike - (0 if begin else self._ahead), 0)
        return alike if node.client == client else whole(alike)

    def _bring(self, nodes: list[Node], tokens: int) -> Known:
        """Share the pages of these nodes, the first `tokens` tokens of a text, with the caller. Nodes that are on the
        host only get pages; if too few are free, less is known."""
        near = {node: node.page for node in nodes if node.page}
        far = {node: None for node in nodes if not node.page and node.tokens}
        self._pages.share(near.values())
        self._tree.renew(nodes)
        states = self._find_states(nodes[-1]) if nodes and self._has_states else None
        if far and tokens >= self._fewest:
            self.evict(len(far))
        room = self._pages.free if tokens >= self._fewest else 0
        fetched = {node: node.places[0] for node in islice(far, room) if node.places}

        # The nodes before the first one that is nowhere, or none if states need all of them.
        there = next((n for n, node in enumerate(nodes) if node in far and node not in fetched), len(nodes))
        if there < len(nodes):
            tokens = 0 if self._has_states else min(tokens, there * PAGE)
            there = 0 if not tokens else there
        self._pages.release(near[node] for node in nodes[there:] if node in near)
        fetched = {node: fetched[node] for node in nodes[:there] if node in fetched}
        try:
            near |= dict(zip(fetched, self._fetch(fetched)))
        except Exception:  # of the machine's memory: nothing is known
            self._pages.release(near[node] for node in nodes[:there] if node in near)
            self.forget()
            log.exception("a text could not be brought back from host memory")
            return Known()

        known = Known(tokens)
        pages = [near[node] for node in nodes[:there] if node.tokens]
        if len(pages) > tokens // PAGE:
            known.partial = pages.pop()
        known.pages = pages
        for number, node in enumerate(nodes[:there]):
            known.hits["host" if node in fetched else "device"] += whole(min(tokens - number * PAGE, PAGE))
        if tokens and states is not None:
            known.states = partial(self._copies.restore, states)
        return known

    def _find_states(self, end: Node) -> Tensor:
        """The states of an end of a text, on the device."""
        if end.states is not None:
            return end.states
        with self._copies.aside():
            return self._copies.load_states(end.places[1:])

    def _fetch(self, places: dict[Node, int]) -> list[int]:
        """Copy nodes from host memory to pages of the pool, which the caller uses, too."""
        if not places:
            return []
        pages = self._pages.take(len(places))
        try:
            with self._copies.aside():
                self._copies.pages(pages, [*places.values()], to_pages=True)
            self._copies.wait()
        except Exception:
            self._pages.release(pages)
            raise
        for node, page in zip(places, pages):
            self._tree.hold(node, page, node.states)
        self._tree.renew([*places])
        return pages

    # --- keeping

    def keep(self, sequence: BatchSequence, tokens: list[int], slots: int, rows: Rows) -> None:
        """Keep the pages of a sequence, and its states, if there are any.

        slots: how many of its `tokens` have keys and values. rows: have its row, and its states after `slots` tokens,
        if it is there or has left as a whole.
        """
        runtime = self._runtime
        if sequence.weights != self._changes or sequence.has_pictures:  # guard: texts-with-pictures
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
            self._keep(sequence, np.asarray(tokens, dtype=TOKENS), slots, rows)
        except Exception:  # of the machine's memory: requests go on
            self.forget()
            log.exception("a text could not be kept for later prompts")

    def _keep(self, sequence: BatchSequence, tokens: np.ndarray, slots: int, rows: Rows) -> None:
        scope, client, chain = sequence.scope, sequence.request.client, list[Node]()
        for number, key in enumerate(self._keys(tokens, slots)):
            if not self._has_states:
                self._drop_beginnings(scope, chain, key)
            node = self._tree.add(scope, chain, key, PAGE, client)
            if not node.page:
                self._tree.hold(node, sequence.pages[number])
        begin = len(chain) * PAGE
        end = min(slots, len(tokens) - self._ahead)
        if self._has_states:
            node = self._tree.add(scope, chain, self._key(tokens, begin, end), end - begin, client)
            if not (node.is_near or node.places):
                page = sequence.pages[begin // PAGE] if node.tokens else 0
                self._tree.hold(node, page, self._copies.states_of(rows, sequence.row))
        elif begin < end < begin + PAGE:
            key = self._key(tokens, begin, end)
            others = self._tree.after(scope, chain).values()
            if not any(other.key.startswith(key) and other.key != key for other in others):
                self._drop_beginnings(scope, chain, key)
                node = self._tree.add(scope, chain, key, end - begin, client)
                if not node.page:
                    self._tree.hold(node, sequence.pages[begin // PAGE])
        self._tree.renew(chain)
        self.trim()

    def _drop_beginnings(self, scope: Scope, chain: list[Node], key: Key) -> None:
        """Drop the ends of texts after a chain with which a page begins."""
        others = [*self._tree.after(scope, chain).values()]
        for other in others:
            if other.is_end and len(other.key) < len(key) and key.startswith(other.key):
                self._tree.drop(other)

    # --- giving up

    def evict(self, count: int) -> None:
        """Give up kept pages that no row uses, the oldest first, until `count` pages are free or none is left."""
        while (missing := count - self._pages.free) > 0:
            spare = [*islice(filter(self._tree.is_spare, self._tree.near()), missing)]
            if not spare:
                return
            self._give_up(spare)

    def trim(self) -> None:
        """Give up the oldest pages and states beyond what `prefix_cache_bytes` allows."""
        if self._room is None:
            return
        near = self._tree.near()
        if len(near) * self._sizes_most <= self._room:
            return
        sizes = {node: size for node in near if (size := self._spare_size(node))}
        beyond, given = sum(sizes.values()) - self._room, list[Node]()
        for node, size in sizes.items():
            if beyond <= 0:
                break
            given.append(node)
            beyond -= size
        self._give_up(given)

    @property
    def _sizes_most(self) -> int:
        return 1 + self._copies.state_places

    def _spare_size(self, node: Node) -> int:
        """Places on the device that a node takes besides those of rows."""
        return self._tree.is_spare(node) + (self._copies.state_places if node.states is not None else 0)

    def _give_up(self, nodes: list[Node]) -> None:
        """Have what no row uses of these nodes on the host only, as far as there is room, and drop the others."""
        new = []
        for node in nodes:
            if node.is_near and not self._pays(node):
                self._tree.evicted += self._tree.drop(node)
            elif node.is_near and self._tree.enter_host(node):  # else it was dropped with one before it
                new.append(node)
        try:
            self._save([node for node in new if node.places])
        except Exception:  # of the machine's memory: some places lack their contents, and requests go on
            self.forget()
            log.exception("texts could not be copied to host memory")
        for node in nodes:
            if not node.places and node.is_near:
                self._tree.evicted += self._tree.drop(node)
            elif self._tree.is_spare(node) or not node.page:
                self._tree.let_go(node)
            else:
                node.states = None

    def _pays(self, node: Node) -> bool:
        """True if a text with this page is long enough to be copied back from the host."""
        tokens, above = node.tokens, node.parent
        while above is not None and above.parent is not None and tokens < self._fewest:
            tokens, above = tokens + above.tokens, above.parent
        return bool(node.children) or tokens >= self._fewest

    def _save(self, nodes: list[Node]) -> None:
        """Copy nodes to their places in host memory."""
        if not nodes:
            return
        pages = [node for node in nodes if node.page]
        with self._copies.aside():
            self._copies.pages([node.page for node in pages], [node.places[0] for node in pages], to_pages=False)
            for node in nodes:
                if node.states is not None:
                    self._copies.save_states(node.states, node.places[1:])
        self._copies.wait()

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
