"""`Part`: a piece of a step, which runs as it is until its graph is compiled, by this process or by any other.

A part is traced in its first call. Its graph and the specs of its inputs are the text of a job, which Inductor compiles
without Dynamo to bytes that every process loads in milliseconds. Texts and bytes lie in the store, by their digests.
"""

import functools
import hashlib
import json
import operator
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

from ..compat import COMPILE_LOCK, CPU_OPTIONS, GPU_OPTIONS, TORCH, forget_shapes, use_own_caches
from ..errors import log
from .serialise import Row, graph_of
from .trace import Source, Spec, fakes, inputs_of, trace
from .workers import CompileWorkers

SAVEABLE = {"strict_autograd_cache": True, "bypass_autograd_cache_key": True, "force_autograd_cache": True}
"""Settings that Inductor needs to return something that can be saved."""
ALWAYS = {"triton.autotune_at_compile_time": False}
"""Options of every part. `standalone_compile` would time Triton's kernels while it compiles them, during other work."""
PLAIN = (bool, int, float, type(None))
"""Types of the constants in a part's result."""

counts: Counter[str] = Counter()
"""Parts of this process since it began: those "traced", "compiled" here, and "loaded" from bytes."""


def digest_of(text: str) -> str:
    """SHA-256 of a text: of a job, it is the name of the compiled part."""
    return hashlib.sha256(text.encode()).hexdigest()


def job_of(rows: list[Row], specs: list[Spec], options: dict[str, Any], threads: int) -> str:
    """All that is needed to compile a part, as a text: no weights, and no code except names of operators.

    options: Inductor's settings.
    threads: OpenMP threads of the process that will run it on a CPU; Inductor bakes the number into its loops.
    """
    job = {"rows": rows, "specs": specs, "options": options, "threads": threads}
    return json.dumps(job, sort_keys=True, separators=(",", ":"))


def compile_part(job: str) -> bytes:
    """The compiled part for `load_part`. ValueError if the text is no job, or names an operator that is not
    permitted."""
    from torch._inductor.standalone_compile import AOTCompiledArtifact, standalone_compile

    try:
        content = json.loads(job)
        rows, specs, options = content["rows"], content["specs"], content["options"]
    except (TypeError, KeyError) as error:
        raise ValueError(f"job: expected rows, specs and options, got {job[:80]!r}") from error
    use_own_caches()
    with COMPILE_LOCK:
        gm = graph_of(rows)
        mode, inputs = fakes(specs)
        shapes: dict[str, Any] = {"dynamic_shapes": "from_example_inputs", "fake_mode": mode}
        if TORCH < (2, 13):
            # It takes the mode of an example of a result. A graph without results returns an input.
            shapes = {"dynamic_shapes": "from_graph"}
            number = next(number for number, value in enumerate(inputs) if isinstance(value, Tensor))
            output = gm.graph.output_node()
            if not output.args[0]:
                output.args = ((gm.graph.find_nodes(op="placeholder")[number],),)
            for node in output.all_input_nodes:
                node.meta["example_value"] = inputs[number]
        try:
            with torch.no_grad(), functorch_config.patch(SAVEABLE):
                options = {"config_patches": {**options, **ALWAYS}}
                artefact = standalone_compile(gm, inputs, options=options, aot=True, **shapes)
        finally:
            forget_shapes(modes=[mode])  # guard: shapes-are-forgotten
    assert isinstance(artefact, AOTCompiledArtifact)
    return artefact.inner_fn.serialize_compile_artifacts(artefact.inner_fn)


def load_part(data: bytes) -> Callable[..., list[Tensor]]:
    """The compiled part as a function of its inputs. `data` is trusted: it is run, as files of Inductor's cache are."""
    from torch._inductor.standalone_compile import AOTCompiledArtifact

    use_own_caches()
    with COMPILE_LOCK:
        return AOTCompiledArtifact.deserialize(data).inner_fn.compiled_fn


@functools.cache
def get_ready_to_load(device_type: str) -> None:
    """Import Inductor, and on a CPU test its instructions, ahead of the first `load_part`: both take seconds."""
    from torch._inductor import async_compile, cpu_vec_isa, select_algorithm  # noqa: F401

    use_own_caches()
    if device_type == "cpu":
        cpu_vec_isa.pick_vec_isa()


@dataclass(eq=False)
class Part:
    """A function and, when it is loaded, what it was compiled to.

    name: for readers.
    alike: a text of its computation; see `PartCompiler.__call__`.
    sources, result: see `Traced`; sources is None before the part is traced or recalled.
    loaded: the compiled graph; None before it is adopted.
    """

    function: Callable
    compiler: "PartCompiler"
    name: str
    alike: str
    sources: list[Source] | None = None
    result: Any = None
    loaded: Callable[..., list] | None = None
    _call: str = ""

    def bound(self, owner: nn.Module | None) -> Callable:
        """The part as a function of all arguments but the owner, its first one, if there is one."""
        first, held = () if owner is None else (owner,), list[dict[str, Any]]()
        is_bound = False

        def part(*arguments: Any) -> Any:
            nonlocal held, is_bound
            arguments = (*first, *arguments)
            if self.sources is None:
                self.compiler.first_call(self, arguments)
            if self.loaded is None:
                return self.function(*arguments)
            if not is_bound:
                held, is_bound = self.holders(arguments), True
            return self.write(self.loaded(*self.read(arguments, held)))

        return part

    def describe(self, sources: list, result: Any) -> None:
        """Take what a trace has found, or JSON of it. ValueError if it is something else.

        read: a function of the arguments and the `holders` that gives the inputs. For sources [("argument", (1, 2)),
            ("held", (3,), slot)] it is ``lambda arguments, held: [arguments[1][2], held[0]['name']]``.
        write: a function of the graph's results that gives the part's. For ``{"tuple": [{"result": 0}, None]}`` it is
            ``lambda results: (results[0], None, )``.
        """
        try:
            checked = [_source(*source) for source in sources]
            texts, held = list[str](), 0
            for kind, path, *slot in checked:
                if kind == "argument":
                    texts.append("arguments" + "".join(f"[{number}]" for number in path))
                else:
                    texts.append(f"held[{held}][{slot[0][2]!r}]")
                    held += 1
            self.read = eval(f"lambda arguments, held: [{', '.join(texts)}]")
            self.write = eval(f"lambda results: {_text(result)}")
        except (TypeError, AttributeError) as error:
            raise ValueError(f"part: expected sources and a result, got {sources!r:.80}, {result!r:.80}") from error
        self.result, self.sources = result, checked

    def holders(self, arguments: tuple) -> list[dict[str, Any]]:
        """The dictionaries that hold the modules' tensors. They stay the same as long as the modules live."""
        found = []
        for kind, path, *slot in self.sources or ():
            if kind == "held":
                names, table, _ = slot[0]
                value = functools.reduce(operator.getitem, path, arguments)
                value = functools.reduce(getattr, filter(None, names.split(".")), value)
                found.append(vars(value)[table] if table else vars(value))
        return found

    def recall(self, arguments: tuple) -> bool:
        """Load what such a first call was traced and compiled to before, in any process. False if there is nothing. It
        runs nothing of the model."""
        with COMPILE_LOCK:
            return self.sources is not None or self.compiler.parts.recall(self, self._digest(arguments))

    def trace(self, arguments: tuple) -> None:
        """Recall the part, or trace its first call, and have it loaded or compiled."""
        compiler = self.compiler
        with COMPILE_LOCK:  # another engine may run the same part for the first time in another thread
            if self.recall(arguments):
                return
            is_open = compiler.is_open or not compiler.parts.at_once
            assert is_open, f"{self.name}: the first call has the sizes of a session"
            rows, specs, sources, result = trace(self.function, arguments, compiler.varies, compiler.device)
            counts["traced"] += 1
            self.describe(sources, result)
            options = CPU_OPTIONS if compiler.device.type == "cpu" else GPU_OPTIONS
            compiler.parts.provide(self, job_of(rows, specs, options, compiler.threads), self._digest(arguments))

    def _digest(self, arguments: tuple) -> str:
        """By which a later process finds what such a first call was traced and compiled to."""
        if not self._call:
            specs, sources, _ = inputs_of(arguments, self.compiler.varies)
            facts = self.compiler.parts.identity, self.name, self.alike, specs, sources, self.compiler.threads
            self._call = digest_of(json.dumps(facts))
        return self._call


def _source(kind: str, path: list[int], *slot: list[str]) -> Source:
    if not all(type(number) is int for number in path) or len(slot) != ("argument", "held").index(kind):
        raise ValueError(f"source: expected an argument or a tensor that a module holds, got {kind!r:.80}")
    if slot and not (len(slot[0]) == 3 and all(isinstance(name, str) for name in slot[0])):
        raise ValueError(f"slot: expected three names, got {slot[0]!r:.80}")
    return kind, tuple(path), *map(tuple, slot)


def _text(result: Any) -> str:
    """The code of a part's result; ValueError if it is something else."""
    match result:
        case {"result": int(number)}:
            return f"results[{number}]"
        case {"list": [*parts]}:
            return f"[{''.join(f'{_text(part)}, ' for part in parts)}]"
        case {"tuple": [*parts]}:
            return f"({''.join(f'{_text(part)}, ' for part in parts)})"
    if type(result) not in PLAIN:
        raise ValueError(f"result: expected results, numbers, None, lists and tuples, got {result!r:.80}")
    return repr(result)


class _Recording(threading.local):
    """The first calls in this thread; None outside of `recording`."""

    calls: dict[Part, tuple] | None = None


_recording = _Recording()


@contextmanager
def recording() -> Iterator[dict[Part, tuple]]:
    """A context in which this thread's first calls run eagerly. Gives their arguments, by part."""
    calls: dict[Part, tuple] = {}
    _recording.calls = calls
    try:
        yield calls
    finally:
        _recording.calls = None


class Shape(NamedTuple):
    """The sizes that compiled code serves, with any number of cache slots. Shape(1) serves single rows.

    rows: 0 serves any number above one.
    paged: a row has several pages, of a pool of any number.
    """

    rows: int
    paged: bool = False


class Parts:
    """The parts of steps, which all sessions and engines share that compute the same. It refers to none of them.

    store: keeps bytes by name between processes (`read`, `write`); None keeps nothing.
    workers: a part runs eagerly until these have compiled it and `adopt` is called. None: this process compiles.
    at_once: a part is traced in its first call. Otherwise only first calls inside `recording` count.
    """

    def __init__(self, store: Any = None, workers: CompileWorkers | None = None, at_once: bool = True):
        self.store, self.workers, self.at_once = store, workers, at_once
        self.identity = ""
        """A text of all code and values that the graphs depend on besides their inputs. "" means that nobody knows it,
        so that each process traces the parts."""
        self.compilers: dict[tuple[Shape, str], PartCompiler] = {}
        """By the shape and the tag of the parts."""
        self.complete: set[tuple[Shape, str]] = set()
        """Shapes and names of steps whose parts are all traced."""
        self.static: frozenset[int] | None = None
        """Sizes of tensors that never vary, when they are known."""
        self.waiting: dict[str, list[Part]] = {}
        """The parts that workers compile, by the digest of their job."""
        self.ready: deque[tuple[Part, Callable[..., list]]] = deque()
        """The parts that are loaded, and not adopted."""
        self.adopted = 0
        """The number of parts that run compiled."""
        self.adoptions = 0
        """How often parts have changed from eager to compiled between answers."""
        self.users: WeakSet[Any] = WeakSet()
        """The `ColdStart` of each engine that has asked for parts."""
        self.failures: list[str] = []
        """The parts that stay eager, and why."""

    def open(self, shape: Shape | None) -> None:
        """Permit first calls of this shape, and of no other."""
        for (other, _), compiler in [*self.compilers.items()]:
            compiler.is_open = other == shape

    def recall(self, part: Part, call: str) -> bool:
        """Load a part that was traced and compiled for such a call. False if there is none."""
        data = self.store.read(call) if self.store is not None and self.identity else None
        if data is None:
            return False
        try:
            content = json.loads(data)
            compiled = self.store.read(content["part"])
            if compiled is None or (function := _loaded(compiled)) is None:
                return False
            part.describe(content["sources"], content["result"])
        except (ValueError, KeyError, TypeError) as error:
            log.info("what a part reads cannot be read: %s: %s", type(error).__name__, error)
            return False
        self._add(function, [part])
        return True

    def provide(self, part: Part, job: str, call: str) -> None:
        """Load the part, or let the workers compile it. call: by which later processes `recall` it."""
        key = digest_of(job)
        if self.store is not None and self.identity:
            content = {"part": key, "sources": part.sources, "result": part.result}
            self.store.write(call, json.dumps(content).encode())
        data = None if self.store is None else self.store.read(key)
        function = None if data is None else _loaded(data)
        if function is None and self.workers is not None:
            self.workers.submit(key, job)
            self.waiting.setdefault(key, []).append(part)
            return
        if function is None:
            data = compile_part(job)
            counts["compiled"] += 1
            if self.store is not None:
                self.store.write(key, data)
            function = load_part(data)
            counts["loaded"] += 1
        self._add(function, [part])

    def load(self) -> None:
        """Load what workers have compiled by now; parts whose compilation failed stay eager. OSError if no worker can
        compile any more."""
        if self.workers is None or not self.waiting:
            return
        for key, data, failure in self.workers.collect([*self.waiting]):
            parts = self.waiting.pop(key, [])
            function = None if data is None else _loaded(data)
            if function is None:
                self.fail(failure or "what a process compiled cannot be loaded in this one", len(parts))
                continue
            self._add(function, parts)
            if self.store is not None:
                self.store.write(key, data)

    def adopt(self) -> None:
        """Parts change from eager to compiled only here, so call it between answers."""
        while self.ready:
            part, function = self.ready.popleft()
            part.loaded = function
            self.adopted += 1

    def _add(self, function: Callable[..., list], parts: list[Part]) -> None:
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
        if self.workers is not None:
            for key in [key for key, parts in self.waiting.items() for _ in parts]:
                self.workers.forget(key)


def _loaded(data: bytes) -> Callable[..., list] | None:
    """The compiled graph of these bytes; None if they are damaged."""
    try:
        function = load_part(data)
    except Exception as error:
        log.info("a compiled part cannot be loaded: %s: %s", type(error).__name__, error)
        return None
    counts["loaded"] += 1
    return function


class PartCompiler:
    """Makes the parts of steps of one shape, each compiled in its first call, for sizes that may vary.

    No guard is checked later: everything that a part reads besides its arguments lies in tensors of its owner of the
    same layout, and in Python values that are equal for all owners.

    tag: ends the name of each part.
    varying: sizes by `example_size`; a dimension that one of them divides in the first call may vary, no other may.
    nodes, slots: numbers of nodes and visible cache slots in the first call.
    exact: True if later calls have as many nodes; otherwise they may have any number above one.
    """

    def __init__(
        self, device: torch.device, tag: str, varying: tuple[int, ...], nodes: int, slots: int, exact: bool,
        parts: Parts | None = None,
    ):  # fmt: skip
        self.device, self.tag, self.varying = device, tag, varying
        self.nodes, self.slots, self.exact = nodes, slots, exact
        self.parts, self.threads = parts or Parts(), torch.get_num_threads()
        self.is_open = True
        """True if first calls may come. They have the sizes `varying`; any other size would be compiled in."""
        self._made: dict[tuple[str, str], Part] = {}

    def __call__(self, function: Callable, name: str, alike: str = "") -> Callable:
        """`function` of tensors, integers, None, and lists and tuples of these, compiled in its first call. Methods of
        the same name share a compilation, and so do functions with the same `alike`, a text of their computation."""
        owner, function = getattr(function, "__self__", None), getattr(function, "__func__", function)
        self._made.setdefault((name, alike), Part(function, self, f"{name}_{self.tag}", alike))
        return self._made[name, alike].bound(owner)  # guard: parts-alike

    def varies(self, size: int) -> bool:
        """True for a size of the first call that may differ in later ones."""
        return any(size % prime == 0 for prime in self.varying)

    def first_call(self, part: Part, arguments: tuple) -> None:
        """Trace and compile a part now, or note its call to do so later."""
        if _recording.calls is not None:
            _recording.calls.setdefault(part, arguments)
        elif self.parts.at_once:
            part.trace(arguments)
