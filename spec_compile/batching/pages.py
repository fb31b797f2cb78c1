"""Which pages of the pool are free, and how many rows use each of the others. How many pages and rows there is memory
for."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from ..cache import PAGE, ROUNDED
from ..runtime.compiled_steps import rows_vary
from ..runtime.pipeline import AHEAD
from ..runtime.round import PREFILL_SIZES
from ..runtime.runtime import PrefixBudget, Runtime
from ..runtime.state import State
from ..tree import MAX_NODES
from .prefill import PREFILL_ROWS, STEPS_OF_TOKENS

MOST = {"cpu": 16, "cuda": 256}
"""Slots unless the user says how many: beyond, rounds cost arithmetic."""
SHARE, ROWS_SHARE = 0.8, 0.25
"""Share of a GPU's free memory that pages and rows may take unless the user says otherwise, and share of that which
rows may take, for states and texts."""
PREFILL_SHARE, FEWEST_PREFILL_ROWS = 0.05, 4
"""Share of the pages that the longest prompts which are processed at once may take, and a number of them that may take
more. If one takes more, the model is so large that few prompts keep the GPU busy."""
MOST_KEPT = 1 << 16
"""Pages for kept prefixes at most."""


class OutOfPages(Exception):
    """More pages were asked for than are free."""


class Pages:
    """The pages of a pool. A page is free while no row uses it, and then it may still be kept for later prompts.

    Page 0 is scratch and never given. With 4 pages, take(2) gives [1, 2]; after share([1]) and release([1, 2]) page 2
    is free, and page 1 has one user. Free pages that are not kept are given first, the one that was given back last
    before others, because a CPU has its memory already. Then kept ones are given, the one that was used the longest
    time ago first: as the pages of a text are given back together, its last page before its first.
    """

    def __init__(self, count: int):
        self.count, self.usable = count, count - 1
        self._free = OrderedDict.fromkeys(range(1, count))
        """The free pages in the order in which they are given."""
        self._users = [0] * count
        self.kept: dict[int, list[Any]] = {}
        """By page the blocks that serve later prompts: the last page of a text may be a whole one of another."""
        self.keeps = True
        """True if it stays once no row uses the page."""
        self.lose: Callable[[list[Any]], None] = lambda kept: None
        """Called with what is not kept any more."""

    @property
    def free(self) -> int:
        """The number of pages that no row uses."""
        return len(self._free)

    @property
    def spare(self) -> int:
        """The number of free pages that are kept."""
        return len(self.kept.keys() & self._free.keys())

    def take(self, count: int) -> list[int]:
        """Pages for one user. OutOfPages if fewer are free; none is taken then."""
        if count > self.free:
            raise OutOfPages(f"{count} pages of {PAGE} tokens are needed, and {self.free} of {self.usable} are free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        self._lose(taken)
        return taken

    def _lose(self, pages: Sequence[int]) -> None:
        if lost := [each for page in pages for each in self.kept.pop(page, ())]:
            self.lose(lost)

    def share(self, pages: Iterable[int]) -> None:
        """Each of these pages, which are in use or kept, has one more user."""
        for page in pages:
            assert self._users[page] or page in self.kept, f"page {page} is free"
            self._users[page] += 1
            self._free.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Each of these pages, which are the pages of a text in order, has one user less."""
        for page in reversed(pages):
            assert self._users[page] > 0, f"page {page} is free"
            self._users[page] -= 1
            if not self._users[page]:
                if not self.keeps:
                    self._lose([page])
                self._free[page] = None
                self._free.move_to_end(page, last=page in self.kept)

    def drop(self, page: int, what: Any) -> None:
        """The contents of a page serve no more."""
        self.kept[page].remove(what)
        if not self.kept[page]:
            del self.kept[page]
            if page in self._free:
                self._free.move_to_end(page, last=False)


def pages_of(slots: int) -> int:
    """Pages that hold `slots` slots: 65 slots take two of 64."""
    return -(-slots // PAGE)


class Sizes(NamedTuple):
    """slots: requests that decode at once. capacity: tokens that each may have, prompt included. prefill_rows: prompts
    that are processed at once. pages: the scratch page included. piece: most tokens of a step in which prompts ride
    along with a round; 0: none do."""

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
    # As the user asks.
    slots, pool, tokens = wanted_slots(runtime, config, hints), wanted_tokens(config), config.max_batch_tokens
    share = SHARE if config.max_memory_percent is None else config.max_memory_percent
    if not 0 < share <= 1:
        raise ValueError(f"max_memory_percent: expected a share above 0 and at most 1, got {share}")
    if pool is not None and pool < 1:
        raise ValueError(f"num_blocks: expected at least 1, got {config.num_blocks}")
    if tokens is not None and tokens < MAX_NODES:
        raise ValueError(f"max_batch_tokens: expected at least {MAX_NODES}, got {tokens}")

    # Prompts ride along with rounds, or are processed between them.
    rides = runtime.mixes and runtime.options.ranks.size == 1 and (rows_vary(runtime) or not runtime.options.compile)
    rides = rides and runtime.algorithm.ahead < 2  # a module after the first goes on from the slice before
    piece = min(tokens or STEPS_OF_TOKENS[-1], PREFILL_SIZES[runtime.device.type][0]) if rides else 0
    prefill_rows = PREFILL_ROWS["cuda" if rides else runtime.device.type]

    # Rows have their small buffers first, and pages the rest.
    capacity, free = runtime.capacity(slots), 0.0
    if runtime.on_gpu:
        free, row = share * runtime.free_bytes, row_bytes(runtime, capacity)
        if config.max_requests_per_batch is None:
            slots = max(1, min(slots, int(ROWS_SHARE * free / row) - prefill_rows))
        free -= row * (slots + min(prefill_rows, slots))
    if pool is not None:
        pages = 1 + pool // PAGE
    else:
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


def wanted_tokens(config: ContinuousBatchingConfig) -> int | None:
    """Tokens of the pool that the user asks for: 1000 blocks of 256 tokens are 256000."""
    size = vars(config).get("page_size") or vars(config)["block_size"]  # transformers 5.17 has this
    return config.num_blocks and config.num_blocks * size


def wanted_slots(runtime: Runtime, config: ContinuousBatchingConfig, hints: WorkloadHints | None = None) -> int:
    """Slots unless memory is short. ValueError if the user asks for fewer than 1."""
    requested, slots = config.max_requests_per_batch, MOST[runtime.device.type]
    if requested is not None and requested < 1:
        raise ValueError(f"max_requests_per_batch: expected at least 1, got {requested}")
    if hints is not None and hints.num_requests:
        slots = min(slots, 1 << (hints.num_requests - 1).bit_length())
    return requested or slots


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
