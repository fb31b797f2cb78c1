"""`DraftBudget`: how many nodes of its trees a round verifies, by what drafts have gained and what rounds cost."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from .draft_record import ALL, ALLOWED, ANY, SHARE, DraftRecord, Group, Hindsight, TreeOutcome, by_group

LEARN = 0.15  # weight of the newest round in the running means
COMMON = 0.75  # share of a change in one size's duration that the others probably share (longer texts, other processes)
# Rows (sequences times nodes) that cost about as much as reading the weights, measured with an 8B model on an H200 and
# with the demo model on two CPU cores.
KNEES = {"cpu": 8, "cuda": 256}
PRIOR = 0.5  # share of drafted nodes that is expected to be accepted at first
# An estimate that is not observed returns to its prior, so that each size is tried again: by the share FORGET in a
# round, or up by at most RISE tokens a row, unless smaller sizes are accepted to their ends. By RISE a size that lacks
# 0.5 tokens is tried again after 50 rounds.
FORGET, RISE = 0.005, 0.01
EARNED = 16.0  # most plain rounds that drafts may lose of those that they have saved before


class RoundCosts:
    """Durations of rounds over `batch` sequences, in seconds, or in any unit before a round has run.

    knee: see `KNEES`.
    measured: durations of the sizes that have run, by number of nodes.
    host: time that the host takes for a round while another runs on a GPU; a shorter round waits for it.
    longer: time that a round on a GPU takes longer than when its size was measured: all sizes read longer texts now.
    switch: time of the steps between a plain round and one that drafts: catching up, and a proposal.
    owed: tokens of prompts that the drafter has to process before drafts. by_token: time that each takes.
    """

    def __init__(self, batch: int = 1, knee: int = KNEES["cuda"]):
        self.batch, self.knee = batch, knee
        self.measured: dict[int, float] = {}
        self.host = self.longer = self.switch = self.by_token = 0.0
        self.owed = 0

    def expected(self, nodes: int) -> float:
        """The duration of a round over `nodes` nodes. Between two sizes that have run it is in proportion to the nodes:
        with 1 s for 1 node and 2.5 s for 16, 4 nodes take 1.3 s. Elsewhere it is in proportion to the knee plus the
        rows: with a knee of 256, and 2 s for 16 nodes of one sequence, 4 nodes take 2 * 260 / 272 = 1.9 s."""
        if nodes in self.measured:  # a round of heads asks twenty times
            return max(self.measured[nodes] + self.longer, self.host)
        known = sorted(self.measured)
        place = bisect_left(known, nodes)
        if 0 < place < len(known):
            below, above = known[place - 1 : place + 1]
            slope = (self.measured[above] - self.measured[below]) / (above - below)
            seconds = self.measured[below] + slope * (nodes - below)
        elif known:
            nearest = known[min(place, len(known) - 1)]
            weight, weight_of_nearest = (self.knee + self.batch * size for size in (nodes, nearest))
            seconds = self.measured[nearest] * weight / weight_of_nearest
        else:
            seconds = self.knee + self.batch * nodes
        return max(seconds + self.longer, self.host)

    def learn(self, nodes: int, seconds: float) -> None:
        """A round over `nodes` nodes took so long. Twice the known duration is the most that counts."""
        change = LEARN * (min(seconds / self.measured.setdefault(nodes, seconds), 2) - 1)
        for size in self.measured:
            self.measured[size] *= 1 + (change if size == nodes else COMMON * change)


def moved(known: float, seconds: float) -> float:
    """A `RoundCosts.host`, `longer` or `switch` after one more measurement; the longest may be other work. 0: none."""
    return known + LEARN * (min(seconds, 2 * known) - known) if known else seconds


class DraftBudget:
    """Chooses the size of each round of a session, which is its number of nodes, and learns from the round's outcome.

    Nodes of a tree come in order of preference and parents first. So a round over 16 nodes with the accepted path
    [1, 3, 9] also tells that 4 nodes would have gained 2 drafts: the nodes 1 and 3 are among the first four.

    sizes: numbers of nodes, ascending.
    adaptive: False: every round verifies whole trees.
    batch, knee: see `RoundCosts`.
    """

    hindsight: Hindsight | None = None

    def __init__(self, sizes: Iterable[int], adaptive: bool = True, batch: int = 1, knee: int = KNEES["cuda"]):
        self.sizes, self.adaptive, self.costs = tuple(sizes), adaptive, RoundCosts(batch, knee)

    def choose(
        self, groups: Sequence[Group] = (), counts: Sequence[int] | None = None, under_way: Sequence[int] = (),
        pending: int | None = None,
    ) -> int:  # fmt: skip
        """The number of nodes of the next round.

        groups: the `Group` of each row's newest tree that is known.
        counts: real nodes of all rows' trees, the root included; None if only the GPU knows some of them.
        under_way: nodes of the rounds whose outcomes are not known yet.
        pending: nodes of the trees that these rounds leave; None: that the newest known round has left.
        """
        raise NotImplementedError

    def learn(self, nodes: int, trees: Sequence[TreeOutcome], seconds: float | None) -> None:
        """After a round over `nodes` nodes of these trees.

        seconds: the duration; None if costs stay as measured at the start (captured graphs).
        """
        if seconds is not None:
            self.costs.learn(nodes, seconds)

    def share(self, other: Any) -> None:
        """Share what is known of gains with `other`, of the same class, from now on both ways; costs stay separate."""
        raise NotImplementedError

    def describe(self) -> str:
        """A line for readers; "" if there is nothing to tell."""
        return ""


class VaryingTreeBudget(DraftBudget):
    """The budget of trees that differ in size, as with n-grams: the size with the most tokens a second.

    hindsight: tells the gain of every size even in plain rounds, so that no size is tried only to learn it; None:
        gains are known only of verified nodes.
    """

    def __init__(self, *arguments: Any, hindsight: Hindsight | None = None, **options: Any):
        super().__init__(*arguments, **options)
        self.hindsight = hindsight
        self.gains: dict[Group, list[float]] = {}  # the expected gain of each size
        self._seen: dict[Group, int] = {}  # trees of each group that hindsight has reported

    def share(self, other: "VaryingTreeBudget") -> None:
        self.gains, self._seen, self.hindsight = other.gains, other._seen, other.hindsight

    def choose(
        self, groups: Sequence[Group] = (), counts: Sequence[int] | None = None, under_way: Sequence[int] = (),
        pending: int | None = None,
    ) -> int:  # fmt: skip
        sizes, costs_ascend = self.sizes, False
        if counts is None or under_way:
            # The trees are not known yet. The newest known ones tell how the text goes: while it repeats itself, a tree
            # of a long match comes after another. Without any, the gains of all rounds count.
            groups = groups or [ALL]
            rows = len(groups)
        else:
            if self.hindsight is not None and self.adaptive:
                self._look_back(self.hindsight)
            most = max(counts, default=1)
            if most <= 1:
                return sizes[0]
            # Sizes up to the smallest that holds all trees. Fewer nodes never cost more: a measurement on a busy
            # machine is too long, never too short.
            sizes, costs_ascend = sizes[: bisect_left(sizes, most) + 1], True
            groups, rows = [group for group, count in zip(groups, counts) if count > 1], len(counts)
        if not self.adaptive:
            return sizes[-1]
        if self.hindsight is not None and not self._seen:
            sizes = sizes[:2]  # the first tree of all may fail, and few nodes of it lose little
        gains, costs = [self._expected(group) for group in groups], [self.costs.expected(n) for n in sizes]
        if costs_ascend:
            costs = [*accumulate(reversed(costs), min)][::-1]
        rates = [(rows + sum(gain[index] for gain in gains)) / cost for index, cost in enumerate(costs)]
        return sizes[rates.index(max(rates))]

    def learn(self, nodes: int, trees: Sequence[TreeOutcome], seconds: float | None) -> None:
        """An observed size moves by a weight for each tree. Another returns to its prior once a round, whatever the
        number of rows, because large sizes cost many rows most."""
        super().learn(nodes, trees, seconds)
        if self.hindsight is not None:
            return
        for group, own in by_group(trees).items():
            gain = self._gains(group)
            followed = sum(len(tree.path) for tree in own) / len(own)
            share = max(PRIOR, followed / max(1, nodes - 1))  # a larger size has at least the share of this one
            for index, n in enumerate(self.sizes):
                gains = [bisect_left(tree.path, n) for tree in own if n <= nodes or tree.count <= nodes]
                if gains:
                    gain[index] += (1 - (1 - LEARN) ** len(gains)) * (sum(gains) / len(gains) - gain[index])
                else:
                    more = share * (n - 1) - gain[index]
                    gain[index] += min(RISE, more) if more > 0 and share == PRIOR else FORGET * more

    def _look_back(self, hindsight: Hindsight) -> None:
        """Take in the trees that texts have left: a mean of a group's first trees, then a running mean."""
        for confidence, path in hindsight.look():
            for group in (Group(0, confidence), ALL):
                self._seen[group] = self._seen.get(group, 0) + 1
                gain, weight = self._gains(group), max(LEARN, 1 / self._seen[group])
                for index, n in enumerate(self.sizes):
                    gain[index] += weight * (bisect_left(path, n) - gain[index])

    def _gains(self, group: Group) -> list[float]:
        """The gains of a group. A new adapter begins like no adapter."""
        like = self.gains.get(Group(0, group.confidence), [PRIOR * (n - 1) for n in self.sizes])
        return self.gains.setdefault(group, [*like])

    def _expected(self, group: Group) -> list[float]:
        """The gains that count. Hindsight tells no adapters, and gives a new group the gains of all rounds."""
        if self.hindsight is not None:
            group = Group(0, group.confidence)
            group = ALL if group not in self.gains and ALL in self.gains else group
        return self._gains(group)


class WholeTreeBudget(DraftBudget):
    """The budget of trees that all have as many nodes: a round verifies all of a tree, its first nodes, or its root.

    `loss(size) = cost(size) - 1 - gain(size)`, in plain rounds. Drafts are made while the best size loses nothing on
    average, and otherwise while `cost - 1`, the loss if nothing is accepted, fits in the budget. A round over more
    nodes than the last one has proposed also costs the `RoundCosts.switch`, because whole trees are proposed before it.

    The budget grows by what drafts save, and by a share in each plain round. Drafts that are never accepted take
    ALLOWED plain rounds at first and RARE of the time from then on: with a cost of 2 and one row there are four trials,
    with four rows one, then every 100th round drafts. Drafts that have paid before are tried for SHARE of the time; so
    are whole trees where fewer nodes are best. They pay for each switch that plain rounds, which take prompts with
    them, make necessary.

    While drafts pay, a round follows the drafter's confidence in its trees, if it has any: of little confidence it
    verifies fewer nodes, or none if a plain round is worth the switch.

    sizes: numbers of nodes up to a whole tree; 1 is always one of them.
    record: what is known of the same draft from rounds over other numbers of rows.
    next_nodes: see `DraftPlan`; by default all rounds but plain ones propose whole trees.
    """

    def __init__(
        self, sizes: Iterable[int], adaptive: bool = True, batch: int = 1, knee: int = KNEES["cuda"],
        record: DraftRecord | None = None, next_nodes: Callable[[int], int] | None = None,
    ):  # fmt: skip
        super().__init__(sorted({1, *sizes}), adaptive, batch, knee)
        self.adaptive = adaptive and len(self.sizes) > 1
        self._next_nodes = next_nodes or (lambda nodes: self.sizes[-1] if nodes > 1 else 1)
        self.record = DraftRecord() if record is None else record
        self._pending = self.sizes[-1]  # nodes of the trees that the last round has proposed

    def share(self, other: "WholeTreeBudget") -> None:
        self.record = other.record

    def choose(
        self, groups: Sequence[Group] = (), counts: Sequence[int] | None = None, under_way: Sequence[int] = (),
        pending: int | None = None,
    ) -> int:  # fmt: skip
        whole, record, loss = self.sizes[-1], self.record, partial(self._loss, pending=pending)
        if not self.adaptive:
            return whole
        spent = sum(self.cost(nodes) - 1 for nodes in under_way)  # nothing of them may be accepted
        budget = record.budget_of(groups) - spent
        # Drafts and plain rounds run once before either is preferred.
        if not record.gains:
            return max((n for n in self.sizes[1:] if loss(n) <= budget), default=1 if spent else self.sizes[1])
        if 1 not in self.costs.measured:
            return 1
        # The best size for trees of this confidence, or of any.
        follows_confidence = record.follows_confidence(groups)
        if not follows_confidence:
            groups = [Group(group.adapter) for group in groups]
        nodes = self._best_drafts(groups)
        if follows_confidence:
            nodes = nodes if self._rate(nodes, groups) >= 1 / (1 + self._switch) else 1
        elif self.best(groups) == 1:
            return nodes if loss(nodes) <= budget else 1
        # Drafts that plain rounds interrupt, as prompts that ride along do, have to pay for each switch.
        if nodes > (pending or self._pending) and loss(nodes) > budget:
            return 1
        # Whole trees are tried now and then, to learn what their other nodes gain.
        if nodes < whole and loss(whole) - loss(nodes) <= record.exploration_budget:
            record.exploration_budget = 0.0
            return whole
        return nodes

    def cost(self, nodes: int) -> float:
        """The cost of a round over `nodes` nodes, in plain rounds."""
        return self.costs.expected(nodes) / self.costs.expected(1)

    def best(self, groups: Sequence[Group] = ()) -> int:
        """The size with the most tokens a second, as far as is known; 1 if no draft pays."""
        return max(1, self._best_drafts(groups), key=partial(self._rate, groups=groups))

    def describe(self) -> str:
        """A line for readers; "" until plain rounds and whole trees have run."""
        if not self.adaptive or not {1, self.sizes[-1]} <= {*self.costs.measured}:
            return ""
        drafts = self._best_drafts()
        cost, gain = self.cost(drafts), self.record.gain(drafts)
        period = max(1, round((cost - 1) / self.record.share))
        choice = "every round drafts" if self.best() > 1 else f"one round in {period} drafts"
        made = ", ".join(map(str, sorted(self.costs.measured)))
        told = f"{drafts} nodes take {cost:.2f} plain rounds, {gain:.2f} drafts are accepted: {choice}"
        return f"{told}; rounds over {made} nodes have run"

    def learn(self, nodes: int, trees: Sequence[TreeOutcome], seconds: float | None) -> None:
        super().learn(nodes, trees, seconds)
        record, whole, loss = self.record, self.sizes[-1], self._loss(nodes)
        self._pending = self._next_nodes(nodes)
        self.costs.owed = self.costs.owed if nodes == 1 else 0
        if not trees:  # no row takes drafts
            return
        groups = [(group.adapter, own) for group, own in by_group(trees).items() if group.confidence == ANY]
        adapters = {adapter: [len(tree.path) for tree in own] for adapter, own in groups}
        if nodes == 1:
            record.fade(adapters)
        else:
            least = min(nodes, *(tree.count for tree in trees))
            record.learn([size for size in self.sizes[1:] if size <= least], trees)
            record.watch(sum(len(tree.path) for tree in trees) / len(trees))
            record.has_paid = record.has_paid or self.best([Group(tree.group.adapter) for tree in trees]) > 1
        # The round has earned time for later trials.
        if nodes < whole:
            earned = SHARE * self.cost(nodes)
            record.exploration_budget = min(record.exploration_budget + earned, self._loss(whole))
        most = max(EARNED, self._loss(whole))
        for adapter, gains in adapters.items():
            earned = record.share if nodes == 1 else sum(gains) / len(gains) - loss  # guard: drafts-earn
            # A trial of many rows tells as much as many of one.
            may_lose = most if nodes == 1 or record.has_paid else min(most, ALLOWED / len(gains))
            record.budget[adapter] = min(record.budget_of([Group(adapter)]) + earned, may_lose)

    @property
    def _switch(self) -> float:
        """Plain rounds that the steps between a plain round and one that drafts cost, and prompts that were put off."""
        costs = self.costs
        before_drafts = costs.switch + costs.owed * costs.by_token
        return before_drafts / max(costs.expected(1), 1e-9) if costs.measured else 0.0

    def _loss(self, nodes: int, pending: int | None = None) -> float:
        """The loss of the next round over `nodes` nodes if none is accepted, in plain rounds. pending: see `choose`."""
        return self.cost(nodes) - 1 + (self._switch if nodes > (pending or self._pending) else 0.0)

    def _best_drafts(self, groups: Sequence[Group] = ()) -> int:
        """The size with the most tokens a second of those with drafts."""
        return max(self.sizes[1:], key=partial(self._rate, groups=groups))

    def _rate(self, nodes: int, groups: Sequence[Group] = ()) -> float:
        """Tokens in the time of a plain round."""
        return (1 + (self.record.gain(nodes, groups) if nodes > 1 else 0.0)) / self.cost(nodes)
