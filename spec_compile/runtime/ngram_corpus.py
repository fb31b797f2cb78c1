"""The n-gram store of a GPU: texts in device memory, matched where they lie (kernels/ngram_match)."""

import os

import torch
from torch import Tensor

from .ngram import check_documents

END = -1
"""Between documents: no match and no continuation crosses it."""


class NgramCorpus:
    """Prompts, outputs, references and corpora as one text on a device; `NgramTrie`'s counterpart there.

    capacity: most tokens held; when it is full the oldest half leaves. vocab_size: token ids must be below this; None:
    below 2**31. Raises ValueError or TypeError, naming the argument, for what is out of range or not an integer.
    """

    def __init__(self, capacity: int, vocab_size: int | None, device: torch.device):
        self.capacity, self._limit = capacity, 2**31 if vocab_size is None else vocab_size
        self.text = torch.zeros(capacity, dtype=torch.int32, device=device)
        """[capacity] int32, documents that end with -1; graphs read it, so it is never replaced."""
        self.length = torch.zeros(1, dtype=torch.int64, device=device)
        """[1]: how much of it is text."""
        self._held = 0

    def add(self, ids) -> None:
        """Hold a document, a 1-D sequence of token ids, or several: a list of such."""
        for document in self.documents(ids):
            self.append(document)

    def append(self, tokens: Tensor) -> None:
        """Hold one text: token ids [n] that are known to be in range, on any device."""
        tokens = tokens[max(0, tokens.shape[0] - self.capacity // 2 + 1) :]
        count = tokens.shape[0]
        if self._held + count + 1 > self.capacity:
            kept = self.text[self._held - self.capacity // 2 : self._held].clone()
            self.text[: len(kept)] = kept
            self._held = len(kept)
        self.text[self._held : self._held + count] = tokens
        self.text[self._held + count :][:1].fill_(END)
        self._held += count + 1
        self.length.fill_(self._held)

    def documents(self, ids, name: str = "ids") -> list[Tensor]:
        """Check what `add` would hold, without holding it: the documents in `ids`, which messages call `name`."""
        return check_documents(ids, name, self._limit)

    def reset(self) -> None:
        """Forget everything."""
        self._held = 0
        self.length.zero_()

    def save(self, path: str | os.PathLike) -> None:
        """Write what is held to a file."""
        torch.save(self.text[: self._held].cpu(), path)

    def load(self, path: str | os.PathLike) -> None:
        """Hold what `save` wrote, and nothing else; ValueError if the file holds something else or too much."""
        text = torch.load(path, weights_only=True)
        if not isinstance(text, Tensor) or text.dtype != torch.int32 or text.dim() != 1 or len(text) > self.capacity:
            raise ValueError(f"path: expected a corpus of at most {self.capacity} tokens, got {path}")
        if len(text) and not (END <= int(text.min()) and int(text.max()) < self._limit):
            raise ValueError(f"path: {path} holds token ids outside the vocabulary of {self._limit}")
        self.text[: len(text)] = text
        self._held = len(text)
        self.length.fill_(self._held)

    def stats(self) -> dict[str, int]:
        """`tokens` held, `bytes` taken."""
        return {"tokens": self._held, "bytes": self.text.numel() * 4}

    def __len__(self) -> int:
        return self._held

    def __bool__(self) -> bool:
        return True  # an empty corpus is still a corpus
