"""`Runtime`: what every session of an engine shares."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import psutil
import torch
from transformers import PreTrainedConfig

from ..compile.cold_start import ColdStart
from ..compile.part import Parts, Shape
from ..config import Options
from ..drafting import Algorithm
from ..errors import UnsupportedModelError, log
from ..graph import ModelGraph
from ..inventory import held_tensors
from ..kernels.all_reduce import EXCHANGES, WARM_UP_SECONDS, set_deadline
from ..kernels.cpu import use_huge_pages
from ..kernels.experts import DOWN, UP
from ..stats import Stats
from .draft_record import DraftRecords
from .round import DraftGuard

if TYPE_CHECKING:
    from .compiled_steps import CompiledSteps


GPU_CACHE = 8192  # default tokens of a sequence on a GPU, where the cache is allocated at once

DEADLINE = 10.0  # seconds that a GPU waits for another rank's part of a sum


@dataclass
class Runtime:
    """The rewritten graphs of a model, its algorithm, and its device.

    sizes: numbers of nodes that a round may verify, ascending.
    max_positions: tokens that the model permits in a sequence.
    say: called with a line when something begins or ends to compile.
    parts: what the steps consist of, compiled or not.
    examples: the steps that compiled them, by shape.
    guard: runs the draft's parts.
    records: results of drafts, by the kind of round, in sessions of all numbers of rows.
    cold_start: compiles parts in the background; None: they are compiled in their first call, or never.
    """

    verify: ModelGraph
    prefill: ModelGraph
    algorithm: Algorithm
    options: Options
    device: torch.device
    sizes: tuple[int, ...]
    max_positions: int
    stats: Stats = field(default_factory=Stats)
    say: Callable[[str], None] = log.info
    parts: Parts = field(default_factory=Parts)
    examples: dict[Shape, "CompiledSteps"] = field(default_factory=dict)
    guard: DraftGuard = field(default_factory=DraftGuard, init=False)
    records: DraftRecords = field(default_factory=DraftRecords)
    cold_start: ColdStart | None = None

    def __post_init__(self) -> None:
        self.guard.raises = self.options.ranks.size > 1
        self.algorithm.take(self.verify)
        if not self.on_gpu:  # parts on the host of a GPU are copied, not multiplied
            use_huge_pages(tensor for graph in self.graphs for tensor in held_tensors(graph.gm))
        self.stats.vocabulary_share = self.algorithm.vocabulary_share

    @property
    def graphs(self) -> list[ModelGraph]:
        """The graphs of the model and of its draft."""
        return [graph for graph in (self.verify, self.prefill, self.algorithm.graph) if graph is not None]

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def has_fixed_chunks(self) -> bool:
        """True if a prompt has the same chunks under any load, after any copied prefix: with exact="request" on a CPU,
        whose libraries may sum a token's products in another order in a chunk of another size."""
        return self.options.exact == "request" and not self.on_gpu

    @property
    def mixes(self) -> bool:
        """True if pieces of prompts may ride along with rounds: on a GPU, by kernels that attend alike in rounds and
        chunks, without states, which go on row by row."""
        kernels = {graph.backend for graph in (self.verify, self.prefill)} == {"triton"}
        return self.on_gpu and kernels and not (self.verify.recurrences or self.verify.indexes)

    @cached_property
    def has_experts(self) -> bool:
        """True if layers choose among experts, so that tokens read different weights."""
        return any(node.target in (UP, DOWN) for node in self.verify.gm.graph.nodes)

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token, the draft's included."""
        return self.verify.token_bytes + self.algorithm.token_bytes

    @property
    def free_bytes(self) -> int:
        """Free memory of the GPU, with what this process has reserved and not allocated. Several GPUs count as far as
        each has room for the share of its layers: 4 and 6 GB, with half of the layers each, are 8 GB."""
        devices = [layer.device or self.device for layer in self.verify.layers] or [self.device]
        unused = {each: torch.cuda.memory_reserved(each) - torch.cuda.memory_allocated(each) for each in devices}
        free = {each: torch.cuda.mem_get_info(each)[0] + bytes for each, bytes in unused.items()}
        return min(bytes * len(devices) // devices.count(each) for each, bytes in free.items())

    def capacity(self, batch: int) -> int:
        """Tokens of a sequence in a new session of this batch size."""
        if self.options.max_cache_len is not None:
            return self.options.max_cache_len
        if self.on_gpu:
            return min(self.max_positions, GPU_CACHE)
        memory = psutil.virtual_memory().total
        return min(self.max_positions, max(memory // 4 // max(self.token_bytes * batch, 1), 1024))

    @contextmanager
    def ranks_apart(self) -> Iterator[None]:
        """A context in which ranks may be minutes apart, because each compiles for itself."""
        ranks, has_deadline = self.options.ranks, self.options.ranks.name in EXCHANGES
        if has_deadline:
            set_deadline(ranks.name, WARM_UP_SECONDS)
        yield
        if has_deadline:
            ranks.meet()
            set_deadline(ranks.name, DEADLINE)

    def check_memory(self, batch: int, tokens: int, argument: str = "max_cache_len") -> None:
        """Report the memory of caches of `tokens` tokens for `batch` sequences. UnsupportedModelError, naming
        `argument`, if there is too little."""
        needed = (tokens * self.token_bytes + self.verify.row_bytes) * batch
        free = self.free_bytes if self.on_gpu else psutil.virtual_memory().total  # pages are taken as they are written
        memory = "free on the GPU are" if self.on_gpu else "the machine has"
        takes = f"a cache of {tokens} tokens for {batch} sequences takes {needed / 1e9:.2f} GB, {memory}"
        if needed > free:
            raise UnsupportedModelError(
                f"{argument}: {takes} {free / 1e9:.2f} GB, so {(needed - free) / 1e9:.2f} GB are missing; ask for "
                "fewer tokens or fewer sequences"
            )
        if self.on_gpu:
            self.say(f"{takes} {free / 1e9:.2f} GB")


def max_positions(config: PreTrainedConfig, table: int | None, options: Options) -> int:
    """Tokens that a sequence may have by default.

    table: rows of a learned position table, or None. ValueError if max_cache_len exceeds it.
    """
    if table is not None and (options.max_cache_len or 0) > table:
        raise ValueError(
            f"max_cache_len: the model has learned positions for {table} tokens, got {options.max_cache_len}"
        )
    config = config.get_text_config(decoder=True)
    return table or getattr(config, "max_position_embeddings", None) or 1 << 20


PREFIX_SHARE, MOST_PREFIXES = 0.1, 4_000_000_000  # default for host memory: this share of it, at most these bytes


@dataclass(frozen=True)
class PrefixBudget:
    """Memory for prefixes of earlier requests.

    device: bytes of pages beyond those that full rows take; None: as many pages again. Without any, pages are kept as
        long as rows use them.
    host: bytes of a GPU's host for copies of pages, and of any host for states.
    """

    device: int | None
    host: int

    @classmethod
    def of(cls, runtime: Runtime) -> "PrefixBudget":
        """The budget that the options give. ValueError if they ask for more than the machine has."""
        options, memory = runtime.options, psutil.virtual_memory().total
        device, host = options.prefix_cache_bytes, options.prefix_cache_host_bytes
        in_host = (0 if runtime.on_gpu else device or 0) + (host or 0)
        if in_host > memory:
            name = "prefix_cache_bytes" if (device or 0) > memory else "prefix_cache_host_bytes"
            raise ValueError(f"{name}: {in_host / 1e9:.2f} GB, the machine has {memory / 1e9:.2f} GB; ask for less")
        host = min(MOST_PREFIXES, int(PREFIX_SHARE * memory)) if host is None else host
        if not runtime.on_gpu:
            device = (device or 0) + host
        return cls(device, host if options.ranks.size == 1 else 0)

    def describe(self) -> str:
        """A line for ``speculation.explain()``."""
        if self.device == 0:
            return "prefixes of earlier requests: reused as long as their rows live"
        host = f"{self.host / 1e9:.2f} GB"
        pages = "as many pages" if self.device is None else f"pages of {self.device / 1e9:.2f} GB"
        return f"prefixes of earlier requests: {pages} besides the rows' own, {host} of the host for copies and states"
