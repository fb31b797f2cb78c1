"""`RoundPipeline`: rounds under way over any rows of a session, launched ahead of their outcomes."""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import RequestError
from ..outcome import Outcome, unpack
from ..tree import MAX_NODES
from .draft_budget import DraftBudget
from .draft_record import ALL, NO_TREE, Group, TreeOutcome
from .request import Sequence
from .runtime import Runtime
from .session import Session
from .state import MOST_LATE
from .steps import StepKind
from .verify.sample import NO_PROBABILITIES

AHEAD = 2
"""Rounds in flight on a GPU."""


class NotEmbeddedError(RequestError, IndexError):
    """A text goes on after a token that the model does not read."""


def check_gained(outcome: Outcome, embedded: int) -> None:
    """RuntimeError if a token could not be drawn; IndexError, as in plain decoding, if a text goes on after a token
    that is not among the `embedded` ones that the model reads."""
    if -1 in outcome.gained:
        raise RuntimeError(NO_PROBABILITIES)
    if outcome.gained and outcome.gained[-1] >= embedded and not outcome.finished:
        raise NotEmbeddedError(
            f"the model generated token id {outcome.gained[-1]}, and has embeddings of {embedded} tokens; suppress the "
            "others by suppress_tokens"
        )


@dataclass
class InFlightRound:
    """A round that was launched over `nodes` nodes of each row.

    drafted: how many of them every tree has, the root included; None if each outcome tells.
    kind: its step's kind, whose policy learns from it.
    sequences: each with the row that it had then.
    groups: the group of each row's tree, as far as the host knew it.
    read: waits for the outcomes and returns them by row.
    seconds: its begin, and after `collect` its duration, without the time spent compiling.
    """

    session: Session
    kind: StepKind
    nodes: int
    drafted: int | None
    sequences: list[tuple[int, Sequence]]
    groups: dict[int, Group]
    read: Callable[[], list[list[int]]]
    seconds: float


class RoundPipeline:
    """Launches rounds, and gives their outcomes to the policies of tree sizes and the statistics.

    trace: collects the tokens that each row gains in each round, for `Stats.trace`; None keeps none.
    """

    def __init__(self, runtime: Runtime, trace: list[list[int]] | None = None):
        self.runtime, self.trace = runtime, trace
        plan = runtime.algorithm.plan
        self.tree_size = plan.nodes if plan.is_whole else None
        """Real nodes of every tree if the drafter's trees have one size; None if each outcome tells."""
        self.pending = plan.nodes
        """Nodes of the rows' trees when the round launched last has ended, if they have one size; 1 without trees."""
        self.late = 0
        """Most tokens that the drafter is late by when that round has ended."""
        self._rounds: deque[InFlightRound] = deque()
        self._collected: float | None = None
        """The time of the last `collect`, if another round was under way then."""
        self._digest = 0
        """A hash of all outcomes so far, which is equal on all ranks."""

    def __len__(self) -> int:
        return len(self._rounds)

    @property
    def nodes(self) -> int:
        """Nodes of all rounds under way."""
        return sum(in_flight.nodes for in_flight in self._rounds)

    def may_launch(self, sequences: list[Sequence], on_host: bool) -> bool:
        """True if one more round may begin. on_host: the host chooses its tokens, so that rounds do not overlap."""
        ahead = AHEAD if self.runtime.on_gpu and not on_host else 1
        return len(self._rounds) < min(ahead, max(sequence.room for sequence in sequences))

    def launch(
        self, session: Session, kind: StepKind, sequences: list[Sequence], longest: int,
        begin: Callable[[int, int], Callable[[], list[list[int]]]], nodes: int | None = None,
    ) -> None:  # fmt: skip
        """Begin a round.

        longest: the largest `Sequence.length` of the session.
        begin: launches a round of (nodes, max_kv_len); its result waits for the outcomes.
        nodes: None leaves the number to the policy.
        """
        # Its size, which the first rank chooses.
        choose = (lambda: [nodes]) if nodes else lambda: [self._choose_nodes(session.steps.policies[kind], sequences)]
        (nodes,) = self.runtime.options.ranks.lead(choose, check=self._digest)
        max_kv_len = session.max_kv_len(longest + nodes)  # guard: slots-of-attention
        now = self._now()
        if nodes > 1 or self.late == MOST_LATE:
            self.catch_up(session, longest)

        # Trees, if the last round has left none, and the round itself.
        plan = self.runtime.algorithm.plan
        if nodes > self.pending:
            session.steps.propose(max_kv_len)
            self.pending = plan.nodes
            if not self.runtime.on_gpu:
                session.steps.policies[kind].costs.learn_switch(self._now() - now)
                now = self._now()
        drafted = None if self.tree_size is None else min(nodes, self.pending)
        self.pending = plan.next_nodes(nodes)
        self.late += self.tree_size is not None and self.pending == 1
        read = begin(nodes, max_kv_len)
        groups = {sequence.row: self.group(sequence) for sequence in sequences}
        rows = [(sequence.row, sequence) for sequence in sequences]
        self._rounds.append(InFlightRound(session, kind, nodes, drafted, rows, groups, read, now))

    def catch_up(self, session: Session, longest: int) -> None:
        """Let the drafter process the tokens that it is late by, if there are any. longest: see `launch`."""
        if self.late:
            size = session.steps.late_size(self.late)
            session.steps.catch_up(size, session.max_kv_len(longest + size))
            self.late = 0

    def collect(self) -> tuple[InFlightRound, list[tuple[Sequence, Outcome]]]:
        """Wait for the oldest round. Returns it with the outcomes of the sequences that go on."""
        in_flight, now = self._rounds.popleft(), self._now()
        if self._collected is not None:
            in_flight.session.steps.policies[in_flight.kind].costs.learn_host(now - self._collected)
        rows = in_flight.read()
        now = self._now()
        in_flight.seconds = now - in_flight.seconds
        self._collected = now if self._rounds else None
        return in_flight, [
            (sequence, unpack(rows[row])) for row, sequence in in_flight.sequences if not sequence.is_over
        ]

    def learn(self, in_flight: InFlightRound, outcomes: list[tuple[Sequence, Outcome]]) -> None:
        """Give a round's outcomes to its policy and the statistics."""
        # Until now `count` and `hint` belong to the verified trees.
        policy = in_flight.session.steps.policies[in_flight.kind]
        trees = [
            TreeOutcome(in_flight.drafted or sequence.count, in_flight.groups.get(sequence.row, ALL), outcome.path[1:])
            for sequence, outcome in outcomes
            if sequence.count is not None and sequence.most_nodes >= policy.sizes[-1]  # a row with a limit tells less
        ]
        policy.learn(in_flight.nodes, trees, None if self.runtime.on_gpu else in_flight.seconds)

        # Each row has another tree now; then the statistics.
        stats, gained = self.runtime.stats, [0] * in_flight.session.batch
        depths: Counter[tuple[int, int]] = Counter()
        for sequence, outcome in outcomes:
            sequence.count, sequence.hint = outcome.next_count, outcome.next_hint
            gained[sequence.row] = len(outcome.gained)
            depths[outcome.depth, max(len(outcome.path) - 1, 0)] += 1
            if self.runtime.options.ranks.size > 1:
                told = outcome.finished, *outcome.gained, *outcome.tokens, *outcome.parents
                self._digest = hash((self._digest, *told))
        for (offered, accepted), count in depths.items():
            stats.count_depths(offered, accepted, count)
        stats.trace = [] if self.trace is None else self.trace  # another call may have put its own there
        stats.count_round(in_flight.nodes, gained, len(outcomes))

    def group(self, sequence: Sequence) -> Group:
        """The group of a row's newest tree that the host knows.

        A part of a tree expects fewer drafts than all of it, so that parts count as other confidences: with a hint of 2
        and MAX_NODES of 64, 4 nodes of 16 have the confidence 66, and all 16 have 2.
        """
        if sequence.count is None or sequence.hint is None:
            return Group(sequence.loaded.number)
        is_part = sequence.count < (self.tree_size or 0)
        confidence = sequence.hint + (MAX_NODES if is_part else 0)
        return Group(sequence.loaded.number, confidence if sequence.count > 1 else NO_TREE)

    def _choose_nodes(self, policy: DraftBudget, sequences: list[Sequence]) -> int:
        """Nodes of the next round: by the trees themselves, unless only the GPU knows them."""
        most = min(max(sequence.most_nodes for sequence in sequences), policy.sizes[-1])
        if most == 1 or self.runtime.guard.error is not None:
            return 1
        known = [sequence for sequence in sequences if sequence.count is not None]
        groups, counts = [self.group(sequence) for sequence in known or sequences], None
        if len(known) == len(sequences):
            counts = [min(sequence.count, sequence.most_nodes) for sequence in known]
        nodes = policy.choose(groups, counts, [in_flight.nodes for in_flight in self._rounds])
        return min(nodes, next(size for size in policy.sizes if size >= most))

    def _now(self) -> float:
        """The time in seconds, without those spent compiling."""
        return time.perf_counter() - self.runtime.stats.seconds["compile"]
