"""CUDA graphs: a step captured once and replayed, and the way its outcomes come back without anyone waiting."""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from ..compat import tensors_in

WARM_UPS = 2
SLOTS = 4
"""Rounds whose outcomes can be on their way at once."""


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
            with torch.cuda.graph(self._graph, pool=pool, stream=stream):
                self.output = function(*arguments)
        except Exception as error:
            torch.cuda.synchronize()
            raise RuntimeError(
                "the round cannot be captured in a CUDA graph, for something in the model waits for the GPU or is not "
                f"allowed there; pass cuda_graphs=False to speculate(). It was: {error}"
            ) from error

    def __call__(self, *arguments):
        for held, given in zip(self._inputs, tensors_in(arguments)):
            if held is not given:
                held.copy_(given, non_blocking=True)
        self._graph.replay()
        return self.output


class Ring:
    """Outcomes on their way to the host, in pinned memory."""

    def __init__(self, batch: int, columns: int):
        self._slots = [
            (torch.empty(batch, columns, dtype=torch.int64, pin_memory=True), torch.cuda.Event()) for _ in range(SLOTS)
        ]
        self._turn = 0

    def send(self, outcome: Tensor) -> Callable[[], list[list[int]]]:
        """Copy `outcome` [B, C] as soon as it is there; what is returned waits for that and gives it as lists."""
        slot, event = self._slots[self._turn % SLOTS]
        self._turn += 1
        slot = slot[:, : outcome.shape[1]]
        slot.copy_(outcome, non_blocking=True)
        event.record()

        def read() -> list[list[int]]:
            while not event.query():
                time.sleep(0)
            return slot.tolist()

        return read
