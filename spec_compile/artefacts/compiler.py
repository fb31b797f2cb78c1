"""`PartCompiler`: the parts of steps, traced in their first call, and then loaded from a store or compiled."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from ..compat import COMPILE_LOCK, CPU_OPTIONS, GPU_OPTIONS
from .children import Children
from .parts import PartJob, compile_part, load_part, part_key
from .trace import Traced, trace

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

    traced: None before the first call.
    loaded: the compiled graph; None before it is adopted.
    """

    def __init__(self, function: Callable, first: Callable[["CompiledPart", tuple], None]):
        self.function = function
        self.traced: Traced | None = None
        self.loaded: Callable[..., list] | None = None
        self._first = first

    def bound(self, owner: nn.Module | None) -> Callable:
        """The part as a function of all arguments but the owner, its first one, if there is one."""
        first, held = () if owner is None else (owner,), list[dict[str, Any]]()
        is_bound = False

        def part(*arguments):
            nonlocal held, is_bound
            arguments = (*first, *arguments)
            if self.traced is None:
                self._first(self, arguments)
            loaded, traced = self.loaded, self.traced
            if loaded is None or traced is None:
                return self.function(*arguments)
            if not is_bound:
                held, is_bound = traced.holders(arguments), True
            return traced.write(loaded(*traced.read(arguments, held)))

        return part


class PartSource:
    """Gives parts their compiled graphs: from a store, compiled by this process, or by child processes.

    store: None keeps nothing.
    children: if there are any, parts run eagerly until they have compiled them and `adopt` is called.
    """

    def __init__(self, store: PartStore | None = None, children: Children | None = None):
        self.store, self.children = store, children
        self.waiting: dict[str, list[CompiledPart]] = {}
        """The parts that children compile, by key."""

    def provide(self, part: CompiledPart, job: PartJob) -> None:
        """Load the part, or let the children compile it."""
        key = part_key(job)
        if self._load_stored(key, part):
            return
        if self.children is not None:
            if key not in self.waiting:
                self.children.submit(key, job.text())
            self.waiting.setdefault(key, []).append(part)
            return
        self._compile(key, part, job)

    def adopt(self) -> int:
        """Load the parts that children have compiled by now. Parts change from eager to compiled only here, so call it
        between answers. Returns how many parts still wait; those whose compilation failed stay eager."""
        for key, data in self.children.collect() if self.children is not None else ():
            parts = self.waiting.pop(key, [])
            if data is None:
                continue
            if self.store is not None:
                self.store.write(key, data)
            for part in parts:
                self._load(part, data)
        return sum(map(len, self.waiting.values()))

    def _load_stored(self, key: str, part: CompiledPart) -> bool:
        data = None if self.store is None else self.store.read(key)
        if data is None:
            return False
        try:
            self._load(part, data)
        except Exception:  # a damaged file: the part is compiled again
            return False
        return True

    def _compile(self, key: str, part: CompiledPart, job: PartJob) -> None:
        data = compile_part(job)
        counts["compiled"] += 1
        if self.store is not None:
            self.store.write(key, data)
        self._load(part, data)

    def _load(self, part: CompiledPart, data: bytes) -> None:
        part.loaded = load_part(data)
        counts["loaded"] += 1


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
        self.source = source or PartSource()
        self.is_open = True
        """True if first calls may come. They have the sizes `varying`; any other size would be compiled in."""
        self._parts: dict[tuple[str, str], CompiledPart] = {}

    def __call__(self, function: Callable, name: str, alike: str = "") -> Callable:
        """`function` of tensors, integers, None, and lists and tuples of these, compiled in its first call. Methods of
        the same name share a compilation, and so do functions with the same `alike`, a text of their computation."""
        owner, function = getattr(function, "__self__", None), getattr(function, "__func__", function)
        if (name, alike) not in self._parts:
            self._parts[name, alike] = CompiledPart(function, partial(self._first, f"{name}_{self.tag}"))
        return self._parts[name, alike].bound(owner)

    def _first(self, name: str, part: CompiledPart, arguments: tuple) -> None:
        with COMPILE_LOCK:  # another engine may run the same part for the first time in another thread
            if part.traced is not None:
                return
            assert self.is_open, f"{name}: the first call has the sizes of a session"
            traced = trace(part.function, arguments, self._varies, self.device)
            counts["traced"] += 1
            options = CPU_OPTIONS if self.device.type == "cpu" else GPU_OPTIONS
            self.source.provide(part, PartJob(traced.rows, traced.specs, options, torch.get_num_threads()))
            part.traced = traced

    def _varies(self, size: int) -> bool:
        return any(size % prime == 0 for prime in self.varying)
