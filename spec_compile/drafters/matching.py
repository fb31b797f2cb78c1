"""The n-gram drafter of a GPU, which matches texts in device memory; that of a CPU is in ngram.py."""

import weakref

import torch
from torch import Tensor

from ..drafting import Drafter
from ..ngram.corpus import END, NgramCorpus
from ..ngram.match import join_documents
from ..ngram.match import propose as match
from ..ngram.match_options import MatchOptions
from ..runtime.state import State


class MatchingDrafter(Drafter):
    """The drafter of a GPU: matches each row's own text, its references and the corpus in device memory, inside the
    captured round. A row whose text has an owner does not read the corpus: the newest of its owner's texts, as far as
    they fit, stand before its references.

    row_references: [B, slots] int32; each row's references, with -1 between them.
    reference_lengths: [B] int64; how many of these count.
    reads_corpus: [B] int64; 1 for rows that draft from the corpus, 0 for others.
    """

    row_references: Tensor
    reference_lengths: Tensor
    reads_corpus: Tensor

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
        self.reads_corpus[row] = not isinstance(share_text, str)  # guard: owners-on-a-gpu
        joined = join_documents(references).to(self.row_references.device)
        if isinstance(share_text, str) and (texts := self.corpus.owned.get(share_text)) is not None:
            room = self.row_references.shape[1] - len(joined)
            joined = torch.cat([texts[max(0, len(texts) - room) :], joined])
        self.row_references[row, : len(joined)] = joined
        self.reference_lengths[row] = len(joined)

    def start(self, state: State, prompts: list[list[int]], references: list[Tensor], share_text: bool = True) -> None:
        self.references = [self.corpus.append(reference) for reference in references]
        self.state, self.share_text = (
            weakref.ref(state),
            share_text,
        )  # not registered as a submodule

    def propose(self, state: State, max_kv_len: int) -> None:
        if self.num_draft_tokens == 1:
            return
        lengths = self.corpus.length * self.reads_corpus
        texts = self.corpus.text, lengths, self.row_references, self.reference_lengths
        state.propose(*match(state.tokens, state.lengths + 1, *texts, self.num_draft_tokens, self.options))

    def leave(self, state: State, row: int, length: int, share_text: bool | str) -> None:
        text = state.tokens[row, : length + 1]
        if not isinstance(share_text, str):
            if share_text:
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
