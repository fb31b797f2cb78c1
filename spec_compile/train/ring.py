"""`Ring`: the last texts that were answered, in bounded memory of the host."""

import threading
from collections import deque
from collections.abc import Sequence

import torch

from .data import Batch, Document, collate, cut, sample

HELD_OUT_EVERY = 10
"""One of so many texts is not trained on."""
LENGTH = 512
"""Tokens of a piece at most."""


class Ring:
    """Pieces of texts, the newest with up to `bound` tokens together, of which each takes 5 bytes.

    Nothing of them is written anywhere.
    """

    def __init__(self, bound: int, shortest: int):
        """shortest: tokens of a piece that can be trained on, at least."""
        self.bound, self.shortest = bound, shortest
        self.texts = self.tokens = 0
        """Texts so far, and tokens that are kept now."""
        self._pieces: deque[tuple[Document, bool]] = deque()
        self._lock = threading.Lock()

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Keep a text, of which the answer is to be learned. Returns the pieces that can be trained on.

        Texts 10, 20, ... are held out.
        """
        ids = torch.tensor([*prompt, *answer], dtype=torch.int32)
        pieces = cut([Document(ids, torch.arange(len(ids)) >= len(prompt))], min(LENGTH, self.bound), self.shortest)
        # A piece is a view of the whole text, whose memory would stay.
        pieces = [Document(piece.ids.clone(), piece.supervised.clone()) for piece in pieces]
        with self._lock:
            self.texts += 1
            is_held_out = self.texts % HELD_OUT_EVERY == 0
            for piece in pieces:
                self._pieces.append((piece, is_held_out))
                self.tokens += len(piece.ids)
            while self.tokens > self.bound:
                self.tokens -= len(self._pieces.popleft()[0].ids)
        return 0 if is_held_out else len(pieces)

    def part(self, held_out: bool) -> list[Document]:
        """The pieces that are held out, or all others, from old to new."""
        with self._lock:
            return [piece for piece, is_held_out in self._pieces if is_held_out == held_out]

    def batch(self, size: int, generator: torch.Generator) -> Batch | None:
        """A batch of `size` random pieces to train on, or of all if they are fewer; None if there are none."""
        pieces = self.part(held_out=False)
        picked = torch.randperm(len(pieces), generator=generator)[:size].tolist()
        return collate([pieces[n] for n in picked]) if picked else None

    def held_out(self, size: int, tokens: int) -> list[Batch]:
        """Batches of held-out pieces, with about `tokens` tokens at most."""
        return sample(self.part(held_out=True), size, tokens)
