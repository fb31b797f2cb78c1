"""How many nodes to verify: the gain of each size so far against its cost."""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from .hindsight import Hindsight
from .round_costs import KNEES, RoundCosts

LEARN = 0.15
"""Weight of the newest round in the running means."""
FORGET = 0.005
"""Share by which an unobserved estimate returns to its prior in a round, so that each size is tried again."""
RISE = 0.01
"""Tokens a row by which such an estimate rises at most in a round, unless smaller sizes are accepted to their ends. A
size that lacks 0.5 tokens is tried again after 50 rounds."""
ANY = -1
"""The bucket of all rounds, of any confidence."""
NO_TREE = -2
"""The bucket of rows without drafts."""
STRIDE = 4096
"""The buckets of rows with the LoRA adapter of number n (see `Loaded`) are n * STRIDE larger than those without one."""
PRIOR = 0.5
"""Share of drafted nodes that is expected to be accepted at first."""


def every(bucket: int) -> int:
    """The bucket of all rounds of the same adapter: ANY for 2 and NO_TREE, STRIDE + ANY for STRIDE + 2."""
    return (bucket - NO_TREE) // STRIDE * STRIDE + ANY


class SizePolicy:
    """Chooses the compiled size of a round that gives the most tokens a second.

    Nodes of a tree come in order of preference and parents first. So a round over 16 nodes with the accepted path
    [1, 3, 9] also tells that 4 nodes would have gained 2 drafts: the nodes 1 and 3 are among the first four. Gains are
    kept per bucket of the drafter's confidence (``hint``; for n-grams the length of the match).

    hindsight: tells the gain of every size even in plain rounds, so that no size is tried only to learn it; None:
        gains are known only of verified nodes.
    costs: durations of rounds over `batch` sequences. A size that has not run counts with its expected cost.
    """

    def __init__(
        self, sizes: tuple[int, ...], adaptive: bool = True, hindsight: Hindsight | None = None, batch: int = 1,
        knee: int = KNEES["cuda"],
    ):  # fmt: skip
        self.sizes = sizes
        self.adaptive, self.hindsight, self.costs = adaptive, hindsight, RoundCosts(batch, knee)
        self.gain: dict[int, list[float]] = {}
        self._seen: dict[int, int] = {}
        """Trees of each bucket that hindsight has reported."""

    def share(self, other: "SizePolicy") -> None:
        """Share gains with `other` from now on, in both directions; costs stay separate."""
        self.gain, self._seen, self.hindsight = other.gain, other._seen, other.hindsight

    def choose(self, counts: list[int], hints: list[int]) -> int:
        """The size for a round over rows with `counts` real nodes (root included) and `hints`; 1 without rows."""
        if self.hindsight is not None and self.adaptive:
            for hint, path in self.hindsight.look():
                self._recall(hint, path)
        most = max(counts, default=1)
        if most <= 1:
            return self.sizes[0]
        fitting = [n for n in self.sizes if n < most]
        fitting += [n for n in self.sizes if n >= most][:1]
        if not self.adaptive:
            return fitting[-1]
        gains = [self._expected(hint) for hint, count in zip(hints, counts) if count > 1]
        # Fewer nodes never cost more. A measurement on a busy machine is too long, never too short.
        costs = [*accumulate((self.costs.expected(n) for n in reversed(fitting)), min)][::-1]
        rates = [(len(counts) + sum(gain[index] for gain in gains)) / cost for index, cost in enumerate(costs)]
        return fitting[rates.index(max(rates))]

    def choose_ahead(self, buckets: Iterable[int] = ()) -> int:
        """The size for a round whose trees are not known yet.

        buckets: of the rows' newest trees that are known, which tell how the text goes: while it repeats itself, a tree
            of a long match comes after another. Without any, the gains of all rounds count.
        """
        if not self.adaptive:
            return self.sizes[-1]
        gains = [self._expected(bucket) for bucket in buckets] or [self._gains(ANY)]
        tokens = [len(gains) + sum(each) for each in zip(*gains)]
        return max(self.sizes, key=lambda n: tokens[self.sizes.index(n)] / self.costs.expected(n))

    def learn(
        self, nodes: int, counts: list[int], buckets: list[int], paths: list[list[int]], seconds: float | None
    ) -> None:
        """After a round over `nodes` nodes: the accepted `paths` (node numbers, root left out) and its duration.

        counts: real nodes of the verified trees.
        buckets: of each row, as it was known when the round began.
        seconds: None if costs stay as measured at the start (captured graphs).
        """
        if seconds is not None:
            self.costs.learn(nodes, seconds)
        if self.hindsight is not None:
            return
        rounds: dict[int, list[tuple[int, list[int]]]] = {}
        for count, bucket, path in zip(counts, buckets, paths):
            for each in {every(bucket), bucket}:
                rounds.setdefault(each, []).append((count, path))
        for bucket, trees in rounds.items():
            self._learn_gains(self._gains(bucket), nodes, trees)

    def _learn_gains(self, gain: list[float], nodes: int, trees: list[tuple[int, list[int]]]) -> None:
        """After a round over `nodes` nodes: `trees` of one bucket, each (real nodes, accepted path).

        An observed size moves by a weight for each tree. Another returns to its prior once a round, whatever the
        number of rows, because large sizes cost many rows most.
        """
        followed = sum(len(path) for _, path in trees) / len(trees)
        share = max(PRIOR, followed / max(1, nodes - 1))  # a larger size has at least the share of this one
        for index, n in enumerate(self.sizes):
            gains = [bisect_left(path, n) for count, path in trees if n <= nodes or count <= nodes]  # paths ascend
            if gains:
                gain[index] += (1 - (1 - LEARN) ** len(gains)) * (sum(gains) / len(gains) - gain[index])
            else:
                more = share * (n - 1) - gain[index]
                gain[index] += min(RISE, more) if more > 0 and share == PRIOR else FORGET * more

    def _recall(self, hint: int, path: list[int]) -> None:
        """Take in a tree that the text followed along `path`: a mean of a bucket's first trees, then a running mean."""
        for bucket in (hint, ANY):
            self._seen[bucket] = self._seen.get(bucket, 0) + 1
            gain, weight = self._gains(bucket), max(LEARN, 1 / self._seen[bucket])
            for index, n in enumerate(self.sizes):
                gain[index] += weight * (bisect_left(path, n) - gain[index])

    def _gains(self, hint: int) -> list[float]:
        without_adapter = (hint - NO_TREE) % STRIDE + NO_TREE  # a new adapter begins like the base model
        return self.gain.setdefault(hint, [*self.gain.get(without_adapter, [PRIOR * (n - 1) for n in self.sizes])])

    def _expected(self, hint: int) -> list[float]:
        """The expected gain of each size. With hindsight a new bucket has the gains of all rounds."""
        like_others = self.hindsight is not None and hint not in self.gain and ANY in self.gain
        return self._gains(ANY if like_others else hint)
