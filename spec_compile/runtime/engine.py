"""The engine: compiled rounds for each batch size, and the loop that runs them."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor

from .. import passes
from ..compat import compile_step
from ..config import Options
from ..drafters import Drafter
from ..graph import ModelGraph
from ..stats import Stats
from .round import Prefill, Round
from .sizes import SizePolicy
from .state import State
from .tree import MAX_NODES

log = logging.getLogger("spec_compile")

SIZES = (1, 4, 16, 64)
PREFILL_SIZES = (512, 128, 32)
SPAN = 128
"""The part of the cache that is looked at grows by this many slots."""
SESSIONS = 4
"""Batch sizes kept ready."""


class Session:
    """Everything for one batch size: state, drafter, and the compiled prefill and rounds."""

    def __init__(self, engine: "Engine", batch: int):
        self.engine, self.batch = engine, batch
        margin = MAX_NODES + PREFILL_SIZES[0]
        slots = -(-(engine.capacity(batch) + margin) // SPAN) * SPAN
        self.state = State(engine.verify, batch, slots, engine.device)
        self.drafter = engine.make_drafter(batch)
        self.policy = SizePolicy(engine.sizes, engine.options.adaptive)
        self.steps: dict[int, Callable] = {}

    def step(self, nodes: int) -> Callable:
        """The round over `nodes` nodes, or with 0 the prefill: a function of (size and) span, compiled on first use."""
        if nodes not in self.steps:
            self.steps[nodes] = self._build(nodes)
        return self.steps[nodes]

    def _build(self, nodes: int) -> Callable:
        engine = self.engine
        if nodes == 0:
            name, module = f"prefill_b{self.batch}", Prefill(engine.prefill, self.drafter, self.state)
            sizes = (PREFILL_SIZES[-1],)
        else:
            name, module = f"round_b{self.batch}_n{nodes}", Round(engine.verify, self.drafter, self.state, nodes)
            sizes = ()
        if not engine.options.compile:
            return module.forward
        engine.report(f"compiling {name}")
        begin = time.perf_counter()
        step = compile_step(module.forward, name)
        with torch.no_grad(), self._untouched():
            step(*sizes, SPAN)
            if nodes:
                tick = time.perf_counter()
                step(SPAN)
                self.policy.cost[nodes] = time.perf_counter() - tick
        seconds = time.perf_counter() - begin
        engine.stats.seconds["compile"] += seconds
        engine.report(f"compiled {name} in {seconds:.1f} s")
        return step

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Steps run inside leave no trace: what they write to the cache and the text lies beyond what is committed."""
        held = {buffer: buffer.clone() for module in (self.state, self.drafter) for buffer in module.small_buffers()}
        try:
            self.drafter.mute()
            yield
        finally:
            for buffer, value in held.items():
                buffer.copy_(value)


class Engine:
    """Runs rounds over one captured model. Not thread-safe: its owner holds the lock."""

    def __init__(
        self,
        graph: ModelGraph,
        make_drafter: Callable[[int], Drafter],
        options: Options,
        device: torch.device,
        max_positions: int,
    ):
        taps = make_drafter(1).taps
        self.verify = passes.run(graph, passes.Settings(options.merge_linears, taps))
        self.prefill = passes.run(graph, passes.Settings(options.merge_linears, taps, logits="none"))
        self.make_drafter, self.options, self.device, self.max_positions = make_drafter, options, device, max_positions
        self.sizes = (*(n for n in SIZES if n < options.num_draft_tokens), options.num_draft_tokens)
        self.stats = Stats()
        self.report: Callable[[str], None] = log.info
        self.sessions: OrderedDict[int, Session] = OrderedDict()

    def capacity(self, batch: int) -> int:
        """Tokens a sequence may hold in a batch of this size."""
        if self.options.max_cache_len is not None:
            return self.options.max_cache_len
        token_bytes = sum(
            layer.kv_heads * (layer.key_dim + layer.value_dim) * self.verify.dtype.itemsize
            for layer in self.verify.layers
        )
        affordable = psutil.virtual_memory().total // 4 // (token_bytes * batch)
        return min(self.max_positions, max(affordable, 1024))

    def session(self, batch: int) -> Session:
        """The session for a batch size; the least recently used ones beyond a few are dropped."""
        if batch not in self.sessions:
            self.sessions[batch] = Session(self, batch)
        self.sessions.move_to_end(batch)
        while len(self.sessions) > SESSIONS:
            self.sessions.popitem(last=False)
        return self.sessions[batch]

    @torch.no_grad()
    def run(
        self,
        prompts: list[list[int]],
        references: list[Tensor],
        min_lengths: list[int],
        max_lengths: list[int],
        eos: list[int],
    ) -> Iterator[list[list[int]]]:
        """Generate greedily; yields, round by round, the tokens each row gained (none once it has finished).

        Lengths count a row's tokens, prompt included.
        """
        session = self.session(len(prompts))
        state, policy, stats = session.state, session.policy, self.stats
        begin = time.perf_counter()
        compiled = stats.seconds["compile"]
        stats.trace = []
        state.reset(prompts, min_lengths, max_lengths, eos)
        session.drafter.begin(state, prompts, references)
        try:
            lengths = [len(prompt) - 1 for prompt in prompts]
            self._prefill(session, max(lengths))
            state.root()
            session.drafter.propose(state)
            counts, hints = state.tree_count.tolist(), state.tree_hint.tolist()
            finished = [length + 1 >= limit for length, limit in zip(lengths, max_lengths)]
            now = time.perf_counter()
            stats.seconds["prefill"] += now - begin - (stats.seconds["compile"] - compiled)
            while not all(finished):
                active = [row for row, done in enumerate(finished) if not done]
                live_counts, live_hints = [counts[row] for row in active], [hints[row] for row in active]
                nodes = policy.choose(live_counts, live_hints)
                step = session.step(nodes)
                span = min(-(-(max(lengths) + nodes) // SPAN) * SPAN, state.capacity)
                started, drafting = time.perf_counter(), session.drafter.seconds
                outcome = step(span).tolist()
                ended = time.perf_counter()
                gained = [[] for _ in prompts]
                paths = []
                for row in active:
                    count, done, counts[row], hints[row], depth, *rest = outcome[row]
                    gained[row] = rest[:count]
                    paths.append(rest[nodes + 1 : nodes + count])
                    lengths[row] += count
                    finished[row] = bool(done)
                    stats.tokens += count
                    stats.count_depths(depth, len(paths[-1]))
                stats.trace.append([len(tokens) for tokens in gained])
                policy.learn(nodes, live_counts, live_hints, paths, ended - started)
                stats.rounds += 1
                stats.steps += len(active)
                stats.nodes[nodes] = stats.nodes.get(nodes, 0) + 1
                drafting = session.drafter.seconds - drafting
                stats.seconds["draft"] += drafting
                stats.seconds["verify"] += ended - started - drafting
                yield gained
                now, before = time.perf_counter(), now
                stats.seconds["host"] += now - before - (ended - started)
        finally:
            session.drafter.end()

    def _prefill(self, session: Session, tokens: int) -> None:
        done = 0
        while done < tokens:
            size = next((size for size in PREFILL_SIZES if size <= tokens - done), PREFILL_SIZES[-1])
            span = min(-(-(done + size) // SPAN) * SPAN, session.state.capacity)
            session.step(0)(size, span)
            done += size
