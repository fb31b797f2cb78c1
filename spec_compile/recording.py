"""`Recording`, the trees and times of one generate()."""

from dataclasses import dataclass, field

from .outcome import Outcome


@dataclass
class Verified:
    """One row's part in a round: the tree that was verified, and its outcome.

    tokens, parents: the tree's nodes without padding, parents first. Node 0 is the root, the last committed token, with
        parent -1.
    path: the accepted nodes from the root down.
    gained: the tokens that the row gained: those of ``path[1:]`` and the bonus token.
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]
    gained: list[int]


@dataclass
class RecordedRound:
    """One round. nodes: its size N. seconds: of the host. rows: one for each sequence; None if it had finished."""

    nodes: int
    seconds: float
    rows: list[Verified | None]


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

    def add(self, nodes: int, seconds: float, counts: dict[int, int], outcomes: dict[int, Outcome]) -> None:
        """Add a round over `nodes` nodes. counts: real nodes of each unfinished row. outcomes: of these rows."""
        rows: list[Verified | None] = [None] * len(self.prompts)
        for row, count in counts.items():
            outcome = outcomes[row]
            rows[row] = Verified(outcome.tokens[:count], outcome.parents[:count], outcome.path, outcome.gained)
        self.rounds.append(RecordedRound(nodes, seconds, rows))

    def output(self, row: int) -> list[int]:
        """The tokens that a row gained."""
        return [token for done in self.rounds if done.rows[row] for token in done.rows[row].gained]
