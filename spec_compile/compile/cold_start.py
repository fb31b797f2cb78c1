"""`ColdStart`: rounds run eagerly until their parts are compiled in the background, by a thread between calls."""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch

from .. import forks
from ..compat import COMPILE_LOCK, check_compiler
from ..config import Options
from ..errors import log
from . import workers
from .part import Part, Parts, Shape, get_ready_to_load, recording
from .replay import patient

LOOK_SECONDS = 0.05
"""Between two looks for something to do, while workers compile."""
PIECE_SECONDS = 0.05
"""A piece of work traces parts for so long, and the last one to its end."""
PATIENCE = 1.0
"""Seconds to wait for a turn of one engine before looking at the next."""
LAST_SECONDS = 10.0
"""Longest wait for the thread's work when Python ends."""


def compiles_at_once(options: Options) -> bool:
    """True if steps are compiled before they first run. Ranks do so too, because all must run the same code."""
    return options.compile is True or (
        options.compile == "background" and (options.ranks.size > 1 or not workers.number_of_workers())
    )


class ColdStart:
    """The parts that an engine still has to trace and to adopt, piece by piece in turns between its calls.

    A step that is used for the first time runs eagerly, and asks. Then, between calls, its example runs eagerly, and
    one part of it after the other is traced. Workers compile the parts, and results are adopted between calls.

    turns: the engine's lock.
    parts: what its steps run.
    fault: why nothing can be compiled in the background; "" if something can.
    only_asks: True while steps are to ask, and not to be made.
    """

    def __init__(self, device: torch.device, turns: Any, may_change: Callable[[], bool]):
        """may_change: tells, in a turn between calls, if parts may change now."""
        self.turns, self.fault, self.only_asks = turns, "", False
        self.device_type, self._device, self._may_change = device.type, device, may_change
        self._asked: set[tuple[Shape, str]] = set()
        self._examples: dict[tuple[Shape, str], Callable[[], object]] = {}
        """By step: run the step's parts."""
        self._step: tuple[Shape, str] | None = None
        """The step that parts are traced of."""
        self._calls: list[tuple[Part, tuple]] = []
        """The parts of this step that are not traced yet, and the arguments of their first calls."""
        try:
            self.parts = Parts(workers=workers.workers(), at_once=False)
            if device.type == "cpu":
                check_compiler()
        except (OSError, ValueError) as error:
            log.warning("rounds stay uncompiled, so that they take longer: %s", error)
            self.parts, self.fault = Parts(at_once=False), str(error)

    @property
    def untraced(self) -> int:
        """Parts that wait to be traced, and steps whose parts are not known."""
        return len(self._examples) + len(self._calls)

    @property
    def waits(self) -> bool:
        """True if something is not adopted yet."""
        return bool(self.untraced or self.parts.waiting or self.parts.ready)

    def ask(self, step: tuple[Shape, str], example: Callable[[], object]) -> None:
        """Let the parts of a step be compiled, once. example: runs each of them."""
        if step not in self._asked and not self.fault:
            self._asked.add(step)
            self._examples[step] = example
            self.parts.users.add(self)
            background.care_for(self)

    def has_work(self) -> bool:
        """True if `work` may do something. Only a turn tells if parts may change: while calls follow one another, they
        may between two of them."""
        return self.untraced > 0 or self._has_news()

    def work(self) -> bool:
        """Do one piece: adopt what is compiled, and run an example, or trace parts. Call it in a turn between calls.

        Returns False if nothing can be done now.
        """
        with _compilers() as is_mine, self._alone():
            if not is_mine:
                return False
            has_adopted = self._has_news() and self._may_change() and self._adopt()
            if not self.untraced:
                return has_adopted
            end, is_example = time.perf_counter() + PIECE_SECONDS, not self._calls
            self._trace()
            while self._calls and not is_example and time.perf_counter() < end:
                self._trace()
        return True

    def load(self) -> None:
        """Load the parts that are compiled by now, and those that an earlier process had compiled. Calls may go on."""
        with _compilers() as is_mine, self._alone():
            if is_mine:
                self.parts.load()
                self._calls = [call for call in self._calls if not call[0].recall(call[1])]
                self._settle()

    def finish(self, say: Callable[[str], None]) -> None:
        """Trace, compile and adopt everything that was asked for, in this thread and in workers. While another engine
        that shares the parts answers, adopting them is left to the thread. say: is called with lines about it."""
        if self.waits:
            say("compiling the parts of all steps")
        with self._alone():
            while self.untraced:
                self._trace()
            parts = uncompiled = len(self.parts.waiting)
            while self.parts.waiting:
                if uncompiled != len(self.parts.waiting):
                    uncompiled = len(self.parts.waiting)
                    say(f"compiled {parts - uncompiled} of {parts} parts")
                if self.parts.workers is None or not self.parts.workers.help():
                    time.sleep(LOOK_SECONDS)
                self.parts.load()
            self._adopt()

    def describe(self) -> str:
        """The numbers of parts by tier, for readers."""
        parts = self.parts
        if self.fault:
            return f"compiled in the background: nothing ({self.fault})"
        waiting = self.untraced + len(parts.ready) + sum(map(len, parts.waiting.values()))
        reasons = f" ({parts.failures[0]})" if parts.failures else ""
        return (
            f"compiled in the background: {parts.adopted} parts run compiled, {waiting} wait, "
            f"{len(parts.failures)} stay eager{reasons}"
        )

    @contextmanager
    def asking(self) -> Iterator[None]:
        """A context in which steps are asked for, and not made."""
        self.only_asks = True
        try:
            yield
        finally:
            self.only_asks = False

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A context of work: whatever is unforeseen ends the work, and not the rounds."""
        try:
            device = torch.cuda.device(self._device) if self.device_type == "cuda" else nullcontext()
            with torch.inference_mode(False), torch.no_grad(), device:
                yield
        except Exception as error:
            # All that waits stays eager.
            reason = f"{type(error).__name__}: {error}"
            for _ in range(self.untraced):
                self.parts.fail(reason)
            self._examples.clear()
            self._calls.clear()
            self.parts.give_up(reason)

    def _has_news(self) -> bool:
        """True if loaded parts should be adopted: on a GPU all at once, because steps are then captured anew."""
        return bool(self.parts.ready) and not (self.device_type == "cuda" and (self.untraced or self.parts.waiting))

    def _trace(self) -> None:
        """Run an example, or trace a part that one has run."""
        with COMPILE_LOCK:
            if self._calls:
                part, arguments = self._calls[0]
                try:
                    part.trace(arguments)
                except Exception as error:
                    self.parts.fail(f"{type(error).__name__}: {error}")
                del self._calls[0]  # only now, because somebody may wait until nothing is untraced
            elif self._examples:
                self._step, example = next(iter(self._examples.items()))
                with recording() as calls:
                    example()
                self._calls = [*calls.items()]
                del self._examples[self._step]
            self._settle()

    def _settle(self) -> None:
        if not self._calls and self._step is not None:
            self.parts.complete.add(self._step)

    def _adopt(self) -> bool:
        """Adopt what is compiled. False if an engine that shares the parts is in the middle of an answer."""
        with ExitStack() as turns:
            for user in self.parts.users - {self}:
                if not (turns.enter_context(user.turns.between(0)) and user._may_change()):  # guard: other-wrappers
                    return False
            self.parts.adopt()
            self.parts.adoptions += 1
        return True


@contextmanager
def _compilers() -> Iterator[bool]:
    """A context with the lock of compilers, if nobody has it: another thread may compile for minutes."""
    is_mine = COMPILE_LOCK.acquire(blocking=False)
    try:
        yield is_mine
    finally:
        if is_mine:
            COMPILE_LOCK.release()


class Background:
    """One thread, which runs while engines have something to do. It keeps neither them nor the process alive.

    An engine here is a `ColdStart`, or has the same ``turns``, ``device_type``, ``waits``, ``load()``,
    ``has_work()`` and ``work()``, as training on finished answers does.
    """

    fork_order = 3
    _thread: threading.Thread | None

    def __init__(self) -> None:
        self._engines: list[weakref.ref[Any]] = []
        self._renew()
        forks.register(self)
        atexit.register(self.end)

    def care_for(self, engine: Any) -> None:
        """Do the work of an engine until it ``waits`` no more."""
        with self._lock:
            if all(each() is not engine for each in self._engines):
                self._engines.append(weakref.ref(engine))
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
        self._thread = None

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

    def _work(self, engine: "weakref.ref[Any]") -> None:
        """Do one piece of an engine's work after the other, as long as one can be done and it is its turn."""
        while not self._ends:
            with self._at_work, patient():
                turns = _load(engine)
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


# Only these functions hold an engine, each for a moment, so that the thread keeps none alive.


def _load(engine: "weakref.ref[Any]") -> Any:
    """Load what is compiled for an engine. Returns its turns if it has work."""
    held = engine()
    if held is None:
        return None
    held.load()
    return held.turns if held.has_work() else None


def _do_piece(engine: "weakref.ref[Any]") -> str:
    """Do a piece of an engine's work. Returns the type of its device, or "" if nothing was done."""
    held = engine()
    return held.device_type if held is not None and held.work() else ""


def _waits(engine: "weakref.ref[Any]") -> bool:
    held = engine()
    return held is not None and held.waits


background = Background()
