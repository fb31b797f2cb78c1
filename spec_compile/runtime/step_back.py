"""`StepBack`: a round drafts if the gain of drafts so far is worth their cost, or if a trial may be lost."""

import logging
from dataclasses import dataclass

log = logging.getLogger("spec_compile")

LEARN = 0.15
"""Least weight of the newest round in the mean gain."""
FADE = 0.9
"""Share of the evidence that is left after a round without drafts."""
ALLOWED = 2.0
"""Plain rounds that drafts may lose before anything is known of them."""
EARNED = 8.0
"""Most plain rounds that drafts may lose of those that they have saved before."""
SHARE = 0.02
"""Share of the time of plain rounds that trials may lose."""
WINDOW = 64
"""Rounds that drafted of which a lasting change is told."""
FALL = 0.25
"""Share of the best such level below which a warning is given, if that was ENOUGH accepted drafts."""
ENOUGH = 0.5


@dataclass
class DraftRecord:
    """Results of the rounds that drafted.

    gain: mean number of accepted drafts of a row.
    rounds: number of rounds that the mean stands for, fewer the older they are.
    slack: plain rounds that may still be lost.
    level: mean number of accepted drafts in about WINDOW rounds, best its largest value, and drafted their number.
    """

    gain: float = 0.0
    rounds: float = 0.0
    slack: float = ALLOWED
    level: float = 0.0
    best: float = 0.0
    drafted: int = 0
    has_warned: bool = False

    def watch(self, gained: float) -> None:
        """Take in the accepted drafts of a round. Warns once if they have become far fewer."""
        self.drafted += 1
        self.level += (gained - self.level) / min(self.drafted, WINDOW)
        self.best = max(self.best, self.level) if self.drafted >= WINDOW else 0.0
        if not self.has_warned and self.best >= ENOUGH and self.level < FALL * self.best:
            self.has_warned = True
            log.warning(
                "%.2f drafts are accepted in a round, where %.2f were before: texts may be of another kind, or longer "
                "than those that the draft was trained with, prompts may lack the chat template, or weights may have "
                "changed; answers stay right", self.level, self.best,
            )  # fmt: skip


class StepBack:
    """Chooses between a round over a whole tree and a plain one, which verifies the root and drafts nothing.

    A tree that costs c plain rounds and gains g drafts loses c - 1 - g plain rounds. Drafts are made while they lose
    nothing on average, and otherwise as long as the loss if nothing is accepted, c - 1, is within the slack. It grows
    by what drafts save, and by SHARE in each plain round. So drafts that are never accepted take ALLOWED plain rounds
    at first and SHARE of the time from then on: trees of c = 2 are tried twice, and then in every 50th round.

    nodes: of a tree, the root included.
    adaptive: False: every round drafts.
    """

    hindsight = None

    def __init__(self, nodes: int, adaptive: bool = True):
        self.sizes = (1, nodes) if nodes > 1 else (1,)
        self.adaptive = adaptive and nodes > 1
        self.cost: dict[int, float] = {}
        """Seconds of a round, by size."""
        self.record = DraftRecord()

    def share(self, other: "StepBack") -> None:
        """Share the record with `other` from now on; costs stay separate."""
        self.record = other.record

    @property
    def ratio(self) -> float | None:
        """Plain rounds that a tree costs; None until both sizes have run."""
        costs = [self.cost.get(size) for size in self.sizes]
        return costs[-1] / costs[0] if all(costs) else None

    @property
    def pays(self) -> bool:
        """True if drafts lose nothing on average."""
        return self.ratio is not None and self.record.rounds > 0 and 1 + self.record.gain >= self.ratio

    def choose_ahead(self) -> int:
        """The number of nodes of the next round. Both sizes run once before either is preferred."""
        plain, nodes = self.sizes[0], self.sizes[-1]
        if not self.adaptive or nodes not in self.cost:
            return nodes
        if self.ratio is None:
            return plain
        return nodes if self.pays or self.ratio - 1 <= self.record.slack else plain

    def describe(self) -> str:
        """A line for readers; "" until both sizes have run."""
        if self.ratio is None or not self.adaptive:
            return ""
        seldom = max(1, round((self.ratio - 1) / SHARE))
        choice = "every round drafts" if self.pays else f"one round in {seldom} drafts"
        return f"a tree takes {self.ratio:.2f} plain rounds, {self.record.gain:.2f} drafts are accepted: {choice}"

    def learn(
        self, nodes: int, counts: list[int], hints: list[int], paths: list[list[int]], seconds: float | None
    ) -> None:
        """After a round over `nodes` nodes; see `SizePolicy.learn`."""
        if seconds is not None:
            known = self.cost.setdefault(nodes, seconds)
            self.cost[nodes] += LEARN * (min(seconds, 2 * known) - known)
        record, ratio = self.record, self.ratio or 1.0
        if not paths:  # only of rows that take no drafts
            return
        if nodes == 1:
            record.rounds *= FADE
            record.slack += SHARE
        else:
            gained = sum(map(len, paths)) / len(paths)
            record.watch(gained)
            record.rounds += 1
            record.gain += max(LEARN, 1 / record.rounds) * (gained - record.gain)
            record.slack += 1 + gained - ratio
        record.slack = min(record.slack, max(EARNED, ratio - 1))
