"""How many nodes to verify: what a size has paid so far against what it costs."""

from bisect import bisect_left

LEARN = 0.15
"""Weight of the newest round in the running means."""
FORGET = 0.005
"""How fast an estimate that is not being observed returns to its prior, so that every size is tried again."""
ANY = -1
"""The bucket of all rounds, whatever the drafter's confidence."""
PRIOR = 0.5
"""Share of the drafted nodes that is expected to be accepted before anything is known."""


class SizePolicy:
    """Chooses among the sizes a round is compiled for, the one with the most tokens a second.

    Nodes of a tree come in order of preference and parents first, so a round over n nodes also tells what any smaller
    size would have gained: the accepted nodes among the first of them. Gains are kept per bucket of the drafter's
    confidence (``hint``; for n-grams the length of the match), costs per size.
    """

    def __init__(self, sizes: tuple[int, ...], adaptive: bool = True):
        self.sizes, self.adaptive = sizes, adaptive
        self.cost: dict[int, float] = {}
        self.gain: dict[int, list[float]] = {}

    def choose(self, counts: list[int], hints: list[int]) -> int:
        """The size for a round over rows with `counts` real nodes (root included) and `hints`; none is left: 1."""
        most = max(counts, default=1)
        if most <= 1:
            return self.sizes[0]
        fitting = [n for n in self.sizes if n < most]
        fitting += [n for n in self.sizes if n >= most][:1]
        if not self.adaptive or any(n not in self.cost for n in fitting):
            return fitting[-1]
        gains = [self._gains(hint) for hint, count in zip(hints, counts) if count > 1]

        def rate(n: int) -> float:
            place = self.sizes.index(n)
            return (len(counts) + sum(gain[place] for gain in gains)) / self.cost[n]

        return max(fitting, key=rate)

    def choose_ahead(self) -> int:
        """The size for a round whose trees are not known yet: by what all rounds have gained."""
        if not self.adaptive or any(n not in self.cost for n in self.sizes):
            return self.sizes[-1]
        gain = self._gains(ANY)
        return max(self.sizes, key=lambda n: (1 + gain[self.sizes.index(n)]) / self.cost[n])

    def learn(
        self, nodes: int, counts: list[int], hints: list[int], paths: list[list[int]], seconds: float | None
    ) -> None:
        """After a round over `nodes` nodes: the accepted `paths` (node numbers, root left out) and its duration.

        seconds: None where a size costs what it did at the start (captured graphs).
        """
        if seconds is not None:
            known = self.cost.get(nodes)
            self.cost[nodes] = seconds if known is None else known + LEARN * (min(seconds, 2 * known) - known)
        for count, hint, path in [
            *((count, hint, path) for count, hint, path in zip(counts, hints, paths) if count > 1),
            *((count, ANY, path) for count, path in zip(counts, paths)),
        ]:
            gain = self._gains(hint)
            share = max(PRIOR, len(path) / max(1, nodes - 1))  # of a larger size: as much as of this one, at least
            for place, n in enumerate(self.sizes):
                if n <= nodes or count <= nodes:
                    gain[place] += LEARN * (bisect_left(path, n) - gain[place])  # a path's nodes ascend
                else:
                    gain[place] += FORGET * (share * (n - 1) - gain[place])

    def _gains(self, hint: int) -> list[float]:
        return self.gain.setdefault(hint, [PRIOR * (n - 1) for n in self.sizes])
