"""Times of calls on a GPU, and the speed of its memory and its arithmetic."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch.distributed import _symmetric_memory as symmetric_memory

from benchmarks.common import ROOT


def bandwidth(size: int = 1 << 32, device: str = "cuda") -> dict[str, float]:
    """Bytes a second of a large read, and of a large copy (read plus written). size: bytes."""

    def speeds(data: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
        read = median_ms(lambda: data.view(torch.int64).max(), 10)
        copy = median_ms(lambda: other.copy_(data), 10)
        return {"read": data.numel() / read * 1e3, "copy": 2 * data.numel() / copy * 1e3}

    measured = speeds(*torch.empty(2, size, dtype=torch.uint8, device=device))
    if device == "cuda":
        torch.cuda.empty_cache()  # other processes may want the memory
    return measured


def link_speed(group_name: str, size: int = 1 << 26) -> float:
    """Bytes a second from this rank's GPU to the next rank's, while all ranks send. All ranks of a host call it.

    size: bytes of a copy.
    """
    mine = symmetric_memory.empty(size, dtype=torch.uint8, device="cuda")
    handle = symmetric_memory.rendezvous(mine, group_name)
    next_rank = handle.get_buffer((handle.rank + 1) % handle.world_size, (size,), torch.uint8)
    data = torch.empty_like(mine)
    return size / median_ms(lambda: next_rank.copy_(data), 10) * 1e3


def launch_ranks(module: str, count: int, more: list[str], seconds: float | None = None) -> bool:
    """Run a module in `count` processes, with the arguments of this one and `more`. True if all succeed in time."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    process = subprocess.Popen([*launcher, "-m", module, *sys.argv[1:], *more], cwd=ROOT)
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its processes, too
        process.wait()
        return False


def sum_bytes(count: int, ranks: int, itemsize: int = 2) -> float:
    """Bytes that each rank must send at least so that all have the sum of `count` numbers: its part of all but its
    share of the numbers, and then the sum of its share to all others. 4096 numbers of 2 bytes and 4 ranks: 12,288."""
    return 2 * (ranks - 1) / ranks * count * itemsize


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
