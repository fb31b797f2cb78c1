"""The gains of drafts: `DraftRecord`, also in earlier processes, and `Hindsight`, without verifying them."""

import json
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..errors import log
from .state import State

LEARN = 0.15  # least weight of the newest round in the mean gains
FADE = 0.9  # share of the evidence that is left after a round without drafts
FEW_ROUNDS = 4.0  # rounds of one confidence that count as much as the mean of all
ALLOWED = 4.0  # plain rounds that drafts may lose before anything is known of them
SHARE = 0.02  # share of the time of plain rounds that trials may lose, if drafts have paid before
RARE = 0.01  # the same if they never have
WINDOW = 64  # number of drafting rounds over which we average before we report a change
FALL, ENOUGH = 0.25, 0.5  # we report a fall to this share of the best average, if that was ENOUGH accepted drafts
NEVER = 32  # drafting rounds after which we report that no draft was ever accepted
CAUSES = (
    "the draft may belong to another model or another fine-tune, or prompts may lack the chat template; "
    "answers stay right"
)
FORMAT = 2  # of the records in a store
ANY, NO_TREE = -1, -2  # confidences that stand for all trees of an adapter, and for rows without drafts


class Group(NamedTuple):
    """Trees whose gains are averaged.

    adapter: number of the row's LoRA adapter, see `Loaded`; 0: none.
    confidence: the drafter's in the tree; for n-grams the length of the match.
    """

    adapter: int = 0
    confidence: int = ANY


ALL = Group()


@dataclass
class TreeOutcome:
    """A verified tree: its real nodes, its group as known when the round began, and the accepted nodes below the root,
    which ascend."""

    count: int
    group: Group
    path: list[int]


def by_group(trees: Sequence[TreeOutcome]) -> dict[Group, list[TreeOutcome]]:
    """The trees of each group, and of each adapter."""
    found: dict[Group, list[TreeOutcome]] = {}
    for tree in trees:
        for group in {Group(tree.group.adapter), tree.group}:
            found.setdefault(group, []).append(tree)
    return found


@dataclass
class Gain:
    """The mean number of accepted drafts of a row. rounds: that the mean stands for, fewer the older they are."""

    mean: float = 0.0
    rounds: float = 0.0

    def learn(self, gained: float) -> None:
        self.rounds += 1
        self.mean += max(LEARN, 1 / self.rounds) * (gained - self.mean)


@dataclass
class DraftRecord:
    """Results of the rounds that drafted.

    gains: what the first nodes of a tree gain, by its group and the number of these nodes.
    budget: plain rounds that drafts of an adapter may still lose. Drafts that fail with one are made without it.
    exploration_budget: time, in plain rounds, left for trying whole trees while a smaller size looks better.
    level: mean number of accepted drafts in about WINDOW rounds, best its largest value, and drafted their number.
    """

    gains: dict[tuple[Group, int], Gain] = field(default_factory=dict)
    budget: dict[int, float] = field(default_factory=dict)
    exploration_budget: float = 0.0
    level: float = 0.0
    best: float = 0.0
    drafted: int = 0
    has_paid: bool = False
    has_warned: bool = False

    @property
    def share(self) -> float:
        """Share of the time of plain rounds that trials may lose."""
        return SHARE if self.has_paid else RARE

    def budget_of(self, groups: Sequence[Group] = ()) -> float:
        """The mean budget of rows of these groups; without any, the budget of rows without an adapter."""
        known = [self.budget.get(group.adapter, ALLOWED) for group in groups or [ALL]]
        return sum(known) / len(known)

    def follows_confidence(self, groups: Sequence[Group]) -> bool:
        """True if drafts pay by and large for rows of these groups, and at least two confidences were seen."""
        has_some = any(group.confidence != ANY for group in groups)
        seen = {group.confidence for group, _ in self.gains} - {ANY}
        return has_some and self.has_paid and self.budget_of(groups) > 0 and len(seen) > 1

    def gain(self, nodes: int, groups: Sequence[Group] = ()) -> float:
        """The expected number of accepted drafts of a row among `nodes` nodes.

        groups: one for each row; without any, rows without an adapter are meant.

        A group of which little is known is expected to be like others: with a mean of 2 in one round and 1 in all
        groups of its adapter, 1.2 = (1 * 2 + FEW_ROUNDS * 1) / (1 + FEW_ROUNDS). So is an adapter of which nothing is
        known.
        """
        base, means = self.gains.get((ALL, nodes), Gain()), []
        for group in groups:
            others = self.gains.get((Group(group.adapter), nodes), base)
            own = self.gains.get((group, nodes), Gain())
            means.append((own.rounds * own.mean + FEW_ROUNDS * others.mean) / (own.rounds + FEW_ROUNDS))
        return sum(means) / len(means) if means else base.mean

    def learn(self, sizes: list[int], trees: Sequence[TreeOutcome]) -> None:
        """Take in the accepted paths of a round. [1, 3, 9] is a gain of 2 for the size 4."""
        for group, own in by_group(trees).items():
            if group.confidence != NO_TREE:
                for nodes in sizes:
                    gain = self.gains.setdefault((group, nodes), Gain())
                    gain.learn(sum(bisect_left(tree.path, nodes) for tree in own) / len(own))

    def fade(self, adapters: Iterable[int] = (0,)) -> None:
        """After a round without drafts of rows with these adapters: their means count less."""
        faded = {*map(Group, adapters)}
        for (group, _), gain in self.gains.items():
            gain.rounds *= FADE if group in faded else 1

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
        gains = {nodes: [gain.mean, gain.rounds] for (group, nodes), gain in self.gains.items() if group == ALL}
        told = {"gains": gains, "budget": min(self.budget_of(), ALLOWED)}
        return told | {name: getattr(self, name) for name in TOLD}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "DraftRecord":
        """The record that `as_data` has told. KeyError, TypeError or ValueError for anything else."""
        gains = {(ALL, int(nodes)): Gain(float(mean), float(rounds)) for nodes, (mean, rounds) in data["gains"].items()}
        told = {name: kind(data[name]) for name, kind in TOLD.items()}
        return cls(gains, {0: float(data["budget"])}, **told)


TOLD = {"level": float, "best": float, "drafted": int, "has_paid": bool}


class DraftRecords:
    """The records of a draft by kind of round."""

    def __init__(self) -> None:
        self._records: dict[str, DraftRecord] = {}
        self._store: Any = None
        self._name = ""
        self._next = NEVER  # drafting rounds at which the records are kept again

    def __getitem__(self, kind: str) -> DraftRecord:
        return self._records.setdefault(kind, DraftRecord())

    def open(self, store: Any, name: str) -> None:
        """Begin with the records that `store` has under a name from earlier processes, and keep them there.

        store: has recall(name) and keep(name, bytes), see `compile.start.StartArtefact`. Data that are missing,
            damaged or of another format are no records.
        """
        self._store, self._name = store, name
        try:
            content = json.loads(store.recall(name) or b"{}")
            known = content if content.pop("format", None) == FORMAT else {}
            self._records = {kind: DraftRecord.from_data(each) for kind, each in known.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            log.debug("the record of earlier drafts is not read: %r", error)
            self._records = {}
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


@dataclass
class _Tree:
    """A tree that the text still follows. end: the slot of the text's token that is `node`."""

    confidence: int
    children: dict[tuple[int, int], int]
    end: int
    node: int = 0
    path: list[int] = field(default_factory=list)

    def follow(self, text: list[int], begin: int) -> bool:
        """Go on along `text`, whose first token is in slot `begin`. True if the text has left the tree.

        With end = 7, begin = 6 and text = [4, 9, 3, 5], slots 8 and 9 hold the next tokens, 3 and 5.
        """
        for token in text[self.end + 1 - begin :]:
            child = self.children.get((self.node, token))
            if child is None:
                return True
            self.path.append(child)
            self.end, self.node = self.end + 1, child
        return all(parent != self.node for parent, _ in self.children)


class Hindsight:
    """Compares the trees in a `State` on a CPU with the tokens that are committed afterwards.

    An n-gram tree does not depend on how many of its nodes are verified, so even plain rounds show the gain of drafts.
    """

    def __init__(self, state: State):
        self._state = state
        self._trees: list[list[_Tree]] = [[] for _ in range(state.batch)]
        self._ends = [-1] * state.batch  # the slot of each row's last token at the last `look`

    def move(self, row: int, to: int) -> None:
        """The text of one row goes on in another."""
        self._trees[to], self._ends[to] = self._trees[row], self._ends[row]
        self.forget(row)

    def forget(self, row: int) -> None:
        """Drop the trees of a row that gets another text."""
        self._trees[row], self._ends[row] = [], int(self._state.lengths[row])

    def look(self) -> list[tuple[int, list[int]]]:
        """Call this before each round. Returns (confidence, path without root) of trees that texts have left since."""
        state, known = self._state, []
        ends, confidences, counts = state.lengths.tolist(), state.tree_confidence.tolist(), state.tree_count.tolist()
        for row, (end, before) in enumerate(zip(ends, self._ends)):
            if end == before:
                continue
            if end < before:
                self._trees[row].clear()  # another text
            text, going = state.tokens[row, before + 1 : end + 1].tolist() if before < end else [], []
            for tree in self._trees[row]:
                if tree.follow(text, before + 1):
                    known.append((tree.confidence, tree.path))
                else:
                    going.append(tree)
            if counts[row] > 1:
                drafts = slice(1, counts[row])
                pairs = zip(state.tree_parents[row, drafts].tolist(), state.tree_tokens[row, drafts].tolist())
                going.append(_Tree(confidences[row], {pair: node for node, pair in enumerate(pairs, 1)}, end))
            self._trees[row], self._ends[row] = going, end
        return known
