"""The n-gram trie: drafts from all text that has been read and written so far (the core is C++, in trie.h)."""

from __future__ import annotations

import copy
import os
from typing import NamedTuple

import torch

from .. import extensions, forks
from ..errors import check_int
from ..tree import MAX_NODES
from . import OwnedTexts
from . import file as ngram_file
from .ids import check_documents, check_ids, is_plain

STREAMS = -(2**63), 2**63 - 1
"""The numbers that a stream could have."""


class Draft(NamedTuple):
    """One draft tree of `count` nodes; `tokens` and `parents` are int64 of shape [N] (see `NgramTrie.propose`)."""

    tokens: torch.Tensor
    parents: torch.Tensor
    count: int
    match: int


def _core_class() -> type:
    """The compiled trie, which is imported when the first `NgramTrie` is made; ImportError if it cannot be."""
    try:
        return extensions.load("ngram._ngram_trie").Core
    except ImportError as error:
        raise ImportError(f"the compiled n-gram trie cannot be imported: {error}") from error


class NgramTrie:
    """Every n-gram of the texts seen so far, with how often and how recently each continuation followed.

    Texts are *streams* (`open`, `extend`, `close`: rows being generated) or whole documents (`add`). From every
    token of a text starts one occurrence: the path of the next `branch_length` tokens, its own included. When
    the trie is full the oldest occurrences leave, whatever text they are from. `propose` matches the last
    tokens of a stream against all n-grams held and merges what followed them into one draft tree.

    Args:
        branch_length: longest n-gram held, 2 to 256.
        min_match_window_size, max_match_window_size: how many of a stream's last tokens are matched,
            1 <= min <= max < branch_length.
        min_bfs_breadth, max_bfs_breadth: how many continuations of a node are drafted, 1 <= min <= max.
            "BFS" takes many after short matches and few after long ones; "PROB" considers max everywhere.
        capacity: most nodes (and most tokens) ever held, from 2 * branch_length to 2**31 - 1. Memory is taken
            as it is used.
        match_type: "BFS" (the most recent continuations, longest match first) or "PROB" (the most frequent,
            by their share of the occurrences, each shorter match worth half the one before).
        vocab_size: token ids must be below this; None: below 2**31.

    All methods may be called from several threads at once. Raises ValueError or TypeError that names an argument
    that is out of range or no integer.
    """

    def __init__(
        self,
        *,
        branch_length: int = 18,
        min_match_window_size: int = 1,
        max_match_window_size: int = 12,
        min_bfs_breadth: int = 1,
        max_bfs_breadth: int = 10,
        capacity: int = 10_000_000,
        match_type: str = "BFS",
        vocab_size: int | None = None,
    ):
        check_int("branch_length", branch_length, 2, 256)
        check_int("min_match_window_size", min_match_window_size, 1, branch_length - 1, "below branch_length")
        check_int(
            "max_match_window_size",
            max_match_window_size,
            min_match_window_size,
            branch_length - 1,
            "from min_match_window_size, and below branch_length",
        )
        check_int("min_bfs_breadth", min_bfs_breadth, 1, 1 << 20)
        check_int("max_bfs_breadth", max_bfs_breadth, min_bfs_breadth, 1 << 20, "from min_bfs_breadth")
        check_int("capacity", capacity, 2 * branch_length, 2**31 - 1, "a number of nodes, from 2 * branch_length")
        if vocab_size is not None:
            check_int("vocab_size", vocab_size, 1, 2**31)
        if not isinstance(match_type, str):
            raise TypeError(f'match_type must be the string "BFS" or "PROB", not {type(match_type).__name__}')
        if match_type.upper() not in ("BFS", "PROB"):
            raise ValueError(f'match_type must be "BFS" (recency) or "PROB" (frequency), not {match_type!r}')
        self.branch_length = branch_length
        self.min_match_window_size = min_match_window_size
        self.max_match_window_size = max_match_window_size
        self.min_bfs_breadth = min_bfs_breadth
        self.max_bfs_breadth = max_bfs_breadth
        self.capacity = capacity
        self.match_type = match_type.upper()
        self.vocab_size = vocab_size
        self._limit = vocab_size or 2**31
        self.fork_order = 1
        self.owned = OwnedTexts(capacity)
        self._core = _core_class()(
            branch_length,
            min_match_window_size,
            max_match_window_size,
            min_bfs_breadth,
            max_bfs_breadth,
            capacity,
            self.match_type == "PROB",
            self._limit,
        )
        forks.register(self)

    def empty(self) -> NgramTrie:
        """A trie of the same parameters that holds nothing."""
        return NgramTrie(
            branch_length=self.branch_length,
            min_match_window_size=self.min_match_window_size,
            max_match_window_size=self.max_match_window_size,
            min_bfs_breadth=self.min_bfs_breadth,
            max_bfs_breadth=self.max_bfs_breadth,
            capacity=self.capacity,
            match_type=self.match_type,
            vocab_size=self.vocab_size,
        )

    def overlay(self) -> NgramTrie:
        """An empty trie of the same parameters that also drafts from this one.

        It adds nothing to this one, so the texts that it reads leave with it. Among matches of one length its own come
        first.
        Raises ValueError if this trie is an overlay itself.
        """
        other = copy.copy(self)
        other._core = self._core.overlay()
        other.fork_order = 0  # its calls take the lock of this one after their own
        forks.register(other)
        return other

    def add(self, ids) -> None:
        """Insert one document, or a list of documents: each a 1-D tensor, array or list of token ids.

        Raises ValueError, before anything is inserted, if any id is outside [0, vocab_size).
        """
        for document in self.documents(ids):
            stream = self._core.open()
            self._core.extend(stream, document.numpy())
            self._core.close(stream)

    def open(self) -> int:
        """Start a stream (a text that grows); returns its number, which is never used again."""
        return self._core.open()

    def extend(self, stream: int, ids) -> None:
        """Append a 1-D tensor, array or list of token ids to an open stream. ValueError: as `add`, or not open."""
        check_int("stream", stream, *STREAMS)
        self._core.extend(stream, self._ids(ids, "ids").numpy())

    def close(self, stream: int) -> None:
        """End a stream. Its text stays until it is evicted. ValueError: not open."""
        check_int("stream", stream, *STREAMS)
        self._core.close(stream)

    def length(self, stream: int) -> int:
        """Tokens appended to an open stream so far. ValueError: not open."""
        check_int("stream", stream, *STREAMS)
        return self._core.length(stream)

    def propose(self, stream: int, num_draft_tokens: int) -> Draft:
        """The draft tree after an open stream's last token.

        Returns `Draft(tokens[N], parents[N], count, match)`, N = num_draft_tokens (1 to 64): node 0 is the
        stream's last token with parent -1; parents come before children and siblings differ. Slots from `count`
        on hold token 0 and parent 0 and are no nodes. `match` is the longest match that has a continuation, 0 if
        none. Raises ValueError if the stream is not open or has no tokens.
        """
        check_int("stream", stream, *STREAMS)
        check_int("num_draft_tokens", num_draft_tokens, 1, MAX_NODES)
        tokens = torch.empty(num_draft_tokens, dtype=torch.int64)
        parents = torch.empty_like(tokens)
        count, match = self._core.propose(stream, tokens.numpy(), parents.numpy())
        return Draft(tokens, parents, count, match)

    def advance(self, streams, tokens, committed, out_tokens, out_parents, out_count, out_match) -> None:
        """One round of a batch: append each row's new tokens to its stream, then write its draft tree.

        All arguments are int64 CPU tensors. Row b of `tokens[B, S]` holds the text of stream `streams[b]`, of
        which `committed[b]` tokens are final; those beyond the stream's length are appended. A negative stream
        adds nothing and yields only the root. Writes `out_tokens[B, N]`, `out_parents[B, N]`, `out_count[B]`,
        `out_match[B]` (see `propose`).

        Raises TypeError or ValueError, before anything is inserted, for a wrong dtype, device, layout or shape,
        a stream that is not open, a `committed` below the stream's length or 1 or above S, or a foreign id.
        """
        batch, size = _shape("tokens", tokens, 2)
        _, n = _shape("out_tokens", out_tokens, 2)
        check_int("the width of out_tokens", n, 1, MAX_NODES)
        for name, tensor, shape in (
            ("streams", streams, (batch,)),
            ("committed", committed, (batch,)),
            ("out_tokens", out_tokens, (batch, n)),
            ("out_parents", out_parents, (batch, n)),
            ("out_count", out_count, (batch,)),
            ("out_match", out_match, (batch,)),
        ):
            if _shape(name, tensor, len(shape)) != shape:
                raise ValueError(f"{name} must have shape {list(shape)}, not {list(tensor.shape)}")
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous: pass {name}.contiguous()")
        if batch == 0:
            return
        stride = tokens.stride(0) if batch > 1 else size
        if (size > 1 and tokens.stride(1) != 1) or stride < size:
            raise ValueError("tokens must have contiguous rows that do not overlap: pass tokens.contiguous()")
        arrays = (streams, tokens, committed, out_tokens, out_parents, out_count, out_match)
        self._core.advance(*(array.numpy() for array in arrays))

    def save(self, path: str | os.PathLike) -> None:
        """Write the held texts to a file, all or nothing. Open streams are saved as far as they have come."""
        nodes, tokens, links, order = self._core.snapshot()
        settings = (
            self.branch_length,
            self.min_match_window_size,
            self.max_match_window_size,
            self.min_bfs_breadth,
            self.max_bfs_breadth,
            self.match_type == "PROB",
            self.capacity,
            self.vocab_size or 0,
        )
        ngram_file.write(path, ngram_file.Contents(settings, nodes, tokens, links, order))

    def load(self, path: str | os.PathLike) -> None:
        """Replace what is held by a saved file's texts; open streams end, as with `reset`.

        Afterwards drafts are those of the saved trie (under this trie's own windows, breadths and match type). The
        texts of a saved `NgramCorpus` are added in their order; if they exceed the capacity the oldest leave.
        Raises ValueError, naming the file and the reason, and leaves the trie as it was, if the file is
        truncated, damaged or no trie, if its branch_length differs, if it holds more than this trie's capacity,
        or if it holds ids outside this trie's vocabulary.
        """
        try:
            self._load(ngram_file.read(path))
        except ValueError as error:
            raise ngram_file.refusal(path, "trie", error) from None

    def _load(self, saved: ngram_file.Contents) -> None:
        if saved.branch_length == 0:
            texts = [check_ids(torch.from_numpy(text.copy()), "it", self._limit) for text in saved.texts()]
            self._core.reset()
            self.add(texts)
            return
        if saved.branch_length != self.branch_length:
            raise ValueError(
                f"its branch_length is {saved.branch_length}, this trie's {self.branch_length}: "
                f"make the trie with branch_length={saved.branch_length}"
            )
        most = max(saved.nodes, saved.num_tokens)
        if most > self.capacity:
            raise ValueError(
                f"it holds {saved.nodes} nodes and {saved.num_tokens} tokens, more than this trie's capacity of "
                f"{self.capacity}: make the trie with capacity={most} or more"
            )
        self._core.restore(saved.nodes, saved.tokens, saved.links, saved.order)

    def reset(self) -> None:
        """Forget everything, the texts of all owners included; open streams end."""
        self.owned.clear()
        self._core.reset()

    def stats(self) -> dict[str, int]:
        """`nodes`, `tokens` (held), `occurrences` (held: one per token), `streams` (open), `bytes`, `evicted`."""
        return self._core.stats()

    def before_fork(self) -> None:
        """See `forks`."""
        self._core.hold()

    def after_fork(self, in_child: bool) -> None:
        """See `forks`."""
        self._core.release(in_child)

    def __len__(self) -> int:
        """Number of nodes, the root not counted."""
        return self._core.stats()["nodes"]

    def __bool__(self) -> bool:
        return True  # an empty trie is still a trie

    def __repr__(self) -> str:
        stats = self.stats()
        return (
            f"NgramTrie({stats['nodes']:,} of {self.capacity:,} nodes, {stats['tokens']:,} tokens, "
            f"{stats['streams']} open streams, {stats['bytes'] / 2**20:.1f} MiB; "
            f"branch_length={self.branch_length}, match_type={self.match_type!r}, "
            f"match window {self.min_match_window_size}..{self.max_match_window_size}, "
            f"breadth {self.min_bfs_breadth}..{self.max_bfs_breadth}, vocab_size={self.vocab_size})"
        )

    def documents(self, ids, name: str = "ids") -> list[torch.Tensor]:
        """Check what `add` would insert, without inserting: the documents in `ids`, which messages call `name`."""
        return check_documents(ids, name, self._limit)

    def _ids(self, ids, name: str) -> torch.Tensor:
        return check_ids(ids, name, self._limit)


def _shape(name: str, tensor, dims: int) -> tuple[int, ...]:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be an int64 CPU tensor, not {type(tensor).__name__}")
    if tensor.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, not {str(tensor.dtype).removeprefix('torch.')}: pass {name}.long()")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, not on {tensor.device}: pass {name}.cpu()")
    if not is_plain(tensor):
        raise TypeError(f"{name} must be a plain tensor with memory, not {type(tensor).__name__} ({tensor.layout})")
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimension(s), not shape {list(tensor.shape)}")
    return tuple(tensor.shape)
