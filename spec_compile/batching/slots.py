"""How many requests decode at once, and how many tokens each may have."""

import torch

from ..capture.weight_values import WeightValues
from ..runtime.prefix_budget import PrefixBudget
from ..runtime.runtime import Runtime
from .lora_slots import LoraSlots
from .prompts import LANES
from .scheduler import Scheduler

MOST = {"cpu": 16, "cuda": 64}
"""Slots unless the user says how many: beyond, rounds cost arithmetic."""
SHARE = 0.8
"""Share of a GPU's free memory that slots and lanes of prompts may take."""
LANES_SHARE = 0.05
"""Share of that for lanes of prompts beyond `FEWEST_LANES`. If a row takes more, the model is so large that few
prompts keep the GPU busy."""
FEWEST_LANES = 4


def take_scheduler(engine, requested: int | None, hints=None) -> Scheduler:
    """The scheduler that an earlier manager has left, if it has enough slots, or a new one.

    engine: of the model. requested, hints: see `choose_slots`.
    """
    ranks = engine.runtime.options.ranks
    slots, capacity, lanes = ranks.lead(lambda: choose_slots(engine.runtime, requested, hints))
    idle, engine.idle_batch = engine.idle_batch, None
    if idle is not None and (idle.slots == slots or (requested is None and idle.slots > slots)):
        return idle
    del idle  # its memory first
    weights, adapters = WeightValues(engine.weights.slots), LoraSlots(engine.loras, slots)
    scheduler = Scheduler(engine.runtime, slots, capacity, lanes, weights, adapters)
    engine.batches.add(scheduler)
    return scheduler


def choose_slots(runtime: Runtime, requested: int | None, hints=None) -> tuple[int, int, int]:
    """Slots, tokens of each, and prompts that are processed at once.

    requested: slots that the user asks for; None leaves it to the memory. hints: transformers' WorkloadHints.
    Raises ValueError if `requested` is below 1.
    """
    if requested is not None and requested < 1:
        raise ValueError(f"max_requests_per_batch: expected at least 1, got {requested}")
    slots = requested or MOST[runtime.device.type]
    if requested is None and hints is not None and hints.num_requests:
        slots = min(slots, 1 << (hints.num_requests - 1).bit_length())
    capacity, lanes = runtime.capacity(slots), LANES[runtime.device.type]
    if runtime.on_gpu:
        prefixes = PrefixBudget.of(runtime).device
        free = SHARE * torch.cuda.mem_get_info(runtime.device)[0] - prefixes
        row_bytes = runtime.token_bytes * (capacity + 2048) + runtime.verify.row_bytes
        if prefixes and free < row_bytes:
            raise ValueError(
                f"prefix_cache_bytes: {prefixes / 1e9:.2f} GB leave no memory for a row of {row_bytes / 1e9:.2f} GB; "
                "ask for less, or use prefix_cache_host_bytes"
            )
        lanes = min(lanes, max(FEWEST_LANES, int(LANES_SHARE * free / row_bytes)))
        if requested is None:
            slots = max(1, min(slots, int(free / row_bytes) - lanes))
    return slots, capacity, min(lanes, slots)
