"""Times of calls on a GPU, and the speed of its memory."""

import fcntl
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_turns = open(os.environ["BENCHMARK_TURNS"], "w") if "BENCHMARK_TURNS" in os.environ else None
if _turns:
    fcntl.flock(_turns, fcntl.LOCK_SH)


@contextmanager
def alone() -> Iterator[None]:
    """What runs inside waits until no other process builds, compiles or times a model on this GPU.

    The environment variable BENCHMARK_TURNS names a file by which processes take turns; without it nothing is awaited.
    """
    if _turns:
        torch.cuda.synchronize()
        fcntl.flock(_turns, fcntl.LOCK_EX)
    try:
        yield
        if _turns:
            torch.cuda.synchronize()
    finally:
        if _turns:
            fcntl.flock(_turns, fcntl.LOCK_UN)
            time.sleep(1)  # others that wait for their turn come before what this one builds next
            fcntl.flock(_turns, fcntl.LOCK_SH)


def bandwidth() -> dict[str, float]:
    """Bytes a second of a large read and of a large copy (read plus written)."""

    def speeds(data: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
        read = median_ms(lambda: data.view(torch.int64).max(), 10)
        copy = median_ms(lambda: other.copy_(data), 10)
        return {"read": data.numel() / read * 1e3, "copy": 2 * data.numel() / copy * 1e3}

    measured = speeds(*torch.empty(2, 1 << 32, dtype=torch.uint8, device="cuda"))
    torch.cuda.empty_cache()  # other processes may want the memory
    return measured


def median_ms(function: Callable, repeats: int, warm: int = 3, before: Callable = lambda: None) -> float:
    """Median milliseconds of a call. before: is called before each, and not timed.

    A GPU is busy while the host launches what is timed, so that the launch is not among it.
    """
    times = []
    for _ in range(warm + repeats):
        before()
        if torch.cuda.is_available():
            torch.cuda._sleep(500_000)  # cycles: about 0.3 ms
        times.append(call_ms(function))
    return statistics.median(times[warm:])


def call_ms(function: Callable) -> float:
    """Milliseconds of a call on the GPU, between events (without one: on the wall)."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)
