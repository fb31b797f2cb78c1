"""Examples: the sizes to compile with, so that code serves as many rows and slots as it can."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ...cache import PAGE
from ..runtime import Runtime
from ..state import State
from .code import Form

PRIMES = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139, 149)
"""Numbers of nodes and of visible slots to compile with."""
SMALL_PRIMES = (5, 7, 11, 13, 17, 19, 23, 29, 31)
"""Numbers of rows and of pages of the cache to compile with, which take memory."""
STATIC_BACKENDS = {"flex"}
"""Attention backends whose code is made for one number of rows and of slots."""
MOST = 4096
"""Larger attributes of a drafter are no sizes of its proposals."""


class ExampleSizes(NamedTuple):
    """Sizes of the buffers of an example.

    static: see `static_sizes`.
    varying: primes that divide the rows and slots that vary, and no static size.
    """

    rows: int
    slots: int
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


def form_of(runtime: Runtime, rows: int, slots: int) -> Form:
    """The form of the code for a session of so many rows and slots."""
    return Form(0 if rows > 1 and rows_vary(runtime) else rows, 0 if slots_vary(runtime) else slots)


def example_sizes(runtime: Runtime, form: Form) -> ExampleSizes:
    """The sizes of the example that compiles code of this form.

    Form(0, 0), PAGE = 128 and static sizes of which 5 and 7 divide none give 5 rows and 7 * 128 slots; [5, 7] vary.
    """
    static, varying = static_sizes(runtime), []
    rows, slots = form
    if not rows:
        rows = example_size(static, primes=SMALL_PRIMES)
        varying.append(rows)
    if not slots:
        pages = example_size({*static, rows}, primes=SMALL_PRIMES)
        varying.append(pages)
        slots = pages * PAGE
    return ExampleSizes(rows, slots, static, tuple(varying))


def rows_vary(runtime: Runtime) -> bool:
    """True if one code serves all numbers of rows above one. Exceptions: recurrences, whose states a commit sorts by
    size; several ranks, whose sizes may differ; `STATIC_BACKENDS`; and static sizes that leave no prime to tell rows.
    """
    if not runtime.options.compile or runtime.verify.recurrences or runtime.options.ranks.size > 1:
        return False
    if not slots_vary(runtime):
        return False
    return any(all(size % prime for size in static_sizes(runtime)) for prime in SMALL_PRIMES)


def slots_vary(runtime: Runtime) -> bool:
    return all(graph.backend not in STATIC_BACKENDS for graph in _graphs(runtime))


def static_sizes(runtime: Runtime) -> frozenset[int]:
    """Every tensor size between two parts, except the numbers of rows and slots."""
    code, plan, graphs = runtime.code, runtime.algorithm.plan, _graphs(runtime)
    if code.static is None:
        state = State(runtime.verify, 1, PAGE, runtime.device, plan)
        drafter = runtime.algorithm.drafter(1, PAGE)
        modules = [*(graph.gm for graph in graphs), state, drafter]
        tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        sizes = {size for tensor in tensors for size in tensor.shape}
        groups = {layer.heads // layer.kv_heads for graph in graphs for layer in graph.layers}
        numbers = {number for part in drafter.modules() for number in _numbers(part)}
        numbers |= {*runtime.sizes, plan.lookahead_slots, *_numbers(runtime.options)}
        code.static = frozenset({*sizes, *groups, *numbers} - {0})
    return code.static


def _numbers(owner: object) -> Iterator[int]:
    """Integers among the attributes of `owner` and of its dataclasses, such as sizes of trees and blocks."""
    values = [*vars(owner).values()]
    for value in values + [x for each in values if dataclasses.is_dataclass(each) for x in vars(each).values()]:
        if type(value) is int and 0 < value <= MOST:
            yield value


def _graphs(runtime: Runtime) -> list:
    graphs = [runtime.verify, runtime.prefill, runtime.algorithm.graph]
    return [graph for graph in graphs if graph is not None]
