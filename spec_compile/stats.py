"""`Stats`, the counters and times of a speculative model, and `Clock`, which measures the times."""

import time
from dataclasses import dataclass, field


@dataclass
class Stats:
    """Counters since the start or the last `reset`.

    rounds: number of rounds.
    tokens: tokens committed in all rows.
    steps: unfinished rows, summed over rounds; plain decoding would need `tokens` of them.
    offered: offered[d] counts trees that reached depth d + 1.
    accepted: accepted[d] counts trees that had a node accepted at depth d + 1.
    nodes: number of rounds by the number of nodes that they verified.
    trace: for each round of the last generate(), the number of tokens that each row gained.
    seconds: the time of prefill, draft, verify (with accept and commit), host (the rest of the loop) and compile.
    vocabulary_share: see `Algorithm.vocabulary_share`; `reset` keeps it.
    """

    rounds: int = 0
    tokens: int = 0
    steps: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    nodes: dict[int, int] = field(default_factory=dict)
    trace: list[list[int]] = field(default_factory=list)
    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("prefill", "draft", "verify", "host", "compile"), 0.0)
    )
    vocabulary_share: float | None = None

    @property
    def accept_length(self) -> float:
        """Tokens committed per round and row, the bonus token included (plain decoding: 1.0)."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def drafting_share(self) -> float:
        """The share of rounds that verified drafts. nodes = {1: 30, 4: 2, 16: 8} gives 10 / 40."""
        return 1 - self.nodes.get(1, 0) / self.rounds if self.rounds else 0.0

    @property
    def mean_nodes(self) -> float:
        """Nodes that a round verified on average. nodes = {1: 30, 4: 2, 16: 8} gives 166 / 40."""
        return sum(nodes * count for nodes, count in self.nodes.items()) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """For each depth d + 1, the share of trees with a node accepted there among those that have a node there."""
        return [a / o for a, o in zip(self.accepted, self.offered)]

    def reset(self) -> None:
        """Set every counter back to zero."""
        vars(self).update(vars(Stats(vocabulary_share=self.vocabulary_share)))

    def count_round(self, nodes: int, gained: list[int], active: int) -> None:
        """Count a round over `nodes` nodes. gained: tokens that each row gained. active: unfinished rows."""
        self.trace.append(gained)
        self.tokens += sum(gained)
        self.rounds += 1
        self.steps += active
        self.nodes[nodes] = self.nodes.get(nodes, 0) + 1

    def move(self, source: str, target: str, seconds: float) -> None:
        """Move `seconds` from the time of `source` to the time of `target`."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def count_depths(self, offered: int, accepted: int, rows: int = 1) -> None:
        """Count the trees of some rows that reached depth `offered` and were accepted down to depth `accepted`."""
        missing = max(0, offered - len(self.offered))
        self.offered += [0] * missing
        self.accepted += [0] * missing
        for depth in range(offered):
            self.offered[depth] += rows
        for depth in range(accepted):
            self.accepted[depth] += rows

    def __str__(self) -> str:
        busy = {name: value for name, value in self.seconds.items() if name != "compile"}
        decode = sum(busy.values())
        sizes = ", ".join(f"{count}×{n}" for n, count in sorted(self.nodes.items()))
        choices = f"{sizes} ({self.drafting_share:.0%} drafted, {self.mean_nodes:.1f} nodes a round)" if sizes else "-"
        depths = " ".join(f"{share:.2f}" for share in self.acceptance_by_depth[:12])
        share = self.vocabulary_share
        return "\n".join(
            [
                f"{self.tokens} tokens in {self.rounds} rounds, accept length {self.accept_length:.2f}",
                f"  rounds × nodes verified: {choices}",
                f"  acceptance by depth: {depths or '-'}",
                *([] if share is None else [f"  vocabulary in common with the draft: {share:.0%}"]),
                "  time: " + ", ".join(f"{name} {value:.3f} s" for name, value in busy.items())
                + (f" ({self.tokens / decode:.0f} tokens/s)" if decode else "")
                + f"; compiling {self.seconds['compile']:.1f} s",
            ]
        )  # fmt: skip


class Clock:
    """Divides the time that passes, less that spent compiling, among the entries of ``stats.seconds``."""

    def __init__(self, stats: Stats):
        self._stats = stats
        self.restart()

    def restart(self) -> None:
        """Leave out the time since the last call of `spend`."""
        self._last, self._compiled = time.perf_counter(), self._stats.seconds["compile"]

    def spend(self, name: str) -> float:
        """Count the time since the last call as time of `name`, and return it in seconds."""
        now, compiled = time.perf_counter(), self._stats.seconds["compile"]
        seconds = now - self._last - (compiled - self._compiled)
        self._last, self._compiled = now, compiled
        self._stats.seconds[name] += seconds
        return seconds
