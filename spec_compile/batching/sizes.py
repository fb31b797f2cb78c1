"""The sizes of a batch: how many requests may be under way, and how many pages there is memory for."""

from typing import NamedTuple

import torch
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from ..cache import PAGE, ROUNDED
from ..runtime.compiled_steps import rows_vary
from ..runtime.pipeline import AHEAD
from ..runtime.round import PREFILL_SIZES
from ..runtime.runtime import PrefixBudget, Runtime
from ..runtime.state import State
from ..tree import MAX_NODES
from .pages import pages_of
from .prefill import DRAFTED_ROWS, PREFILL_ROWS, STEPS_OF_TOKENS

MOST = {"cpu": 16, "cuda": 256}
"""Slots unless the user says how many: beyond, rounds cost arithmetic."""
SHARE = 0.8
"""Share of a GPU's free memory that pages and rows may take unless the user says otherwise."""
ROWS_SHARE = 0.25
"""Share of that which rows may take, for states and texts."""
PREFILL_SHARE = 0.05
"""Share of the pages that as many longest prompts take as are processed at once, beyond `FEWEST_PREFILL_ROWS`. If one
takes more, the model is so large that few prompts keep the GPU busy."""
FEWEST_PREFILL_ROWS = 4
MOST_KEPT = 1 << 16
"""Pages for kept prefixes at most."""


class Sizes(NamedTuple):
    """slots: requests that decode at once. capacity: tokens that each may have, prompt included. prefill_rows: prompts
    that are processed at once. pages: of the pool, the scratch page included. piece: most tokens of a step in which
    prompts ride along with a round; 0: none do."""

    slots: int
    capacity: int
    prefill_rows: int
    pages: int
    piece: int


def choose_sizes(runtime: Runtime, config: ContinuousBatchingConfig, hints: WorkloadHints | None = None) -> Sizes:
    """The sizes that the user's config asks for, and else as much as there is memory for.

    The config's `max_requests_per_batch`, `num_blocks` times `page_size` and `max_memory_percent` count. The pool has
    the pages that all rows can fill, and pages for kept prefixes.
    Raises ValueError if a number is out of range, or if the pool does not hold one row of `max_cache_len`.
    """
    slots, pages = wanted_slots(runtime, config, hints), wanted_pages(config)
    capacity, free = runtime.capacity(slots), 0.0
    share = SHARE if config.max_memory_percent is None else config.max_memory_percent
    if not 0 < share <= 1:
        raise ValueError(f"max_memory_percent: expected a share above 0 and at most 1, got {share}")
    piece = _piece(runtime, config)
    prefill_rows = PREFILL_ROWS["cuda" if piece else runtime.device.type]
    if piece and runtime.algorithm.remembers:
        prefill_rows = DRAFTED_ROWS
    # Rows have their small buffers first, and pages the rest.
    if runtime.on_gpu:
        free = share * free_bytes(runtime)
        row = row_bytes(runtime, capacity)
        if config.max_requests_per_batch is None:
            slots = max(1, min(slots, int(ROWS_SHARE * free / row) - prefill_rows))
        free -= row * (slots + min(prefill_rows, slots))
    if pages is None:
        pages, kept = slots * row_pages(runtime, capacity), PrefixBudget.of(runtime).device
        page_bytes = PAGE * runtime.token_bytes  # 0 without attention
        pages += 1 + (pages if kept is None else min(kept // max(page_bytes, 1), MOST_KEPT))
        if runtime.on_gpu and page_bytes:
            pages = min(pages, int(free / page_bytes))
    capacity = fitting_capacity(runtime, capacity, pages)
    # The longest prompts that are processed together take a small part of the pool.
    if runtime.on_gpu:
        together = int(PREFILL_SHARE * pages / row_pages(runtime, capacity))
        prefill_rows = min(prefill_rows, max(FEWEST_PREFILL_ROWS, together))
    return Sizes(slots, capacity, min(prefill_rows, slots), pages, piece)


def wanted_slots(runtime: Runtime, config: ContinuousBatchingConfig, hints: WorkloadHints | None = None) -> int:
    """Slots unless memory is short. ValueError if the user asks for fewer than 1."""
    requested = config.max_requests_per_batch
    if requested is not None and requested < 1:
        raise ValueError(f"max_requests_per_batch: expected at least 1, got {requested}")
    slots = requested or MOST[runtime.device.type]
    if requested is None and hints is not None and hints.num_requests:
        slots = min(slots, 1 << (hints.num_requests - 1).bit_length())
    return slots


def wanted_pages(config: ContinuousBatchingConfig) -> int | None:
    """Pages with the scratch page that the user asks for, as transformers counts them: `num_blocks` of `page_size`
    tokens; None leaves it to the memory. ValueError if there are fewer than 1."""
    blocks = config.num_blocks
    if blocks is None:
        return None
    if blocks < 1:
        raise ValueError(f"num_blocks: expected at least 1, got {blocks}")
    return 1 + blocks * config.page_size // PAGE


def row_pages(runtime: Runtime, tokens: int) -> int:
    """Pages of a row of `tokens` tokens, with all that rounds in flight may write after them."""
    rounds = AHEAD if runtime.on_gpu else 1
    return pages_of(tokens + rounds * runtime.sizes[-1] + runtime.algorithm.plan.lookahead_slots)


def fitting_capacity(runtime: Runtime, capacity: int, pages: int) -> int:
    """The tokens of a row in a pool of `pages` pages, at most `capacity`. ValueError if the user asks for a row that
    does not fit."""
    needed, usable = row_pages(runtime, capacity), pages - 1
    if needed <= usable:
        return capacity
    most = capacity - (needed - usable) * PAGE
    if runtime.options.max_cache_len is not None or most < 1:
        raise ValueError(
            f"max_cache_len: a row of {capacity} tokens takes {needed} pages of {PAGE} tokens, and there is memory for "
            f"{max(usable, 0)}; ask for fewer tokens, or for more by num_blocks or max_memory_percent"
        )
    return most


def row_bytes(runtime: Runtime, capacity: int) -> int:
    """Bytes of a row without its keys and values: its states, its tree, and about two numbers a token."""
    plan = runtime.algorithm.plan
    state = State(runtime.verify, 1, ROUNDED, runtime.device, plan)
    buffers = *state.small_buffers(), *runtime.algorithm.drafter(1, ROUNDED).row_buffers()
    return sum(buffer.nbytes for buffer in buffers) + runtime.verify.row_bytes + 16 * capacity


def _piece(runtime: Runtime, config: ContinuousBatchingConfig) -> int:
    """Most tokens of a step that holds a round and prompts. ValueError if the user asks for fewer than 64."""
    tokens = getattr(config, "max_batch_tokens", None)
    if tokens is not None and tokens < MAX_NODES:
        raise ValueError(f"max_batch_tokens: expected at least {MAX_NODES}, got {tokens}")
    rides = runtime.mixes and runtime.options.ranks.size == 1 and (rows_vary(runtime) or not runtime.options.compile)
    return min(tokens or STEPS_OF_TOKENS[-1], PREFILL_SIZES[runtime.device.type][0]) if rides else 0


def free_bytes(runtime: Runtime) -> int:
    """Free memory of the GPU, with what this process has reserved and not allocated."""
    device = runtime.device
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
