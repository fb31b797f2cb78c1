"""The n-gram store of a GPU: texts in device memory, which `match.propose` reads in place."""

import numpy as np
import torch
from torch import Tensor

from ..errors import check_int
from . import file as ngram_file
from .store import NgramStore

END = -1
"""Between documents: no match and no continuation crosses it."""


class NgramCorpus(NgramStore):
    """Prompts, outputs, references and corpora as one text on a device; `NgramTrie`'s counterpart there.

    capacity: most tokens held; when it is full the oldest half leaves.
    text: [capacity] int32, documents that end with -1. Graphs read it, so it is never replaced.
    length: [1] int64; tokens of `text` that are in use.

    Raises ValueError or TypeError that names an argument that is out of range or no integer.
    """

    _kind = "corpus"

    def __init__(self, capacity: int, vocab_size: int | None, device: torch.device):
        check_int("capacity", capacity, 2, 2**31 - 1, "a number of tokens")
        super().__init__(capacity, vocab_size)
        try:
            self.text = torch.zeros(capacity, dtype=torch.int32, device=device)
        except RuntimeError as error:
            raise ValueError(
                f"capacity: {capacity} tokens take {4 * capacity / 2**30:.1f} GiB, which {device} has not free; "
                "ask for fewer"
            ) from error
        self.length = torch.zeros(1, dtype=torch.int64, device=device)
        self._held = self._left = 0  # tokens in `text`; tokens that have left from its front, ever

    def append(self, tokens: Tensor) -> range:
        """Hold one text: token ids [n], known to be in range, on any device. Returns the argument of `remove`."""
        tokens = tokens[max(0, tokens.shape[0] - self.capacity // 2 + 1) :]
        count = tokens.shape[0]
        if self._held + count + 1 > self.capacity:
            kept = self.text[self._held - self.capacity // 2 : self._held].clone()
            self.text[: len(kept)] = kept
            self._left += self._held - len(kept)
            self._held = len(kept)
        begin = self._left + self._held
        self.text[self._held : self._held + count] = tokens
        self.text[self._held + count :][:1].fill_(END)
        self._held += count + 1
        self.length.fill_(self._held)
        return range(begin, begin + count + 1)

    def remove(self, places: range) -> None:
        """Forget a text that `append` has added. If several are removed, the last comes first."""
        begin, end = (max(0, place - self._left) for place in (places.start, places.stop))
        later = self.text[end : self._held].clone()
        self.text[begin : begin + len(later)] = later
        self._held -= end - begin
        self.length.fill_(self._held)

    def stats(self) -> dict[str, int]:
        """`tokens` held, `bytes` taken."""
        return {"tokens": self._held, "bytes": self.text.numel() * 4}

    def __len__(self) -> int:
        return self._held

    def _add(self, document: Tensor) -> None:
        self.append(document)

    def _reset(self) -> None:
        self._hold(self.text[:0])

    def _contents(self) -> ngram_file.Contents:
        return ngram_file.from_text(self.text[: self._held].cpu().numpy(), END, self.capacity, self._limit)

    def _restore(self, saved: ngram_file.Contents) -> None:
        texts = self._saved_texts(saved)
        size = sum(len(text) + 1 for text in texts)
        if size > self.capacity:
            raise ValueError(
                f"its texts take {size} tokens, this corpus holds {self.capacity}: pass capacity={size} or more"
            )
        ended = [part for text in texts for part in (text.numpy(), np.array([END]))]
        self._hold(torch.from_numpy(np.concatenate(ended)) if ended else self.text[:0])

    def _hold(self, text: Tensor) -> None:
        self.text[: len(text)] = text
        self._left += self._held
        self._held = len(text)
        self.length.fill_(self._held)
