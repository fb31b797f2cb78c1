"""`PartCompiler`: the parts of steps, traced in their first call, and then loaded from a store or compiled."""

import hashlib
import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import nn

from ..compat import COMPILE_LOCK, CPU_OPTIONS, GPU_OPTIONS
from .children import Children
from .forms import PartForm
from .parts import PartJob, compile_part, load_part, part_key
from .trace import PartInputs, trace

log = logging.getLogger("spec_compile")

counts: Counter[str] = Counter()
"""Parts of this process since it began: those "traced", "compiled" here, and "loaded" from bytes."""


class PartStore(Protocol):
    """Bytes by name that outlive the process."""

    def read(self, name: str) -> bytes | None:
        """The bytes that were written, or None if there are none, or none that are whole."""

    def write(self, name: str, data: bytes) -> None:
        """Keep bytes. It raises nothing if they cannot be kept."""


class CompiledPart:
    """A function and, when it is loaded, what it was compiled to.

    form: None before the part is traced or recalled.
    loaded: the compiled graph; None before it is adopted.
    """

    def __init__(self, function: Callable, first: Callable[["CompiledPart", tuple], None]):
        self.function = function
        self.form: PartForm | None = None
        self.loaded: Callable[..., list] | None = None
        self._first = first

    def bound(self, owner: nn.Module | None) -> Callable:
        """The part as a function of all arguments but the owner, its first one, if there is one."""
        first, held = () if owner is None else (owner,), list[dict[str, Any]]()
        is_bound = False

        def part(*arguments):
            nonlocal held, is_bound
            arguments = (*first, *arguments)
            if self.form is None:
                self._first(self, arguments)
            loaded, form = self.loaded, self.form
            if loaded is None or form is None:
                return self.function(*arguments)
            if not is_bound:
                held, is_bound = form.holders(arguments), True
            return form.write(loaded(*form.read(arguments, held)))

        return part


class PartSource:
    """Gives parts their compiled graphs: from a store, compiled by this process, or by child processes.

    store: None keeps nothing.
    children: a part runs eagerly until they have compiled it and `adopt` is called.
    at_once: a part is traced in its first call. Otherwise only first calls inside `recording` count.
    """

    def __init__(self, store: PartStore | None = None, children: Children | None = None, at_once: bool = True):
        self.store, self.children, self.at_once = store, children, at_once
        self.identity = ""
        """A text of all code and values that graphs of parts depend on besides their inputs. "" means that nobody knows
        it, so that each process traces the parts."""
        self.waiting: dict[str, list[CompiledPart]] = {}
        """The parts that children compile, by key."""
        self.ready: deque[tuple[CompiledPart, Callable[..., list]]] = deque()
        """The parts that are loaded, and not adopted."""
        self.adopted = 0
        """The number of parts that run compiled."""
        self.failures: list[str] = []
        """The parts that stay eager, and why."""

    def recall(self, part: CompiledPart, call: str) -> bool:
        """Load a part that was traced and compiled for such a call. False if there is none."""
        data = self.store.read(call) if self.store is not None and self.identity else None
        try:
            content = json.loads(data or "{}")
            compiled = self.store.read(content["part"]) if content else None
            form = PartForm.of(content["form"]) if compiled is not None else None
        except (ValueError, KeyError, TypeError) as error:
            log.info("the form of a part cannot be read: %s: %s", type(error).__name__, error)
            return False
        if form is None or not self._is_loaded(compiled, [part]):
            return False
        part.form = form
        return True

    def provide(self, part: CompiledPart, job: PartJob, call: str) -> None:
        """Load the part, or let the children compile it. call: by which later processes `recall` it."""
        key = part_key(job)
        if self.store is not None and self.identity:
            self.store.write(call, json.dumps({"part": key, "form": part.form.data()}).encode())
        data = None if self.store is None else self.store.read(key)
        if data is not None and self._is_loaded(data, [part]):
            return
        if self.children is not None:
            self.children.submit(key, job.text())
            self.waiting.setdefault(key, []).append(part)
            return
        data = compile_part(job)
        counts["compiled"] += 1
        if self.store is not None:
            self.store.write(key, data)
        self._load(data, [part])

    def load(self) -> None:
        """Load what children have compiled by now; parts whose compilation failed stay eager. OSError if no child can
        compile any more."""
        if self.children is None or not self.waiting:
            return
        for key, data, failure in self.children.collect([*self.waiting]):
            parts = self.waiting.pop(key, [])
            if data is None:
                self.fail(failure, len(parts))
            elif not self._is_loaded(data, parts):
                self.fail("what a process compiled cannot be loaded in this one", len(parts))
            elif self.store is not None:
                self.store.write(key, data)

    def adopt(self) -> None:
        """Parts change from eager to compiled only here, so call it between answers."""
        while self.ready:
            part, function = self.ready.popleft()
            part.loaded = function
            self.adopted += 1

    def _is_loaded(self, data: bytes, parts: list[CompiledPart]) -> bool:
        """Load a part; False if the bytes are damaged."""
        try:
            self._load(data, parts)
        except Exception as error:
            log.info("a compiled part cannot be loaded: %s: %s", type(error).__name__, error)
            return False
        return True

    def _load(self, data: bytes, parts: list[CompiledPart]) -> None:
        function = load_part(data)
        counts["loaded"] += 1
        self.ready.extend((part, function) for part in parts)
        if self.at_once:
            self.adopt()

    def fail(self, reason: str, parts: int = 1) -> None:
        """Some parts stay eager. The first failure is a warning of the log; the others are in `failures`."""
        if not self.failures:
            log.warning("a part of the rounds stays uncompiled, so that they take longer: %s", reason)
        self.failures += [reason] * parts

    def give_up(self, reason: str) -> None:
        """All parts that wait stay eager."""
        for parts in self.waiting.values():
            self.fail(reason, len(parts))
        self.waiting.clear()

    def __del__(self) -> None:
        for key, parts in self.waiting.items():
            for _ in parts:
                self.children.forget(key)


@dataclass(eq=False)
class FirstCall:
    """The first call of a part, for sizes that may vary.

    name: of the part. alike: a text of its computation; see `PartCompiler.__call__`.
    """

    compiler: "PartCompiler"
    name: str
    alike: str
    part: CompiledPart
    arguments: tuple

    def recall(self) -> bool:
        """Load what such a call was traced and compiled to before, in any process. False if there is nothing. It runs
        nothing of the model."""
        with COMPILE_LOCK:
            return self.part.form is not None or self.compiler.source.recall(self.part, self._digest)

    def trace(self) -> None:
        """Recall the part, or trace it, and have it loaded or compiled."""
        source, device = self.compiler.source, self.compiler.device
        with COMPILE_LOCK:  # another engine may run the same part for the first time in another thread
            if self.recall():
                return
            is_open = self.compiler.is_open or not source.at_once
            assert is_open, f"{self.name}: the first call has the sizes of a session"
            traced = trace(self.part.function, self.arguments, self.compiler.varies, device)
            counts["traced"] += 1
            self.part.form = traced.form
            options = CPU_OPTIONS if device.type == "cpu" else GPU_OPTIONS
            job = PartJob(traced.rows, traced.specs, options, self.compiler.threads)
            source.provide(self.part, job, self._digest)

    @cached_property
    def _digest(self) -> str:
        """By which a later process finds what such a call was traced and compiled to."""
        inputs = PartInputs(self.arguments, self.compiler.varies)
        identity, threads = self.compiler.source.identity, self.compiler.threads
        facts = identity, self.name, self.alike, inputs.specs, inputs.sources, threads
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


class _Recording(threading.local):
    """The first calls of parts in this thread, by part; None outside of `recording`."""

    calls: dict[CompiledPart, FirstCall] | None = None


_recording = _Recording()


@contextmanager
def recording() -> Iterator[dict[CompiledPart, FirstCall]]:
    """A context in which this thread's first calls of parts run eagerly, and are collected."""
    _recording.calls = calls = {}
    try:
        yield calls
    finally:
        _recording.calls = None


class PartCompiler:
    """Compiles the parts of steps, each in its first call, for sizes that may vary.

    No guard is checked later: everything that a part reads besides its arguments lies in tensors of its owner of the
    same layout, and in Python values that are equal for all owners.

    tag: ends the name of each part.
    varying: sizes by `example_size`; a dimension that one of them divides in the first call may vary, no other may.
    nodes, slots: numbers of nodes and visible cache slots in the first call.
    exact: True if later calls have as many nodes; otherwise they may have any number above one.
    source: gives the compiled graphs.
    """

    def __init__(
        self, device: torch.device, tag: str, varying: tuple[int, ...], nodes: int, slots: int, exact: bool,
        source: PartSource | None = None,
    ):  # fmt: skip
        self.device, self.tag, self.varying = device, tag, varying
        self.nodes, self.slots, self.exact = nodes, slots, exact
        self.source, self.threads = source or PartSource(), torch.get_num_threads()
        self.is_open = True
        """True if first calls may come. They have the sizes `varying`; any other size would be compiled in."""
        self._parts: dict[tuple[str, str], CompiledPart] = {}

    def __call__(self, function: Callable, name: str, alike: str = "") -> Callable:
        """`function` of tensors, integers, None, and lists and tuples of these, compiled in its first call. Methods of
        the same name share a compilation, and so do functions with the same `alike`, a text of their computation."""
        owner, function = getattr(function, "__self__", None), getattr(function, "__func__", function)
        self._parts.setdefault((name, alike), CompiledPart(function, partial(self._first, f"{name}_{self.tag}", alike)))
        return self._parts[name, alike].bound(owner)  # guard: parts-alike

    def varies(self, size: int) -> bool:
        """True for a size of the first call that may differ in later ones."""
        return any(size % prime == 0 for prime in self.varying)

    def _first(self, name: str, alike: str, part: CompiledPart, arguments: tuple) -> None:
        call = FirstCall(self, name, alike, part, arguments)
        if _recording.calls is not None:
            _recording.calls.setdefault(part, call)
        elif self.source.at_once:
            call.trace()
