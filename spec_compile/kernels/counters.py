"""Counters in device memory that tell a program if it is the last of its launch to arrive; zero between launches."""

import torch
from torch import Tensor

COUNTERS = 1 << 20
_counters: dict[torch.device, Tensor] = {}
_next: dict[torch.device, int] = {}


def prepare(device: torch.device) -> None:
    """Allocate the counters of a device. Otherwise the first launch does, and during a capture every launch."""
    if device not in _counters:
        _counters[device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        _next[device] = 0
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def zero_counters(device: torch.device, count: int) -> Tensor:
    """Counters [>= count] int32 of value 0, which a launch must leave at 0; concurrent launches get other ones."""
    count = -(-count // 32) * 32  # aligned, so that every launch has the same specialisation
    if device not in _counters:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.zeros(count, dtype=torch.int32, device=device)
        prepare(device)
    begin = _next[device] if _next[device] + count <= COUNTERS else 0
    _next[device] = begin + count
    return _counters[device][begin : begin + count]


def all_zero() -> bool:
    """True if every launch so far left its counters at 0."""
    return not any(counters.any() for counters in _counters.values())
