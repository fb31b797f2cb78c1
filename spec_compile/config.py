"""Options: one frozen dataclass, checked before any work starts."""

from collections.abc import Callable
from dataclasses import dataclass, fields

from .errors import did_you_mean
from .runtime.tree import MAX_NODES

ALGORITHMS = {"ngram": "ngram", "lookahead": "ngram"}
"""Names and aliases -> algorithm."""


@dataclass(frozen=True)
class Options:
    """Options of `speculate`; n-gram options carry the engines' names and mean what they mean there.

    num_draft_tokens: nodes verified a round, the root included (1 to 64; 1: plain decoding, nothing is drafted).
    adaptive: choose each round's number of nodes by what it has paid so far; if False every proposed node is
    verified. max_cache_len: tokens a sequence may hold, prompt included (default: what the model was trained for, as
    far as a quarter of the memory goes; on a GPU 8192 at most). compile: run rounds through Inductor (False: eagerly,
    for debugging; same tokens). cuda_graphs: on a GPU, capture each round in one CUDA graph (False: for debugging; same
    tokens). check: compare the captured graphs with the model's own forward before use. merge_linears: see
    `passes.merge_linears`.

    N-gram: branch_length: tokens of a stored path, match and continuation together. min_match_window_size,
    max_match_window_size: lengths of suffix that are matched. min_bfs_breadth, max_bfs_breadth: children taken of a
    node, narrow for long matches and wide for short ones. match_type: "BFS" (most recent first) or "PROB" (most
    frequent first). capacity: nodes held at most.
    """

    num_draft_tokens: int = 16
    adaptive: bool = True
    max_cache_len: int | None = None
    compile: bool = True
    cuda_graphs: bool = True
    check: bool = True
    merge_linears: bool = True
    branch_length: int = 18
    min_match_window_size: int = 1
    max_match_window_size: int = 12
    min_bfs_breadth: int = 1
    max_bfs_breadth: int = 10
    match_type: str = "BFS"
    capacity: int = 10_000_000

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            kind = int if field.name == "max_cache_len" and value is not None else type(field.default)
            if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is int)):
                raise TypeError(f"{field.name}: expected {kind.__name__}, got {type(value).__name__} ({value!r})")
        if not 1 <= self.num_draft_tokens <= MAX_NODES:
            raise ValueError(
                f"num_draft_tokens: expected 1 to {MAX_NODES} (nodes verified a round, the root included), "
                f"got {self.num_draft_tokens}"
            )
        if self.max_cache_len is not None and self.max_cache_len < 2:
            raise ValueError(f"max_cache_len: expected at least 2 tokens, got {self.max_cache_len}")

    @property
    def ngram(self) -> dict:
        """The options that `NgramTrie` takes."""
        names = (
            "branch_length", "min_match_window_size", "max_match_window_size", "min_bfs_breadth", "max_bfs_breadth",
            "match_type", "capacity",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


def parse_algorithm(algo: str) -> str:
    """The algorithm a user named, whatever the case or alias; ValueError if there is none."""
    if not isinstance(algo, str):
        raise TypeError(f"algo: expected a string, got {type(algo).__name__}")
    if algo.lower() not in ALGORITHMS:
        raise ValueError(
            f"algo: expected one of {', '.join(sorted(ALGORITHMS))}, got {algo!r}."
            + did_you_mean(algo.lower(), ALGORITHMS)
        )
    return ALGORITHMS[algo.lower()]


def parse_options(cls: Callable, options: dict):
    """Build the dataclass `cls` from a user's options; TypeError with a did-you-mean for one it does not have."""
    known = [field.name for field in fields(cls)]
    for name in options:
        if name not in known:
            raise TypeError(
                f"unknown option {name!r}.{did_you_mean(str(name), known)} Known options: {', '.join(known)}"
            )
    return cls(**options)
