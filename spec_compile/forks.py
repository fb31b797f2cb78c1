"""``os.fork``: what must be whole in the child, whatever other threads did at that moment.

The child has the memory of all threads and runs only the one that forked: a lock that another thread held stays locked
there for good, and what that thread was changing stays half changed.
"""

import os
import weakref
from typing import Protocol

from .compat import COMPILE_LOCK, renew_compile_threads


class Forks(Protocol):
    """What `register` takes. fork_order: locks are taken in this order, as threads take them."""

    fork_order: int

    def before_fork(self) -> None:
        """Wait until no other thread is changing it, and keep them away."""

    def after_fork(self, in_child: bool) -> None:
        """Let other threads go on; in the child, which has none, be as new."""


_registered: "weakref.WeakSet[Forks]" = weakref.WeakSet()
_waiting: list[Forks] = []


def register(one: Forks) -> None:
    """Call `one`'s methods around every ``os.fork`` from now on, as long as it lives."""
    _registered.add(one)


def _before() -> None:
    alive = sorted(_registered, key=lambda one: one.fork_order)
    if alive:
        COMPILE_LOCK.acquire()  # a compilation in another thread ends first
        _waiting.extend(alive)
        for one in _waiting:
            one.before_fork()


def _after(in_child: bool) -> None:
    if _waiting:
        for one in _waiting:
            one.after_fork(in_child)
        _waiting.clear()
        if in_child:
            renew_compile_threads()
        COMPILE_LOCK.release()


os.register_at_fork(before=_before, after_in_parent=lambda: _after(False), after_in_child=lambda: _after(True))
