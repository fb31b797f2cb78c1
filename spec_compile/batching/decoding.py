"""The rows that decode: rounds over as many of them as are in use."""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache import PAGE
from ..outcome import Outcome, unpack
from ..runtime.accept.draw_rows import DrawRows, RowSettings
from ..runtime.accept.greedy import accept_greedy
from ..runtime.accept.random_numbers import NO_PROBABILITIES
from ..runtime.call import AHEAD
from ..runtime.runtime import Runtime
from ..runtime.session import Session
from ..tree import MAX_NODES, Accepted, Tree, ancestry
from .job import Job
from .lanes import Lanes
from .texts import Texts


@dataclass
class Flight:
    """A round that was launched: over `nodes` nodes of each of `riders`, at the rows that they had then. read: waits
    for the outcomes and gives them."""

    session: Session
    part: str
    nodes: int
    riders: list[tuple[int, Job]]
    read: Callable[[], list[list[int]]]
    begin: float


class Decoder:
    """Runs rounds over the requests in `jobs`, by row. On a GPU a round is launched while the one before it runs."""

    def __init__(self, runtime: Runtime, rows: int, capacity: int):
        self.runtime = runtime
        self.lanes = Lanes(runtime, rows, capacity)
        self.texts = Texts(rows, capacity, has_states=bool(runtime.verify.recurrences))
        self.jobs: list[Job | None] = [None] * rows
        self.rounds = 0
        self._digest = 0
        """Of all outcomes so far, which every rank must have alike."""
        self._most = runtime.algorithm.plan.nodes if self.lanes.has_one_size else None
        """Nodes of every tree, if they have one size."""
        self._settings = RowSettings()
        """What any row so far was drawn with; rounds are captured for that, rather than anew for every mixture."""
        self._has_trees = True
        """Whether the round launched last has proposed trees."""
        self._flying: deque[Flight] = deque()

    @property
    def active(self) -> list[Job]:
        return [job for job in self.jobs if job is not None]

    @property
    def is_flying(self) -> bool:
        """Whether a round is under way."""
        return bool(self._flying)

    @property
    def is_busy(self) -> bool:
        return self.is_flying or any(self.jobs)

    @property
    def round_seconds(self) -> float | None:
        """What the shortest round costs over the rows that are in use; None if nobody has measured it."""
        session = self.lanes.session(max((job.row for job in self.active), default=0) + 1)
        return min(session.policies["round"].cost.values(), default=None)

    def free_row(self) -> int:
        """The first row that nobody uses."""
        return self.jobs.index(None)

    def enter(self, job: Job) -> None:
        """A prompt that is done has been copied to row `job.row`."""
        self.jobs[job.row] = job
        self._settings = self._settings.merge(job.settings)
        self.lanes.state.finished[job.row].fill_(False)
        counts = job.weights == self.texts.weights and not job.has_pictures
        self.texts.put(job.row, job.prompt if counts else None)
        self._hindsight("forget", job.row)

    def leave(self, job: Job) -> None:
        """A request is over. Its text stays for others that begin alike, until the row is used again."""
        state, row = self.lanes.state, job.row
        self.jobs[row] = None
        state.finished[row].fill_(True)
        if job.is_whole and not self.runtime.verify.clamps_prompts:  # or an answer's states are not those of a prompt
            self.texts.end(row)
        self.lanes.all.drafter.leave(state, row, job.length, job.share_text)

    def compact(self) -> None:
        """Move the last rows to free ones, if rounds over fewer rows will do then."""
        width = self.lanes.width(max(len(self.active), 1))
        for job in self.active[::-1]:
            row, to = job.row, self.free_row() if None in self.jobs else len(self.jobs)
            if row < width or to > row:
                return
            slots = job.length + 1 + (1 + len(self._flying)) * MAX_NODES + self.runtime.algorithm.plan.lookahead_slots
            self.lanes.copy_row(row, to, min(slots, self.lanes.state.capacity))
            self.texts.move(row, to)
            self._hindsight("move", row, to)
            self.jobs[row], self.jobs[to], job.row = None, job, to

    def launch(self) -> None:
        """Begin as many rounds as may be in flight."""
        riders = [(row, job) for row, job in enumerate(self.jobs) if job is not None]
        if not riders:
            return
        acceptors = any(job.acceptor for _, job in riders)
        part = "look" if acceptors or any(job.settings for _, job in riders) else "round"
        ahead = AHEAD if self.runtime.on_gpu and not acceptors else 1
        ahead = min(ahead, max(job.room for _, job in riders))
        longest, session = max(job.length for _, job in riders), self.lanes.session(riders[-1][0] + 1)
        while len(self._flying) < ahead:
            begin = time.perf_counter()
            (nodes,) = self.runtime.options.ranks.lead(lambda: [self._size(session, part, riders)], check=self._digest)
            max_kv_len = self._max_kv_len(longest + nodes)
            if nodes > 1 and not self._has_trees:
                session.propose(max_kv_len)
            self._has_trees = nodes > 1 or self._most is None
            if acceptors:
                read = self._accept_on_host(session, nodes, riders, max_kv_len)
            else:
                read = session.launch(DrawRows(self._settings) if part == "look" else None, nodes, max_kv_len)
            self._flying.append(Flight(session, part, nodes, riders, read, begin))

    def collect(self) -> list[Job]:
        """Wait for the round that was launched first; returns the requests that gained tokens in it."""
        flight = self._flying.popleft()
        rows = flight.read()
        self.rounds += 1
        seconds = None if self.runtime.on_gpu else time.perf_counter() - flight.begin
        riders = [(job, unpack(rows[row])) for row, job in flight.riders if not job.is_over]
        known = [(job, outcome) for job, outcome in riders if job.count is not None]
        # The trees that were verified are those that `count` and `hint` have told of until now.
        counts, hints = [self._most or job.count for job, _ in known], [job.hint for job, _ in known]
        paths = [outcome.path[1:] for _, outcome in known]
        flight.session.policies[flight.part].learn(flight.nodes, counts, hints, paths, seconds)
        for job, outcome in riders:
            self._take(job, outcome, flight.nodes)
            job.count, job.hint = outcome.next_count, outcome.next_hint
        if self.runtime.options.ranks.size > 1:
            self._digest = hash((self._digest, *((outcome.depth, *outcome.gained) for _, outcome in riders)))
            self._end_alike([job for job, _ in riders])
        stats = self.runtime.stats
        stats.trace = []  # of the round alone, because a batch never ends
        depths = Counter((outcome.depth, max(len(outcome.path) - 1, 0)) for _, outcome in riders)
        for (offered, accepted), count in depths.items():
            stats.count_depths(offered, accepted, count)
        stats.count_round(flight.nodes, [len(outcome.gained) for _, outcome in riders], len(riders))
        return [job for job, outcome in riders if outcome.gained or job.is_over]

    def _end_alike(self, jobs: list[Job]) -> None:
        """Give requests the tokens and the end that they have on the first rank."""
        ranks = self.runtime.options.ranks
        verdicts = iter(ranks.lead(lambda: [number for job in jobs for number in (len(job.tokens), job.is_over)]))
        for job, length, is_over in zip(jobs, verdicts, verdicts):
            if not ranks.leads:
                del job.tokens[length:]
                if is_over:
                    job.finish("stop")

    def _take(self, job: Job, outcome: Outcome, nodes: int) -> None:
        """Give a request what a round has gained for its row."""
        drafted = min(self._most or job.count or nodes, nodes) - 1
        job.speculation.count(drafted, max(len(outcome.path) - 1, 0), len(outcome.gained))
        before = len(job.tokens)
        try:
            if job.failure is not None:
                raise job.failure
            if -1 in outcome.gained:
                raise RuntimeError(NO_PROBABILITIES)
            job.gain(outcome.gained)
            job.is_whole = outcome.finished and sum(job.speculation.per_step_tokens) == len(job.tokens)
        except Exception as error:  # of a criterion of its own; the others go on
            job.fail(error)
        self.texts.extend(job.row, job.tokens[before:])

    def _size(self, session: Session, part: str, riders: list[tuple[int, Job]]) -> int:
        """Nodes of the next round."""
        policy = session.policies[part]
        if self._flying or self._most or any(job.count is None for _, job in riders):
            return policy.choose_ahead()
        return policy.choose([job.count for _, job in riders], [job.hint for _, job in riders])

    def _accept_on_host(self, session: Session, nodes: int, riders: list[tuple[int, Job]], max_kv_len: int):
        """A round in two halves, between which the host accepts tokens of the rows that have an acceptor."""
        look, finish, state = session.step("look", nodes), session.step("finish", nodes), session.state
        logits, *features = look(max_kv_len)
        tree = state.tree(nodes)
        accepted = self._accept_rows(session, riders, tree, logits)
        return finish(accepted.path, accepted.tokens, accepted.count, features, max_kv_len).tolist

    def _accept_rows(self, session: Session, riders: list[tuple[int, Job]], tree: Tree, logits: Tensor) -> Accepted:
        """Greedily, but the rows that have acceptors or settings of their own by these."""
        device, state = logits.device, session.state
        ancestors, depth = ancestry(tree.parents)
        if any(job.settings for _, job in riders):
            accepted = DrawRows(self._settings)(state, tree, ancestors, depth, logits)
        else:
            accepted = accept_greedy(tree, ancestors, depth, state.forbid_early_eos(logits, depth))
        ranks = self.runtime.options.ranks
        if ranks.leads:
            self._ask_acceptors(riders, tree, logits, accepted)
        if ranks.size > 1:
            failed = [row for row, job in riders if ranks.leads and job.failure is not None]
            parts = accepted.path, accepted.tokens, accepted.count
            numbers = ranks.lead(
                lambda: [len(failed), *failed, *torch.cat([each.flatten() for each in parts]).tolist()]
            )
            for row in numbers[1 : 1 + numbers[0]]:
                state.finished[row].fill_(True)
            chosen = torch.tensor(numbers[1 + numbers[0] :], device=device).split([each.numel() for each in parts])
            for part, values in zip(parts, chosen):
                part.copy_(values.view(part.shape))
        return accepted

    def _ask_acceptors(self, riders: list[tuple[int, Job]], tree: Tree, logits: Tensor, accepted: Accepted) -> None:
        """Replace what was accepted of the rows that have an acceptor."""
        device, state = logits.device, self.lanes.state
        for row, job in riders:
            if job.acceptor is None:
                continue
            probs = None if tree.probs is None else tree.probs[row : row + 1]
            own = Tree(*(part[row : row + 1] for part in (tree.tokens, tree.parents, tree.real)), probs)
            try:
                result = job.acceptor(own, logits[row : row + 1])
                check_tokens(result.tokens, logits.shape[-1])
            except Exception as error:  # of a logits processor or a criterion of its own; the others go on
                job.failure = error
                state.finished[row].fill_(True)
                continue
            for part in ("path", "tokens", "count"):
                getattr(accepted, part)[row : row + 1] = getattr(result, part).to(device)

    def _hindsight(self, what: str, *rows: int) -> None:
        hindsight = self.lanes.all.policies["round"].hindsight
        if hindsight is not None:
            getattr(hindsight, what)(*rows)

    def _max_kv_len(self, slots: int) -> int:
        """As `Call` has it: slots that a step looks at on a CPU."""
        needed = slots + self.runtime.algorithm.plan.lookahead_slots
        return min(-(-needed // PAGE) * PAGE, self.lanes.state.capacity)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """ValueError if a token is outside the vocabulary, which would end the rounds of all rows."""
    if not bool(((tokens >= 0) & (tokens < vocab_size)).all()):
        raise ValueError(f"logits_processor: its scores choose a token outside the vocabulary of {vocab_size} tokens")
