"""Times of calls on a GPU, and the speed of its memory and its arithmetic."""

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
    """A context that no other process shares: others that build, compile or time a model on this GPU wait.

    The environment variable BENCHMARK_TURNS names the file by which processes take turns; without it nothing waits.
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
            time.sleep(1)  # others that wait for their turn come before this process builds again
            fcntl.flock(_turns, fcntl.LOCK_SH)


def bandwidth() -> dict[str, float]:
    """Bytes a second of a large read, and of a large copy (read plus written)."""

    def speeds(data: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
        read = median_ms(lambda: data.view(torch.int64).max(), 10)
        copy = median_ms(lambda: other.copy_(data), 10)
        return {"read": data.numel() / read * 1e3, "copy": 2 * data.numel() / copy * 1e3}

    measured = speeds(*torch.empty(2, 1 << 32, dtype=torch.uint8, device="cuda"))
    torch.cuda.empty_cache()  # other processes may want the memory
    return measured


def product_speed(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, size: int = 8192) -> float:
    """Multiplications and additions a second of a product of two square random matrices."""
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / median_ms(lambda: a @ b, 10) * 1e3


def captured(run: Callable, **how) -> torch.cuda.CUDAGraph:
    """A CUDA graph of the launches of `run`, which runs once before. how: arguments of ``torch.cuda.graph``."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **how):
        run()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, repeats: int = 15, before: Callable = lambda: None) -> float:
    """Median microseconds of a replay. before: as of `median_ms`."""
    return median_ms(graph.replay, repeats, before=before) * 1e3


def median_ms(function: Callable, repeats: int, warm: int = 3, before: Callable = lambda: None) -> float:
    """Median milliseconds of a call. before: called before each call, and not timed.

    The host launches the call while the GPU is still busy, so that the launch takes no part of the time.
    """
    times = []
    for _ in range(warm + repeats):
        before()
        if torch.cuda.is_available():
            torch.cuda._sleep(500_000)  # cycles: about 0.3 ms
        times.append(call_ms(function))
    return statistics.median(times[warm:])


def call_ms(function: Callable) -> float:
    """Milliseconds of a call on the GPU, between two events; without a GPU, by the clock."""
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
