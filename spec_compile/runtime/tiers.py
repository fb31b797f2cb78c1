"""`Tiers`: rounds run eagerly until their parts are compiled in the background."""

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from ..artefacts.compiler import FirstCall, PartSource, recording
from ..compat import COMPILE_LOCK

if TYPE_CHECKING:
    from .fair_lock import FairLock
    from .runtime import Runtime

LOOK_SECONDS = 0.05
"""Between two looks for results of children."""
PIECE_SECONDS = 0.05
"""A piece of work traces parts for so long, and the last one to its end."""


class Tiers:
    """The parts that an engine still has to trace and to adopt, piece by piece in turns of its own.

    A step that is used for the first time runs eagerly, and asks. Then, between calls, its example runs eagerly, and
    one part of it after the other is traced. Child processes compile the parts, and results are adopted between calls.

    turns: of the engine.
    fault: why nothing can be compiled; "" if something can.
    only_asks: True while steps are to ask, and not to be made.
    """

    def __init__(
        self, runtime: "Runtime", turns: "FairLock", may_change: Callable[[], bool], wake: Callable[["Tiers"], None],
        fault: str = "",
    ):  # fmt: skip
        """may_change: tells, in a turn between calls, if parts may change now. wake: starts the work."""
        self.turns, self.fault, self.only_asks = turns, fault, False
        self._runtime, self._may_change, self._wake = runtime, may_change, wake
        self._asked: set[Hashable] = set()
        self._examples: dict[Hashable, Callable[[], object]] = {}
        """By step: run the step's parts."""
        self._step: Hashable = None
        """The step that parts are traced of."""
        self._calls: list[FirstCall] = []
        """The first calls of its parts that are not traced yet."""

    @property
    def source(self) -> PartSource:
        return self._runtime.code.source

    @property
    def device_type(self) -> str:
        return self._runtime.device.type

    @property
    def untraced(self) -> int:
        """Parts that wait to be traced, and steps whose parts are not known."""
        return len(self._examples) + len(self._calls)

    @property
    def waits(self) -> bool:
        """True if something is not adopted yet."""
        return bool(self.untraced or self.source.waiting or self.source.ready)

    def ask(self, step: Hashable, example: Callable[[], object]) -> None:
        """Let the parts of a step be compiled, once. example: runs each of them."""
        if step not in self._asked and not self.fault:
            self._asked.add(step)
            self._examples[step] = example
            self._runtime.code.users.add(self)
            self._wake(self)

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
                self.source.load()
                self._calls = [call for call in self._calls if not call.recall()]
                self._settle()

    def finish(self) -> None:
        """Trace, compile and adopt everything that was asked for, in this thread and in child processes. While another
        engine that shares the parts answers, adopting them is left to the thread."""
        begin, children = time.perf_counter(), self.source.children
        if self.waits:
            self._runtime.say("compiling the parts of all steps")
        with self._alone():
            while self.untraced:
                self._trace()
            parts = uncompiled = len(self.source.waiting)
            while self.source.waiting:
                if uncompiled != len(self.source.waiting):
                    uncompiled = len(self.source.waiting)
                    self._runtime.say(f"compiled {parts - uncompiled} of {parts} parts")
                if not children.help():
                    time.sleep(LOOK_SECONDS)
                self.source.load()
            self._adopt()
        self._runtime.stats.seconds["compile"] += time.perf_counter() - begin

    def describe(self) -> str:
        """The numbers of parts by tier, for readers."""
        source = self.source
        if self.fault:
            return f"compiled in the background: nothing ({self.fault})"
        waiting = self.untraced + len(source.ready) + sum(map(len, source.waiting.values()))
        reasons = f" ({source.failures[0]})" if source.failures else ""
        return (
            f"compiled in the background: {source.adopted} parts run compiled, {waiting} wait, "
            f"{len(source.failures)} stay eager{reasons}"
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
            device = torch.cuda.device(self._runtime.device) if self._runtime.on_gpu else nullcontext()
            with torch.inference_mode(False), torch.no_grad(), device:
                yield
        except Exception as error:
            self._give_up(error)

    def _has_news(self) -> bool:
        """True if loaded parts should be adopted: on a GPU all at once, because steps are then captured anew."""
        return bool(self.source.ready) and not (self._runtime.on_gpu and (self.untraced or self.source.waiting))

    def _trace(self) -> None:
        """Run an example, or trace a part that one has run."""
        with COMPILE_LOCK:
            if self._calls:
                try:
                    self._calls[0].trace()
                except Exception as error:
                    self.source.fail(f"{type(error).__name__}: {error}")
                del self._calls[0]  # only now, because somebody may wait until nothing is untraced
            elif self._examples:
                self._step, example = next(iter(self._examples.items()))
                with recording() as calls:
                    example()
                self._calls = [*calls.values()]
                del self._examples[self._step]
            self._settle()

    def _settle(self) -> None:
        if not self._calls and self._step is not None:
            self._runtime.code.complete.add(self._step)

    def _adopt(self) -> bool:
        """Adopt what is compiled. False if an engine that shares the parts is in the middle of an answer."""
        with ExitStack() as turns:
            for user in self._runtime.code.users - {self}:
                if not (turns.enter_context(user.turns.between(0)) and user._may_change()):  # guard: other-wrappers
                    return False
            self.source.adopt()
            self._runtime.code.adoptions += 1
        return True

    def _give_up(self, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        for _ in range(self.untraced):
            self.source.fail(reason)
        self._examples.clear()
        self._calls.clear()
        self.source.give_up(reason)


@contextmanager
def _compilers() -> Iterator[bool]:
    """A context with the lock of compilers, if nobody has it: another thread may compile for minutes."""
    is_mine = COMPILE_LOCK.acquire(blocking=False)
    try:
        yield is_mine
    finally:
        if is_mine:
            COMPILE_LOCK.release()


def build_compiled(runtime: "Runtime", build: Callable[[], None]) -> None:
    """Call `build`, which makes steps, when all that these steps run is compiled."""
    if runtime.tiers is not None:
        with runtime.tiers.asking():
            build()
        runtime.tiers.finish()
    build()
