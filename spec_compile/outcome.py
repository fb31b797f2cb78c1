"""`Outcome`: the message of a round to the host, packed into one tensor of integers so that one copy brings it."""

from typing import NamedTuple

import torch
from torch import Tensor

from .tree import MAX_NODES

HEADER = 5
PER_NODE = 4
WIDEST = HEADER + PER_NODE * MAX_NODES
"""Most numbers of a row's outcome."""


class Outcome(NamedTuple):
    """One row's part in a round over N nodes.

    gained: the tokens that the row gained.
    finished: whether the row has ended.
    next_count: real nodes of the tree that is verified next.
    next_hint: the drafter's confidence in that tree.
    depth: of the tree that was verified.
    path: its accepted nodes from the root down, as many as tokens were gained.
    tokens, parents: of its N nodes.
    """

    gained: list[int]
    finished: bool
    next_count: int
    next_hint: int
    depth: int
    path: list[int]
    tokens: list[int]
    parents: list[int]


def pack(
    gained: Tensor, finished: Tensor, next_count: Tensor, next_hint: Tensor, depth: Tensor,
    tokens: Tensor, path: Tensor, tree_tokens: Tensor, tree_parents: Tensor,
) -> Tensor:  # fmt: skip
    """All values in one int64 tensor [B, 5 + 4 N]: first those of rows [B], then those of nodes [B, N]."""
    header = torch.stack([gained, finished.to(torch.int64), next_count, next_hint, depth], dim=1)
    return torch.cat([header, tokens, path, tree_tokens, tree_parents], dim=1)


def unpack(row: list[int]) -> Outcome:
    """One row that `pack` made."""
    gained, finished, next_count, next_hint, depth = row[:HEADER]
    paths, drafted, parents = range(HEADER, len(row), (len(row) - HEADER) // PER_NODE)[1:]
    tokens, path = row[HEADER : HEADER + gained], row[paths : paths + gained]
    return Outcome(tokens, bool(finished), next_count, next_hint, depth, path, row[drafted:parents], row[parents:])
