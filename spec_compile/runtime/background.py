"""The thread that works between the calls of a model: it compiles parts of rounds, and trains drafts."""

import atexit
import logging
import threading
import time
import weakref
from contextlib import suppress
from functools import cache
from typing import Protocol

from .. import forks
from ..artefacts.children import Children, number_of_children
from ..artefacts.parts import get_ready_to_load
from ..compat import check_compiler
from ..config import Options
from .fair_lock import FairLock
from .steps.capture import patient

log = logging.getLogger("spec_compile")

LOOK_SECONDS = 0.05
"""Between two looks for something to do, while children compile."""
PATIENCE = 1.0
"""Seconds to wait for a turn of one engine before looking at the next."""
LAST_SECONDS = 10.0
"""Longest wait for the thread's work when Python ends."""


class Chore(Protocol):
    """Work of an engine that can wait, such as its `Tiers`. turns: of the engine. device_type: of its device."""

    turns: FairLock

    @property
    def device_type(self) -> str: ...

    @property
    def waits(self) -> bool:
        """True as long as the thread is to look after it."""
        ...

    def load(self) -> None:
        """Take what has become ready. Calls may go on."""

    def has_work(self) -> bool:
        """True if `work` may do something."""
        ...

    def work(self) -> bool:
        """Do one piece in a turn between calls. False if no other piece can follow at once."""
        ...


@cache
def children() -> Children:
    """The child processes of this process. OSError if there is no folder for temporary files."""
    return Children(number_of_children())


def compiles_at_once(options: Options) -> bool:
    """True if steps are compiled before they first run. Ranks do so too, because all must run the same code."""
    return options.compile is True or (
        options.compile == "background" and (options.ranks.size > 1 or not number_of_children())
    )


def find_fault(device_type: str) -> str:
    """Why nothing can be compiled in the background, which is logged; "" if something can."""
    try:
        children()
        if device_type == "cpu":
            check_compiler()
    except (OSError, ValueError) as error:
        log.warning("rounds stay uncompiled, so that they take longer: %s", error)
        return str(error)
    return ""


class Background:
    """One thread, which runs while engines have something to do. It keeps neither them nor the process alive."""

    fork_order = 3

    def __init__(self) -> None:
        self._engines: list[weakref.ref[Chore]] = []
        self._renew()
        forks.register(self)
        atexit.register(self.end)

    def care_for(self, chore: Chore) -> None:
        """Do this work."""
        with self._lock:
            if all(each() is not chore for each in self._engines):
                self._engines.append(weakref.ref(chore))
            if self._thread is None and not self._ends:
                self._thread = threading.Thread(target=self._run, name="spec_compile tiers", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """Wait until the thread has done its piece of work. A thread that computes while Python ends can crash it."""
        self._ends, thread = True, self._thread
        if thread is not None:
            thread.join(LAST_SECONDS)

    def before_fork(self) -> None:
        """See `forks`. No piece of work is under way: in the child, its frames would keep the engine for ever."""
        self._at_work.acquire()
        self._lock.acquire()

    def after_fork(self, in_child: bool) -> None:
        self._lock.release()
        self._at_work.release()
        if in_child:  # which has no such thread
            self._renew()

    def _renew(self) -> None:
        self._lock, self._at_work, self._ends = threading.Lock(), threading.Lock(), False
        self._thread: threading.Thread | None = None

    def _run(self) -> None:
        while not self._ends:
            for engine in [*self._engines]:
                self._work(engine)
            with self._lock:
                self._engines = [engine for engine in self._engines if _waits(engine)]
                if not self._engines:
                    self._thread = None
                    return
            time.sleep(LOOK_SECONDS)

    def _work(self, engine: "weakref.ref[Chore]") -> None:
        """Do one piece of an engine's work after the other, as long as one can be done and it is its turn."""
        while not self._ends:
            with self._at_work, patient():
                _load(engine)
                turns = _turns_of_work(engine)
            if turns is None:
                return
            with turns.between(PATIENCE) as is_mine:  # the engine may be deleted meanwhile
                if not is_mine:
                    return
                with self._at_work:
                    device_type = _do_piece(engine)
            if not device_type:
                return
            with suppress(Exception), patient():  # Python is ending, or else `_load` meets the error again
                get_ready_to_load(device_type)


def _load(engine: "weakref.ref[Chore]") -> None:
    tiers = engine()
    if tiers is not None:
        tiers.load()


def _turns_of_work(engine: "weakref.ref[Chore]") -> FairLock | None:
    """The turns of an engine that has work."""
    tiers = engine()
    return tiers.turns if tiers is not None and tiers.has_work() else None


def _do_piece(engine: "weakref.ref[Chore]") -> str:
    """Do a piece of an engine's work. Returns the type of its device, or "" if nothing was done."""
    tiers = engine()
    return tiers.device_type if tiers is not None and tiers.work() else ""


def _waits(engine: "weakref.ref[Chore]") -> bool:
    tiers = engine()
    return tiers is not None and tiers.waits


background = Background()
