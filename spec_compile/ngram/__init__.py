"""N-gram stores: `trie.NgramTrie` on a CPU and `corpus.NgramCorpus` on a GPU, which read each other's files."""

import os
from collections import OrderedDict
from collections.abc import Sized
from typing import Any, Protocol

from torch import Tensor

MOST_OWNERS = 256
"""Owners whose texts are kept."""


class OwnedTexts(OrderedDict[str, Any]):
    """The texts of requests that share them with others of the same owner only, by the name of the owner.

    The owners whose requests began or ended last are kept, at most `MOST_OWNERS`, with `capacity` nodes of tries or
    tokens together, and always the last one.
    """

    def __init__(self, capacity: int):
        super().__init__()
        self.capacity = capacity
        self._sizes: dict[str, int] = {}

    def renew(self, owner: str, texts: Sized) -> None:
        """Keep these texts as the owner's, who is the newest one from now on."""
        self[owner], self._sizes[owner] = texts, len(texts)
        self.move_to_end(owner)
        while len(self) > MOST_OWNERS or (len(self) > 1 and sum(self._sizes.values()) > self.capacity):
            self._sizes.pop(self.popitem(last=False)[0], None)

    def clear(self) -> None:
        """Forget the texts of all owners."""
        super().clear()
        self._sizes.clear()


class NgramStore(Protocol):
    """The methods that both stores have; ``model.speculation.ngram`` is one of them. It holds the texts that everybody
    drafts from.

    owned: the texts that only requests of one owner draft from. No file has them.
    """

    owned: OwnedTexts

    def add(self, ids) -> None:
        """Hold one document, or a list of documents: each a 1-D tensor, array or list of token ids.

        Raises ValueError or TypeError, before anything is held, if any id is outside the vocabulary or no integer.
        """

    def documents(self, ids, name: str = "ids") -> list[Tensor]:
        """The documents that `add` would hold, checked, each [n] int64 on the CPU. name: of `ids` in messages."""

    def reset(self) -> None:
        """Forget everything, the texts of all owners included."""

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
