"""The n-gram store of a GPU: texts in device memory, which `match.propose` reads in place."""

import os

import numpy as np
import torch
from torch import Tensor

from ..errors import check_int
from . import OwnedTexts
from . import file as ngram_file
from .ids import check_documents

END = -1
"""Between documents: no match and no continuation crosses it."""


class NgramCorpus:
    """Prompts, outputs, references and corpora as one text on a device; `NgramTrie`'s counterpart there.

    capacity: most tokens held; when it is full the oldest half leaves.
    vocab_size: token ids must be below this; None: below 2**31.

    Raises ValueError or TypeError that names an argument that is out of range or no integer.
    """

    def __init__(self, capacity: int, vocab_size: int | None, device: torch.device):
        check_int("capacity", capacity, 2, 2**31 - 1, "a number of tokens")
        self.capacity, self._limit = capacity, 2**31 if vocab_size is None else vocab_size
        self.owned = OwnedTexts(capacity)
        try:
            self.text = torch.zeros(capacity, dtype=torch.int32, device=device)
        except RuntimeError as error:
            raise ValueError(
                f"capacity: {capacity} tokens take {4 * capacity / 2**30:.1f} GiB, which {device} has not free; "
                "ask for fewer"
            ) from error
        """[capacity] int32, documents that end with -1; graphs read it, so it is never replaced."""
        self.length = torch.zeros(1, dtype=torch.int64, device=device)
        """[1]: tokens of `text` that are in use."""
        self._held = self._left = 0  # tokens in `text`; tokens that have left from its front, ever

    def add(self, ids) -> None:
        """Hold a document, a 1-D sequence of token ids, or several: a list of such."""
        for document in self.documents(ids):
            self.append(document)

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

    def documents(self, ids, name: str = "ids") -> list[Tensor]:
        """Check what `add` would hold, without holding it: the documents in `ids`, which messages call `name`."""
        return check_documents(ids, name, self._limit)

    def reset(self) -> None:
        """Forget everything, the texts of all owners included."""
        self.owned.clear()
        self._hold(self.text[:0])

    def save(self, path: str | os.PathLike) -> None:
        """Write what is held to a file, all or nothing; `NgramTrie.load` reads it, too."""
        text = self.text[: self._held].cpu().numpy()
        ngram_file.write(path, ngram_file.from_text(text, END, self.capacity, self._limit))

    def load(self, path: str | os.PathLike) -> None:
        """Hold the texts of a file, which a corpus or an `NgramTrie` has saved, and nothing else.

        Raises ValueError, naming the file and the reason, and leaves the corpus as it was, if the file is truncated,
        damaged or none of these, or holds more than this corpus' capacity or ids outside its vocabulary.
        """
        try:
            texts = ngram_file.read(path).texts()
            check_documents([torch.from_numpy(text.copy()) for text in texts], "it", self._limit)
            size = sum(len(text) + 1 for text in texts)
            if size > self.capacity:
                raise ValueError(
                    f"its texts take {size} tokens, this corpus holds {self.capacity}: pass capacity={size} or more"
                )
        except ValueError as error:
            raise ngram_file.refusal(path, "corpus", error) from None
        ended = [part for text in texts for part in (text, np.array([END], np.int32))]
        self._hold(torch.from_numpy(np.concatenate(ended)) if ended else self.text[:0])

    def _hold(self, text: Tensor) -> None:
        self.text[: len(text)] = text
        self._left += self._held
        self._held = len(text)
        self.length.fill_(self._held)

    def stats(self) -> dict[str, int]:
        """`tokens` held, `bytes` taken."""
        return {"tokens": self._held, "bytes": self.text.numel() * 4}

    def __len__(self) -> int:
        return self._held

    def __bool__(self) -> bool:
        return True  # an empty corpus is still a corpus
