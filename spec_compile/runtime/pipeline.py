"""`RoundPipeline`: rounds under way over any rows of a session, launched ahead of their outcomes."""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import RequestError
from ..outcome import Outcome, unpack
from ..tree import MAX_NODES
from .accept.random_numbers import NO_PROBABILITIES
from .draft_length import ANY, NO_TREE, STRIDE, SizePolicy
from .request import Sequence
from .runtime import Runtime
from .session import Session
from .state import MOST_LATE
from .step_back import StepBack
from .steps import StepKind

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

    drafted: those of them that every tree has, the root included; None if each outcome tells.
    kind: of its step, whose policy learns from it.
    sequences: with the row that each had then.
    buckets: of the drafter's confidence, for each of these rows, as far as the host knew it.
    read: waits for the outcomes and returns them by row.
    seconds: its begin, and after `collect` its duration, without the time spent compiling.
    """

    session: Session
    kind: StepKind
    nodes: int
    drafted: int | None
    sequences: list[tuple[int, Sequence]]
    buckets: dict[int, int]
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
        choose = (lambda: [nodes]) if nodes else lambda: [self._choose_nodes(session.steps.policies[kind], sequences)]
        (nodes,) = self.runtime.options.ranks.lead(choose, check=self._digest)
        max_kv_len = session.max_kv_len(longest + nodes)  # guard: slots-of-attention
        now = self._now()
        if nodes > 1 or self.late == MOST_LATE:
            self.catch_up(session, longest)
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
        buckets = {sequence.row: self.bucket(sequence) for sequence in sequences}
        rows = [(sequence.row, sequence) for sequence in sequences]
        self._rounds.append(InFlightRound(session, kind, nodes, drafted, rows, buckets, read, now))

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
        # Until now `count` and `hint` are those of the verified trees.
        policy = in_flight.session.steps.policies[in_flight.kind]
        known = [
            (sequence, outcome) for sequence, outcome in outcomes
            if sequence.count is not None and sequence.most_nodes >= policy.sizes[-1]  # a row with a limit tells less
        ]  # fmt: skip
        policy.learn(
            in_flight.nodes, [in_flight.drafted or sequence.count for sequence, _ in known],
            [in_flight.buckets.get(sequence.row, ANY) for sequence, _ in known],
            [outcome.path[1:] for _, outcome in known], None if self.runtime.on_gpu else in_flight.seconds,
        )  # fmt: skip
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

    def bucket(self, sequence: Sequence) -> int:
        """The bucket of a row's newest tree that the host knows.

        A part of a tree expects fewer drafts than all of it, so that parts have buckets of their own: with a hint of 2
        and MAX_NODES of 64, 4 nodes of 16 have bucket 66, and all 16 have bucket 2.
        """
        first = sequence.loaded.number * STRIDE
        if sequence.count is None or sequence.hint is None:
            return first + ANY
        if sequence.count == 1:
            return first + NO_TREE
        return first + sequence.hint + (MAX_NODES if sequence.count < (self.tree_size or 0) else 0)

    def _choose_nodes(self, policy: SizePolicy | StepBack, sequences: list[Sequence]) -> int:
        """Nodes of the next round: by the trees themselves, unless only the GPU knows them."""
        most = min(max(sequence.most_nodes for sequence in sequences), policy.sizes[-1])
        if most == 1 or self.runtime.guard.error is not None:
            return 1
        buckets = [self.bucket(sequence) for sequence in sequences if sequence.count is not None]
        is_known = len(buckets) == len(sequences)
        buckets = buckets or [*map(self.bucket, sequences)]
        if isinstance(policy, StepBack):
            nodes = policy.choose_ahead(buckets, [in_flight.nodes for in_flight in self._rounds])
        elif self._rounds or not is_known:
            nodes = policy.choose_ahead(buckets)
        else:
            counts = [min(sequence.count, sequence.most_nodes) for sequence in sequences]
            hints = (
                [sequence.hint for sequence in sequences] if policy.hindsight else buckets
            )  # hindsight tells no adapters
            nodes = policy.choose(counts, hints)
        return min(nodes, next(size for size in policy.sizes if size >= most))

    def _now(self) -> float:
        """The time in seconds, without those spent compiling."""
        return time.perf_counter() - self.runtime.stats.seconds["compile"]
