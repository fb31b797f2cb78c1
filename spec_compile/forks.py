"""``os.fork`` with several threads: objects that must be usable in the child are registered here.

The child has the memory of all threads but runs only the one that forked. A lock that another thread holds would stay
locked in the child, and an object that it is changing would stay half changed.
"""

import os
import weakref
from typing import Protocol

from .compat import COMPILE_LOCK, renew_compile_threads


class Forks(Protocol):
    """An object for `register`. fork_order: locks are acquired in this order, as threads acquire them."""

    fork_order: int

    def before_fork(self) -> None:
        """Wait until no other thread is changing the object, and lock it."""

    def after_fork(self, in_child: bool) -> None:
        """Unlock the object. In the child, which has no other threads, make it as new."""


_registered: "weakref.WeakSet[Forks]" = weakref.WeakSet()
_waiting: list[Forks] = []
"""Objects that are locked for the current fork."""


def register(forking: Forks) -> None:
    """Call the object's methods around every ``os.fork`` from now on, as long as it lives."""
    _registered.add(forking)


def _before() -> None:
    alive = sorted(_registered, key=lambda forking: forking.fork_order)
    if alive:
        COMPILE_LOCK.acquire()  # a compilation in another thread ends first
        _waiting.extend(alive)
        for forking in _waiting:
            forking.before_fork()


def _after(in_child: bool) -> None:
    if _waiting:
        for forking in _waiting:
            forking.after_fork(in_child)
        _waiting.clear()
        if in_child:
            renew_compile_threads()
        COMPILE_LOCK.release()


os.register_at_fork(before=_before, after_in_parent=lambda: _after(False), after_in_child=lambda: _after(True))
