"""`Workers`: a few threads in which the handlers of requests run, so that the event loop only passes tokens on."""

import asyncio
import inspect
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any
from weakref import WeakValueDictionary

from .call import CURRENT

WORKERS, MOST_IDLE = 2, 62
"""Threads that work at once, and others that may wait for a child process. More would take the interpreter from the
rounds for longer, and tokenizers use all cores by themselves."""


class Waiting:
    """A future or a coroutine of the event loop, in the form that a coroutine in `Workers` can await. Errors that it
    raises end the request, and the coroutine in `Workers` does not see them."""

    def __init__(self, future: Awaitable):
        self.future = future

    def __await__(self) -> Generator[Awaitable, Any, Any]:
        return (yield self.future)


class _Seats:
    """A semaphore that threads pass in the order in which they came; in `threading.Semaphore` later ones overtake."""

    def __init__(self, free: int):
        self._lock, self._free = threading.Lock(), free
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()  # hands over the place
            else:
                self._free += 1


class Workers:
    """Runs coroutines in threads, and awaits their futures on the event loop. Clients take turns: of each only as many
    coroutines as there are threads begin at a time.

    busy: number of coroutines that have not reached their first `Waiting` or their end
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(WORKERS + MOST_IDLE, thread_name_prefix="spec_compile requests")
        self._free = _Seats(WORKERS)
        self.busy = 0
        self._busy: Counter[str] = Counter()
        """The same by client."""
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def has_room(self, most: int) -> bool:
        """True if one more coroutine may begin for the current call: of each client an equal share of `most`. Together
        they may be more, if the first ones had all of it."""
        others = {client: count for client, count in self._busy.items() if client != _client()}
        return self.busy - sum(others.values()) < most // (1 + len(others))

    async def drive(self, coroutine: Coroutine) -> Any:
        """The result of a coroutine that only awaits `Waiting`. Each of its steps runs in one of the threads."""
        loop, context, result, client = asyncio.get_running_loop(), copy_context(), None, _client()
        turn = self._turns.setdefault(client, asyncio.Semaphore(WORKERS))
        self.busy += 1
        self._busy[client] += 1
        try:
            async with turn:
                is_over, value = await loop.run_in_executor(self._pool, context.run, self._step, coroutine, result)
        finally:
            self.busy -= 1
            self._busy[client] -= 1
            self._busy += Counter()  # drops those without any
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # cancelled before a thread was free
        while not is_over:
            result = await value
            is_over, value = await loop.run_in_executor(self._pool, context.run, self._step, coroutine, result)
        return value

    def _step(self, coroutine: Coroutine, value: Any) -> tuple[bool, Any]:
        with self._free:
            return _step(coroutine, value)

    @contextmanager
    def waits(self) -> Iterator[None]:
        """A context in which one of the threads only waits, so that another one may work."""
        self._free.__exit__()
        try:
            yield
        finally:
            self._free.__enter__()

    def close(self) -> None:
        """End the threads once they are done."""
        self._pool.shutdown(wait=False)


def _client() -> str:
    call = CURRENT.get(None)
    return "" if call is None else call.client


async def together(coroutines: Sequence[tuple[Context, Coroutine]]) -> list:
    """The results of coroutines that only await `Waiting`, each in its context. All begin before any is awaited."""
    results = []
    try:
        steps = [context.run(_step, coroutine, None) for context, coroutine in coroutines]
        for (context, coroutine), (is_over, value) in zip(coroutines, steps):
            while not is_over:
                is_over, value = context.run(_step, coroutine, await Waiting(value))
            results.append(value)
        return results
    finally:
        for _, coroutine in coroutines:
            coroutine.close()  # does nothing to those that have ended


def _step(coroutine: Coroutine, value: Any) -> tuple[bool, Any]:
    """Run a coroutine to its next `Waiting`: (True, its result) if it has ended, else (False, the future)."""
    try:
        return False, coroutine.send(value)
    except StopIteration as end:
        return True, end.value
