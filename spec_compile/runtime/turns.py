"""Who runs when: `FairLock` among the threads of a process, `Agreement` among the ranks of tensor parallelism."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..parallel.ranks import Alone

PAUSE = 0.05  # seconds without a call after which work that can wait begins
EVERY = 0.1  # if there is no pause, seconds until the next piece of such work
SHARE = 4  # longer pieces wait for this multiple of their time, so that calls keep four fifths of it


class FairLock:
    """A lock around one model: one thread has it at a time, and may take it several times over.

    As a context manager it is the turn of a call. Calls go in the order in which they came. A batch of requests takes a
    turn for every round. While both wait, each has half of the time: after a call of t seconds, rounds of t seconds
    come before the next call. So a request waits for at most one call until its next round, and a call at most twice
    the time of the calls before it.

    Work that can wait is done `between` calls: after a pause, or if there is none, one piece in EVERY seconds.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._owner: int | None = None
        self._depth = 0
        self._calls: deque[object] = deque()  # a ticket for each call that waits, the first one first
        self._rounds: deque[object] = deque()
        self._batches = 0  # batches inside `rounds`
        self._owed = 0.0  # seconds that rounds may run before the next call
        # Threads that wait in `between`; when one of them goes before any call; and when the last call ended.
        self._workers, self._due, self._quiet_since = 0, -math.inf, -math.inf

    def __enter__(self) -> None:
        self._take(self._calls, lambda: not (self._batches and self._owed > 0) and not self._work_is_due())
        if self._depth == 1:
            self._begin = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        with self._changed:
            if self._depth == 1:
                self._quiet_since = time.perf_counter()
                self._owed = self._owed + time.perf_counter() - self._begin if self._batches else 0.0  # guard: owed
            self._give_back()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """A context in which other threads may have the turn of this call, unless it is inside another turn."""
        with self._changed:
            if is_lent := self._depth == 1:
                self._give_back()
        try:
            yield
        finally:
            if is_lent:
                self.__enter__()

    @contextmanager
    def rounds(self) -> Iterator[None]:
        """A context of rounds, each in a turn `of_a_round`; calls leave them their share of the time."""
        with self._changed:
            self._batches += 1
        try:
            yield
        finally:
            with self._changed:
                self._batches -= 1
                if not self._batches:
                    self._owed = 0.0
                self._changed.notify_all()

    @contextmanager
    def of_a_round(self) -> Iterator[None]:
        self._take(self._rounds, lambda: (self._owed > 0 or not self._calls) and not self._work_is_due())
        begin = time.perf_counter()
        try:
            with torch.inference_mode(False), torch.no_grad():
                yield
        finally:
            with self._changed:
                if self._depth == 1:
                    self._quiet_since = time.perf_counter()
                    self._owed = max(0.0, self._owed - (time.perf_counter() - begin))
                self._give_back()

    @contextmanager
    def between(self, patience: float) -> Iterator[bool]:
        """A turn for one piece of work that can wait. True if it came within `patience` seconds; 0 takes only a lock
        that nobody has. A thread that has the turn itself gets none."""
        with self._changed:
            self._workers += 1
            end = time.perf_counter() + patience
            self._due = max(self._due, time.perf_counter() + EVERY) if patience else self._due
            try:
                while (waits := not self._work_may_go(patience)) and time.perf_counter() < end:
                    self._changed.wait(PAUSE)
            finally:
                self._workers -= 1
                self._changed.notify_all()  # calls that let it go first
            if not waits:
                self._owner, self._depth = threading.get_ident(), 1
        begin = time.perf_counter()
        try:
            yield not waits
        finally:
            if not waits:
                with self._changed:
                    now = time.perf_counter()
                    self._due = now + max(EVERY, SHARE * (now - begin))
                    self._give_back()

    def _work_may_go(self, patience: float) -> bool:
        is_quiet = not (self._calls or self._rounds) and time.perf_counter() > self._quiet_since + PAUSE
        return self._owner is None and (not patience or is_quiet or self._work_is_due())

    def _work_is_due(self) -> bool:
        return self._workers > 0 and time.perf_counter() > self._due

    def renew(self) -> None:
        """In a forked process, which has only this thread: forget all others, and a lock of theirs."""
        if not self.is_mine:
            self._owner, self._depth = None, 0
        self._changed = threading.Condition()
        self._calls.clear()
        self._rounds.clear()
        self._batches, self._owed, self._workers = 0, 0.0, 0

    @property
    def is_mine(self) -> bool:
        return self._owner == threading.get_ident()

    def _take(self, queue: deque, may_go: Callable[[], bool]) -> None:
        """Wait until nobody has it, this thread is the first of its `queue`, and `may_go()` is True."""
        with self._changed:
            if not self.is_mine:
                queue.append(ticket := object())
                try:
                    self._changed.wait_for(lambda: self._owner is None and queue[0] is ticket and may_go())
                finally:
                    queue.remove(ticket)
                    self._changed.notify_all()  # after an interrupt, the next one may be the first now
                self._owner = threading.get_ident()
            self._depth += 1

    def _give_back(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._changed.notify_all()


class Agreement:
    """Ranks agree once in each generate(), before the first of them decides anything for all."""

    def __init__(self, ranks: Alone):
        self.ranks = ranks
        self._parts: dict[str, Any] = {}
        self._is_awaited = False
        self._batches = 0  # managers of requests whose threads run here

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The context of a thread that runs rounds of requests, on all ranks at once."""
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """The context of one generate(). A rank that leaves it before `reach` says why, so that no other waits."""
        if self._is_awaited or self._parts:
            raise RuntimeError(
                "generate() inside a streamer, criterion or processor of another generate(): with tensor_parallel "
                "rank 0 alone runs these, so no other rank would take part; call it when the other one is over"
            )
        if self.ranks.size == 1:
            yield
            return
        if self._batches:  # guard: generate-during-ranks
            error = RuntimeError(
                "generate(): with tensor_parallel it cannot run while a manager of requests does, because the ranks "
                "follow one stream of rounds; stop the manager first, or add a request"
            )
            self.ranks.agree("generate()", {}, error)
            raise error
        self._is_awaited = True
        try:
            yield
            if self._is_awaited:
                self.reach({"the decoding loop": "transformers' own"})
        except Exception as error:
            if self._is_awaited:
                self.ranks.agree("generate()", {}, error)
            raise
        finally:
            self._is_awaited = False
            self._parts.clear()

    def add(self, name: str, value: Any) -> None:
        if self._is_awaited:
            self._parts[name] = value

    def reach(self, parts: dict[str, Any]) -> None:
        """Wait for the other ranks. ValueError if the call of one differs, or if one has refused its call."""
        if self._is_awaited:
            self._is_awaited = False
            self.ranks.agree("generate()", self._parts | parts)
