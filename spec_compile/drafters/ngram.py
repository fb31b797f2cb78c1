"""The n-gram drafters: continuations of the same words in earlier text, from a trie or, on a GPU, a corpus."""

import time
import weakref
from dataclasses import dataclass, fields
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from ..capture.admit import Inventory
from ..config import Options
from ..drafting import Algorithm, Drafter, DraftPlan
from ..errors import check_int
from ..kernels import ops
from ..kernels.together import ahead
from ..kernels.top_logits import MAX_K
from ..ngram import NgramStore
from ..ngram.corpus import END, NgramCorpus
from ..ngram.match import check_memory, compile_kernels, join_documents
from ..ngram.match import propose as match
from ..ngram.store import MatchOptions
from ..ngram.trie import NgramTrie
from ..parallel.ranks import ALONE, Alone
from ..runtime.state import State

_handles = count()
_private_streams = count(1 << 62)


@dataclass(frozen=True)
class NgramOptions(Options):
    """Options of algo="ngram", with the engines' names and meaning.

    branch_length: tokens of a stored path, match and continuation together.
    min_match_window_size, max_match_window_size: lengths of suffix that are matched.
    min_bfs_breadth, max_bfs_breadth: children taken of a node, narrow for long matches and wide for short ones.
    match_type: "BFS" (most recent first) or "PROB" (most frequent first).
    capacity: most nodes that are held, on a GPU tokens.
    recycle: likeliest tokens after each token that are kept and drafted, too (0 to 16).
    share_text: True: later calls may draft from the prompts, answers and references of a call that does not say (see
    `generate`).
    """

    branch_length: int = 18
    min_match_window_size: int = 1
    max_match_window_size: int = 12
    min_bfs_breadth: int = 1
    max_bfs_breadth: int = 10
    match_type: str = "BFS"
    capacity: int = 10_000_000
    recycle: int = 8
    share_text: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("recycle", self.recycle, 0, MAX_K, "candidates of a token")

    @property
    def matching(self) -> MatchOptions:
        """How texts are matched."""
        own = vars(self)
        return MatchOptions(**{field.name: own[field.name] for field in fields(MatchOptions) if field.name in own})


class PrivateText(NamedTuple):
    """Where the text of a row goes on that not all rows draft from.

    trie, stream: that have it. keeper: the trie that has texts of its owner after the row's end; None: there is none.
    """

    trie: NgramTrie
    stream: int
    keeper: NgramTrie | None


class NgramDrafter(Drafter):
    """Continues the longest matches of each row's own end, found in prompts, outputs, references and corpora."""

    def __init__(
        self, trie: NgramTrie, num_draft_tokens: int, batch: int, private: dict[int, PrivateText],
        ranks: Alone = ALONE,
    ):  # fmt: skip
        """private: the rows whose text not all rows draft from while it goes on, by their numbers in `streams`."""
        super().__init__()
        self.private, self.ranks = private, ranks
        self.trie, self.reading, self.num_draft_tokens = trie, trie, num_draft_tokens
        self.open_streams: list[int] = []
        self.register_buffer("streams", torch.zeros(batch, dtype=torch.int64), persistent=False)
        self.register_buffer("handle", torch.tensor([next(_handles)]), persistent=False)
        self.seconds = 0.0
        home = weakref.WeakMethod(self.advance)
        handle = int(self.handle)
        ops.NGRAM_HOMES[handle] = lambda *tensors: home()(*tensors)
        weakref.finalize(self, ops.NGRAM_HOMES.pop, handle)

    def mute(self) -> None:
        self.streams.fill_(-1)

    def row_buffers(self) -> list[Tensor]:
        return [self.streams]

    def enter(self, row: int, share_text: bool | str, references: list[Tensor]) -> None:
        if share_text is True and not references:
            self.streams[row] = self.trie.open()
            return
        # The row's references, and its own text unless others may draft from it, go into a layer over the texts.
        base = self._texts_of(share_text)
        trie = base if isinstance(share_text, str) and not (share_text and references) else base.overlay()
        for reference in references:
            trie.add(reference)
        self.streams[row] = stream = next(_private_streams)
        self.private[stream] = PrivateText(trie, trie.open(), base if share_text else None)

    def _texts_of(self, share_text: bool | str) -> NgramTrie:
        """The trie that a row drafts from, but for its references."""
        if not isinstance(share_text, str):
            return self.trie
        texts = self.trie.owned.get(share_text) or self.trie.empty()  # guard: owners-of-texts
        if share_text:
            self.trie.owned.renew(share_text, texts)
        return texts

    def vacate(self, row: int) -> None:
        self.streams[row] = -1

    def leave(self, state: State, row: int, length: int, share_text: bool | str) -> None:
        # End the row's text, which goes to the texts of all or of its owner.
        stream = int(self.streams[row])
        text = self.private.pop(stream, PrivateText(self.trie, stream, self.trie))
        text.trie.close(text.stream)
        if share_text and text.keeper is not None:
            if text.keeper is not text.trie:  # it had references, which leave now; its text stays
                text.keeper.add(state.tokens[row, : length + 1])
            if isinstance(share_text, str) and self.trie.owned.get(share_text) is text.keeper:
                self.trie.owned.renew(share_text, text.keeper)
        self.vacate(row)

    def start(self, state: State, prompts: list[list[int]], references: list[Tensor], share_text: bool = True) -> None:
        self.reading = self.trie if share_text else self.trie.overlay()
        for reference in references:
            self.reading.add(reference)
        self.open_streams = [self.reading.open() for _ in prompts]
        self.streams.copy_(torch.tensor(self.open_streams))

    def propose(self, state: State, max_kv_len: int) -> None:
        if self.num_draft_tokens == 1:
            return
        trees: tuple[Tensor, ...] = torch.ops.spec_compile.ngram_propose(
            state.tokens, state.lengths + 1, self.streams, self.handle, self.num_draft_tokens
        )
        state.propose(*trees)

    def advance(self, *tensors: Tensor) -> None:
        """Runs on the host in `ops.ngram_propose`. If there are several ranks, the first one's trie decides for all."""
        tick = time.perf_counter()
        if self.ranks.size == 1:
            self._advance(*tensors)
        else:
            trees = tensors[3:]
            numbers = self.ranks.lead(lambda: self._advanced(tensors))
            for tree, part in zip(trees, torch.tensor(numbers).split([tree.numel() for tree in trees])):
                tree.copy_(part.view(tree.shape))
        self.seconds += time.perf_counter() - tick

    def _advance(self, streams: Tensor, *texts_and_trees: Tensor) -> None:
        private = {row: self.private[s] for row, s in enumerate(streams.tolist()) if s in self.private}
        shared = streams.index_fill(0, torch.tensor([*private], dtype=torch.int64), -1) if private else streams
        self.reading.advance(shared, *texts_and_trees)
        for row, text in private.items():
            text.trie.advance(torch.tensor([text.stream]), *(tensor[row : row + 1] for tensor in texts_and_trees))

    def _advanced(self, tensors: tuple[Tensor, ...]) -> list[int]:
        """The trees and their numbers, as the trie proposes them, flattened and joined."""
        self._advance(*tensors)
        return torch.cat([tree.flatten() for tree in tensors[3:]]).tolist()

    def finish(self, lengths: list[int]) -> None:
        while self.open_streams:
            self.reading.close(self.open_streams.pop())
        self.reading = self.trie


class Ngram(Algorithm):
    """N-gram drafts from one `store`, of all that the model has read and written."""

    def __init__(self, store: NgramStore, options: NgramOptions):
        self.store: NgramStore = store
        self.options = options
        self.private: dict[int, PrivateText] = {}
        self.plan = DraftPlan(options.num_draft_tokens, sizes="adaptive" if options.adaptive else "tree")

    @property
    def stored(self) -> int:
        """Tokens of the corpus; 0 for tries, because only the first rank's trie is asked."""
        return len(self.store) if isinstance(self.store, NgramCorpus) else 0

    def drafter(self, batch: int, slots: int) -> Drafter:
        nodes = self.options.num_draft_tokens
        if isinstance(self.store, NgramTrie):
            return NgramDrafter(self.store, nodes, batch, self.private, self.options.ranks)
        return MatchingDrafter(self.store, self.options.matching, nodes, batch, slots)

    def documents(self, reference) -> list[Tensor]:
        return self.store.documents(reference, "reference")


def build(target: Inventory, options: NgramOptions) -> Ngram:
    """The algorithm for the device of `target`."""
    trie = NgramTrie.of(options.matching, options.capacity, target.embedded)
    if target.device.type != "cuda":
        return Ngram(trie, options)
    if options.num_draft_tokens > 1:
        check_memory(options.matching, options.num_draft_tokens, target.device)
        ahead(partial(compile_kernels, options.matching, target.device))
    return Ngram(NgramCorpus(options.capacity, target.embedded, target.device), options)


class MatchingDrafter(Drafter):
    """The drafter of a GPU: matches each row's own text, its references and the corpus in device memory, inside the
    captured round. A row whose text has an owner does not read the corpus: the newest of its owner's texts, as far as
    they fit, stand before its references.

    row_references: [B, slots] int32; each row's references, with -1 between them.
    reference_lengths: [B] int64; how many of these count.
    reads_corpus: [B] int64; 1 for rows that draft from the corpus, 0 for others.
    """

    def __init__(self, corpus: NgramCorpus, options: MatchOptions, num_draft_tokens: int, batch: int, slots: int):
        super().__init__()
        self.corpus, self.options, self.num_draft_tokens = corpus, options, num_draft_tokens
        self.state = lambda: None
        self.share_text, self.references = True, []
        device = corpus.text.device
        references = torch.zeros(batch, slots, dtype=torch.int32, device=device)
        self.register_buffer("row_references", references, persistent=False)
        lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.register_buffer("reference_lengths", lengths, persistent=False)
        self.register_buffer("reads_corpus", torch.ones_like(lengths), persistent=False)

    def resize(self, slots: int) -> None:
        before = self.row_references
        self.row_references = before.new_zeros(len(before), slots)
        self.row_references[:, : before.shape[1]] = before

    def enter(self, row: int, share_text: bool | str, references: list[Tensor]) -> None:
        super().enter(row, share_text, references)
        # The host would wait for a GPU if it assigned these numbers.
        self.reads_corpus[row].fill_(not isinstance(share_text, str))  # guard: owners-on-a-gpu
        joined = join_documents(references).to(self.row_references.device)
        if isinstance(share_text, str) and (texts := self.corpus.owned.get(share_text)) is not None:
            room = self.row_references.shape[1] - len(joined)
            joined = torch.cat([texts[max(0, len(texts) - room) :], joined])
        self.row_references[row, : len(joined)] = joined
        self.reference_lengths[row].fill_(len(joined))

    def start(self, state: State, prompts: list[list[int]], references: list[Tensor], share_text: bool = True) -> None:
        self.references = [self.corpus.append(reference) for reference in references]
        self.state, self.share_text = weakref.ref(state), share_text  # a state would be registered as a submodule

    def propose(self, state: State, max_kv_len: int) -> None:
        if self.num_draft_tokens == 1:
            return
        lengths = self.corpus.length * self.reads_corpus
        texts = self.corpus.text, lengths, self.row_references, self.reference_lengths
        state.propose(*match(state.tokens, state.lengths + 1, *texts, self.num_draft_tokens, self.options))

    def leave(self, state: State, row: int, length: int, share_text: bool | str) -> None:
        text = state.tokens[row, : length + 1]
        if share_text is True:
            self.corpus.append(text)
        elif share_text:
            earlier = self.corpus.owned.get(share_text, self.row_references[row, :0])
            texts = torch.cat([earlier, text.int(), earlier.new_full((1,), END)])
            self.corpus.owned.renew(share_text, texts[max(0, len(texts) - self.row_references.shape[1]) :].clone())

    def finish(self, lengths: list[int]) -> None:
        if not self.share_text:
            while self.references:
                self.corpus.remove(self.references.pop())
            return
        for row, length in enumerate(lengths):
            self.corpus.append(self.state().tokens[row, : length + 1])
