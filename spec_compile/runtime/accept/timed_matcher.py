"""`TimedMatcher`: a matcher of a client's grammar, whose steps may take only so long."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ...errors import RequestError

STEP_SECONDS = 0.25
"""Time of a processor that one step of a matcher may take. Bounded lengths of texts take 0.02 with 150,000 tokens."""
FIRST_SECONDS, SECONDS_A_STEP = 1.0, 0.03
"""Time of a processor that all steps of a matcher may take: the first figure, and the second for each step."""
TOO_SLOW = "its grammar takes too long to follow; send a simpler one, without nested or ambiguous repetitions"


class _Thread(threading.Thread):
    """Runs one step after the other. xgrammar lets go of the interpreter, so a long step stops no other thread."""

    def __init__(self) -> None:
        super().__init__(name="spec_compile grammar", daemon=True)
        self._begun, self._done = threading.Lock(), threading.Lock()
        self._begun.acquire()
        self._done.acquire()
        self._step: Callable[[], Any] = bool
        self._result: Any = None
        self._error: BaseException | None = None
        self.is_given_up = False
        self.start()
        self._clock = time.pthread_getcpuclockid(self.ident)

    def run(self) -> None:
        while not self.is_given_up:
            self._begun.acquire()
            if self.is_given_up:  # just after its step
                break
            try:
                self._result, self._error = self._step(), None
            except BaseException as error:
                self._error = error
            self._step = bool
            self._done.release()

    def run_step(self, step: Callable[[], Any]) -> tuple[Any, float]:
        """The result of a step, and the seconds of a processor that it took. TimeoutError after `STEP_SECONDS`."""
        begin = time.clock_gettime(self._clock)
        self._step = step
        self._begun.release()
        left = STEP_SECONDS
        while not self._done.acquire(timeout=left):
            left = begin + STEP_SECONDS - time.clock_gettime(self._clock)
            if left <= 0:
                raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._result, time.clock_gettime(self._clock) - begin

    def give_up(self) -> None:
        """Let the thread end after its step, which goes on with the time that nobody else needs."""
        self.is_given_up = True
        self._begun.release()
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.native_id or 0, 19)


_free: list[_Thread] = []
"""Threads that wait for a step."""
_given_up: list[_Thread] = []
os.register_at_fork(after_in_child=_free.clear)
os.register_at_fork(after_in_child=_given_up.clear)


def given_up() -> int:
    """Steps that took too long, and still run."""
    _given_up[:] = [thread for thread in _given_up if thread.is_alive()]
    return len(_given_up)


class TimedMatcher:
    """A GrammarMatcher whose steps run in threads, and end their request by a RequestError if they take too long.

    make: returns xgrammar's matcher
    field: of the request, for errors
    """

    def __init__(self, make: Callable[[], Any], field: str):
        self._field, self._left = field, FIRST_SECONDS
        self._matcher = self._run(make)

    def is_terminated(self) -> bool:
        """See xgrammar, as for the other methods."""
        return self._matcher.is_terminated()

    def accept_token(self, token: int) -> bool:
        return self._run(partial(self._matcher.accept_token, token))

    def rollback(self, count: int = 1) -> None:
        self._run(partial(self._matcher.rollback, count))

    def fill_next_token_bitmask(self, bits: Any, index: int = 0) -> bool:
        return self._run(partial(self._matcher.fill_next_token_bitmask, bits, index))

    def _run(self, step: Callable[[], Any]) -> Any:
        if self._left < 0:
            raise RequestError(f"{self._field}: {TOO_SLOW}", field=self._field)
        try:
            thread = _free.pop()
        except IndexError:
            thread = _Thread()
        try:
            result, seconds = thread.run_step(step)
        except TimeoutError:
            thread.give_up()
            _given_up.append(thread)
            self._left = -1.0
            raise RequestError(f"{self._field}: {TOO_SLOW}", field=self._field) from None
        except Exception:
            _free.append(thread)
            raise
        _free.append(thread)
        self._left = min(FIRST_SECONDS, self._left + SECONDS_A_STEP - seconds)
        return result
