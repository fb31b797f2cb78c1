"""Times of calls on a GPU, and the speed of its memory."""

import statistics
import time
from collections.abc import Callable

import torch


def bandwidth() -> dict[str, float]:
    """Bytes a second of a large read and of a large copy (read plus written)."""
    data, other = torch.empty(2, 1 << 32, dtype=torch.uint8, device="cuda")
    read = median_ms(lambda: data.view(torch.int64).max(), 10)
    copy = median_ms(lambda: other.copy_(data), 10)
    return {"read": data.numel() / read * 1e3, "copy": 2 * data.numel() / copy * 1e3}


def median_ms(function: Callable, repeats: int, warm: int = 3) -> float:
    """Median milliseconds of a call."""
    for _ in range(warm):
        function()
    return statistics.median(call_ms(function) for _ in range(repeats))


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
