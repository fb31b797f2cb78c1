"""The n-gram trie: drafts from all text that has been read and written so far (the core is C++, in trie.h)."""

import copy
from typing import NamedTuple

import torch
from torch import Tensor

from .. import extensions, forks
from ..errors import check_int
from ..tree import MAX_NODES
from . import file as ngram_file
from .store import MatchOptions, NgramStore, check_ids, is_plain

STREAMS = -(2**63), 2**63 - 1
"""The numbers that a stream could have."""


class Draft(NamedTuple):
    """One draft tree of `count` nodes; `tokens` and `parents` are int64 of shape [N] (see `NgramTrie.propose`)."""

    tokens: Tensor
    parents: Tensor
    count: int
    match: int


class NgramTrie(NgramStore):
    """Every n-gram of the texts seen so far, with how often and how recently each continuation followed.

    Texts are *streams* (`open`, `extend`, `close`: rows being generated) or whole documents (`add`). From every
    token of a text starts one occurrence: the path of the next `branch_length` tokens, its own included. When
    the trie is full the oldest occurrences leave, whatever text they are from. `propose` matches the last
    tokens of a stream against all n-grams held and merges what followed them into one draft tree.

    Args:
        branch_length to max_bfs_breadth: see `MatchOptions`. "BFS" takes many continuations after short matches and
            few after long ones; "PROB" considers max everywhere.
        capacity: most nodes (and most tokens) ever held, from 2 * branch_length to 2**31 - 1. Memory is taken
            as it is used.
        match_type: "BFS" (the most recent continuations, longest match first) or "PROB" (the most frequent,
            by their share of the occurrences, each shorter match worth half the one before).
        vocab_size: token ids must be below this; None: below 2**31.

    All methods may be called from several threads at once. Raises ValueError or TypeError that names an argument
    that is out of range or no integer.
    """

    _kind = "trie"

    def __init__(
        self, *, branch_length: int = 18, min_match_window_size: int = 1, max_match_window_size: int = 12,
        min_bfs_breadth: int = 1, max_bfs_breadth: int = 10, capacity: int = 10_000_000, match_type: str = "BFS",
        vocab_size: int | None = None,
    ):  # fmt: skip
        self.options = MatchOptions(
            branch_length, min_match_window_size, max_match_window_size, min_bfs_breadth, max_bfs_breadth,
            match_type.upper() if isinstance(match_type, str) else match_type,
        )  # fmt: skip
        check_int("capacity", capacity, 2 * branch_length, 2**31 - 1, "a number of nodes, from 2 * branch_length")
        if vocab_size is not None:
            check_int("vocab_size", vocab_size, 1, 2**31)
        super().__init__(capacity, vocab_size)
        self.fork_order = 1
        *sizes, by_frequency = self.options.numbers
        try:  # the compiled trie is imported when the first one is made
            core = extensions.load("ngram._ngram_trie").Core
        except ImportError as error:
            raise ImportError(f"the compiled n-gram trie cannot be imported: {error}") from error
        self._core = core(*sizes, capacity, bool(by_frequency), self._limit)
        forks.register(self)

    @classmethod
    def of(cls, options: MatchOptions, capacity: int, vocab_size: int | None) -> "NgramTrie":
        """A trie with these options."""
        taken = {name: value for name, value in vars(options).items() if name != "match_limit"}
        return cls(**taken, capacity=capacity, vocab_size=vocab_size)

    def empty(self) -> "NgramTrie":
        """A trie of the same parameters that holds nothing."""
        return NgramTrie.of(self.options, self.capacity, self.vocab_size)

    def overlay(self) -> "NgramTrie":
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

    def open(self) -> int:
        """Start a stream (a text that grows); returns its number, which is never used again."""
        return self._core.open()

    def extend(self, stream: int, ids) -> None:
        """Append a 1-D tensor, array or list of token ids to an open stream. ValueError: as `add`, or not open."""
        check_int("stream", stream, *STREAMS)
        self._core.extend(stream, check_ids(ids, "ids", self._limit).numpy())

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
        arrays = dict(
            streams=streams, tokens=tokens, committed=committed, out_tokens=out_tokens, out_parents=out_parents,
            out_count=out_count, out_match=out_match,
        )  # fmt: skip
        for name, tensor in arrays.items():
            _check_memory(name, tensor)
        if streams.numel():
            self._core.advance(*(tensor.numpy() for tensor in arrays.values()))

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

    def __repr__(self) -> str:
        stats = self.stats()
        branch_length, *windows_and_breadths, _ = self.options.numbers
        window, breadth = ("{}..{}".format(*windows_and_breadths[at : at + 2]) for at in (0, 2))
        return (
            f"NgramTrie({stats['nodes']:,} of {self.capacity:,} nodes, {stats['tokens']:,} tokens, "
            f"{stats['streams']} open streams, {stats['bytes'] / 2**20:.1f} MiB; branch_length={branch_length}, "
            f"match_type={self.options.match_type!r}, match window {window}, breadth {breadth}, "
            f"vocab_size={self.vocab_size})"
        )

    def _add(self, document: Tensor) -> None:
        stream = self._core.open()
        self._core.extend(stream, document.numpy())
        self._core.close(stream)

    def _reset(self) -> None:
        self._core.reset()

    def _contents(self) -> ngram_file.Contents:
        nodes, tokens, links, order = self._core.snapshot()
        settings = *self.options.numbers, self.capacity, self.vocab_size or 0
        return ngram_file.Contents(settings, nodes, tokens, links, order)

    def _restore(self, saved: ngram_file.Contents) -> None:
        length = self.options.branch_length
        if saved.branch_length == 0:  # a corpus
            texts = self._saved_texts(saved)
            self._core.reset()
            for text in texts:
                self._add(text)
            return
        if saved.branch_length != length:
            raise ValueError(
                f"its branch_length is {saved.branch_length}, this trie's {length}: "
                f"make the trie with branch_length={saved.branch_length}"
            )
        most = max(saved.nodes, saved.num_tokens)
        if most > self.capacity:
            raise ValueError(
                f"it holds {saved.nodes} nodes and {saved.num_tokens} tokens, more than this trie's capacity of "
                f"{self.capacity}: make the trie with capacity={most} or more"
            )
        self._core.restore(saved.nodes, saved.tokens, saved.links, saved.order)


def _check_memory(name: str, tensor) -> None:
    """TypeError or ValueError unless a tensor's numbers are int64 in this machine's memory. The core checks shapes."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be an int64 CPU tensor, not {type(tensor).__name__}")
    if tensor.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, not {str(tensor.dtype).removeprefix('torch.')}: pass {name}.long()")
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} must be on the CPU, not on {tensor.device}: pass {name}.cpu()")
    if not is_plain(tensor):
        raise TypeError(f"{name} must be a plain tensor with memory, not {type(tensor).__name__} ({tensor.layout})")
