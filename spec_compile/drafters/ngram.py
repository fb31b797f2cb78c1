"""The n-gram drafter: what followed the same words before, from the trie."""

import time
import weakref
from itertools import count

import torch
from torch import Tensor

from ..kernels import ops
from ..kernels.ngram_match import MatchOptions
from ..kernels.ngram_match import propose as match
from ..runtime.ngram import NgramTrie
from ..runtime.ngram_corpus import NgramCorpus
from ..runtime.state import State
from . import Drafter

_handles = count()


class NgramDrafter(Drafter):
    """Continues the longest matches of each row's own end, found in prompts, outputs, references and corpora."""

    def __init__(self, trie: NgramTrie, num_draft_tokens: int, batch: int):
        super().__init__()
        self.trie, self.num_draft_tokens = trie, num_draft_tokens
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

    def begin(self, state: State, prompts: list[list[int]], references: list[Tensor]) -> None:
        for reference in references:
            self.trie.add(reference)
        self.open_streams = [self.trie.open() for _ in prompts]
        self.streams.copy_(torch.tensor(self.open_streams))

    def propose(self, state: State) -> None:
        if self.num_draft_tokens == 1:
            return
        trees: tuple[Tensor, ...] = ops.ngram_propose(
            state.tokens, state.lengths + 1, self.streams, self.handle, self.num_draft_tokens
        )
        state.propose(*trees)

    def advance(self, *tensors: Tensor) -> None:
        """What `ops.ngram_propose` runs on the host."""
        begin = time.perf_counter()
        self.trie.advance(*tensors)
        self.seconds += time.perf_counter() - begin

    def end(self, lengths: list[int]) -> None:
        while self.open_streams:
            self.trie.close(self.open_streams.pop())


class MatchingDrafter(Drafter):
    """The same on a GPU: matches each row's own text and the corpus where they lie, inside the captured round."""

    def __init__(self, corpus: NgramCorpus, options: MatchOptions, num_draft_tokens: int):
        super().__init__()
        self.corpus, self.options, self.num_draft_tokens = corpus, options, num_draft_tokens
        self.state: State | None = None

    def begin(self, state: State, prompts: list[list[int]], references: list[Tensor]) -> None:
        for reference in references:
            self.corpus.append(reference)
        self.state = state

    def propose(self, state: State) -> None:
        if self.num_draft_tokens == 1:
            return
        text, length = self.corpus.text, self.corpus.length
        state.propose(*match(state.tokens, state.lengths + 1, text, length, self.num_draft_tokens, self.options))

    def end(self, lengths: list[int]) -> None:
        for row, length in enumerate(lengths):
            self.corpus.append(self.state.tokens[row, : length + 1])


def make_ngram_drafter(store: NgramTrie | NgramCorpus, options, batch: int) -> Drafter:
    """The n-gram drafter for where `store` is."""
    if isinstance(store, NgramTrie):
        return NgramDrafter(store, options.num_draft_tokens, batch)
    windows = {name: value for name, value in options.ngram.items() if name != "capacity"}
    return MatchingDrafter(store, MatchOptions(**windows), options.num_draft_tokens)
