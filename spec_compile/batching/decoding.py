"""The rows that decode: rounds over as many of them as are in use."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..outcome import Outcome
from ..runtime.accept.draw import DrawRows, RowSettings
from ..runtime.accept.greedy import accept_greedy
from ..runtime.flights import Flight, Flights, check_gained
from ..runtime.runtime import Runtime
from ..runtime.session import Session
from ..runtime.steps.build import StepKind
from ..tree import MAX_NODES, Accepted, Tree, ancestry
from .job import Job
from .lanes import Lanes
from .logprobs import look_ahead
from .rows import Rows
from .texts import LEAST, Texts


class Decoder(Rows):
    """Runs rounds over the requests in `jobs`, by row. On a GPU a round is launched while the one before it runs."""

    def __init__(self, runtime: Runtime, rows: int, capacity: int):
        super().__init__(Lanes(runtime, rows, capacity))
        self.runtime = runtime
        self.texts = Texts(rows, capacity, has_states=bool(runtime.verify.recurrences))
        self.rounds_by_nodes: Counter[int] = Counter()
        self.flights = Flights(runtime)
        self._settings = RowSettings()
        """All that any row so far was drawn with; rounds are captured for that, rather than anew for every mixture."""

    @property
    def is_flying(self) -> bool:
        """True if a round is under way."""
        return len(self.flights) > 0

    @property
    def is_busy(self) -> bool:
        return self.is_flying or any(self.jobs)

    @property
    def round_seconds(self) -> float | None:
        """Seconds that the shortest round takes over the rows in use; None if nobody has measured it."""
        session = self.lanes.session(max((job.row for job in self.active), default=0) + 1)
        return min(session.steps.policies[StepKind.ROUND].costs.measured.values(), default=None)

    def enter(self, job: Job) -> None:
        """A prompt that is done has been copied to row `job.row`."""
        self.jobs[job.row] = job
        self._settings = self._settings.merge(job.settings)
        self.lanes.state.finished[job.row].fill_(False)
        counts = job.weights == self.texts.weights and not job.has_pictures  # guard: texts-with-pictures
        if self.runtime.has_fixed_chunks:  # only keys and values from chunks serve others, and no states after them
            counts = counts and not (job.scores_prompt or self.runtime.verify.recurrences)
        self.texts.put(job.row, job.prompt if counts else None, job.scope, job.client)
        if self.runtime.has_fixed_chunks:
            self.texts.close(job.row)
        self._hindsight("forget", job.row)

    def leave(self, job: Job) -> None:
        """A request is over. Its text stays for others that begin alike, until the row is used again."""
        state, row = self.lanes.state, job.row
        self.jobs[row] = None
        state.finished[row].fill_(True)
        if job.is_whole and not self.runtime.verify.clamps_prompts:  # or an answer's states are not those of a prompt
            self.texts.end(row)
        self.runtime.guard(self.lanes.all.drafter.leave, state, row, job.length, job.share_text)
        if self.texts.length(row) > LEAST:
            self.catch_up(job)
        self.runtime.records.keep()

    def catch_up(self, *left: Job) -> None:
        """Let the drafter process all tokens that it is late by, so that others can go on from what it has of a row.

        left: requests that have left their rows just now.
        """
        jobs = [*self.active, *left]
        if self.flights.late and self.runtime.algorithm.remembers:
            session = self.lanes.session(max(job.row for job in jobs) + 1)
            self.flights.catch_up(session, max(job.length for job in jobs))

    def used_slots(self, job: Job) -> int:
        rounds = 1 + len(self.flights)
        return job.length + 1 + rounds * MAX_NODES + self.runtime.algorithm.plan.lookahead_slots

    def moved(self, row: int, to: int) -> None:
        self.texts.move(row, to)
        self._hindsight("move", row, to)

    def launch(self) -> None:
        """Begin as many rounds as may be in flight."""
        jobs = self.active
        if not jobs:
            return
        on_host = any(job.is_on_host for job in jobs)
        kind = StepKind.LOOK if on_host or any(job.settings for job in jobs) else StepKind.ROUND
        longest, session = max(job.length for job in jobs), self.lanes.session(jobs[-1].row + 1)
        begin = partial(self._begin, session, kind, jobs, on_host)
        while self.flights.may_launch(jobs, on_host):
            self.flights.launch(session, kind, jobs, longest, begin)

    def _begin(
        self, session: Session, kind: StepKind, jobs: list[Job], on_host: bool, nodes: int, max_kv_len: int
    ) -> Callable[[], list[list[int]]]:
        """Begin a round; see `Flights.launch`."""
        if on_host:
            return session.steps.launch_on_host(partial(self._accept_rows, session, jobs), nodes, max_kv_len)
        return session.steps.launch(DrawRows(self._settings) if kind is StepKind.LOOK else None, nodes, max_kv_len)

    def collect(self) -> list[Job]:
        """Wait for the round that was launched first; returns the requests that gained tokens in it."""
        flight, outcomes = self.flights.collect()
        self.rounds_by_nodes[flight.nodes] += 1
        for job, outcome in outcomes:
            self._take(job, outcome, flight)
        self.flights.learn(flight, outcomes)
        if self.runtime.options.ranks.size > 1:
            self._end_alike([job for job, _ in outcomes])
        return [job for job, outcome in outcomes if outcome.gained or job.is_over]

    def _end_alike(self, jobs: list[Job]) -> None:
        """Give requests the tokens and the end that they have on the first rank."""
        ranks = self.runtime.options.ranks
        verdicts = iter(ranks.lead(lambda: [number for job in jobs for number in (len(job.tokens), job.is_over)]))
        for job, length, is_over in zip(jobs, verdicts, verdicts):
            if not ranks.leads:
                del job.tokens[length:]
                if is_over:
                    job.finish("stop")

    def _take(self, job: Job, outcome: Outcome, flight: Flight) -> None:
        """Give a request what a round has gained for its row."""
        drafted = min(flight.drafted or job.count or flight.nodes, flight.nodes, job.most_nodes) - 1
        job.speculation.count(drafted, max(len(outcome.path) - 1, 0), len(outcome.gained))
        before = len(job.tokens)
        try:
            if job.failure is not None:
                raise job.failure
            check_gained(outcome, self.runtime.verify.embedded)
            job.gain(outcome.gained)
            job.is_whole = outcome.finished and sum(job.speculation.per_step_tokens) == len(job.tokens)
        except Exception as error:  # of a criterion of its own; the others go on
            job.fail(error)
        self.texts.extend(job.row, job.tokens[before:])

    def _accept_rows(self, session: Session, jobs: list[Job], tree: Tree, logits: Tensor) -> Accepted:
        """Accept the likeliest tokens, or in rows with an acceptor or settings the tokens that these choose."""
        device, state = logits.device, session.state
        ancestors, depth = ancestry(tree.parents)
        if any(job.settings for job in jobs):
            accepted = DrawRows(self._settings)(state, tree, ancestors, depth, logits)
        else:
            accepted = accept_greedy(tree, ancestors, depth, state.forbid_early_eos(logits, depth))
        ranks = self.runtime.options.ranks
        if ranks.leads:
            self._ask_acceptors(jobs, tree, logits, accepted)
        if ranks.size > 1:
            failed = [job.row for job in jobs if ranks.leads and job.failure is not None]
            parts = accepted.path, accepted.tokens, accepted.count
            numbers = ranks.lead(
                lambda: [len(failed), *failed, *torch.cat([each.flatten() for each in parts]).tolist()]
            )
            for row in numbers[1 : 1 + numbers[0]]:
                state.finished[row].fill_(True)
            chosen = torch.tensor(numbers[1 + numbers[0] :], device=device).split([each.numel() for each in parts])
            for part, values in zip(parts, chosen):
                part.copy_(values.view(part.shape))
        look_ahead(jobs, logits, accepted)
        return accepted

    def _ask_acceptors(self, jobs: list[Job], tree: Tree, logits: Tensor, accepted: Accepted) -> None:
        """Replace what was accepted of the rows that have an acceptor."""
        device, state = logits.device, self.lanes.state
        for job in jobs:
            if job.acceptor is None:
                continue
            row = job.row
            probs = None if tree.probs is None else tree.probs[row : row + 1]
            own = Tree(*(part[row : row + 1] for part in (tree.tokens, tree.parents, tree.real)), probs)
            try:
                result = job.acceptor(own, logits[row : row + 1])
                check_tokens(result.tokens, logits.shape[-1])  # guard: chosen-tokens
            except Exception as error:  # of a logits processor or a criterion of its own; the others go on
                job.failure = error
                state.finished[row].fill_(True)
                continue
            for part in ("path", "tokens", "count"):
                getattr(accepted, part)[row : row + 1] = getattr(result, part).to(device)

    def _hindsight(self, what: str, *rows: int) -> None:
        hindsight = self.lanes.all.steps.policies[StepKind.ROUND].hindsight
        if hindsight is not None:
            getattr(hindsight, what)(*rows)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """ValueError if a token is outside the vocabulary, which would end the rounds of all rows."""
    if not bool(((tokens >= 0) & (tokens < vocab_size)).all()):
        raise ValueError(f"logits_processor: its scores choose a token outside the vocabulary of {vocab_size} tokens")
