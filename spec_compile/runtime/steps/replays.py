"""`Replays`: a function of tensors, some of which stay in place, as CUDA graphs that record themselves."""

import logging
import operator
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...compat import tensors_in
from .capture import WARM_UPS, CaptureError, aside, record

log = logging.getLogger("spec_compile")
MOST = 4
"""Graphs that a function keeps. The one that was recorded first goes first."""


class Replays:
    """``function(*arguments)`` of tensors of one GPU and integers, replayed from the third call of a kind on.

    kept: places of the tensors that stay where they are, such as caches; a kind of call has them at one place.
    first_weight: the arguments from this place on are weights, the same tensors in every call; others begin anew.
    Other tensors are copied for every call, and results are copies. A function that returns memory of its arguments,
    or cannot be recorded, always runs itself.
    """

    def __init__(self, function: Callable, kept: list[int], first_weight: int):
        self.function, self.kept, self.first_weight = function, set(kept), first_weight
        self._graphs: dict[tuple, _ReplayedCall] = {}
        self._weights: tuple[Tensor, ...] = ()
        self._runs_itself = False

    def __call__(self, *arguments):
        if self._runs_itself:
            return self.function(*arguments)
        weights = arguments[self.first_weight :]
        if len(weights) != len(self._weights) or any(map(operator.is_not, weights, self._weights)):  # guard: new-weight
            self._graphs.clear()
            self._weights = weights
        replay = self._of(tuple([self._kind(place, x) for place, x in enumerate(arguments[: self.first_weight])]))
        try:
            result = replay(arguments)
            self._runs_itself = replay.shares_memory
        except CaptureError as error:
            log.info("spec: a forward runs without a CUDA graph: %s", error)
            result = self.function(*arguments)
            self._runs_itself = True
        if self._runs_itself:
            self._graphs.clear()
        return result

    def _kind(self, place: int, x: Tensor | int):
        if isinstance(x, int):
            return x
        return (x.data_ptr(), x.shape) if place in self.kept else x.shape  # guard: replayed-cache

    def _of(self, kind: tuple) -> "_ReplayedCall":
        """The graph of a kind of calls; a new one may take the place of the oldest."""
        if kind not in self._graphs:
            if len(self._graphs) >= MOST:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[kind] = _ReplayedCall(self.function, self.kept, self.first_weight)
        return self._graphs[kind]


class _ReplayedCall:
    """One graph, and the calls before it is recorded, which warm the function up."""

    def __init__(self, function: Callable, kept: set[int], first_weight: int):
        self.function, self.kept, self.first_weight, self.calls = function, kept, first_weight, 0
        self.shares_memory = False
        """True if a result was memory of an argument."""
        self._stream = torch.cuda.Stream()

    def __call__(self, arguments: tuple):
        self.calls += 1
        if self.calls <= WARM_UPS:
            with aside(self._stream):
                result = self.function(*arguments)
            given = {x.untyped_storage().data_ptr() for x in tensors_in(arguments)}
            self.shares_memory = any(x.untyped_storage().data_ptr() in given for x in tensors_in(result))
            return result
        if self.calls == WARM_UPS + 1:
            self._record(arguments)
        for place, copy in self._copies.items():
            copy.copy_(arguments[place], non_blocking=True)
        self._replay()
        return [x.clone() if isinstance(x, Tensor) else x for x in self._result]

    def _record(self, arguments: tuple) -> None:
        """Record the graph over copies of what is copied. It holds no cache or weight: if one is freed, no call has its
        address, so that the graph is not replayed."""
        self._copies = {
            place: x.clone() for place, x in enumerate(arguments[: self.first_weight])
            if isinstance(x, Tensor) and place not in self.kept
        }  # fmt: skip
        recorded = [self._copies.get(place, x) for place, x in enumerate(arguments)]
        pool = torch.cuda.graph_pool_handle()
        self._replay, self._result = record(partial(self.function, *recorded), pool, self._stream)
