"""The engine: a session for each batch size, and the loop of rounds."""

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from .. import passes
from ..compat import forget_shapes
from ..config import Options, promises_bits
from ..drafting import Algorithm
from ..graph import ModelGraph
from ..kernels.linear.low_rank import LowRank
from ..outcome import Recording
from ..passes.row_invariance import require_kernels_of_experts, require_same_bits
from ..stats import Clock
from ..tree import MAX_NODES
from .call import Call
from .runtime import Runtime
from .session import Session

SHARE, MOST = 0.1, 4_000_000_000
"""The default for host memory: this share of it, and at most this number of bytes."""


@dataclass(frozen=True)
class PrefixBudget:
    """device, host: bytes. denial: the reason why nothing is kept although there would be memory; None if there is
    none."""

    device: int
    host: int
    denial: str | None = None

    @classmethod
    def of(cls, runtime: Runtime) -> "PrefixBudget":
        """The budget that the options give. ValueError if they ask for more than the machine has."""
        options, memory = runtime.options, psutil.virtual_memory().total
        device, host = options.prefix_cache_bytes, options.prefix_cache_host_bytes
        in_host = (0 if runtime.on_gpu else device) + (host or 0)
        if in_host > memory:
            name = "prefix_cache_bytes" if device > memory else "prefix_cache_host_bytes"
            raise ValueError(f"{name}: {in_host / 1e9:.2f} GB, the machine has {memory / 1e9:.2f} GB; ask for less")
        if options.ranks.size > 1:
            return cls(0, 0, "the ranks of tensor parallelism would have to keep the same")
        return cls(device, min(MOST, int(SHARE * memory)) if host is None else host)

    def describe(self) -> str:
        """A line for ``speculation.explain()``."""
        if self.denial is not None:
            return f"prefixes of earlier requests: reused as long as their rows live, because {self.denial}"
        if not self.device + self.host:
            return "prefixes of earlier requests: reused as long as their rows live"
        on_device, in_host = (f"{number / 1e9:.2f} GB" for number in (self.device, self.host))
        return f"prefixes of earlier requests: {on_device} on the device, {in_host} in host memory"


SIZES = {"cpu": (1, 4, 16, 64), "cuda": (1, 2, 4, 8, 16, 32, 64)}
"""Nodes that a round may verify."""
SESSIONS = 4
"""Batch sizes kept ready."""


class Engine:
    """Runs rounds over one captured model. Not thread-safe: its owner holds the lock."""

    def __init__(
        self, graph: ModelGraph | None, algorithm: Algorithm, options: Options, device: torch.device,
        max_positions: int, graphs: dict[str, ModelGraph] | None = None, low_rank: dict[str, LowRank] | None = None,
    ):  # fmt: skip
        """graph: as captured; None if `graphs` has the rewritten ones, by purpose. low_rank: see `passes.Settings`."""
        plan, merge = algorithm.plan, options.merge_linears
        sharing = options.ranks, options.expert_parallel
        self.settings = {
            purpose: passes.Settings(
                merge, plan.taps, options.attention(purpose), *sharing, low_rank or {}, options.exact
            )
            for purpose in ("verify", "prefill")
        }
        """The settings with which `passes.run` made each graph of the runtime."""
        graphs = graphs or {purpose: passes.run(graph, settings) for purpose, settings in self.settings.items()}
        self._captured = graph
        self.described = graph or graphs["verify"]
        """A graph that describes the layers of the model, as captured or rewritten."""
        if options.cuda_graphs:
            require_kernels_of_experts(graphs["verify"])
        if promises_bits(options.exact, device.type):
            require_same_bits(options.exact, graphs)
        sizes = (*(n for n in SIZES[device.type] if n < plan.nodes and plan.sizes != "fixed"), plan.nodes)
        self.runtime = Runtime(**graphs, algorithm=algorithm, options=options, device=device, sizes=sizes,
                               max_positions=max_positions)  # fmt: skip
        forget_shapes(*(each.gm for each in (graph, *graphs.values()) if each is not None))
        self.most_nodes = MAX_NODES
        """Nodes that rounds verify of each tree, at most. 1 is plain decoding."""
        self.records = False
        self.recording: Recording | None = None
        """The last generate() that ran while `records` was set."""
        self.sessions: OrderedDict[tuple[int, int], Session] = OrderedDict()
        """By nesting depth and batch size."""
        self.running: list[tuple[Session, Clock]] = []
        """Calls of `run` under way, outermost first; streamers, criteria and processors may nest them."""
        self.batches: weakref.WeakSet = weakref.WeakSet()
        """The schedulers of requests over this engine's runtime."""
        self.idle_batch: Any = None
        """A scheduler without a manager, kept for its compiled steps."""
        if options.max_cache_len is not None:
            self.runtime.check_memory(1, options.max_cache_len)
        self.prefix_budget = PrefixBudget.of(self.runtime)

    @property
    def captured(self) -> ModelGraph:
        assert self._captured is not None
        return self._captured

    def room(self, batch: int) -> int:
        """Tokens of a sequence in the next call of this batch size before its cache has to grow."""
        session = self.sessions.get((len(self.running), batch))
        return self.runtime.capacity(batch) if session is None else session.capacity

    def session(self, batch: int) -> Session:
        """The session for a batch size and the present nesting depth: a call inside another has its own buffers. At
        most SESSIONS are kept, the last used ones."""
        key = len(self.running), batch
        if key not in self.sessions or self.sessions[key].is_growing:  # a growth that failed, or that a fork cut off
            self.sessions[key] = Session(self.runtime, batch)
        self.sessions[key].steps.renew()
        self.sessions.move_to_end(key)
        busy = [session for session, _ in self.running]
        idle = [other for other, session in self.sessions.items() if other != key and session not in busy]
        for other in idle[: max(len(self.sessions) - SESSIONS, 0)]:
            del self.sessions[other]
        return self.sessions[key]

    def forget_running(self) -> None:
        """In a forked process: end the calls of threads that it lacks. Their sessions stay usable, because a call first
        sets every buffer that it reads."""
        for session, _ in self.running:
            session.drafter.finish([])
            session.answers = []
        self.running.clear()
        self.batches = weakref.WeakSet(filter(None, [self.idle_batch]))  # managers have no thread here

    def refresh(self) -> None:
        """After a change of weights: update the drafter's copies, and forget its keys and values of earlier calls."""
        self.runtime.algorithm.refresh()
        for session in self.sessions.values():
            session.answers = []
        for scheduler in self.batches:
            scheduler.prefixes.forget()

    @torch.no_grad()
    def run(self, call: Call) -> Iterator[list[list[int]]]:
        """Generate; yields for each round the tokens that each row gained, none once it has finished. The caller may
        run another call between two rounds."""
        session, clock = self.session(len(call.sequences)), Clock(self.runtime.stats)
        for sequence in call.sequences:
            sequence.most_nodes = min(sequence.most_nodes, self.most_nodes)
        for _, outer in self.running[-1:]:
            outer.spend("host")
        self.running.append((session, clock))
        try:
            yield from self._generate(session, clock, call)
        finally:
            self.running.remove((session, clock))
            for _, outer in self.running[-1:]:
                outer.restart()

    def _generate(self, session: Session, clock: Clock, call: Call) -> Iterator[list[list[int]]]:
        stats = self.runtime.stats
        spent_before = dict(stats.seconds)
        recording = Recording(call.prompts) if self.records else None
        try:
            call.start(self.runtime, session)
            clock.spend("prefill")
            while not call.is_over:
                drafting = session.drafter.seconds
                call.launch()
                in_flight, outcomes = call.collect()
                seconds = clock.spend("verify")
                stats.move("verify", "draft", session.drafter.seconds - drafting)
                if recording:
                    counts = {each.row: each.count for each in call.sequences if not each.is_over}
                    recording.add(in_flight.nodes, seconds, counts, {each.row: told for each, told in outcomes})
                yield call.learn(in_flight, outcomes)
                clock.spend("host")
        finally:
            self.runtime.guard(session.drafter.finish, call.lengths)
            self.runtime.records.keep()
            if recording:
                recording.seconds = {name: spent - spent_before[name] for name, spent in stats.seconds.items()}
                self.recording = recording
