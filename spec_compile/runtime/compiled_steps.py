"""Rounds and prefills whose parts are compiled, each part by itself, and shared by sessions and engines.

Layers alike share one compiled function, so that a deep model compiles nearly as fast as a shallow one. One compilation
serves single rows with any number of slots, and a second one every number of rows. On a GPU it serves any number of
nodes above one; on a CPU, where each node costs arithmetic, every number of nodes has its own. Parts take tensors and
modules as arguments: they serve every engine that computes the same, and refer to none of them.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from ..cache import PAGE, ROUNDED
from ..compat import COMPILE_LOCK
from ..compile.part import PartCompiler, Parts, Shape, digest_of
from ..compile.regions import compile_regions, describe
from ..compile.replay import OutcomeRing
from ..compile.start import timed
from ..drafting import Drafter, use_pages
from ..inventory import held_items
from ..kernels.together import compile_together
from ..tree import MAX_NODES
from .round import Prefill, Round
from .runtime import Runtime
from .state import State

# Numbers of nodes and of visible slots to compile with.
PRIMES = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139, 149)
# Numbers of rows, of a row's slots and of pages to compile with, which take memory. `PRIMES` follow if these do not do.
SMALL_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31)
MOST = 4096  # larger attributes of a drafter are no sizes of its proposals
KEPT = 2  # Parts of different options kept for a model. A living wrapper keeps its own parts.
# Options that parts do not depend on. `_facts` reads the draft itself.
BESIDE = (
    "adaptive", "artefact", "cache", "check", "draft", "max_cache_len", "prefix_cache_bytes", "prefix_cache_host_bytes",
    "trust_artefact",
)  # fmt: skip


class CompiledSteps:
    """The rounds and the prefill over the buffers of `state` and `drafter`, made on first use.

    An example compiles their parts. It has buffers whose sizes tell which dimensions may vary, and runs each part once,
    before any session does, or later if parts are compiled in the background (see `cold_start`).
    """

    def __init__(self, runtime: Runtime, state: State, drafter: Drafter, shape: Shape | None = None):
        """shape: the sizes that an example serves; None for the steps of a session."""
        self.runtime, self.state, self.drafter = runtime, state, drafter
        self._example_shape = shape
        # By name (see `_name`): on a CPU n4 verifies 4 nodes and n4_to_4 also proposes 4 of more; on a GPU any and
        # any_to_4 verify any number above one.
        self._rounds: dict[str, Round] = {}
        self._prefill: Prefill | None = None

    @property
    def shape(self) -> Shape:
        """The sizes that the parts here serve."""
        if self._example_shape is not None:
            return self._example_shape
        rows = 0 if self.state.batch > 1 and rows_vary(self.runtime) else self.state.batch
        return Shape(rows, self.state.kv.is_paged)

    def round(self, nodes: int) -> Round:
        """The round over `nodes` nodes; its `forward` and `look` take the number again."""
        runtime, plan = self.runtime, self.runtime.algorithm.plan
        next_nodes = plan.next_nodes(nodes)
        few = next_nodes if next_nodes < plan.nodes else None
        name = _name(self._tag(nodes), few)
        if name not in self._rounds:
            self._complete(name, lambda example: example.round(nodes))
            size = None if runtime.on_gpu else nodes
            round_ = Round(runtime.verify, self.drafter, self.state, runtime.guard, size, few)
            if runtime.options.compile:
                self._compile_round(round_, self._compiler(nodes, self._tag(nodes)))
            self._rounds[name] = round_
        return self._rounds[name]

    def finish(self, nodes: int) -> Round:
        """The same round, whose `finish` is compiled as well."""
        round_, tag = self.round(nodes), self._tag(nodes)
        self._complete(f"finish {_name(tag, round_.next_nodes)}", lambda example: example.finish(nodes))
        if self._example_shape is not None:
            compiler = self._compiler(nodes, tag)
            round_.finish(*self.accepted(round_, compiler.nodes, compiler.slots))
        return round_

    def accepted(self, round_: Round, nodes: int, slots: int) -> tuple:
        """Arguments to try `Round.finish` with: of `nodes` nodes only the root is accepted."""
        _, *features = round_.look(slots, nodes)
        path = torch.zeros(self.state.batch, nodes, dtype=torch.int64, device=self.runtime.device)
        return path, path.clone(), torch.ones_like(path[:, 0]), features, slots

    def prefill(self) -> Prefill:
        """The prefill, for chunks of any size above one."""
        if self._prefill is None:
            self._complete("prefill", lambda example: example.prefill())
            self._prefill = prefill = Prefill(self.runtime.prefill, self.drafter, self.state, self.runtime.guard)
            if self.runtime.options.compile:
                compiler = self._compiler(None, "prefill")
                has_conclude = self.drafter.fuses and not self.runtime.on_gpu
                _compile_methods(prefill, ("prepare", "conclude") if has_conclude else ("prepare",), compiler)
                prefill.model = compile_regions(self.runtime.prefill, compiler, "model")
                if self._example_shape is not None:
                    prefill.forward(compiler.nodes, compiler.slots)
        return self._prefill

    def _compile_round(self, round_: Round, compiler: PartCompiler) -> None:
        _compile_methods(round_, ("prepare",), compiler)
        round_.verify = compile_regions(self.runtime.verify, compiler, "verify")
        ends = ("conclude", "finish") if self.drafter.fuses or not round_.proposes else ("accept", "settle", "outcome")
        _compile_methods(round_, ends, compiler, round_.next_nodes)
        self.drafter.compile(self._compiler(self.runtime.algorithm.plan.nodes, "draft"))
        if self._example_shape is not None:
            round_.forward(compiler.slots, compiler.nodes)
            if not (round_.proposes or self.drafter.fuses):
                self.drafter.propose(self.state, compiler.slots)

    def _complete(self, name: str, build: Callable[["CompiledSteps"], object]) -> None:
        """Let an example compile what `build` makes of it, unless that was done for these parts."""
        runtime, parts, key = self.runtime, self.runtime.parts, (self.shape, name)
        if self._example_shape is not None or not runtime.options.compile or key in parts.complete:
            return
        run = partial(_run_example, runtime, self.shape, build)
        if runtime.cold_start is not None:
            runtime.cold_start.ask(key, run)
            return
        with COMPILE_LOCK:
            if key not in parts.complete:
                run()
                parts.complete.add(key)

    def _compiler(self, nodes: int | None, tag: str) -> PartCompiler:
        """The compiler of parts over `nodes` nodes; None: over chunks of a prompt."""
        parts, shape = self.runtime.parts, self.shape
        if (shape, tag) not in parts.compilers:
            sizes = example_sizes(self.runtime, shape)
            exact = nodes if nodes == 1 or not self.runtime.on_gpu else None  # a number that does not vary
            static = {*sizes.static, sizes.rows, *sizes.varying}
            example = example_size(static, MAX_NODES) if exact is None else exact
            slots = example_size({*static, *(example * size for size in static)})
            varying = (slots, *((example,) if exact is None else ()), *sizes.varying)
            name = f"{f'b{shape.rows}' if shape.rows else 'any'}_{tag}"
            new = PartCompiler(self.runtime.device, name, varying, example, slots, exact is not None, parts)
            parts.compilers.setdefault((shape, tag), new)
        return parts.compilers[shape, tag]

    def _tag(self, nodes: int) -> str:
        """The name of the parts that serve a round over `nodes` nodes."""
        return f"n{nodes}" if nodes == 1 or not self.runtime.on_gpu else "any"


def _compile_methods(
    step: nn.Module, names: tuple[str, ...], compiler: PartCompiler, next_nodes: int | None = None
) -> None:
    """Replace methods of a step by compiled parts."""
    for name in names:
        setattr(step, name, compiler(getattr(step, name), _name(name, next_nodes)))


def _name(name: str, next_nodes: int | None) -> str:
    """The name of a part, or of parts, of rounds that propose `next_nodes` nodes (see `Round`)."""
    return name if next_nodes in (None, 1) else f"{name}_to_{next_nodes}"


def _run_example(runtime: Runtime, shape: Shape, build: Callable[[CompiledSteps], object]) -> None:
    """Let the example of this shape, whose parts may be compiled, make something and run it. It leaves no trace."""
    if shape not in runtime.examples:
        sizes, plan = example_sizes(runtime, shape), runtime.algorithm.plan
        slots = ROUNDED if shape.paged else sizes.slots
        state = State(runtime.verify, sizes.rows, slots, runtime.device, plan)
        drafter = runtime.algorithm.drafter(sizes.rows, slots)
        if shape.paged:
            use_pages(sizes.slots, repeat(sizes.pages), state, drafter)
        runtime.examples[shape] = CompiledSteps(runtime, state, drafter, shape)
    example = runtime.examples[shape]
    runtime.parts.open(shape)
    try:
        with untouched(example.state, example.drafter):
            if runtime.cold_start is not None:
                # Steps run only when they are made, so these are others.
                compile_together(partial(build, CompiledSteps(runtime, example.state, example.drafter, shape)))
            build(example)
    finally:
        runtime.parts.open(None)


@contextmanager
def untouched(state: State, drafter: Drafter, ring: OutcomeRing | None = None) -> Iterator[None]:
    """A context of steps that leave no trace: small buffers are restored after it. Caches and texts are written only
    after the committed slots."""
    buffers = [*state.small_buffers(), *drafter.small_buffers()]
    buffers += [ring.turn] if ring else []
    held = {buffer: buffer.clone() for buffer in buffers}
    try:
        drafter.mute()
        state.finished.fill_(True)  # so that no state is led over what these steps verify
        state.prompt_lengths.zero_()
        if ring:
            ring.turn.fill_(-1)
        yield
    finally:
        for buffer, value in held.items():
            buffer.copy_(value)


def build_compiled(runtime: Runtime, build: Callable[[], None]) -> None:
    """Call `build`, which makes steps, when all that these steps run is compiled."""
    if (cold_start := runtime.cold_start) is not None:
        with cold_start.asking():
            build()
        with timed(runtime.stats.seconds, "compile"):
            cold_start.finish(runtime.say)
    build()


# The sizes to compile with, so that parts serve as many rows and slots as they can.


class ExampleSizes(NamedTuple):
    """Sizes of the buffers of an example.

    slots: the slots of a row.
    pages: the pages of the pool; 0 if each row has one page.
    static: see `static_sizes`.
    varying: primes that divide the slots, and the rows and pages that vary, and no static size.
    """

    rows: int
    slots: int
    pages: int
    static: frozenset[int]
    varying: tuple[int, ...]


def example_size(static: Iterable[int], at_most: int | None = None, primes: tuple[int, ...] = PRIMES) -> int:
    """A size for the first call of parts: the first prime that divides no `static` size, so that every dimension which
    it divides varies. static = [74, 128] gives 41, since 37 divides 74. RuntimeError if there is none."""
    static = set(static)
    for prime in primes:
        if (at_most is None or prime <= at_most) and not any(size and size % prime == 0 for size in static):
            return prime
    raise RuntimeError(f"no size to compile with: {sorted(static)} have every prime as a factor; pass compile=False")


def example_sizes(runtime: Runtime, shape: Shape) -> ExampleSizes:
    """The sizes of the example that compiles parts of this shape.

    Shape(0), ROUNDED = 128 and static sizes of which 5 and 7 divide none give 5 rows and 7 * 128 slots; [5, 7] vary.
    With pages and 11, which divides no static size, either, they are 5 rows of 7 of the 11 pages.
    """
    static, varying = static_sizes(runtime), list[int]()

    def vary() -> int:
        varying.append(example_size({*static, shape.rows, *varying}, primes=(*SMALL_PRIMES, *PRIMES)))
        return varying[-1]

    rows = shape.rows or vary()
    slots = vary() * (PAGE if shape.paged else ROUNDED)
    return ExampleSizes(rows, slots, vary() if shape.paged else 0, static, tuple(varying))


def rows_vary(runtime: Runtime) -> bool:
    """True if the same parts serve all numbers of rows above one. Exceptions: recurrences, whose states a commit sorts
    by size; several ranks, whose sizes may differ; and static sizes that leave no prime to tell rows."""
    if not runtime.options.compile or runtime.verify.recurrences or runtime.options.ranks.size > 1:
        return False
    return any(all(size % prime for size in static_sizes(runtime)) for prime in SMALL_PRIMES)


def static_sizes(runtime: Runtime) -> frozenset[int]:
    """Every tensor size between two parts, except the numbers of rows and slots."""
    parts, plan, graphs = runtime.parts, runtime.algorithm.plan, runtime.graphs
    if parts.static is None:
        state = State(runtime.verify, 1, ROUNDED, runtime.device, plan)
        drafter = runtime.algorithm.drafter(1, ROUNDED)
        modules = [*(graph.gm for graph in graphs), state, drafter]
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        sizes = {size for tensor in tensors for size in tensor.shape}
        groups = {layer.heads // layer.kv_heads for graph in graphs for layer in graph.layers}
        numbers = {number for part in drafter.modules() for number in _numbers(part)}
        numbers |= {*runtime.sizes, plan.lookahead_slots, *_numbers(runtime.options)}
        parts.static = frozenset({*sizes, *groups, *numbers} - {0})
    return parts.static


def _numbers(owner: object) -> Iterator[int]:
    """Integers among the attributes of `owner` and of its dataclasses, such as sizes of trees and blocks."""
    values = [*vars(owner).values()]
    for value in values + [x for each in values if dataclasses.is_dataclass(each) for x in vars(each).values()]:
        if type(value) is int and 0 < value <= MOST:
            yield value


# Engines that compute the same share their parts.

# By model. No parts refer to their model, so that both are freed together.
_parts: "WeakKeyDictionary[nn.Module, OrderedDict[tuple, Parts]]" = WeakKeyDictionary()


def share_parts(model: nn.Module, algorithm: str, runtime: Runtime) -> Parts:
    """Give a new engine's runtime the parts of engines of `model` that compute the same. algorithm: its name."""
    cold_start = runtime.cold_start
    parts = Parts() if cold_start is None else cold_start.parts
    if runtime.options.ranks.size == 1 and runtime.options.compile:
        with COMPILE_LOCK:
            facts, classes = _facts(algorithm, runtime), _classes(runtime)
            shared, key = _parts.setdefault(model, OrderedDict()), (digest_of(facts), classes)
            parts = shared.setdefault(key, parts)
            parts.identity = identity_of(facts, classes)
            shared.move_to_end(key)
            while len(shared) > KEPT:
                shared.popitem(last=False)
    runtime.parts = parts
    if cold_start is not None:
        cold_start.parts = parts
    return parts


def _classes(runtime: Runtime) -> tuple[type, ...]:
    """Classes whose methods are compiled. A notebook's cell that runs again defines new ones."""
    draft, drafter = runtime.algorithm.draft_module, runtime.algorithm.drafter(1, ROUNDED)
    modules = [*drafter.modules(), *(() if draft is None else draft.modules())]
    return (type(runtime.algorithm), *(type(part) for part in modules if not isinstance(part, fx.GraphModule)))


def identity_of(facts: str, classes: tuple[type, ...]) -> str:
    """The `Parts.identity`: "" if `facts` has an address, or an artefact's key lacks code of `classes`."""
    packages = {part.__module__.partition(".")[0] for part in classes}
    is_known = packages <= {"spec_compile", "torch", "transformers"} and " at 0x" not in facts
    return digest_of(facts) if is_known else ""


def _facts(algorithm: str, runtime: Runtime) -> str:
    """A text that is equal for runtimes of the same graphs, options and draft, whose parts compile to the same code."""
    options, draft, cold_start = runtime.options, runtime.algorithm.draft_module, runtime.cold_start
    facts = [
        algorithm,
        type(options).__name__,
        _values(options, BESIDE),
        runtime.algorithm.plan,
        [runtime.device, runtime.sizes, torch.get_num_threads()],
        cold_start and cold_start.fault,
        [(describe(graph), *_values(graph, {"gm", "log"})) for graph in runtime.graphs],
        [] if draft is None else _module_facts(draft),
    ]
    return repr(facts)


def _values(owner: Any, without: Collection[str]) -> list[tuple[str, Any]]:
    """The fields of a dataclass, with their values."""
    return [(each.name, getattr(owner, each.name)) for each in dataclasses.fields(owner) if each.name not in without]


def _module_facts(module: nn.Module) -> list:
    """Classes, attributes and tensor layouts of a module and its parts. An attribute whose repr has an address equals
    no other."""
    machinery, facts = set(vars(nn.Module())), []
    for path, part in module.named_modules():
        values = [(name, _layout(value)) for name, value in vars(part).items() if name not in machinery]
        held = [*held_items(part._parameters), *held_items(part._buffers)]
        facts.append((path, type(part).__qualname__, values, [(name, _layout(value)) for name, value in held]))
    return facts


def _layout(value: Any) -> Any:
    """The facts about a tensor that parts depend on; any other value unchanged."""
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value
