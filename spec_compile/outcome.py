"""`Outcome`, the message of a round to the host, packed into one tensor so that one copy brings it; and `Recording`."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .tree import MAX_NODES

HEADER = 5
PER_NODE = 4
WIDEST = HEADER + PER_NODE * MAX_NODES
"""Most numbers of a row's outcome."""


@dataclass(slots=True)
class Outcome:
    """One row's part in a round over N nodes.

    gained: the tokens that the row gained: the tokens of ``path[1:]`` and the bonus token.
    finished: True if the row has ended.
    next_count: real nodes of the tree that is verified next.
    next_confidence: the drafter's confidence in that tree.
    depth: the depth of the tree that was verified.
    path: its accepted nodes from the root down.
    tokens, parents: its N nodes, parents first. Node 0 is the root, the last committed token, with parent -1.
    """

    gained: list[int]
    finished: bool
    next_count: int
    next_confidence: int
    depth: int
    path: list[int]
    tokens: list[int]
    parents: list[int]


def pack(
    gained: Tensor, finished: Tensor, next_count: Tensor, next_confidence: Tensor, depth: Tensor,
    tokens: Tensor, path: Tensor, tree_tokens: Tensor, tree_parents: Tensor,
) -> Tensor:  # fmt: skip
    """All values in one int64 tensor [B, 5 + 4 N]: first the values of rows [B], then the values of nodes [B, N]."""
    header = torch.stack([gained, finished.to(torch.int64), next_count, next_confidence, depth], dim=1)
    return torch.cat([header, tokens, path, tree_tokens, tree_parents], dim=1)


def unpack(row: list[int]) -> Outcome:
    """One row that `pack` made."""
    gained, finished, count, confidence, depth = row[:HEADER]
    paths, drafted, parents = range(HEADER, len(row), (len(row) - HEADER) // PER_NODE)[1:]
    tokens, path = row[HEADER : HEADER + gained], row[paths : paths + gained]
    return Outcome(tokens, bool(finished), count, confidence, depth, path, row[drafted:parents], row[parents:])


# The trees and times of one generate(), as `report` shows them.


@dataclass
class RecordedRound:
    """One round over N nodes, which took the host `seconds`.

    rows: the outcome of each sequence, whose tree has no padding; None if the sequence had finished before.
    """

    nodes: int
    seconds: float
    rows: list[Outcome | None]


@dataclass
class Recording:
    """One generate(), round by round.

    prompts: token ids of each row.
    rounds: in order. A row's text is its prompt and all that its rounds gained, even if a stopping criterion cuts the
        answer in the middle of a round.
    seconds: as in `Stats`, of this call.
    """

    prompts: list[list[int]]
    rounds: list[RecordedRound] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, nodes: int, seconds: float, counts: dict[int, int | None], outcomes: dict[int, Outcome]) -> None:
        """Add a round over `nodes` nodes. counts: real nodes of each unfinished row; None: all."""
        rows: list[Outcome | None] = [None] * len(self.prompts)
        for row, count in counts.items():
            outcome = outcomes[row]
            rows[row] = replace(outcome, tokens=outcome.tokens[:count], parents=outcome.parents[:count])
        self.rounds.append(RecordedRound(nodes, seconds, rows))

    def output(self, row: int) -> list[int]:
        """The tokens that a row gained."""
        return [token for done in self.rounds if done.rows[row] for token in done.rows[row].gained]
