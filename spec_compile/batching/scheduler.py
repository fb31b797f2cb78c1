"""What happens between two rounds: requests leave, wait, have their prompts processed, and enter."""

from collections import deque
from collections.abc import Callable

from ..runtime.runtime import Runtime
from .decoding import Decoder
from .job import Job
from .prompts import Prompts
from .ranks import Admission, Shadow, pack, unpack


class Scheduler:
    """First come, first served. A request waits until a row is free for it; then its prompt is processed in chunks, at
    most one between two rounds, and its row joins the next round."""

    def __init__(self, runtime: Runtime, slots: int, capacity: int, lanes: int):
        """slots: requests that decode at once. capacity: tokens of each. lanes: prompts that are processed at once."""
        self.slots, self.capacity = slots, capacity
        self.waiting: deque[Job] = deque()
        """Any thread may append to it."""
        self.prompts = Prompts(runtime, lanes, capacity)
        self.decoder = Decoder(runtime, slots, capacity)
        self._keeps_a_token_less, self._has_states = runtime.algorithm.remembers, bool(runtime.verify.recurrences)
        self.ranks = runtime.options.ranks
        self.check: Callable[[], None] = lambda: None
        """Raises if the model has changed."""
        self._unchecked: list[Job] = []
        """Requests that have entered since the last `check`."""

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting) or bool(self.prompts.active) or self.decoder.is_busy

    @property
    def jobs(self) -> list[Job]:
        """All requests that are not over."""
        return [*self.waiting, *self.prompts.active, *self.decoder.active]

    def step(self) -> list[Job]:
        """Run a round, and what comes before it; returns the requests that gained tokens or are over."""
        news: list[Job] = []
        if self.ranks.size == 1:
            if self.waiting and self.prompts.runtime.on_gpu:  # rounds to compute while the host lets requests in
                self.decoder.launch()
            self._change(news)
        elif self.ranks.leads:
            self.ranks.lead(lambda: pack(self._change(news)))
        else:
            self._change_alike(*unpack(self.ranks.lead(list)))
        if self.prompts.active:
            decoding = len(self.decoder.active)
            waiting = min(len(self.waiting), self.slots - decoding - len(self.prompts.active))
            for job in self.prompts.step(waiting, decoding, self.decoder.round_seconds):
                self.prompts.move(job, self.decoder.lanes, self.decoder.free_row())
                self.decoder.enter(job)
        else:
            self.decoder.compact()
        self.decoder.launch()
        self._check_model()
        if self.decoder.is_flying:
            news += self.decoder.collect()
        for job in news:
            if job.is_over and job in self.decoder.jobs:
                self.decoder.leave(job)
        return news

    def forget(self) -> None:
        """The weights have changed: keys and values of earlier requests are of no use."""
        self.decoder.texts.forget()

    def warmup(self) -> None:
        """Compile and capture what rounds and prompts of all widths need."""
        for width in self.prompts.lanes.widths:
            session = self.prompts.lanes.session(width)
            session.build_prefill()
            session.build_proposal()
        for width in self.decoder.lanes.widths:
            session = self.decoder.lanes.session(width)
            for nodes in session.policies["round"].sizes:
                session.step("round", nodes)
            if self.decoder.lanes.has_one_size:
                session.build_proposal()

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
            elif job in self.prompts.jobs:
                self.prompts.drop(job)
            else:
                self.decoder.leave(job)
            job.finish("cancelled") if error is None else job.fail(error)
        return jobs

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

    def _change(self, news: list[Job]) -> tuple[list[str], list[Admission]]:
        """Let those leave that were cancelled and those enter for which there are rows. Those that are over are `news`.

        Returns who has left and who has entered, for the other ranks.
        """
        cancelled = [job for job in self.jobs if job.is_cancelled]
        news += self.drop(cancelled)
        return [job.request_id for job in cancelled], self._admit(news)

    def _change_alike(self, left: list[str], entered: list[Admission]) -> None:
        """What the first rank has done by `_change`."""
        self.drop([job for job in self.jobs if job.request_id in left])
        for admission in entered:
            self.prompts.enter(Shadow(admission), self.decoder.lanes, admission.row, admission.known)

    def _admit(self, news: list[Job]) -> list[Admission]:
        """Begin with the prompts of those that wait, as far as there are rows for them. Those that fail are `news`."""
        entered: list[Admission] = []
        while self.waiting and self.prompts.has_room:
            if len(self.prompts.active) + len(self.decoder.active) == self.slots:
                break
            job = self.waiting.popleft()
            try:
                job.admit()
                self._unchecked.append(job)
                if job.has_pictures:
                    self.prompts.process(job, self.decoder.lanes, self.decoder.free_row())
                    self.decoder.enter(job)
                    continue
            except Exception as error:  # of a processor or a criterion of its own, or of its pictures
                job.fail(error)
                news.append(job)
                continue
            # The last token is the root of the first tree.
            row, known = self.decoder.texts.longest_prefix(job.prompt[:-1])
            if self._keeps_a_token_less:  # a drafter's slot may depend on the token behind it, as that of a head does
                known = 0 if self._has_states else max(known - 1, 0)
            self.prompts.enter(job, self.decoder.lanes, row, known)
            entered.append(Admission.of(job, row, known))
        return entered
