"""CUDA graphs: a step captured once and replayed, and the way its outcomes come back without a launch of their own."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ...compat import tensors_in

T = TypeVar("T")
WARM_UPS = 2
SLOTS = 4
"""Rounds whose outcomes can be on their way at once."""
LOOKS = 10_000
"""After so many looks for an outcome, whether the GPU still runs is looked at, too: a failed kernel raises there."""


class CaptureError(RuntimeError):
    """Something cannot be in a CUDA graph; says what it was."""


class Captured:
    """``function(*arguments)`` as one CUDA graph; every call of it is one launch.

    Tensors among the arguments (also in lists) are copied into those of the capture; everything else is as it was then.
    Its result is overwritten by the next call. CaptureError as of `record`.
    """

    def __init__(self, function: Callable, arguments: tuple, pool):
        self._inputs = tensors_in(arguments)
        stream = torch.cuda.Stream()
        with aside(stream):
            for _ in range(WARM_UPS):
                function(*arguments)
        self._replay, self.output = record(partial(function, *arguments), pool, stream)

    def __call__(self, *arguments):
        for held, given in zip(self._inputs, tensors_in(arguments)):
            if held is not given:
                held.copy_(given, non_blocking=True)
        self._replay()
        return self.output


def record(function: Callable[[], T], pool, stream: torch.cuda.Stream) -> tuple[Callable[[], None], T]:
    """A function that launches again, as one CUDA graph, what `function` launches now; and what `function` returned,
    which every replay overwrites. CaptureError if that cannot be; `pool` must not be used again then.

    `function` must have run before, `aside` on this stream. pool: whose memory the graph takes.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(stream.device):
        try:
            # Other threads may take memory meanwhile: NCCL's look at the GPU, and requests are prepared.
            # The outer context returns to its stream even if the inner one cannot end its capture.
            outer = torch.cuda.stream(torch.cuda.current_stream())
            capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
            with outer, workspaces_of_the_pool(), capture:
                output = function()
        except Exception as error:
            torch.cuda.synchronize()
            raise CaptureError(str(error.__context__ or error)) from error
    return graph.replay, output


@contextmanager
def aside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """On this stream, after what was launched before; what is launched afterwards waits for it. None: where it was."""
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
def workspaces_of_the_pool() -> Iterator[None]:
    """Around a capture: cuBLAS takes its workspaces from the graph's pool. It keeps those it has had of a stream, until
    someone frees all (``torch.compile(mode="reduce-overhead")`` does) and replays would write to memory of others."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class OutcomeRing:
    """Outcomes on their way to the host: rounds write them to pinned memory, each in a slot of its own."""

    def __init__(self, width: int, device: torch.device, check_peers: Callable[[], None]):
        """width: most numbers of an outcome. check_peers: raises if an outcome waits for a rank that is gone."""
        self._check_peers = check_peers
        self.turn = torch.zeros(1, dtype=torch.int64, device=device)
        """[1]: rounds so far, counted by the rounds themselves; negative: what they write is not for anyone."""
        self._slots = torch.zeros(SLOTS + 1, 1 + width, dtype=torch.int64, pin_memory=True)
        self._seen = self._slots.numpy()
        self._sent = 0

    def publishing(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`function`, whose outcome is also written to the ring."""
        from ...kernels.publish import publish  # needs Triton

        def published(*arguments) -> Tensor:
            outcome = function(*arguments)
            publish(outcome, self._slots, self.turn)
            return outcome

        return published

    def begin(self) -> None:
        """Nothing is on its way: the next outcome is the one expected next, whatever ran in between."""
        self.turn.fill_(self._sent)

    def expect(self, shape: torch.Size) -> Callable[[], list[list[int]]]:
        """The next outcome, of this shape [B, C], was launched; what is returned waits for it and gives it as lists."""
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
                time.sleep(0)
            return slot[1 : 1 + shape.numel()].reshape(shape).tolist()

        return read
