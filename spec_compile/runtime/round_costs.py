"""`RoundCosts`: how long the rounds of a session take, by number of nodes."""

from bisect import bisect_left

LEARN = 0.15
"""Weight of the newest duration in a running mean."""
COMMON = 0.75
"""Share of a change in one size's duration that the other sizes probably share (longer texts, other processes)."""
KNEES = {"cpu": 8, "cuda": 256}
"""Rows (sequences times nodes) that cost about as much as reading the weights, measured with an 8B model on an H200 and
with the demo model on two CPU cores."""


class RoundCosts:
    """Durations in seconds, or in any unit before a round has run.

    batch: sequences of a round.
    knee: see `KNEES`.
    measured: of the sizes that have run, by number of nodes.
    host: that the host takes for a round while another runs on a GPU; a shorter round waits for it.
    switch: of the steps between a round without drafts and one that drafts: catching up, and a proposal.
    """

    def __init__(self, batch: int = 1, knee: int = KNEES["cuda"]):
        self.batch, self.knee = batch, knee
        self.measured: dict[int, float] = {}
        self.host = 0.0
        self.switch = 0.0

    def expected(self, nodes: int) -> float:
        """The duration of a round over `nodes` nodes. Between two sizes that have run it is in proportion to the nodes:
        with 1 s for 1 node and 2.5 s for 16, 4 nodes take 1.3 s. Elsewhere it is in proportion to the knee plus the
        rows: with a knee of 256, and 2 s for 16 nodes of one sequence, 4 nodes take 2 * 260 / 272 = 1.9 s."""
        if nodes in self.measured:
            return max(self.measured[nodes], self.host)
        known = sorted(self.measured)
        place = bisect_left(known, nodes)
        if 0 < place < len(known):
            below, above = known[place - 1 : place + 1]
            slope = (self.measured[above] - self.measured[below]) / (above - below)
            seconds = self.measured[below] + slope * (nodes - below)
        elif known:
            nearest = known[min(place, len(known) - 1)]
            seconds = self.measured[nearest] * self._weight(nodes) / self._weight(nearest)
        else:
            seconds = self._weight(nodes)
        return max(seconds, self.host)

    def _weight(self, nodes: int) -> int:
        return self.knee + self.batch * nodes

    def learn(self, nodes: int, seconds: float) -> None:
        """A round over `nodes` nodes took so long. Twice the known duration is the most that counts."""
        known = self.measured.setdefault(nodes, seconds)
        change = LEARN * (min(seconds / known, 2) - 1)
        for size in self.measured:
            self.measured[size] *= 1 + (change if size == nodes else COMMON * change)

    def learn_host(self, seconds: float) -> None:
        """The host took so long between two rounds, while another ran."""
        self.host = _moved(self.host, seconds)

    def learn_switch(self, seconds: float) -> None:
        """Catching up and a proposal took so long."""
        self.switch = _moved(self.switch, seconds)


def _moved(known: float, seconds: float) -> float:
    """A duration after one more measurement, of which the longest may be other work; `seconds` if none is known."""
    return known + LEARN * (min(seconds, 2 * known) - known) if known else seconds
