"""Code: compiled parts without buffers, so that sessions and engines share them.

Parts take tensors and modules as arguments. Code that was compiled for one engine serves every engine that computes the
same, and refers to none of them.
"""

import dataclasses
import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, fx, nn

from ...artefacts.compiler import PartCompiler, PartSource
from ...cache import PAGE
from ...compat import COMPILE_LOCK
from ...graph import ModelGraph
from ...inventory import held_items
from .. import background
from .regions import describe

if TYPE_CHECKING:
    from ..runtime import Runtime
    from ..tiers import Tiers

KEPT = 2
"""Codes of different options kept for a model. A living wrapper keeps its own code."""

BESIDE = (
    "adaptive", "artefact", "cache", "check", "draft", "max_cache_len", "prefix_cache_bytes", "prefix_cache_host_bytes",
    "trust_artefact",
)  # fmt: skip
"""Options that code does not depend on. `_facts` reads the draft itself."""


class Form(NamedTuple):
    """The shape that code is compiled for. Form(1, 0) serves single rows and any number of cache slots.

    rows: 0 serves any number above one.
    slots: of the cache; 0 serves any number.
    """

    rows: int
    slots: int


class Code:
    """Compiled parts, and the steps that are complete.

    source: gives parts their compiled graphs.
    compilers: by the form and the tag of the parts.
    complete: forms and names of steps whose parts are all compiled.
    static: the cached result of `example.static_sizes`.
    users: of engines that run these parts and have them compiled in the background.
    adoptions: how often parts have changed from eager to compiled.
    """

    def __init__(self, tiers: "Tiers | None" = None) -> None:
        children = background.children() if tiers is not None and not tiers.fault else None
        self.source = PartSource(children=children, at_once=tiers is None)
        self.users: WeakSet[Tiers] = WeakSet()
        self.adoptions = 0
        self.compilers: dict[tuple[Form, str], PartCompiler] = {}
        self.complete: set[tuple[Form, str]] = set()
        self.static: frozenset[int] | None = None

    def open(self, form: Form) -> None:
        for (other, _), compiler in [*self.compilers.items()]:
            compiler.is_open = other == form

    def close(self) -> None:
        for compiler in [*self.compilers.values()]:
            compiler.is_open = False


_codes: "WeakKeyDictionary[nn.Module, OrderedDict[tuple, Code]]" = WeakKeyDictionary()
"""By model. No code refers to its model, so that both are freed together."""


def shared_code(model: nn.Module, algorithm: str, runtime: "Runtime") -> Code:
    """The code of engines of `model` that compute the same as `runtime`, a new engine's. algorithm: its name."""
    if runtime.options.ranks.size > 1 or not runtime.options.compile:
        return Code()
    with COMPILE_LOCK:
        facts, classes = _facts(algorithm, runtime), _classes(runtime)
        codes, key = _codes.setdefault(model, OrderedDict()), (hashlib.sha256(facts.encode()).hexdigest(), classes)
        code = codes.setdefault(key, Code(runtime.tiers))
        code.source.identity = identity_of(facts, classes)
        codes.move_to_end(key)
        while len(codes) > KEPT:
            codes.popitem(last=False)
    return code


def _classes(runtime: "Runtime") -> tuple[type, ...]:
    """Classes whose methods are compiled. A notebook's cell that runs again defines new ones."""
    draft, drafter = runtime.algorithm.draft_module, runtime.algorithm.drafter(1, PAGE)
    modules = [*drafter.modules(), *(() if draft is None else draft.modules())]
    return (type(runtime.algorithm), *(type(part) for part in modules if not isinstance(part, fx.GraphModule)))


def identity_of(facts: str, classes: tuple[type, ...]) -> str:
    """The `PartSource.identity` of code: "" if `facts` has an address, or an artefact's key lacks code of `classes`."""
    packages = {part.__module__.partition(".")[0] for part in classes}
    is_known = packages <= {"spec_compile", "torch", "transformers"} and " at 0x" not in facts
    return hashlib.sha256(facts.encode()).hexdigest() if is_known else ""


def _facts(algorithm: str, runtime: "Runtime") -> str:
    """A text that is equal for runtimes of the same graphs, options and draft, whose parts compile to the same code."""
    options, draft = runtime.options, runtime.algorithm.draft_module
    names = [field.name for field in dataclasses.fields(options) if field.name not in BESIDE]
    graphs = [graph for graph in (runtime.verify, runtime.prefill, runtime.algorithm.graph) if graph is not None]
    facts = [
        algorithm,
        type(options).__name__,
        [(name, getattr(options, name)) for name in names],
        runtime.algorithm.plan,
        [runtime.device, runtime.sizes, torch.get_num_threads()],
        runtime.tiers and runtime.tiers.fault,
        [_graph_facts(graph) for graph in graphs],
        [] if draft is None else _module_facts(draft),
    ]
    return repr(facts)


def _graph_facts(graph: ModelGraph) -> list:
    fields = [field.name for field in dataclasses.fields(graph) if field.name not in ("gm", "log")]
    return [describe(graph), *((name, getattr(graph, name)) for name in fields)]


def _module_facts(module: nn.Module) -> list:
    """Classes, attributes and tensor layouts of a module and its parts. An attribute whose repr has an address equals
    no other."""
    machinery, facts = set(vars(nn.Module())), []
    for path, part in module.named_modules():
        values = [(name, _layout(value)) for name, value in vars(part).items() if name not in machinery]
        held = [*held_items(part._parameters), *held_items(part._buffers)]
        tensors = [(name, _layout(value)) for name, value in held]
        facts.append((path, type(part).__qualname__, values, tensors))
    return facts


def _layout(value: Any) -> Any:
    """The facts about a tensor that code depends on; any other value unchanged."""
    return (tuple(value.shape), value.stride(), value.dtype) if isinstance(value, Tensor) else value
