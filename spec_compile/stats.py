"""What speculation has done so far: `Stats`."""

import time
from dataclasses import dataclass, field


@dataclass
class Stats:
    """Counters since the start or the last `reset`.

    rounds: rounds run. tokens: tokens committed, all rows. steps: rounds times the rows unfinished in them (plain
    decoding would need `tokens` of them). offered[d], accepted[d]: how often a tree reached depth d + 1, and how often
    its node there was accepted. nodes: how often each size was verified. trace: of the last generate(), round by
    round, the tokens each row gained. seconds: prefill, draft, verify (with accept and commit), host (everything else
    in the loop), compile.
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

    @property
    def accept_length(self) -> float:
        """Tokens committed per round and row, the bonus token included (plain decoding: 1.0)."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Of the trees verified with a node at depth d + 1, the share that had one accepted there."""
        return [a / o for a, o in zip(self.accepted, self.offered)]

    def reset(self) -> None:
        """Set every counter back to zero."""
        vars(self).update(vars(Stats()))

    def count_round(self, nodes: int, gained: list[int], active: int) -> None:
        """A round over `nodes` nodes and `active` unfinished rows, that gained so many tokens each."""
        self.trace.append(gained)
        self.tokens += sum(gained)
        self.rounds += 1
        self.steps += active
        self.nodes[nodes] = self.nodes.get(nodes, 0) + 1

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count `seconds` of `source` as time of `target`."""
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

    def count_depths(self, offered: int, accepted: int) -> None:
        """One row's tree reached depth `offered` and was accepted down to depth `accepted`."""
        missing = offered - len(self.offered)
        if missing > 0:
            self.offered += [0] * missing
            self.accepted += [0] * missing
        for depth in range(offered):
            self.offered[depth] += 1
        for depth in range(accepted):
            self.accepted[depth] += 1

    def __str__(self) -> str:
        busy = {name: value for name, value in self.seconds.items() if name != "compile"}
        decode = sum(busy.values())
        sizes = ", ".join(f"{count}×{n}" for n, count in sorted(self.nodes.items()))
        depths = " ".join(f"{share:.2f}" for share in self.acceptance_by_depth[:12])
        return "\n".join(
            [
                f"{self.tokens} tokens in {self.rounds} rounds, accept length {self.accept_length:.2f}",
                f"  rounds × nodes verified: {sizes or '-'}",
                f"  acceptance by depth: {depths or '-'}",
                "  time: " + ", ".join(f"{name} {value:.3f} s" for name, value in busy.items())
                + (f" ({self.tokens / decode:.0f} tokens/s)" if decode else "")
                + f"; compiling {self.seconds['compile']:.1f} s",
            ]
        )  # fmt: skip


class Clock:
    """Divides the time that passes among ``stats.seconds``, leaving out what was spent compiling."""

    def __init__(self, stats: Stats):
        self._stats = stats
        self.restart()

    def restart(self) -> None:
        """Leave out the time since the last call of `spend`."""
        self._last, self._compiled = time.perf_counter(), self._stats.seconds["compile"]

    def spend(self, name: str) -> float:
        """The time since the last call was spent on `name`; returns it."""
        now, compiled = time.perf_counter(), self._stats.seconds["compile"]
        seconds = now - self._last - (compiled - self._compiled)
        self._last, self._compiled = now, compiled
        self._stats.seconds[name] += seconds
        return seconds
