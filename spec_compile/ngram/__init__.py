"""N-gram stores: `trie.NgramTrie` on a CPU and `corpus.NgramCorpus` on a GPU, which read each other's files."""

import os
from typing import Protocol

from torch import Tensor


class NgramStore(Protocol):
    """The methods that both stores have; ``model.speculation.ngram`` is one of them."""

    def add(self, ids) -> None:
        """Hold one document, or a list of documents: each a 1-D tensor, array or list of token ids.

        Raises ValueError or TypeError, before anything is held, if any id is outside the vocabulary or no integer.
        """

    def documents(self, ids, name: str = "ids") -> list[Tensor]:
        """The documents that `add` would hold, checked, each [n] int64 on the CPU. name: of `ids` in messages."""

    def reset(self) -> None:
        """Forget everything."""

    def save(self, path: str | os.PathLike) -> None:
        """Write the texts to a file, all or nothing."""

    def load(self, path: str | os.PathLike) -> None:
        """Hold the texts of a file that either store has saved, and nothing else.

        Raises ValueError, naming the file and the reason, and leaves the store as it was, if the file cannot be read or
        does not fit.
        """

    def stats(self) -> dict[str, int]:
        """Sizes by name, `tokens` and `bytes` among them."""

    def __len__(self) -> int:
        """Nodes of a trie or tokens of a corpus, which count against the capacity."""
