"""`Turns`: who may use a model now."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Turns:
    """A lock around calls, which one thread may take several times. As a context manager it is that of a call.

    A batch of requests never ends, so it takes a turn for every round, and lets all calls that wait go first.
    """

    def __init__(self) -> None:
        self._lock, self._count = threading.RLock(), threading.Lock()
        self._calls, self._no_call = 0, threading.Event()
        self._no_call.set()

    def __enter__(self) -> None:
        with self._count:
            self._calls += 1
            self._no_call.clear()
        self._lock.acquire()

    def __exit__(self, *error) -> None:
        self._lock.release()
        with self._count:
            self._calls -= 1
            if not self._calls:
                self._no_call.set()

    @contextmanager
    def of_a_round(self) -> Iterator[None]:
        """The turn of a round."""
        self._no_call.wait()
        with self._lock, torch.inference_mode(False), torch.no_grad():
            yield

    @property
    def is_mine(self) -> bool:
        """Whether this thread has it."""
        return self._lock._is_owned()  # type: ignore[attr-defined]
