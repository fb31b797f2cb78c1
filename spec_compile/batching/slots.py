"""How many requests decode at once, and how many tokens each may have."""

import torch

from ..runtime.runtime import Runtime

MOST = {"cpu": 16, "cuda": 64}
"""Slots unless the user says how many: beyond, rounds cost arithmetic."""
SHARE = 0.8
"""Of the free memory of a GPU that the slots may take."""


def choose_slots(runtime: Runtime, requested: int | None, hints=None) -> tuple[int, int]:
    """Slots, and tokens of each.

    requested: slots that the user asks for; None leaves it to the memory. hints: transformers' WorkloadHints.
    Raises ValueError if `requested` is below 1.
    """
    if requested is not None and requested < 1:
        raise ValueError(f"max_requests_per_batch: expected at least 1, got {requested}")
    slots = requested or MOST[runtime.device.type]
    if requested is None and hints is not None and hints.num_requests:
        slots = min(slots, hints.num_requests)
    capacity = runtime.capacity(slots)
    if hints is not None and hints.max_generated_length:
        capacity = min(capacity, hints.max_prompt_length + hints.max_generated_length)
    if runtime.on_gpu and requested is None:
        free = SHARE * torch.cuda.mem_get_info(runtime.device)[0]
        slots = max(1, min(slots, int(free / (runtime.token_bytes * (capacity + 2048)))))
    return slots, capacity
