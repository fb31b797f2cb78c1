"""`NgramStore`, `MatchOptions`: common to n-grams on a CPU and on a GPU, like the checks of the ids that they hold."""

import os
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import check_int
from . import file as ngram_file

MAX_MATCH_LIMIT = 128
MOST_BREADTH = 1 << 20
MOST_OWNERS = 256
"""Owners whose texts are kept."""
_INTEGERS = frozenset(
    getattr(torch, name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
)


@dataclass(frozen=True)
class MatchOptions:
    """How to match and how to grow trees from the matches.

    branch_length: 2 to 256, most tokens of match and continuation together.
    min_match_window_size, max_match_window_size: 1 <= min <= max < branch_length, lengths of suffix to match.
    min_bfs_breadth, max_bfs_breadth: 1 <= min <= max, continuations of a node.
    match_type: "BFS" (the most recent continuations, longest match first) or "PROB" (the most frequent).
    match_limit: 1 to 128, the matches that a tree is grown from on a GPU. A trie grows it from all.
    """

    branch_length: int = 18
    min_match_window_size: int = 1
    max_match_window_size: int = 12
    min_bfs_breadth: int = 1
    max_bfs_breadth: int = 10
    match_type: str = "BFS"
    match_limit: int = 64

    def __post_init__(self):
        def check(name: str, low: int, high: int, meaning: str = "") -> None:
            check_int(name, getattr(self, name), low, high, meaning)

        longest, above = self.branch_length, "from min_match_window_size, and below branch_length"
        check("branch_length", 2, 256)
        check("min_match_window_size", 1, longest - 1, "below branch_length")
        check("max_match_window_size", self.min_match_window_size, longest - 1, above)
        check("min_bfs_breadth", 1, MOST_BREADTH)
        check("max_bfs_breadth", self.min_bfs_breadth, MOST_BREADTH, "from min_bfs_breadth")
        check("match_limit", 1, MAX_MATCH_LIMIT)
        if not isinstance(self.match_type, str):
            raise TypeError(f'match_type must be the string "BFS" or "PROB", not {type(self.match_type).__name__}')
        if self.match_type not in ("BFS", "PROB"):
            raise ValueError(f'match_type must be "BFS" (recency) or "PROB" (frequency), not {self.match_type!r}')

    @property
    def numbers(self) -> tuple[int, int, int, int, int, int]:
        """Branch length, windows, breadths, and 1 if the most frequent continuations are taken."""
        return (
            self.branch_length, self.min_match_window_size, self.max_match_window_size, self.min_bfs_breadth,
            self.max_bfs_breadth, int(self.match_type == "PROB"),
        )  # fmt: skip

    @classmethod
    def of(cls, numbers: list[int]) -> "MatchOptions":
        """The options with these `numbers`, after which comes the `match_limit`."""
        *sizes, by_frequency, limit = numbers
        return cls(*sizes, "PROB" if by_frequency else "BFS", limit)


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


class NgramStore(ABC):
    """The texts that everybody drafts from; ``model.speculation.ngram`` is a store.

    capacity: most nodes of a trie, or tokens of a corpus.
    vocab_size: token ids are below this; None: below 2**31.
    owned: the texts that only requests of one owner draft from. No file has them.
    """

    on_reset: Callable[[], None] = staticmethod(lambda: None)
    """Called when everything is forgotten."""

    _kind: str
    """The store's name in messages."""

    def __init__(self, capacity: int, vocab_size: int | None):
        self.capacity, self.vocab_size = capacity, vocab_size
        self._limit = 2**31 if vocab_size is None else vocab_size
        self.owned = OwnedTexts(capacity)

    def add(self, ids) -> None:
        """Hold one document, or a list of documents: each a 1-D tensor, array or list of token ids.

        Raises ValueError or TypeError, before anything is held, if any id is outside the vocabulary or no integer.
        """
        for document in self.documents(ids):
            self._add(document)

    def documents(self, ids, name: str = "ids") -> list[Tensor]:
        """The documents that `add` would hold, checked, each [n] int64 on the CPU. name: of `ids` in messages."""
        if isinstance(ids, (list, tuple)) and any(_is_sequence(item) for item in ids):
            return [check_ids(item, f"{name}[{i}]", self._limit) for i, item in enumerate(ids)]
        return [check_ids(ids, name, self._limit)]

    def reset(self) -> None:
        """Forget everything, the texts of all owners included; open streams of a trie end."""
        self.owned.clear()
        self._reset()
        self.on_reset()

    def save(self, path: str | os.PathLike) -> None:
        """Write the texts to a file, all or nothing. Open streams of a trie are saved as far as they have come."""
        ngram_file.write(path, self._contents())

    def load(self, path: str | os.PathLike) -> None:
        """Hold the texts of a file that either store has saved, and nothing else; open streams of a trie end.

        Afterwards a trie drafts what the saved one drafted, under its own windows, breadths and match type. The texts
        of a corpus are added to a trie in their order; if they exceed the capacity the oldest leave.

        Raises ValueError, naming the file and the reason, and leaves the store as it was, if the file is truncated,
        damaged or of another kind, if its branch_length differs, if it holds more than this store's capacity, or if it
        holds ids outside the vocabulary.
        """
        try:
            self._restore(ngram_file.read(path))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: cannot load this n-gram {self._kind}: {error}") from None

    def _saved_texts(self, saved: ngram_file.Contents) -> list[Tensor]:
        """The texts of a file, each [n] int64; ValueError if they do not fit the vocabulary."""
        return [check_ids(torch.from_numpy(text.copy()), "it", self._limit) for text in saved.texts()]

    @abstractmethod
    def stats(self) -> dict[str, int]:
        """Sizes by name, `tokens` and `bytes` among them."""

    @abstractmethod
    def __len__(self) -> int:
        """Nodes of a trie or tokens of a corpus, which count against the capacity."""

    def __bool__(self) -> bool:
        return True  # an empty store is still a store

    @abstractmethod
    def _add(self, document: Tensor) -> None:
        """Hold a text [n] int64 that was checked."""

    @abstractmethod
    def _reset(self) -> None: ...

    @abstractmethod
    def _contents(self) -> ngram_file.Contents: ...

    @abstractmethod
    def _restore(self, saved: ngram_file.Contents) -> None: ...


def check_ids(ids, name: str, limit: int) -> Tensor:
    """`ids` as a contiguous int64 CPU tensor of ids in range; it stays alive while its pointer is used."""
    tensor = ids
    if not isinstance(tensor, Tensor):
        if isinstance(ids, (str, bytes)) or not _is_sequence(ids):
            raise TypeError(
                f"{name} must be a 1-D tensor, array or list of token ids, not {type(ids).__name__}: "
                "tokenize text first"
            )
        try:
            tensor = torch.tensor(ids) if len(ids) else torch.empty(0, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TypeError(f"{name} must be a 1-D tensor, array or list of token ids: {error}") from None
    if not is_plain(tensor) or tensor.is_meta:
        raise TypeError(f"{name} must be a plain tensor with memory, not {type(tensor).__name__} ({tensor.layout})")
    if tensor.dim() != 1:
        raise ValueError(
            f"{name} must be 1-D, not of shape {list(tensor.shape)}: pass a list of its rows without padding"
        )
    if tensor.dtype not in _INTEGERS:
        raise TypeError(f"{name} must hold integer token ids, not {str(tensor.dtype).removeprefix('torch.')}")
    tensor = tensor.detach().to("cpu", torch.int64).contiguous()
    if tensor.numel():
        low, high = (int(bound) for bound in tensor.aminmax())
        if low < 0 or high >= limit:
            bad = low if low < 0 else high
            raise ValueError(
                f"{name} holds token id {bad}, outside the vocabulary [0, {limit}): was it tokenized for another model?"
            )
    return tensor


def is_plain(tensor: Tensor) -> bool:
    """True if a tensor's numbers lie in memory as its strides say: it is not sparse, nested, fake or a wrapper."""
    is_own = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return is_own and tensor.layout == torch.strided and not tensor.is_nested


def _is_sequence(value) -> bool:
    if isinstance(value, Tensor):
        return value.dim() > 0
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and getattr(value, "shape", None) != ()
