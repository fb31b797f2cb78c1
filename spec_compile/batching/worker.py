"""`Worker`: the thread of a manager, which runs rounds over the requests that were handed in."""

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from transformers.generation.continuous_batching.continuous_api import BackgroundThreadStatus, OutputRouter

from ..errors import RequestError
from .intake import child_name
from .job import Job
from .metrics import Metrics
from .output import Output
from .scheduler import Scheduler

log = logging.getLogger("spec_compile")

IDLE = 0.1
"""Seconds after which an idle thread looks whether it is to stop."""


class Worker:
    """Runs rounds until its manager stops. Every request that was handed in delivers one last output.

    status: transformers' record of who asked the thread to stop. router: takes what is delivered. metrics: counts it.
    jobs: the requests under way, by name. observers: see `Manager`. last_round: when a round last ended, or nothing was
    to be done, in perf_counter seconds. wake_up: set when something is to be done.
    """

    def __init__(self, engine: Any, scheduler: Scheduler, status: BackgroundThreadStatus, router: OutputRouter):
        self._engine, self._scheduler, self._status, self._router = engine, scheduler, status, router
        self.metrics = Metrics(scheduler, engine)
        self.jobs: dict[str, Job] = {}
        self.observers: list[Callable[[Output], None]] = []
        self.last_round = time.perf_counter()
        self.wake_up = threading.Event()
        self.is_open = True
        """True if requests are taken. Changed under the lock, so that none comes after all others were ended."""
        self._lock = threading.Lock()

    def open(self) -> None:
        """Take requests again, after a stop."""
        self._status.clear()
        with self._lock:
            self.is_open = True

    def hand_in(self, jobs: list[Job], bound: int, require_open: Callable[[], None]) -> None:
        """Take requests of one client, all or none.

        bound: requests that may wait, or 0 for any number; if several clients wait, each may have an equal share.
        require_open: raises RuntimeError if none is taken.
        Raises queue.Full if more would wait; TypeError or ValueError for a name that cannot be, or is in use.
        """
        names = [job.request_id for job in jobs]
        with self._lock:
            require_open()
            waiting = self._scheduler.waiting
            clients = Counter(job.client for job in [*waiting, *jobs])
            share, added = bound // len(clients), len(jobs)  # guard: shares-of-the-queue
            if bound and clients[jobs[0].client] > share:
                self.metrics.reject("queue_full")
                whose = f" of each of {len(clients)} clients" if len(clients) > 1 else ""
                own = clients[jobs[0].client] - added
                raise queue.Full(f"max_queue_size: {share} requests{whose} may wait, {own} do, and {added} were added")
            for name in names:
                if not isinstance(name, str):
                    raise TypeError(f"request_id: expected a text, got {type(name).__name__}")
                if name in self.jobs or names.count(name) > 1:
                    raise ValueError(f"request_id: {name!r} is under way already")
            self.jobs |= dict(zip(names, jobs))
            waiting.extend(jobs)
        self.wake_up.set()

    def cancel(self, request_id: str) -> None:
        """End a request with all its sequences."""
        with self._lock:
            for name, job in self.jobs.items():
                if name == request_id or name.startswith(child_name(request_id, "")):
                    job.is_cancelled = True
        self.wake_up.set()

    def run(self) -> None:
        """Run rounds until somebody says that it is enough; on other ranks than the first, until that one says so."""
        ranks, device = self._engine.options.ranks, self._engine.runtime.device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            with self._engine.agreement.serving(), ranks.call():
                self._run_rounds() if ranks.leads else self._follow_rounds()
                self.clear()
        except BaseException as error:  # of the device, or a bug: nobody can go on
            log.exception("the thread of continuous batching died")
            self._status.record_fatal_error(error)
            self._engine.batches.discard(self._scheduler)
            self._fail_all(error)
        finally:
            self._status.mark_as_stopped()

    def _run_rounds(self) -> None:
        status, ranks, turns = self._status, self._engine.options.ranks, self._engine.turns
        while status.local_status != BackgroundThreadStatus.HARD_STOP:
            if self._scheduler.is_busy:
                with turns.rounds():
                    while self._scheduler.is_busy and status.local_status != BackgroundThreadStatus.HARD_STOP:
                        with turns.of_a_round():
                            ranks.lead(lambda: [True])
                            news = self._scheduler.step()
                        self.last_round = time.perf_counter()
                        self.deliver(news)
            elif status.local_status == BackgroundThreadStatus.FLUSH_AND_STOP and self._close(if_idle=True):
                break
            else:
                self.wake_up.wait(IDLE)
                self.wake_up.clear()
                self.last_round = time.perf_counter()
        ranks.lead(lambda: [False])

    def _follow_rounds(self) -> None:
        ranks = self._engine.options.ranks
        while any(ranks.lead(list, is_patient=True)):  # another round
            with self._engine.turns.of_a_round():
                self._scheduler.step()

    def _close(self, if_idle: bool = False) -> bool:
        """Take no more requests, with `if_idle` only if none waits; returns whether none is taken."""
        with self._lock:
            self.is_open &= if_idle and bool(self._scheduler.waiting)
            return not self.is_open

    def clear(self) -> None:
        """End all requests."""
        self._close()
        error = RequestError("the manager was stopped", 500)
        with self._engine.turns.of_a_round():
            self._scheduler.clear(error)
        self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        self._close()
        with self._lock:
            jobs = [*self.jobs.values()]
        for job in jobs:
            job.fail(error)
            self._scheduler.adapters.release(job)
        self.deliver(jobs)

    def deliver(self, news: list[Job]) -> None:
        """Hand out what there is of these requests. An error here is the reader's, not the request's."""
        outputs = [job.output() for job in news if job.is_over or job.streaming]
        for job in news:
            if job.is_over:
                with self._lock:
                    self.jobs.pop(job.request_id, None)
                self.metrics.finish(job)
                self._learn(job)
        for output in outputs:
            try:
                self._router.deliver(output)
            except RuntimeError:  # the event loop of its reader is closed
                log.warning("request %s: nobody reads its output any more", output.request_id)
            for observer in self.observers if output.is_finished() else ():
                try:
                    observer(output)
                except Exception:
                    log.exception("request %s: an observer failed", output.request_id)

    def _learn(self, job: Job) -> None:
        """Let a draft learn from an answer, unless its text is forgotten or ids do not say all of its prompt."""
        learner = self._engine.online
        if (
            learner is not None
            and job.finish_reason in ("stop", "length")
            and job.share_text is not False
            and not job.has_pictures
        ):
            learner.keep(job.prompt, job.tokens)
