"""`Worker`: the thread of a manager, which runs rounds over the requests that were handed in, and counts them."""

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
from .output import Output
from .prefix_cache import whole
from .scheduler import Scheduler
from .sequence import BatchSequence

log = logging.getLogger("spec_compile")

IDLE = 0.1
"""Seconds after which an idle thread looks whether it is to stop."""
REASONS = ("stop", "length", "cancelled", "error")
PLACES = ("row", "device", "host")
"""Where keys and values of a prompt's beginning may be."""
REJECTIONS = ("queue_full", "invalid", "stopping")
COUNTERS = (
    "drafts_total", "draft_tokens_total", "accepted_tokens_total", "prompt_tokens_total", "reused_prompt_tokens_total",
    "generation_tokens_total",
)  # fmt: skip


class Worker:
    """Runs rounds until its manager stops. Every request that was handed in delivers one last output.

    status: transformers' record of who asked the thread to stop. router: takes what is delivered. metrics: counts it.
    sequences: those under way, by name. observers: see `Manager`.
    last_round: when a round last ended, or nothing was to be done, in perf_counter seconds.
    wake_up: set when something is to be done.
    """

    def __init__(self, engine: Any, scheduler: Scheduler, status: BackgroundThreadStatus, router: OutputRouter):
        self._engine, self._scheduler, self._status, self._router = engine, scheduler, status, router
        self.metrics = Metrics(scheduler, engine)
        self.sequences: dict[str, BatchSequence] = {}
        self.observers: list[Callable[[Output], None]] = []
        self.last_round = time.perf_counter()
        self.wake_up = threading.Event()
        self.is_open = True
        """True if requests are taken. Changed under the lock, so that none comes after all others were ended."""
        self._lock = threading.Lock()

    def open(self) -> None:
        self._status.clear()
        with self._lock:
            self.is_open = True

    def hand_in(self, sequences: list[BatchSequence], bound: int, require_open: Callable[[], None]) -> None:
        """Take requests of one client, all or none.

        bound: requests that may wait, or 0 for any number; if several clients wait, each may have an equal share.
        require_open: raises RuntimeError if none is taken.
        Raises queue.Full if more would wait; TypeError or ValueError for a name that cannot be, or is in use.
        """
        names = [sequence.request_id for sequence in sequences]
        with self._lock:
            require_open()
            waiting = self._scheduler.waiting
            clients = Counter(sequence.request.client for sequence in [*waiting, *sequences])
            share, added = bound // len(clients), len(sequences)  # guard: shares-of-the-queue
            if bound and clients[sequences[0].request.client] > share:
                self.metrics.reject("queue_full")
                whose = f" of each of {len(clients)} clients" if len(clients) > 1 else ""
                own = clients[sequences[0].request.client] - added
                raise queue.Full(f"max_queue_size: {share} requests{whose} may wait, {own} do, and {added} were added")
            for name in names:
                if not isinstance(name, str):
                    raise TypeError(f"request_id: expected a text, got {type(name).__name__}")
                if name in self.sequences or names.count(name) > 1:
                    raise ValueError(f"request_id: {name!r} is under way already")
            self.sequences |= dict(zip(names, sequences))
            waiting.extend(sequences)
        self.wake_up.set()

    def cancel(self, request_id: str) -> None:
        with self._lock:
            for name, sequence in self.sequences.items():
                if name == request_id or name.startswith(child_name(request_id, "")):
                    sequence.is_cancelled = True
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
        self._close()
        error = RequestError("the manager was stopped", 500)
        with self._engine.turns.of_a_round():
            self._scheduler.clear(error)
        self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        self._close()
        with self._lock:
            sequences = [*self.sequences.values()]
        for sequence in sequences:
            sequence.fail(error)
            self._scheduler.adapters.release(sequence)
        self.deliver(sequences)

    def deliver(self, news: list[BatchSequence]) -> None:
        """Hand out what there is of these requests. An error here is the reader's, not the request's."""
        outputs = [sequence.output() for sequence in news if sequence.is_over or sequence.request.streaming]
        for sequence in news:
            if sequence.is_over:
                with self._lock:
                    self.sequences.pop(sequence.request_id, None)
                self.metrics.finish(sequence)
                self._learn(sequence)
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

    def _learn(self, sequence: BatchSequence) -> None:
        """Let a draft learn from an answer, unless its text is forgotten or ids do not say all of its prompt."""
        learner = self._engine.online
        if (
            learner is not None
            and sequence.finish_reason in ("stop", "length")
            and sequence.request.share_text is not False
            and not sequence.has_pictures
        ):
            learner.keep(sequence.prompt, sequence.tokens)


class Metrics:
    """Numbers about a manager: counters of finished requests, and gauges of the scheduler. Calling it gives a dict."""

    def __init__(self, scheduler: Scheduler, engine: Any):
        self._engine = engine
        self._scheduler, self._rounds_before = scheduler, scheduler.decoder.rounds_by_nodes.copy()
        self._prefixes_before = self._count_prefixes()
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._finished, self._rejected = dict.fromkeys(REASONS, 0), dict.fromkeys(REJECTIONS, 0)
        self._positions: list[int] = []

    def reject(self, reason: str) -> None:
        """Count a request that was not taken, by one of `REJECTIONS`."""
        self._rejected[reason] += 1

    def finish(self, sequence: BatchSequence) -> None:
        speculation = sequence.speculation
        self._finished[sequence.finish_reason] += 1
        self._counters.update(
            drafts_total=sum(drafted > 0 for drafted in speculation.per_step_drafted),
            draft_tokens_total=speculation.drafted, accepted_tokens_total=speculation.accepted,
            prompt_tokens_total=len(sequence.prompt), generation_tokens_total=len(sequence.tokens),
            reused_prompt_tokens_total=whole(speculation.reused_prompt_tokens),
        )  # fmt: skip
        self._positions += [0] * (len(speculation.accepted_per_position) - len(self._positions))
        for depth, accepted in enumerate(speculation.accepted_per_position):
            self._positions[depth] += accepted

    def _count_prefixes(self) -> Counter[str]:
        """Tokens that were looked for, tokens that were copied from each place, and blocks that were dropped."""
        store = self._scheduler.prefixes.store
        return Counter(store.hits) + Counter(asked=store.asked, evicted=store.evicted)

    def __call__(self) -> dict:
        """Gauges: requests, slots and tokens of the cache now. Counters, which end with ``_total``: since the start, of
        requests that are over; the counters of ``prefix_cache`` count requests that have begun, too."""
        scheduler, decoder, prefill = self._scheduler, self._scheduler.decoder, self._scheduler.prefill
        rounds = decoder.rounds_by_nodes - self._rounds_before
        prefixes = self._count_prefixes() - self._prefixes_before
        tokens, used = scheduler.slots * scheduler.capacity, decoder.texts.used
        return {
            "requests_running": len(decoder.active),
            "requests_prefilling": len(prefill.begun),
            "requests_waiting": len(scheduler.waiting),
            "slots": scheduler.slots,
            "slot_tokens": scheduler.capacity,
            "cache_bytes": decoder.bytes + prefill.bytes,
            "cache_tokens": tokens,
            "cache_tokens_used": used,
            "cache_usage": used / tokens,
            "prefix_cache_bytes": {tier: scheduler.prefixes.store.bytes(tier) for tier in PLACES[1:]},
            "prefix_cache_queries_total": prefixes["asked"],
            "prefix_cache_hits_total": sum(prefixes[place] for place in PLACES),
            "prefix_cache_hits_by_place_total": {place: prefixes[place] for place in PLACES},
            "prefix_cache_evicted_blocks_total": prefixes["evicted"],
            "rounds_total": rounds.total(),
            "rounds_by_nodes_total": dict(rounds),
            **self._counters,
            "accepted_tokens_per_position_total": list(self._positions),
            "requests_finished_total": dict(self._finished),
            "requests_rejected_total": dict(self._rejected),
            "online_training": {} if self._engine.online is None else self._engine.online.figures(),
        }  # fmt: skip
