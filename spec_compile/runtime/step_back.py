"""`StepBack`: a round verifies all of a tree, its first nodes, or only its root, by what drafts gain and cost."""

import logging
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field

log = logging.getLogger("spec_compile")

LEARN = 0.15
"""Least weight of the newest round in the mean gains."""
FADE = 0.9
"""Share of the evidence that is left after a round without drafts."""
ALLOWED = 4.0
"""Plain rounds that drafts may lose before anything is known of them."""
EARNED = 8.0
"""Most plain rounds that drafts may lose of those that they have saved before."""
SHARE = 0.02
"""Share of the time of plain rounds that trials may lose, if drafts have paid before."""
RARE = 0.01
"""The same if they never have."""
WINDOW = 64
"""Rounds that drafted of which a lasting change is told."""
FALL = 0.25
"""Share of the best such level below which a warning is given, if that was ENOUGH accepted drafts."""
ENOUGH = 0.5
NEVER = 32
"""Rounds that drafted after which a warning is given if no draft was ever accepted."""


@dataclass
class DraftRecord:
    """Results of the rounds that drafted.

    gain: by number of nodes, the mean number of accepted drafts of a row among so many nodes of a tree.
    rounds: by number of nodes, the rounds that the mean stands for, fewer the older they are.
    slack: plain rounds that may still be lost.
    looks: plain rounds that whole trees may still lose to learn what they gain, where fewer nodes are better.
    level: mean number of accepted drafts in about WINDOW rounds, best its largest value, and drafted their number.
    """

    gain: dict[int, float] = field(default_factory=dict)
    rounds: dict[int, float] = field(default_factory=dict)
    slack: float = ALLOWED
    looks: float = 0.0
    level: float = 0.0
    best: float = 0.0
    drafted: int = 0
    has_paid: bool = False
    has_warned: bool = False

    @property
    def share(self) -> float:
        """Share of the time of plain rounds that trials may lose."""
        return SHARE if self.has_paid else RARE

    def learn(self, nodes: int, paths: list[list[int]]) -> None:
        """Take in the accepted `paths` of the first `nodes` nodes. [1, 3, 9] is a gain of 2 for 4 nodes."""
        gained = sum(bisect_left(path, nodes) for path in paths) / len(paths)
        rounds = self.rounds[nodes] = self.rounds.get(nodes, 0.0) + 1
        before = self.gain.setdefault(nodes, gained)
        self.gain[nodes] += max(LEARN, 1 / rounds) * (gained - before)

    def watch(self, gained: float) -> None:
        """Take in the accepted drafts of a round. Warns once if there are none, or far fewer than before."""
        self.drafted += 1
        self.level += (gained - self.level) / min(self.drafted, WINDOW)
        self.best = max(self.best, self.level) if self.drafted >= WINDOW else 0.0
        if self.drafted == NEVER and not self.level:
            log.warning(
                "no draft was accepted in the first %d rounds that drafted: the draft may belong to another model or "
                "another fine-tune, or prompts may lack the chat template; answers stay right", NEVER,
            )  # fmt: skip
        if not self.has_warned and self.best >= ENOUGH and self.level < FALL * self.best:
            self.has_warned = True
            log.warning(
                "%.2f drafts are accepted in a round, where %.2f were before: texts may be of another kind, or longer "
                "than those that the draft was trained with, prompts may lack the chat template, or weights may have "
                "changed; answers stay right", self.level, self.best,
            )  # fmt: skip


def moved(known: float | None, seconds: float) -> float:
    """A duration after one more measurement, of which the longest may be other work; `seconds` if none is known."""
    return known + LEARN * (min(seconds, 2 * known) - known) if known else seconds


class StepBack:
    """Chooses the nodes of a round, of trees that all have as many. The best size has the most tokens a second.

    Nodes of a tree come in order of preference and parents first, so that a round over all of them tells the gain of
    each smaller size. A size that costs c plain rounds and gains g drafts loses c - 1 - g plain rounds. Drafts are made
    while the best size loses nothing on average, and otherwise as long as the loss if nothing is accepted, c - 1, is
    within the slack. The first round after a plain one also loses the `switch`. The slack grows by what drafts save,
    and by a share in each plain round. So drafts that are never accepted take ALLOWED plain rounds at first and RARE of
    the time from then on: with c = 2 they are tried four times, and then in every 100th round. Drafts that have paid
    before are tried for SHARE of the time; so are whole trees where fewer nodes are best.

    sizes: numbers of nodes, ascending, from the root only to a whole tree.
    adaptive: False: every round verifies whole trees.
    record: of the same draft in rounds over other numbers of rows; costs stay separate.
    """

    hindsight = None

    def __init__(self, sizes: Iterable[int], adaptive: bool = True, record: DraftRecord | None = None):
        self.sizes = tuple(sorted({1, *sizes}))
        self.adaptive = adaptive and len(self.sizes) > 1
        self.cost: dict[int, float] = {}
        """Seconds of a round, by size."""
        self.host = 0.0
        """Seconds that the host takes for a round while another runs; a shorter round waits for it."""
        self.switch = 0.0
        """Seconds of the steps between a plain round and one that drafts: catching up, and a proposal."""
        self.record = DraftRecord() if record is None else record
        self._was_plain = False

    def share(self, other: "StepBack") -> None:
        """Share the record with `other` from now on; costs stay separate."""
        self.record = other.record

    def ratio(self, nodes: int) -> float | None:
        """Plain rounds that a round over so many nodes costs; None until plain rounds and whole trees have run. A size
        that has not run costs in proportion: with 1 and 2.5 for 1 and 16 nodes, 4 nodes cost 1.3."""
        plain, whole = (self.cost.get(size) for size in (self.sizes[0], self.sizes[-1]))
        if not plain or not whole:
            return None
        seconds = self.cost.get(nodes)
        if seconds is None:
            seconds = plain + (whole - plain) * (nodes - 1) / (self.sizes[-1] - 1)
        return max(seconds, self.host) / max(plain, self.host)

    def _loss(self, nodes: int) -> float:
        """Plain rounds that the next round over so many nodes loses if none is accepted."""
        switch = self.switch / max(self.cost.get(1, 0.0), self.host, 1e-9) if self._was_plain else 0.0
        return (self.ratio(nodes) or 1.0) - 1 + switch

    @property
    def best(self) -> int:
        """The size with the most tokens a second, as far as is known; 1 if no draft pays."""
        return max(1, self._best_drafts, key=self._rate)

    @property
    def _best_drafts(self) -> int:
        """The same of the sizes with drafts."""
        return max(self.sizes[1:], key=self._rate)

    def _rate(self, nodes: int) -> float:
        """Tokens in the time of a plain round."""
        return (1 + self.record.gain.get(nodes, 0.0)) / (self.ratio(nodes) or 1.0)

    def choose_ahead(self, buckets: Iterable[int] = ()) -> int:
        """The number of nodes of the next round. Whole trees and plain rounds run once before either is preferred."""
        whole, record = self.sizes[-1], self.record
        if not self.adaptive or whole not in self.cost:
            return whole
        loss = self.ratio(whole)
        if loss is None:
            return 1
        drafts = self._best_drafts
        if self.best == 1:
            return drafts if self._loss(drafts) <= record.slack or not record.gain else 1
        return whole if loss - (self.ratio(drafts) or 1.0) <= record.looks else drafts

    def describe(self) -> str:
        """A line for readers; "" until both sizes have run."""
        if not self.adaptive or self.ratio(self.sizes[-1]) is None:
            return ""
        drafts, best = self._best_drafts, self.best
        ratio, gain = self.ratio(drafts) or 1.0, self.record.gain.get(drafts, 0.0)
        period = max(1, round((ratio - 1) / self.record.share))
        choice = "every round drafts" if best > 1 else f"one round in {period} drafts"
        return f"{drafts} nodes take {ratio:.2f} plain rounds, {gain:.2f} drafts are accepted: {choice}"

    def learn_host(self, seconds: float) -> None:
        """The host took so long between two rounds, while another ran."""
        self.host = moved(self.host, seconds)

    def learn_switch(self, seconds: float) -> None:
        """Catching up and a proposal took so long."""
        self.switch = moved(self.switch, seconds)

    def learn(
        self, nodes: int, counts: list[int], buckets: list[int], paths: list[list[int]], seconds: float | None
    ) -> None:
        """After a round over `nodes` nodes; see `SizePolicy.learn`."""
        if seconds is not None:
            self.cost[nodes] = moved(self.cost.get(nodes), seconds)
        record, ratio, tree_ratio = self.record, self.ratio(nodes) or 1.0, self.ratio(self.sizes[-1]) or 1.0
        if not paths:  # only of rows that take no drafts
            return
        loss = self._loss(nodes)
        self._was_plain = nodes == 1
        if nodes == 1:
            record.rounds = {size: FADE * rounds for size, rounds in record.rounds.items()}
            record.slack += record.share
        else:
            gained = sum(map(len, paths)) / len(paths)
            for size in self.sizes[1:]:
                if size <= nodes:
                    record.learn(size, paths)
            record.watch(gained)
            record.slack += gained - loss
            record.has_paid |= self.best > 1
            is_look = nodes == self.sizes[-1] != self.best
            record.looks = 0.0 if is_look else min(record.looks + SHARE * ratio, tree_ratio)
        record.slack = min(record.slack, max(EARNED, self._loss(self.sizes[-1])))
