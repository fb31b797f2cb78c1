"""`DraftRecord`: what drafts of one kind have gained so far, in this process and in those before it."""

import json
import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .draft_length import ANY, NO_TREE, STRIDE, every

log = logging.getLogger("spec_compile")

LEARN = 0.15
"""Least weight of the newest round in the mean gains."""
FADE = 0.9
"""Share of the evidence that is left after a round without drafts."""
FEW_ROUNDS = 4.0
"""Rounds of a bucket of confidence that count as much as the mean of all buckets."""
ALLOWED = 4.0
"""Plain rounds that drafts may lose before anything is known of them."""
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
CAUSES = (
    "the draft may belong to another model or another fine-tune, or prompts may lack the chat template; "
    "answers stay right"
)
FORMAT = 1


@dataclass
class Gain:
    """The mean number of accepted drafts of a row.

    rounds: that the mean stands for, fewer the older they are.
    """

    mean: float = 0.0
    rounds: float = 0.0

    def learn(self, gained: float) -> None:
        self.rounds += 1
        self.mean += max(LEARN, 1 / self.rounds) * (gained - self.mean)

    def toward(self, other: float) -> float:
        """The mean of these rounds, and of FEW_ROUNDS more with the mean `other`."""
        return (self.rounds * self.mean + FEW_ROUNDS * other) / (self.rounds + FEW_ROUNDS)


@dataclass
class DraftRecord:
    """Results of the rounds that drafted.

    gains: by bucket of the drafter's confidence and number of nodes, what so many nodes of a tree gain. Rows of
        different LoRA adapters have different buckets, see `draft_length.STRIDE`.
    slack: plain rounds that may still be lost, by the bucket of all rounds of an adapter (`draft_length.every`).
    looks: plain rounds that a whole tree may lose next to learn what it gains, where fewer nodes seem better.
    level: mean number of accepted drafts in about WINDOW rounds, best its largest value, and drafted their number.
    """

    gains: dict[int, dict[int, Gain]] = field(default_factory=dict)
    slack: dict[int, float] = field(default_factory=dict)
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

    def slack_of(self, buckets: Sequence[int] = ()) -> float:
        """The mean slack of rows of these buckets; without any, that of rows without an adapter."""
        known = [self.slack.get(every(bucket), ALLOWED) for bucket in buckets or [ANY]]
        return sum(known) / len(known)

    def tells_buckets(self, buckets: Sequence[int]) -> bool:
        """True if drafts pay by and large for rows of these buckets, and confidence in them differs."""
        confidences = {bucket % STRIDE for bucket in self.gains}
        has_some = any(bucket != every(bucket) for bucket in buckets)
        return has_some and self.has_paid and self.slack_of(buckets) > 0 and len(confidences) > 2  # ANY, and two others

    def gain(self, nodes: int, buckets: Sequence[int] = ()) -> float:
        """The expected number of accepted drafts of a row among `nodes` nodes.

        buckets: of the rows; none: of rows without an adapter. A bucket of which little is known is expected to be like
            others: with a mean of 2 in one round and 1 in all buckets of its adapter,
            1.2 = (1 * 2 + FEW_ROUNDS * 1) / (1 + FEW_ROUNDS). So is an adapter of which nothing is known.
        """
        base = self.gains.get(ANY, {}).get(nodes, Gain())
        means = []
        for bucket in buckets:
            like_others = self.gains.get(every(bucket), {}).get(nodes, base).mean
            means.append(self.gains.get(bucket, {}).get(nodes, Gain()).toward(like_others))
        return sum(means) / len(means) if means else base.mean

    def learn(self, sizes: list[int], buckets: list[int], paths: list[list[int]]) -> None:
        """Take in the accepted `paths` of rows of these `buckets`. [1, 3, 9] is a gain of 2 for the size 4."""
        rows: dict[int, list[list[int]]] = {}
        for bucket, path in zip(buckets, paths):
            has_confidence = (bucket - NO_TREE) % STRIDE >= -NO_TREE  # `ANY` and `NO_TREE` are below
            for each in {every(bucket), bucket} if has_confidence else {every(bucket)}:
                rows.setdefault(each, []).append(path)
        for bucket, own in rows.items():
            for nodes in sizes:
                gain = self.gains.setdefault(bucket, {}).setdefault(nodes, Gain())
                gain.learn(sum(bisect_left(path, nodes) for path in own) / len(own))

    def fade(self, buckets: Sequence[int] = (ANY,)) -> None:
        """After a round without drafts of rows of these buckets: the means of their adapters count less."""
        for bucket in {*map(every, buckets)}:
            for gain in self.gains.get(bucket, {}).values():
                gain.rounds *= FADE

    def watch(self, gained: float) -> None:
        """Take in the accepted drafts of a round. Warns once if there are none, or far fewer than before."""
        self.drafted += 1
        self.level += (gained - self.level) / min(self.drafted, WINDOW)
        self.best = max(self.best, self.level) if self.drafted >= WINDOW else 0.0
        if self.drafted == NEVER and not self.level:
            log.warning("no draft was accepted in the first %d rounds that drafted: %s", NEVER, CAUSES)
        if not self.has_warned and self.best >= ENOUGH and self.level < FALL * self.best:
            self.has_warned = True
            log.warning(
                "%.2f drafts are accepted in a round, where %.2f were before: texts may be of another kind, or longer "
                "than those that the draft was trained with, prompts may lack the chat template, or weights may have "
                "changed; answers stay right", self.level, self.best,
            )  # fmt: skip

    def as_data(self) -> dict[str, Any]:
        """All that later processes begin with, as JSON has it."""
        gains = {str(nodes): [gain.mean, gain.rounds] for nodes, gain in self.gains.get(ANY, {}).items()}
        return {
            "gains": gains, "slack": min(self.slack_of(), ALLOWED), "level": self.level,
            "best": self.best, "drafted": self.drafted, "has_paid": self.has_paid,
        }  # fmt: skip

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "DraftRecord":
        """The record that `as_data` has told. KeyError, TypeError or ValueError for anything else."""
        gains = {int(nodes): Gain(float(mean), float(rounds)) for nodes, (mean, rounds) in data["gains"].items()}
        return cls(
            {ANY: gains} if gains else {}, {ANY: float(data["slack"])}, 0.0, float(data["level"]),
            float(data["best"]), int(data["drafted"]), bool(data["has_paid"]),
        )  # fmt: skip


class RecordStore(Protocol):
    """Data by name, between processes (`artefacts.start.StartArtefact`)."""

    def recall(self, name: str) -> bytes | None: ...
    def keep(self, name: str, data: bytes) -> None: ...


class DraftRecords:
    """The records of a draft by kind of round."""

    def __init__(self) -> None:
        self._records: dict[str, DraftRecord] = {}
        self._store: RecordStore | None = None
        self._name = ""
        self._next = NEVER
        """Rounds that drafted at which the records are kept again."""

    def __getitem__(self, kind: str) -> DraftRecord:
        return self._records.setdefault(kind, DraftRecord())

    def open(self, store: RecordStore, name: str) -> None:
        """Begin with the records that `store` has under a name from earlier processes, and keep them there."""
        self._store, self._name = store, name
        self._records = _unpacked(store.recall(name))
        self._next = max(NEVER, 2 * self._drafted)
        for record in self._records.values():
            if record.drafted >= NEVER and not record.level:
                log.warning("no draft was accepted in the last rounds of earlier processes: %s", CAUSES)

    def keep(self) -> None:
        """Keep the records if twice as many rounds as the last time have drafted."""
        if self._store is not None and self._drafted >= self._next:
            self._next = 2 * self._drafted
            data = {kind: record.as_data() for kind, record in self._records.items()}
            self._store.keep(self._name, json.dumps({"format": FORMAT, **data}).encode())

    @property
    def _drafted(self) -> int:
        return sum(record.drafted for record in self._records.values())


def _unpacked(data: bytes | None) -> dict[str, DraftRecord]:
    """The records in a file; none if it is missing, damaged, or of another format."""
    try:
        content = json.loads(data or b"{}")
        if content.pop("format", None) != FORMAT:
            return {}
        return {kind: DraftRecord.from_data(each) for kind, each in content.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        log.debug("the record of earlier drafts is not read: %r", error)
        return {}
