"""CUDA graphs: a step is captured once and replayed, and writes its outcome to the host without another launch."""

import functools
import gc
import itertools
import operator
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..compat import tensors_in
from ..errors import log

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as Pool

T = TypeVar("T")
WARM_UPS = 2
AROUND: list[Callable[..., AbstractContextManager]] = []
"""Contexts of captures, of (graph, stream, pool), which give a function of the launch; `contrib` adds some."""
MOST = 4
"""Graphs that `Replays` keeps. The one that was recorded first goes first."""
SLOTS = 4
"""Rounds whose outcomes may be under way at once."""
LOOKS = 10_000
"""After each LOOKS looks for an outcome, the host also asks if the GPU still runs; a failed kernel raises there."""

LOOK_SECONDS = 2e-5
"""Between two looks while another thread is `patient`."""
_look_seconds = 0.0


class CaptureError(RuntimeError):
    """A CUDA graph cannot contain something; the message names it."""


class Captured:
    """``function(*arguments)`` as one CUDA graph, which each call launches once.

    A call copies its tensors, also those in lists, into the captured ones; other arguments keep their captured values.
    The next call overwrites the result. Raises CaptureError as `record` does.
    """

    def __init__(self, function: Callable, arguments: tuple, pool: "Pool | None"):
        self._inputs = tensors_in(arguments)
        stream = torch.cuda.Stream()
        with aside(stream):
            for _ in range(WARM_UPS):
                function(*arguments)
        self._replay, self.output = record(partial(function, *arguments), pool, stream)

    def __call__(self, *arguments: Any) -> Any:
        for held, given in zip(self._inputs, tensors_in(arguments)):
            if held is not given:
                held.copy_(given, non_blocking=True)
        self._replay()
        return self.output


def record(function: Callable[[], T], pool: "Pool | None", stream: torch.cuda.Stream) -> tuple[Callable[[], None], T]:
    """Capture `function` as one CUDA graph. Returns (replay, output); each replay overwrites the output.

    function: has run before, inside `aside` on this stream.
    pool: gives the graph its memory, None a new one; after a CaptureError it must not be used again.
    """
    graph, collects, pool = torch.cuda.CUDAGraph(), gc.isenabled(), pool or torch.cuda.graph_pool_handle()
    with torch.cuda.device(stream.device):
        try:
            # thread_local: NCCL and the preparation of requests may allocate in other threads meanwhile.
            capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
            # This context returns to its stream even if the capture's cannot end.
            with torch.cuda.stream(torch.cuda.current_stream()):
                # cuBLAS takes its workspaces from the graph's pool. Otherwise it would reuse the stream's, which
                # torch.compile(mode="reduce-overhead") frees, and replays would write to memory of others.
                torch._C._cuda_clearCublasWorkspaces()
                # Python does not look for garbage. It could find an earlier graph, whose pool of memory cannot be freed
                # meanwhile: torch ends the process.
                gc.disable()
                try:
                    with capture, ExitStack() as stack:
                        around = [stack.enter_context(each(graph, stream, pool)) for each in AROUND]
                        output = function()
                finally:
                    if collects:
                        gc.enable()
                    torch._C._cuda_clearCublasWorkspaces()
        except Exception as error:
            # torch does not do it if a capture fails, and aborts when it frees memory later.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(stream.device_index, pool)
            torch.cuda.synchronize()
            raise CaptureError(str(error.__context__ or error)) from error
    return functools.reduce(lambda launch, wrap: wrap(launch), around, graph.replay), output


@contextmanager
def aside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run on this stream, in order with the launches before and after it. None keeps the current stream."""
    if stream is None:
        yield
        return
    with torch.cuda.device(stream.device):
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            current.wait_stream(stream)


@contextmanager
def patient() -> Iterator[None]:
    """A context in which threads that wait for outcomes let this one work. They have ``time.sleep(0)`` between looks
    otherwise, after which they go on before another thread wakes up: an import of seconds would take a minute."""
    global _look_seconds
    _look_seconds = LOOK_SECONDS
    try:
        yield
    finally:
        _look_seconds = 0.0


class OutcomeRing:
    """Outcomes under way to the host: round n (from 1) writes to pinned slot (n - 1) % SLOTS, its number first."""

    def __init__(self, width: int, device: torch.device, check_peers: Callable[[], None]):
        """width: largest number of integers in an outcome. check_peers: raises if a rank that is waited for is gone."""
        self._check_peers = check_peers
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        """[1]: rounds so far, which the rounds count; if negative, nobody reads their outcomes."""
        self._slots = torch.zeros(SLOTS + 1, 1 + width, dtype=torch.int64, pin_memory=True)
        self._seen = self._slots.numpy()
        self._sent = 0

    def publishing(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`function`, which also writes its outcome to the ring."""
        from ..kernels.copies import publish  # needs Triton

        def published(*arguments: Any) -> Tensor:
            outcome = function(*arguments)
            publish(outcome, self._slots, self.turn)
            return outcome

        return published

    def begin(self) -> None:
        """Set the rounds' counter to the outcomes that were expected so far; no outcome is under way."""
        self.turn.fill_(self._sent)

    def expect(self, shape: torch.Size) -> Callable[[], list[list[int]]]:
        """Count a launched round. The result waits for its outcome, of this shape [B, C], and returns it as lists."""
        slot = self._seen[self._sent % SLOTS]
        self._sent += 1
        number = self._sent

        def read() -> list[list[int]]:
            for look in itertools.count(1):
                if slot[0] == number:
                    break
                if look % LOOKS == 0:
                    self._check_peers()
                if look % LOOKS == 0 and torch.cuda.current_stream(self.turn.device).query() and slot[0] != number:
                    raise RuntimeError("the GPU is idle and a round has left no outcome; please report this")
                time.sleep(_look_seconds)
            return slot[1 : 1 + shape.numel()].reshape(shape).tolist()

        return read


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

    def __call__(self, *arguments: Any) -> Any:
        if self._runs_itself:
            return self.function(*arguments)
        weights = arguments[self.first_weight :]
        if len(weights) != len(self._weights) or any(map(operator.is_not, weights, self._weights)):  # guard: new-weight
            self._graphs.clear()
            self._weights = weights
        kind = tuple([self._kind(place, x) for place, x in enumerate(arguments[: self.first_weight])])
        if kind not in self._graphs:
            if len(self._graphs) >= MOST:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[kind] = _ReplayedCall(self.function, self.kept, self.first_weight)
        replay = self._graphs[kind]
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

    def _kind(self, place: int, x: Tensor | int) -> Hashable:
        if isinstance(x, int):
            return x
        return (x.data_ptr(), x.shape) if place in self.kept else x.shape  # guard: replayed-cache


class _ReplayedCall:
    """One graph, and the calls before it is recorded, which warm the function up."""

    def __init__(self, function: Callable, kept: set[int], first_weight: int):
        self.function, self.kept, self.first_weight, self.calls = function, kept, first_weight, 0
        self.shares_memory = False
        """True if a result was memory of an argument."""
        self._stream = torch.cuda.Stream()

    def __call__(self, arguments: tuple) -> Any:
        self.calls += 1
        if self.calls <= WARM_UPS:
            with aside(self._stream):
                result = self.function(*arguments)
            given = {x.untyped_storage().data_ptr() for x in tensors_in(arguments)}
            self.shares_memory = any(x.untyped_storage().data_ptr() in given for x in tensors_in(result))
            return result
        if self.calls == WARM_UPS + 1:
            # The graph reads copies of what is copied. It holds no cache or weight: if one is freed, no call has its
            # address, so that the graph is not replayed.
            self._copies = {
                place: x.clone() for place, x in enumerate(arguments[: self.first_weight])
                if isinstance(x, Tensor) and place not in self.kept
            }  # fmt: skip
            recorded = [self._copies.get(place, x) for place, x in enumerate(arguments)]
            self._replay, self._result = record(partial(self.function, *recorded), None, self._stream)
        for place, copy in self._copies.items():
            copy.copy_(arguments[place], non_blocking=True)
        self._replay()
        return [x.clone() if isinstance(x, Tensor) else x for x in self._result]
