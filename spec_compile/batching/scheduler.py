"""Between two rounds requests leave, wait, have their prompts processed, and enter."""

import logging
from collections import Counter, deque
from collections.abc import Callable
from itertools import count

from ..capture.weight_values import WeightValues
from ..parallel.messages import pack, unpack
from ..runtime.runtime import Runtime
from ..runtime.state import MOST_LATE
from ..runtime.steps.build import StepKind
from ..runtime.tiers import build_compiled
from .beginnings import Beginnings
from .decoding import Decoder
from .job import Job
from .lora_slots import LoraSlots
from .prompts import Prompts
from .ranks import Admission, RoundChange, Shadow

log = logging.getLogger("spec_compile")


class Scheduler:
    """A request waits until a row is free for it; then its prompt is processed in chunks, at most one between two
    rounds, and its row joins the next round. Clients take turns: a free row goes to the one with the fewest rows, and
    then to the one that has had no turn for the longest time. Within a client it is first come, first served. An error
    while a request enters, decodes or leaves ends that request only."""

    def __init__(
        self, runtime: Runtime, slots: int, capacity: int, lanes: int, weights: WeightValues, adapters: LoraSlots
    ):  # fmt: skip
        """slots: requests that decode at once. capacity: tokens of each. lanes: prompts that are processed at once.
        weights: tell whether keys and values of earlier requests still hold. adapters: of requests."""
        self.adapters = adapters
        self.slots, self.capacity = slots, capacity
        self.waiting: deque[Job] = deque()
        """Any thread may append to it."""
        self.prompts = Prompts(runtime, lanes, capacity)
        self.decoder = Decoder(runtime, slots, capacity)
        self.beginnings = Beginnings(runtime, self.decoder, weights)
        self.prompts.at_branch = self.beginnings.keep_prompt
        self.ranks = runtime.options.ranks
        self._turns: dict[str, int] = {}
        """By client the number of its last event: it came, had a turn, or left a row."""
        self._numbers = count(1)
        self.check: Callable[[], None] = lambda: None
        """Raises if the model has changed."""
        self._unchecked: list[Job] = []
        """Requests that have entered since the last `check`."""

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting) or bool(self.prompts.begun) or self.decoder.is_busy

    @property
    def jobs(self) -> list[Job]:
        """All requests that are not over."""
        return [*self.waiting, *self.prompts.begun, *self.decoder.active]

    def step(self) -> list[Job]:
        """Run a round, and what comes before it; returns the requests that gained tokens or are over."""
        news: list[Job] = []
        if self.ranks.size == 1:
            if self.waiting and self.prompts.runtime.on_gpu:  # rounds to compute while the host lets requests in
                self.decoder.launch()
            self._change(news)
        else:
            change = unpack(self.ranks.lead(lambda: pack(self._change(news))), RoundChange, "the requests of rank 0")
            if not self.ranks.leads:
                self._change_alike(change)
        if self.prompts.active:
            decoding = len(self.decoder.active)
            waiting = min(len(self.waiting), self.slots - decoding - len(self.prompts.begun))
            for job in self.prompts.step(waiting, decoding, self.decoder.round_seconds):
                try:
                    self.beginnings.keep_prompt(job, self.prompts.lanes, job.row, len(job.prompt) - 1)
                    self.prompts.move(job, self.decoder.lanes, self.decoder.free_row())
                    self.decoder.enter(job)
                except Exception as error:
                    news += self.drop([job], error)
        else:
            self.decoder.compact()
        self.decoder.launch()
        self._check_model()
        if self.decoder.is_flying:
            news += self.decoder.collect()
        for job in news:
            if job.is_over:
                self._free(job)
        return news

    def forget(self) -> None:
        """The weights have changed: keys and values of earlier requests are of no use."""
        self.beginnings.forget()

    def warmup(self) -> None:
        """Compile and capture what rounds and prompts of all widths need."""
        build_compiled(self.prompts.runtime, self._build)

    def _build(self) -> None:
        for width in self.prompts.lanes.widths:
            steps = self.prompts.lanes.session(width).steps
            steps.make([*steps.prompt_steps(), *steps.proposal_steps()])
        for width in self.decoder.lanes.widths:
            steps = self.decoder.lanes.session(width).steps
            rounds = [(StepKind.ROUND, nodes) for nodes in steps.policies[StepKind.ROUND].sizes]
            steps.make([*rounds, *(steps.proposal_steps(MOST_LATE) if self.decoder.flights.tree_size else [])])

    def clear(self, error: BaseException) -> None:
        """End all requests by an error, and every round."""
        self.drop(self.jobs, error)
        while self.decoder.is_flying:
            self.decoder.collect()

    def drop(self, jobs: list[Job], error: BaseException | None = None) -> list[Job]:
        """End these requests, as cancelled or by an error."""
        for job in jobs:
            if job in self.waiting:
                self.waiting.remove(job)
            self._free(job)
            job.finish("cancelled") if error is None else job.fail(error)
        return jobs

    def _free(self, job: Job) -> None:
        """Take the row of a request that is over, if it has one, and its adapter."""
        self.adapters.release(job)  # guard: adapters-are-freed
        self._turns[job.client] = next(self._numbers)
        for place in (self.prompts, self.decoder):
            if job in (place.begun if place is self.prompts else place.jobs):
                row = job.row
                try:
                    place.leave(job)
                    if place is self.decoder:
                        self.beginnings.keep(row)
                except Exception:  # of the drafter: the row is free, and the answer is what it is
                    log.exception("request %s: its row was left with an error", job.request_id)

    def _check_model(self) -> None:
        """Let requests that have entered fail in their first round if the model has changed. A GPU computes in the
        time that this takes."""
        if self._unchecked:
            try:
                self.check()
            except Exception as error:
                for job in self._unchecked:
                    job.failure = error
            self._unchecked.clear()

    def _change(self, news: list[Job]) -> RoundChange:
        """Let cancelled requests leave, and others enter as far as there are rows. Requests that are over go to `news`.

        Returns who has left and who has entered, for the other ranks.
        """
        cancelled = [job for job in self.jobs if job.is_cancelled]
        news += self.drop(cancelled)
        return RoundChange([job.request_id for job in cancelled], self._admit(news))

    def _change_alike(self, change: RoundChange) -> None:
        """Repeat a `_change` of the first rank."""
        self.drop([job for job in self.jobs if job.request_id in change.left])
        for admission in change.entered:
            row, known = admission.row, admission.known
            self.prompts.enter(Shadow(admission), known, self.beginnings.copy_row(row, known))

    def _admit(self, news: list[Job]) -> list[Admission]:
        """Begin with the prompts of waiting requests, as far as there are rows. Requests that fail go to `news`."""
        entered: list[Admission] = []
        self.beginnings.distrusts_weights |= not (self.prompts.begun or self.decoder.active)
        while (job := self._next()) is not None and self.prompts.make_room(job):
            self._turns[job.client] = next(self._numbers)
            if job in self.prompts.aside:
                self.prompts.resume(job)
                continue
            self.waiting.remove(job)
            try:
                self.adapters.take(job)
                job.admit()
                self._unchecked.append(job)
                row, known, copy, branch = self.beginnings.find(job)
                job.weights = self.decoder.texts.weights
                if job.has_pictures:
                    self.prompts.process(job, self.decoder.lanes, self.decoder.free_row())
                    self.decoder.enter(job)
                else:
                    self.prompts.enter(job, known, copy, branch)
                    entered.append(Admission.of(job, row, known))
            except Exception as error:  # of a processor or a criterion of its own, or of its pictures
                news += self.drop([job], error)
        return entered

    def _next(self) -> Job | None:
        """The request whose prompt begins or goes on next, once a lane is free for it; None if there is none."""
        if not (self.waiting or self.prompts.aside):
            return None
        begun, waiting = [*self.prompts.begun, *self.decoder.active], [*self.waiting]
        clients = dict.fromkeys(job.client for job in (*begun, *waiting))
        self._turns = {client: self._turns.get(client) or next(self._numbers) for client in clients}
        rows = Counter(job.client for job in begun)

        def order(job: Job) -> tuple[int, int]:
            rows[job.client] += 1
            return rows[job.client], self._turns[job.client]

        first = self.adapters.next(sorted(waiting, key=order)) if len(begun) < self.slots else None  # guard: row-turns
        jobs = [*self.prompts.aside, *([] if first is None else [first])]
        return min(jobs, key=lambda job: self._turns[job.client], default=None)
