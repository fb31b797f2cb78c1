"""`RoundPipeline`: rounds over rows of a session, launched ahead of their outcomes. `Call`: one generate()."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ..errors import RequestError, log
from ..outcome import Outcome, unpack
from ..tree import MAX_NODES
from .draft_budget import DraftBudget, moved
from .draft_record import ALL, NO_TREE, Group, TreeOutcome
from .prompt import Past, Prompt
from .request import Request, Sequence
from .round import STEP_COST, chunks
from .runtime import Runtime
from .session import Kind, Session, StepKind
from .state import MOST_LATE
from .verify.host import HostAcceptor
from .verify.sample import NO_PROBABILITIES, DrawInRound

S = TypeVar("S", bound=Sequence)

AHEAD = 2  # rounds in flight on a GPU


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
class InFlightRound(Generic[S]):
    """A round that was launched over `nodes` nodes of each row.

    drafted: how many of them every tree has, the root included; None if each outcome tells.
    kind: its step's kind, whose policy learns from it.
    sequences: each with the row that it had then.
    groups: the group of each row's tree, as far as the host knew it.
    teaches: False if it had other nodes than its policy has chosen, which would learn from itself.
    is_alone: True if no prompts and no proposal ran with it.
    read: waits for the outcomes and returns them by row.
    seconds: its begin, and after `collect` its duration, without the time spent compiling.
    """

    session: Session
    kind: StepKind
    nodes: int
    drafted: int | None
    sequences: list[tuple[int, S]]
    groups: dict[int, Group]
    teaches: bool
    is_alone: bool
    read: Callable[[], list[list[int]]]
    seconds: float


class RoundPipeline(Generic[S]):
    """Launches rounds, and gives their outcomes to the policies of tree sizes and the statistics.

    trace: collects the tokens that each row gains in each round, for `Stats.trace`; None keeps none.
    """

    def __init__(self, runtime: Runtime, trace: list[list[int]] | None = None):
        self.runtime, self.trace = runtime, trace
        plan = runtime.algorithm.plan
        # Real nodes of every tree if the drafter's trees have one size; None if each outcome tells.
        self.tree_size = plan.nodes if plan.is_whole else None
        # Nodes of the rows' trees when the round launched last has ended, if they have one size; 1 without trees.
        self.pending = plan.nodes
        self.late = 0  # most tokens that the drafter is late by when that round has ended
        self._rounds: deque[InFlightRound[S]] = deque()
        self._collected: float | None = None  # the time of the last `collect`, if another round was under way then
        self._digest = 0  # a hash of all outcomes so far, which is equal on all ranks

    def __len__(self) -> int:
        return len(self._rounds)

    @property
    def nodes(self) -> int:
        """Nodes of all rounds under way."""
        return sum(in_flight.nodes for in_flight in self._rounds)

    def may_launch(self, sequences: list[S], on_host: bool) -> bool:
        """True if one more round may begin. on_host: the host chooses its tokens, so that rounds do not overlap."""
        ahead = AHEAD if self.runtime.on_gpu and not on_host else 1
        under_way = len(self._rounds)
        return under_way < ahead and any(sequence.room > under_way for sequence in sequences)

    def launch(
        self, session: Session, kind: StepKind, sequences: list[S], longest: int,
        begin: Callable[[int, int], Callable[[], list[list[int]]]], drafting: int | None = None,
    ) -> None:  # fmt: skip
        """Begin a round.

        longest: the largest `Sequence.length` of the session.
        begin: launches a round of (nodes, max_kv_len); its result waits for the outcomes.
        drafting: the nodes of a round that drafts; None leaves them to the policy.
        """
        # Its size, which the first rank chooses.
        choose = lambda: [self._choose_nodes(session.policies[kind], sequences)]  # noqa: E731
        (nodes,) = self.runtime.options.ranks.lead(choose, check=self._digest)
        teaches = nodes == 1 or drafting != 1
        nodes = nodes if nodes == 1 else drafting or nodes
        max_kv_len = session.max_kv_len(longest + nodes)  # guard: slots-of-attention
        catches_up = nodes > 1 or self.late == MOST_LATE
        costs, now = session.policies[kind].costs, self._now()
        if catches_up and session.pay():
            costs.by_token = moved(costs.by_token, (self._now() - now) / costs.owed)
            costs.owed, now = costs.owed if nodes > 1 else 0, self._now()  # a trial has to earn it
        if catches_up:
            self.catch_up(session, longest)

        # Trees, if the last round has left none, and the round itself.
        plan, is_alone = self.runtime.algorithm.plan, drafting is None and nodes <= self.pending
        if nodes > self.pending:
            session.propose(max_kv_len)
            self.pending = plan.nodes
            if not self.runtime.on_gpu:
                costs.switch = moved(costs.switch, self._now() - now)
                now = self._now()
        drafted = None if self.tree_size is None else min(nodes, self.pending)
        self.pending = plan.next_nodes(nodes)
        self.late += self.tree_size is not None and self.pending == 1
        read = begin(nodes, max_kv_len)
        groups = {sequence.row: self.group(sequence) for sequence in sequences}
        rows = [(sequence.row, sequence) for sequence in sequences]
        self._rounds.append(InFlightRound(session, kind, nodes, drafted, rows, groups, teaches, is_alone, read, now))

    def catch_up(self, session: Session, longest: int) -> None:
        """Let the drafter process the tokens that it is late by, if there are any. longest: see `launch`."""
        if self.late:
            session.catch_up(self.late, longest)
            self.late = 0

    def collect(self) -> tuple[InFlightRound[S], list[tuple[S, Outcome]]]:
        """Wait for the oldest round. Returns it with the outcomes of the sequences that go on."""
        in_flight, now, before = self._rounds.popleft(), self._now(), self._collected
        costs = in_flight.session.policies[in_flight.kind].costs
        if before is not None:
            costs.host = moved(costs.host, now - before)
        rows = in_flight.read()
        now = self._now()
        if before is not None and in_flight.is_alone:  # it began when the round before it ended
            costs.longer = moved(costs.longer, max(now - before - costs.measured.get(in_flight.nodes, now), 0.0))
        in_flight.seconds = now - in_flight.seconds
        self._collected = now if self._rounds else None
        return in_flight, [
            (sequence, unpack(rows[row])) for row, sequence in in_flight.sequences if not sequence.is_over
        ]

    def learn(self, in_flight: InFlightRound[S], outcomes: list[tuple[S, Outcome]]) -> None:
        """Give a round's outcomes to its policy and the statistics."""
        # Until now `count` and `confidence` belong to the verified trees.
        policy = in_flight.session.policies[in_flight.kind]
        trees = [
            TreeOutcome(in_flight.drafted or sequence.count, in_flight.groups.get(sequence.row, ALL), outcome.path[1:])
            for sequence, outcome in (outcomes if in_flight.teaches else ())
            if sequence.count is not None and sequence.most_nodes >= policy.sizes[-1]  # a row with a limit tells less
        ]
        policy.learn(in_flight.nodes, trees, None if self.runtime.on_gpu else in_flight.seconds)

        # Each row has another tree now; then the statistics.
        stats, gained = self.runtime.stats, [0] * in_flight.session.batch
        depths: Counter[tuple[int, int]] = Counter()
        for sequence, outcome in outcomes:
            sequence.count, sequence.confidence = outcome.next_count, outcome.next_confidence
            gained[sequence.row] = len(outcome.gained)
            depths[outcome.depth, max(len(outcome.path) - 1, 0)] += 1
            if self.runtime.options.ranks.size > 1:
                told = outcome.finished, *outcome.gained, *outcome.tokens, *outcome.parents
                self._digest = hash((self._digest, *told))
        for (offered, accepted), count in depths.items():
            stats.count_depths(offered, accepted, count)
        stats.trace = [] if self.trace is None else self.trace  # another call may have put its own there
        stats.count_round(in_flight.nodes, gained, len(outcomes))

    def group(self, sequence: S) -> Group:
        """The group of a row's newest tree that the host knows.

        A part of a tree expects fewer drafts than all of it, so that parts count as other confidences: a tree of 16
        nodes has the confidence 2, and its first 4 nodes have 66, which is 2 + MAX_NODES.
        """
        if sequence.count is None or sequence.confidence is None:
            return Group(sequence.loaded.number)
        is_part = sequence.count < (self.tree_size or 0)
        confidence = sequence.confidence + (MAX_NODES if is_part else 0)
        return Group(sequence.loaded.number, confidence if sequence.count > 1 else NO_TREE)

    def _choose_nodes(self, policy: DraftBudget, sequences: list[S]) -> int:
        """Nodes of the next round: by the trees themselves, unless only the GPU knows them."""
        most = min(max(sequence.most_nodes for sequence in sequences), policy.sizes[-1])
        if most == 1 or self.runtime.guard.error is not None:
            return 1
        known = [sequence for sequence in sequences if sequence.count is not None]
        groups, counts = [self.group(sequence) for sequence in known or sequences], None
        if len(known) == len(sequences):
            counts = [min(each.count, each.most_nodes) for each in sequences if each.count is not None]
        nodes = policy.choose(groups, counts, [in_flight.nodes for in_flight in self._rounds], self.pending)
        return min(nodes, next(size for size in policy.sizes if size >= most))

    def _now(self) -> float:
        """The time in seconds, without those spent compiling."""
        return time.perf_counter() - self.runtime.stats.seconds["compile"]


class Call:
    """One generate(): its prompts, then its rounds.

    On a GPU the next round is launched before the outcome of the last has arrived, unless the host chooses tokens.
    """

    runtime: Runtime
    session: Session

    def __init__(
        self, request: Request, sequences: list[Sequence], acceptor: HostAcceptor | DrawInRound | None = None,
        prompt: Prompt | None = None, past: Past | None = None, check: Callable[[], None] | None = None,
    ):  # fmt: skip
        """sequences: the rows.
        acceptor: accepts tokens; None accepts greedily inside the round (see `verify.Route`).
        prompt: the prompts as transformers gave them; None if they are plain rows of tokens.
        past: has the first prompt tokens; its first logits need a `HostAcceptor`.
        check: raises if the model has changed; called once, while the GPU computes, before a token is given out.
        """
        self.request, self.sequences, self.past, self._check = request, sequences, past, check
        self.acceptor, self.is_on_host = acceptor, isinstance(acceptor, HostAcceptor)
        self._kind = StepKind.LOOK if acceptor else StepKind.ROUND
        self.has_unknown_tokens = prompt is not None and prompt.has_unknown_tokens
        self._position_offsets = (prompt.position_offsets if prompt else None) or [0] * len(sequences)
        self._first_logits = None if past is None else past.first_logits
        self._longest = max(sequence.longest for sequence in sequences)
        self._is_started = False
        # [2, B] until it is read: the numbers of nodes and the confidences of the first trees.
        self._first: Tensor | None = None

    @property
    def prompts(self) -> list[list[int]]:
        return [sequence.prompt for sequence in self.sequences]

    @property
    def is_over(self) -> bool:
        return all(sequence.is_over for sequence in self.sequences)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row less one, as `State.lengths` has them; empty before `start`."""
        return [sequence.length for sequence in self.sequences] if self._is_started else []

    def start(self, runtime: Runtime, session: Session) -> None:
        """Process the prompts, and propose the first trees."""
        self.runtime, self.session, state, drafter = runtime, session, session.state, session.drafter
        self._pipeline = RoundPipeline[Sequence](runtime, trace=[])
        request, sequences, prompts = self.request, self.sequences, self.prompts
        if max(map(len, prompts)) >= session.capacity:
            self._grow(0)

        # The drafter may be late by tokens of an earlier call.
        if self.past is not None:
            session.pay()
            if session.late:
                session.catch_up(session.late, session.capacity)
        costs = session.policies[self._kind].costs
        session.late, session.owed, costs.owed = 0, [], 0
        if session.ring is not None:
            session.ring.begin()

        # The rows of this call.
        eos = [token for token in request.eos if 0 <= token < runtime.verify.vocab_size]
        for sequence, offset in zip(sequences, self._position_offsets):
            shifts = {} if state.position_offsets is None else {"position_offsets": offset}
            numbers = {"lengths": 0, **sequence.numbers(), **shifts}
            state.enter(sequence.row, sequence.prompt, eos, sequence.loaded.index, **numbers)
        state.finished.zero_()  # guard: next-request
        begins = self._take_past()
        session.answers = [(sequence.prompt, sequence.tokens) for sequence in sequences]
        runtime.guard(drafter.start, state, prompts, request.references, request.share_text)

        # The prompts, and the first trees.
        prompt_sizes = self._chunks(max(len(prompt) - 1 - begin for prompt, begin in zip(prompts, begins)))
        self._build_rounds(prompt_sizes)
        if self.past is not None and self.past.features is not None and runtime.algorithm.remembers:
            session.prefill_draft(self.past, self._chunks(max(begins)))
        is_plain = self._first_logits is not None or self._begins_plain
        puts_off = is_plain and not runtime.on_gpu and runtime.algorithm.remembers  # until a round drafts
        done = max(begins)  # prompts of 9 and 6 tokens, of which the state has 4 and 0: 5 more, and 9 slots are visible
        for size in prompt_sizes:
            session.prefill(size, session.max_kv_len(done + size), puts_off)
            done += size
        costs.owed = sum(prompt_sizes) if puts_off else 0
        if is_plain:
            self._pipeline.pending = 1
            state.root()
        else:
            self._pipeline.pending = runtime.algorithm.plan.nodes
            session.propose(session.max_kv_len(max(map(len, prompts))))
        self._first = torch.stack((state.tree_count, state.tree_confidence))
        for sequence in sequences:
            sequence.is_over = sequence.room <= 0
        self._is_started = True
        if runtime.on_gpu and not self.is_on_host:
            self._first = self._first.to("cpu", non_blocking=True)
        else:
            self._read_first()

    def launch(self) -> None:
        """Begin as many rounds as may be in flight."""
        session, pipeline, longest = self.session, self._pipeline, max(self.lengths)
        active = [sequence for sequence in self.sequences if not sequence.is_over]
        while pipeline.may_launch(active, self.is_on_host):
            if self._longest > session.capacity <= longest + 1 + pipeline.nodes:
                if len(pipeline):
                    break  # collect the rounds under way before growing
                self._grow(longest + MAX_NODES + self.runtime.algorithm.plan.lookahead_slots)
            nodes = None if self._first_logits is None else 1
            pipeline.launch(session, self._kind, active, longest, self._begin, nodes)
            session.late = pipeline.late

    def _begin(self, nodes: int, max_kv_len: int) -> Callable[[], list[list[int]]]:
        """The `begin` of `RoundPipeline.launch`."""
        logits, self._first_logits = self._first_logits, None
        return self.session.launch(self.acceptor, nodes, max_kv_len, logits)

    def collect(self) -> tuple[InFlightRound, list[tuple[Sequence, Outcome]]]:
        """Wait for the oldest round. Returns it with the outcome of each row that goes on."""
        if self._check is not None:  # the first time, while the GPU computes and before any token counts
            check, self._check = self._check, None
            check()  # guard: check-before-tokens
        in_flight, outcomes = self._pipeline.collect()
        self._read_first()  # it has arrived, because its copy was launched before the round
        return in_flight, outcomes

    def learn(self, in_flight: InFlightRound, outcomes: list[tuple[Sequence, Outcome]]) -> list[list[int]]:
        """Take in a round's outcomes. Returns the tokens that each row gained."""
        for _, outcome in outcomes:
            check_gained(outcome, self.runtime.verify.embedded)
        self._pipeline.learn(in_flight, outcomes)
        gains: list[list[int]] = [[] for _ in self.sequences]
        for sequence, outcome in outcomes:
            gains[sequence.row] = outcome.gained
            sequence.tokens += outcome.gained
            sequence.is_over = outcome.finished
        return gains

    def stop(self, rows: Iterable[int]) -> None:
        """Between two rounds: these rows need no more tokens."""
        for row in rows:
            if not self.sequences[row].is_over:
                self.sequences[row].is_over = True
                self.session.state.finished[row : row + 1].fill_(True)

    @property
    def _begins_plain(self) -> bool:
        """True if the first round will verify no drafts, so that none have to be made for it. The first rank says so
        for all, because each has measured other durations."""
        if self.runtime.guard.error is not None or not self.runtime.algorithm.plan.is_whole:
            return self.runtime.guard.error is not None
        policy, most = self.session.policies[self._kind], self.sequences[0].most_nodes
        numbers = [sequence.loaded.number for sequence in self.sequences]
        groups = [*map(Group, numbers)] if any(numbers) else []
        (nodes,) = self.runtime.options.ranks.lead(lambda: [min(policy.choose(groups), most)])
        return nodes == 1

    def _build_rounds(self, prompt_sizes: list[int]) -> None:
        """Make the steps of prompts of these sizes, the first proposal, and the rounds of an algorithm of one size.

        Their trial runs would later overwrite drafts in the drafter's cache.
        """
        session, sizes = self.session, tuple[int, ...]()
        if self.runtime.algorithm.plan.sizes == "fixed":
            policy = session.policies[self._kind]
            sizes = policy.sizes if policy.adaptive else policy.sizes[-1:]
            sizes = sizes if self.runtime.on_gpu else tuple({*sizes[:1], sizes[-1]})  # a CPU compiles others later
            sizes = sizes if self.sequences[0].most_nodes > 1 else (1,)
        kinds: tuple[Kind, ...] = (StepKind.LOOK, StepKind.FINISH)
        if not isinstance(self.acceptor, HostAcceptor):
            kinds = (self.acceptor or StepKind.ROUND,)
        proposal = session.proposal_steps() if self._first_logits is None else []
        prompts = session.prompt_steps(prompt_sizes) if prompt_sizes else []
        session.make([*((kind, nodes) for nodes in sizes for kind in kinds), *proposal, *prompts])

    def _grow(self, used: int) -> None:
        """Make room for the longest row; the first `used` slots of the caches are in use."""
        session, tokens = self.session, self._longest
        log.warning(
            "the cache of %d tokens a sequence is full and grows to %d, whose rounds are compiled anew; with "
            "speculate(model, max_cache_len=%d) it has the room from the start", session.capacity, tokens, tokens,
        )  # fmt: skip
        with session.growing(tokens, used):
            self._build_rounds([])

    def _take_past(self) -> list[int]:
        """Take over existing keys, values and states. Returns the tokens of each row that need no prefill."""
        state, algorithm, past = self.session.state, self.runtime.algorithm, self.past
        if past is None:
            return [0] * state.batch
        cached = [past.length - pad for pad in past.padding]
        can_step_back = past.features is None and not (self.has_unknown_tokens or self.runtime.verify.recurrences)
        if can_step_back:
            cached = [max(length + 1 - max(algorithm.ahead, 1), 0) for length in cached]
        fresh = algorithm.plan.fresh_tokens if can_step_back else 1
        begins = [max(min(length, len(prompt) - fresh), 0) for length, prompt in zip(cached, self.prompts)]
        if any(begins) and algorithm.remembers and not self.has_unknown_tokens:
            # The drafter's cache has the first tokens of the last call's texts. If the prompts begin otherwise, they
            # are processed again.
            texts = [prompt + answer for prompt, answer in self.session.answers]
            starts = [(text[: n + algorithm.ahead], prompt[: n + algorithm.ahead])
                      for n, text, prompt in zip(begins, texts, self.prompts)]  # fmt: skip
            if len(texts) != len(begins) or any(text != prompt for text, prompt in starts):
                return [0] * state.batch
        state.fill(past, begins)
        return begins

    def _read_first(self) -> None:
        """Read the counts and confidences of the first trees, once."""
        if self._first is not None:
            for sequence, count, confidence in zip(self.sequences, *self._first.tolist()):
                sequence.count, sequence.confidence = count, confidence
            self._first = None

    def _chunks(self, tokens: int) -> list[int]:
        """Sizes of the prefill steps for `tokens` tokens of each prompt; see `round.chunks`."""
        limit, all_sizes = self.request.config.prefill_chunk_size, self.session.prefill_sizes
        sizes = tuple(size for size in all_sizes if size <= (limit or size)) or all_sizes[-1:]
        return [*chunks(tokens, sizes, STEP_COST[self.runtime.device.type])]
