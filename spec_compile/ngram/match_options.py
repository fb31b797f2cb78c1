"""`MatchOptions`: the options of matching on a device and of growing trees from the matches."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import check_int

MAX_MATCH_LIMIT = 128


@dataclass(frozen=True)
class MatchOptions:
    """How to match and how to grow trees from the matches, as in `NgramTrie` except for `match_limit`.

    branch_length: 2 to 256, most tokens of match and continuation together.
    min_match_window_size, max_match_window_size: 1 <= min <= max < branch_length, lengths of suffix to match.
    min_bfs_breadth, max_bfs_breadth: 1 <= min <= max, continuations of a node.
    match_type: "BFS" (the most recent continuations, longest match first) or "PROB" (the most frequent).
    match_limit: 1 to 128, the matches a tree is grown from.
    """

    branch_length: int = 18
    min_match_window_size: int = 1
    max_match_window_size: int = 12
    min_bfs_breadth: int = 1
    max_bfs_breadth: int = 10
    match_type: str = "BFS"
    match_limit: int = 64

    def __post_init__(self):
        def check(name: str, low: int, high: int) -> None:
            check_int(name, getattr(self, name), low, high)

        check("branch_length", 2, 256)
        check("min_match_window_size", 1, self.branch_length - 1)
        check("max_match_window_size", self.min_match_window_size, self.branch_length - 1)
        check("min_bfs_breadth", 1, 1 << 20)
        check("max_bfs_breadth", self.min_bfs_breadth, 1 << 20)
        check("match_limit", 1, MAX_MATCH_LIMIT)
        if self.match_type not in ("BFS", "PROB"):
            raise ValueError(f'match_type must be "BFS" (recency) or "PROB" (frequency), not {self.match_type!r}')


def empty_outputs(tokens: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Memory for the results of `match.propose`, for the rows of tokens [B, S]."""
    batch = tokens.shape[0]
    tree, summary = tokens.new_empty((batch, num_nodes)), tokens.new_empty((batch,))
    return tree, torch.empty_like(tree), summary, torch.empty_like(summary)
