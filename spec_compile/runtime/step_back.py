"""`StepBack`: a round verifies all of a tree, its first nodes, or only its root, by what drafts gain and cost."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from .draft_length import every
from .draft_record import SHARE, DraftRecord
from .round_costs import KNEES, RoundCosts

EARNED = 16.0
"""Most plain rounds that drafts may lose of those that they have saved before."""


class StepBack:
    """Chooses the nodes of a round, of trees that all have as many. The best size has the most tokens a second.

    Nodes of a tree come in order of preference and parents first, so that a round over all of them tells the gain of
    each smaller size. A size that costs c plain rounds and gains g drafts loses c - 1 - g plain rounds. Drafts are made
    while the best size loses nothing on average, and otherwise as long as the loss if nothing is accepted, c - 1, is
    within the slack. A round over more nodes than the last one has proposed also loses the `RoundCosts.switch`, because
    whole trees are proposed before it. The slack grows by what drafts save, and by a share in each plain round. So
    drafts that are never accepted take ALLOWED plain rounds at first and RARE of the time from then on: with c = 2 they
    are tried four times, and then in every 100th round. Drafts that have paid before are tried for SHARE of the time;
    so are whole trees where fewer nodes are best.

    While drafts pay, a round follows the drafter's confidence in its trees, if it has any: of little confidence it
    verifies fewer nodes, or none if a plain round is worth the switch.

    sizes: numbers of nodes, ascending, from the root only to a whole tree.
    adaptive: False: every round verifies whole trees.
    record: of the same draft in rounds over other numbers of rows. Gains and slack are those of each LoRA adapter, so
        that drafts that fail with one adapter are made for rows without it.
    costs: durations of rounds over `batch` sequences.
    next_nodes: see `DraftPlan`; by default all rounds but plain ones propose whole trees.
    """

    hindsight = None

    def __init__(
        self, sizes: Iterable[int], adaptive: bool = True, record: DraftRecord | None = None, batch: int = 1,
        knee: int = KNEES["cuda"], next_nodes: Callable[[int], int] | None = None,
    ):  # fmt: skip
        self.sizes = tuple(sorted({1, *sizes}))
        self._next_nodes = next_nodes or (lambda nodes: self.sizes[-1] if nodes > 1 else 1)
        self.adaptive = adaptive and len(self.sizes) > 1
        self.record = DraftRecord() if record is None else record
        self.costs = RoundCosts(batch, knee)
        self._pending = self.sizes[-1]
        """Nodes of the trees that the last round has proposed."""

    def share(self, other: "StepBack") -> None:
        """Share the record with `other` from now on; costs stay separate."""
        self.record = other.record

    def ratio(self, nodes: int) -> float:
        """Plain rounds that a round over so many nodes costs."""
        return self.costs.expected(nodes) / self.costs.expected(1)

    @property
    def is_measured(self) -> bool:
        """True after plain rounds and whole trees have run."""
        return all(nodes in self.costs.measured for nodes in (1, self.sizes[-1]))

    @property
    def best(self) -> int:
        """The size with the most tokens a second, as far as is known; 1 if no draft pays."""
        return self._best()

    def choose_ahead(self, buckets: Iterable[int] = (), under_way: Iterable[int] = ()) -> int:
        """The number of nodes of the next round. Drafts and plain rounds run once before either is preferred.

        buckets: of the confidence in the rows' newest trees that are known.
        under_way: nodes of the rounds whose outcomes are not known yet; nothing of them may be accepted.
        """
        whole, record, measured = self.sizes[-1], self.record, self.costs.measured
        if not self.adaptive:
            return whole
        buckets, spent = [*buckets], sum(self.ratio(nodes) - 1 for nodes in under_way)
        slack = record.slack_of(buckets) - spent
        if not record.gains:
            first = 1 if spent else self.sizes[1]
            return max((nodes for nodes in self.sizes[1:] if self._loss(nodes) <= slack), default=first)
        if 1 not in measured:
            return 1
        tells = record.tells_buckets(buckets)
        buckets = buckets if tells else [*map(every, buckets)]
        drafts = self._best_drafts(buckets)
        if tells:
            nodes = drafts if self._rate(drafts, buckets) >= 1 / (1 + self._switch) else 1
        elif self._best(buckets) == 1:
            return drafts if self._loss(drafts) <= slack else 1
        else:
            nodes = drafts
        if nodes < whole and self._loss(whole) - self._loss(nodes) <= record.looks:
            record.looks = 0.0
            return whole
        return nodes

    def describe(self) -> str:
        """A line for readers; "" until both sizes have run."""
        if not self.adaptive or not self.is_measured:
            return ""
        drafts = self._best_drafts()
        ratio, gain = self.ratio(drafts), self.record.gain(drafts)
        period = max(1, round((ratio - 1) / self.record.share))
        choice = "every round drafts" if self.best > 1 else f"one round in {period} drafts"
        made = ", ".join(map(str, sorted(self.costs.measured)))
        told = f"{drafts} nodes take {ratio:.2f} plain rounds, {gain:.2f} drafts are accepted: {choice}"
        return f"{told}; rounds over {made} nodes have run"

    def learn(
        self, nodes: int, counts: list[int], buckets: list[int], paths: list[list[int]], seconds: float | None
    ) -> None:
        """After a round over `nodes` nodes; see `SizePolicy.learn`."""
        if seconds is not None:
            self.costs.learn(nodes, seconds)
        record = self.record
        if not paths:  # only of rows that take no drafts
            return
        loss = self._loss(nodes)
        self._pending = self._next_nodes(nodes)
        if nodes == 1:
            record.fade(buckets)
        else:
            gained = sum(map(len, paths)) / len(paths)
            record.learn([size for size in self.sizes[1:] if size <= min(nodes, *counts)], buckets, paths)
            record.watch(gained)
            record.has_paid = record.has_paid or self._best([*map(every, buckets)]) > 1
        if nodes < self.sizes[-1]:
            record.looks = min(record.looks + SHARE * self.ratio(nodes), self._loss(self.sizes[-1]))
        most = max(EARNED, self._loss(self.sizes[-1]))
        by_adapter: dict[int, list[int]] = {}
        for bucket, path in zip(buckets, paths):
            by_adapter.setdefault(every(bucket), []).append(len(path))
        for adapter, gains in by_adapter.items():
            earned = record.share if nodes == 1 else sum(gains) / len(gains) - loss  # guard: drafts-earn
            record.slack[adapter] = min(record.slack_of([adapter]) + earned, most)

    @property
    def _switch(self) -> float:
        """Plain rounds that the steps between a plain round and one that drafts cost."""
        return self.costs.switch / max(self.costs.expected(1), 1e-9) if self.costs.measured else 0.0

    def _loss(self, nodes: int) -> float:
        """Plain rounds that the next round over so many nodes loses if none is accepted."""
        return self.ratio(nodes) - 1 + (self._switch if nodes > self._pending else 0.0)

    def _best(self, buckets: Sequence[int] = ()) -> int:
        return max(1, self._best_drafts(buckets), key=partial(self._rate, buckets=buckets))

    def _best_drafts(self, buckets: Sequence[int] = ()) -> int:
        """The size with the most tokens a second of those with drafts."""
        return max(self.sizes[1:], key=partial(self._rate, buckets=buckets))

    def _rate(self, nodes: int, buckets: Sequence[int] = ()) -> float:
        """Tokens in the time of a plain round."""
        return (1 + (self.record.gain(nodes, buckets) if nodes > 1 else 0.0)) / self.ratio(nodes)
