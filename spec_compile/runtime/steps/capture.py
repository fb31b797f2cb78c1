"""CUDA graphs: a step captured once and replayed, and the way its outcomes come back without a launch of their own."""

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ...compat import tensors_in

WARM_UPS = 2
SLOTS = 4
"""Rounds whose outcomes can be on their way at once."""
LOOKS = 10_000
"""After so many looks for an outcome, whether the GPU still runs is looked at, too: a failed kernel raises there."""


class Captured:
    """``function(*arguments)`` as one CUDA graph; every call of it is one launch.

    Tensors among the arguments (also in lists) are copied into those of the capture; everything else is as it was then.
    What it returns is overwritten by the next call.
    """

    def __init__(self, function: Callable, arguments: tuple, pool):
        self._inputs = tensors_in(arguments)
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function(*arguments)
        torch.cuda.current_stream().wait_stream(stream)
        try:
            mode = "thread_local" if dist.is_initialized() else "global"  # NCCL has threads that look at the GPU
            capture = torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode=mode)
            with workspaces_of_the_pool(), capture:
                self.output = function(*arguments)
        except Exception as error:
            torch.cuda.synchronize()
            raise RuntimeError(
                "a step cannot be captured in a CUDA graph, for something in the model waits for the GPU or is not "
                f"allowed there; pass cuda_graphs=False to speculate(). It was: {error}"
            ) from error

    def __call__(self, *arguments):
        for held, given in zip(self._inputs, tensors_in(arguments)):
            if held is not given:
                held.copy_(given, non_blocking=True)
        self._graph.replay()
        return self.output


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
