"""What one generate() did, tree by tree: `Recording`."""

from dataclasses import dataclass, field

from .outcome import Outcome


@dataclass
class Verified:
    """One row's part in a round: the tree that was verified and what came of it.

    tokens, parents: the tree's real nodes, parents first; node 0 is the root, the last token of the text before, with
    parent -1. path: the accepted nodes from the root down. gained: the tokens that the row gained: those of
    ``path[1:]``, and the target's own token after them.
    """

    tokens: list[int]
    parents: list[int]
    path: list[int]
    gained: list[int]


@dataclass
class RecordedRound:
    """nodes: the size that was verified, N. seconds: the host's time for it. rows: None where a row had finished."""

    nodes: int
    seconds: float
    rows: list[Verified | None]


@dataclass
class Recording:
    """One generate(), round by round. A row's text is its prompt and what its rounds gained, also where a stopping
    criterion cuts the answer in the middle of a round. seconds: as in `Stats`, of this call."""

    prompts: list[list[int]]
    rounds: list[RecordedRound] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, nodes: int, seconds: float, counts: dict[int, int], outcomes: list[Outcome]) -> None:
        """A round over `nodes` nodes. counts: real nodes of each unfinished row. outcomes: of all rows."""
        rows: list[Verified | None] = [None] * len(self.prompts)
        for row, count in counts.items():
            outcome = outcomes[row]
            rows[row] = Verified(outcome.tokens[:count], outcome.parents[:count], outcome.path, outcome.gained)
        self.rounds.append(RecordedRound(nodes, seconds, rows))

    def output(self, row: int) -> list[int]:
        """The tokens that a row gained."""
        return [token for one in self.rounds if one.rows[row] for token in one.rows[row].gained]
