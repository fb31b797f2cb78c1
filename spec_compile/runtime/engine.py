"""The engine: compiled rounds for each batch size, and the loop that runs them."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil
import torch
from torch import Tensor

from .. import passes
from ..compat import compile_step
from ..config import Options
from ..drafters import Drafter
from ..graph import ModelGraph
from ..stats import Stats
from .accept import Accepted
from .past import Past
from .round import Prefill, Round
from .sizes import SizePolicy
from .state import State
from .tree import MAX_NODES, Tree

log = logging.getLogger("spec_compile")

SIZES = (1, 4, 16, 64)
PREFILL_SIZES = (512, 128, 32)
SPAN = 128
"""The part of the cache that is looked at grows by this many slots."""
SESSIONS = 4
"""Batch sizes kept ready."""


@dataclass
class Request:
    """What one generate() asks for. Lengths count a row's own tokens, prompt included and padding not.

    past: keys and values that exist already. first_logits [B, V]: of the token after the prompts, if they are known;
    then `past` covers the whole prompts. choose: makes an `Accepted` of verified trees and their logits [B, N, V], in
    place of greedy acceptance inside the round. stopped: rows that the caller has ended; it may add to them.
    """

    prompts: list[list[int]]
    min_lengths: list[int]
    max_lengths: list[int]
    eos: list[int] = field(default_factory=list)
    references: list[Tensor] = field(default_factory=list)
    past: Past | None = None
    first_logits: Tensor | None = None
    choose: Callable[[Tree, Tensor], Accepted] | None = None
    prefill_chunk_size: int | None = None
    stopped: set[int] = field(default_factory=set)


class Session:
    """Everything for one batch size: state, drafter, and the compiled prefill and rounds."""

    def __init__(self, engine: "Engine", batch: int):
        self.engine, self.batch = engine, batch
        margin = MAX_NODES + PREFILL_SIZES[0]
        slots = -(-(engine.capacity(batch) + margin) // SPAN) * SPAN
        self.drafter = engine.make_drafter(batch)
        self.state = State(engine.verify, batch, slots, engine.device, self.drafter.draws)
        self.policies = {part: SizePolicy(engine.sizes, engine.options.adaptive) for part in ("round", "look")}
        self.steps: dict[tuple[str, int], Callable] = {}

    def step(self, part: str, nodes: int = 0) -> Callable:
        """A function, compiled on first use: "prefill" of (size, span); "round" or "look" over `nodes` nodes, of span;
        "finish" of what was accepted (see `Round`)."""
        if (part, nodes) not in self.steps:
            self.steps[part, nodes] = self._build(part, nodes)
        return self.steps[part, nodes]

    def _build(self, part: str, nodes: int) -> Callable:
        engine = self.engine
        if part == "prefill":
            function = Prefill(engine.prefill, self.drafter, self.state).forward
        else:
            whole = Round(engine.verify, self.drafter, self.state, nodes)
            function = {"round": whole.forward, "look": whole.look, "finish": whole.finish}[part]
        if not engine.options.compile:
            return function
        name = f"{part}_b{self.batch}" + (f"_n{nodes}" if nodes else "")
        engine.report(f"compiling {name}")
        begin = time.perf_counter()
        step = compile_step(function, name)
        with torch.no_grad(), self._untouched():
            arguments = self._arguments(part, nodes)
            step(*arguments)
            if part in self.policies:
                tick = time.perf_counter()
                step(*arguments)
                self.policies[part].cost[nodes] = time.perf_counter() - tick
        seconds = time.perf_counter() - begin
        engine.stats.seconds["compile"] += seconds
        engine.report(f"compiled {name} in {seconds:.1f} s")
        return step

    def _arguments(self, part: str, nodes: int) -> tuple:
        """Arguments to try a step with."""
        if part != "finish":
            return (PREFILL_SIZES[-1], SPAN) if part == "prefill" else (SPAN,)
        _, *features = self.step("look", nodes)(SPAN)
        path = torch.zeros(self.batch, nodes, dtype=torch.int64, device=self.engine.device)
        return path, path.clone(), torch.ones_like(path[:, 0]), features

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
    def run(self, request: Request) -> Iterator[list[list[int]]]:
        """Generate; yields, round by round, the tokens each row gained (none once it has finished)."""
        session = self.session(len(request.prompts))
        state, stats, choose = session.state, self.stats, request.choose
        policy = session.policies["look" if choose else "round"]
        begin = time.perf_counter()
        compiled = stats.seconds["compile"]
        stats.trace = []
        state.reset(request.prompts, request.min_lengths, request.max_lengths, request.eos)
        if request.past is not None:
            state.fill(request.past)
        session.drafter.begin(state, request.prompts, request.references)
        try:
            lengths = [len(prompt) - 1 for prompt in request.prompts]
            self._prefill(session, request)
            state.root()
            if request.first_logits is None:
                session.drafter.propose(state)
            counts, hints = state.tree_count.tolist(), state.tree_hint.tolist()
            finished = [length + 1 >= limit for length, limit in zip(lengths, request.max_lengths)]
            logits = request.first_logits
            now = time.perf_counter()
            stats.seconds["prefill"] += now - begin - (stats.seconds["compile"] - compiled)
            compiled = stats.seconds["compile"]
            while not all(finished):
                active = [row for row, done in enumerate(finished) if not done]
                live_counts, live_hints = [counts[row] for row in active], [hints[row] for row in active]
                nodes = policy.choose(live_counts, live_hints) if logits is None else 1
                span = min(-(-(max(lengths) + nodes) // SPAN) * SPAN, state.capacity)
                if choose is None:
                    step = session.step("round", nodes)
                    started, drafting = time.perf_counter(), session.drafter.seconds
                    outcome = step(span).tolist()
                else:
                    look, finish = session.step("look", nodes), session.step("finish", nodes)
                    started, drafting = time.perf_counter(), session.drafter.seconds
                    outcome = self._chosen(session, request, nodes, span, look, finish, logits)
                    logits = None
                ended = time.perf_counter()
                gained = [[] for _ in request.prompts]
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
                for row in request.stopped:
                    finished[row] = state.finished[row] = True
                now, before, compiled_before = time.perf_counter(), now, compiled
                compiled = stats.seconds["compile"]
                stats.seconds["host"] += now - before - (ended - started) - (compiled - compiled_before)
        finally:
            session.drafter.end()

    def _chosen(
        self, session: Session, request: Request, nodes: int, span: int, look: Callable, finish: Callable, logits
    ) -> list[list[int]]:
        """One round whose tokens the request chooses; with `logits` [B, V] of the roots, these are known already."""
        if logits is None:
            logits, *features = look(span)
        else:
            logits, features = logits[:, None], []
        accepted = request.choose(session.state.tree(nodes), logits)
        return finish(accepted.path, accepted.tokens, accepted.count, features).tolist()

    def _prefill(self, session: Session, request: Request) -> None:
        """Keys and values of every prompt token but the last, beyond those that the state has."""
        state, step = session.state, session.step("prefill")
        allowed = [n for n in PREFILL_SIZES if n <= (request.prefill_chunk_size or n)] or PREFILL_SIZES[-1:]
        held = state.lengths.tolist()
        place, end = max(held), max(held)
        end += max(len(prompt) - 1 - there for prompt, there in zip(request.prompts, held))
        while place < end:
            size = next((size for size in allowed if size <= end - place), allowed[-1])
            span = min(-(-(place + size) // SPAN) * SPAN, state.capacity)
            step(size, span)
            place += size
