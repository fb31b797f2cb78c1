"""A session: state, drafter and steps, compiled and on a GPU captured, for one batch size."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from ..cache import PAGE, Cache
from ..compat import EXAMPLE, compile_piece, compile_step
from ..kernels.attention import BACKENDS
from ..tree import MAX_NODES, ancestry
from . import prefill_chunks as chunks
from .accept.draw import DrawInRound
from .draft_length import SizePolicy
from .round import Prefill, Round
from .state import State
from .steps.capture import Captured, Ring
from .steps.regions import compiled_regions

SAMPLERS = 32
"""Captured rounds that draw, kept for the settings used last."""
CAPTURED_TOKENS = 2048
"""A step with a prompt is captured up to so many tokens of all rows; that of more takes longer than launching it."""


class Session:
    """Everything for one batch size. `engine`: see `engine.Engine`. `capacity`: tokens that a sequence may hold."""

    def __init__(self, engine, batch: int):
        self.engine, self.batch, self.capacity = engine, batch, engine.capacity(batch)
        self.on_gpu = engine.device.type == "cuda"
        self.prefill_sizes = chunks.SIZES[engine.device.type]
        slots = self._slots(self.capacity)
        engine.check_memory(batch, slots)
        self.drafter = engine.algorithm.drafter(batch, slots)
        drawn = engine.options.num_draft_tokens if engine.algorithm.draws else 0
        self.state = State(engine.verify, batch, slots, engine.device, drawn)
        self.policies = {part: SizePolicy(engine.sizes, engine.algorithm.adaptive) for part in ("round", "look")}
        self.ring = Ring(batch * (5 + 4 * MAX_NODES), engine.device) if self.on_gpu else None
        self.texts: list[list[int]] = []
        """What each row was in the last call, prompt and output: of these the drafter's own cache knows."""
        self.steps: dict[tuple[str, int], Callable] = {}
        self._pieces: dict[tuple[bool, bool], Prefill | Round] = {}
        self._called: list[Callable] = []
        self.pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        self.is_growing = False

    def _slots(self, tokens: int) -> int:
        """Slots for so many tokens and for what a step writes behind them."""
        return -(-(tokens + MAX_NODES + self.prefill_sizes[0]) // PAGE) * PAGE

    @contextmanager
    def growing(self, tokens: int, used: int) -> Iterator[None]:
        """Make room for `tokens` tokens a sequence. Inside, steps may be built, all of them anew; then the first `used`
        slots of every cache are taken over."""
        slots = self._slots(tokens)
        self.engine.check_memory(self.batch, slots, "max_new_tokens")
        if self.on_gpu:
            torch.cuda.synchronize(self.engine.device)
        self.steps.clear(), self._pieces.clear(), self._called.clear()
        self.capacity, self.is_growing = tokens, True
        caches = [self.state.kv, *(module for module in self.drafter.modules() if isinstance(module, Cache))]
        before = [cache.resize(slots) for cache in caches]
        self.state.resize(slots)
        self.drafter.resized(slots)
        if not used:
            self.texts = []
        yield
        for cache, tensors in zip(caches, before):
            for new, old in zip(cache.tensors, tensors):
                new[:, :, :used] = old[:, :, :used]
        self.is_growing = False

    def step(self, part: str, nodes: int = 0) -> Callable:
        """A function, made on first use: "prefill" of (size, span), `nodes` being the size or 0 for all; "round" or
        "look" over `nodes` nodes, of span; "finish" of what was accepted (see `Round`). On a GPU all but a "prefill" of
        0 are captured graphs."""
        if (part, nodes) not in self.steps:
            self.steps[part, nodes] = self._build(part, nodes)
        return self.steps[part, nodes]

    def prefill(self, size: int, span: int) -> None:
        """Process the next `size` tokens of every row's prompt."""
        self.step("prefill", self._prefill_key(size))(size, span)

    def build_prefill(self) -> None:
        """Make all that `prefill` needs."""
        for size in self.prefill_sizes:
            self.step("prefill", self._prefill_key(size))

    def _prefill_key(self, size: int) -> int:
        captured = self.on_gpu and self.engine.options.cuda_graphs and size * self.batch <= CAPTURED_TOKENS
        return size if captured and BACKENDS[self.engine.prefill.backend].prompts_captured else 0

    def build(self, nodes: int, sampler: DrawInRound | None, chosen: bool) -> None:
        """Make the steps of a round over `nodes` nodes; chosen: whose tokens are chosen outside."""
        if chosen:
            self.step("look", nodes), self.step("finish", nodes)
        else:
            self._round(nodes, sampler)

    def _round(self, nodes: int, sampler: DrawInRound | None) -> Callable:
        return self.step("round", nodes) if sampler is None else self._sampled(sampler, nodes)

    def launch(self, sampler: DrawInRound | None, nodes: int, span: int) -> Callable[[], list[list[int]]]:
        """Begin a round, greedy or drawing; what is returned waits for it and gives its outcome. On a GPU nothing here
        waits."""
        outcome = self._round(nodes, sampler)(span)
        return outcome.tolist if self.ring is None else self.ring.expect(outcome.shape)

    def _build(self, part: str, nodes: int) -> Callable:
        engine, options = self.engine, self.engine.options
        captures = self.on_gpu and options.cuda_graphs and (part != "prefill" or nodes > 0)
        if not (options.compile or captures):
            return self._function(part, nodes)
        name = f"{part}_b{self.batch}" + (f"_n{nodes}" if nodes else "")
        engine.report(f"compiling {name}")
        begin = time.perf_counter()
        with torch.no_grad(), self._untouched():
            step = self._function(part, nodes)
            arguments = self._arguments(part, nodes)
            step(*arguments)
            if captures:
                step = self._capture(step, arguments)
            if part in self.policies:
                self.policies[part].cost[nodes] = self._seconds(step, arguments)
        seconds = time.perf_counter() - begin
        engine.stats.seconds["compile"] += seconds
        engine.report(f"compiled {name} in {seconds:.1f} s")
        return step

    def _sampled(self, sampler: DrawInRound, nodes: int) -> Callable:
        """The round over `nodes` nodes that draws, a function of span; on a GPU captured for these processors."""
        key = f"sampled {sampler.key}", nodes
        if key not in self.steps:
            with torch.no_grad(), self._untouched():
                look, finish, state = self._function("look", nodes), self._function("finish", nodes), self.state

            def sampled(span: int) -> Tensor:
                tree = state.tree(nodes)
                logits, *features = look(span)
                accepted = sampler(state, tree, *ancestry(tree.parents), logits)
                return finish(accepted.path, accepted.tokens, accepted.count, features, span)

            sampled = self.ring.publishing(sampled) if self.on_gpu else sampled
            captures = self.on_gpu and self.engine.options.cuda_graphs
            with torch.no_grad(), self._untouched():
                self.steps[key] = self._capture(sampled, (PAGE,)) if captures else sampled
                self.policies["look"].cost[nodes] = self._seconds(self.steps[key], (PAGE,))
            forgotten = [k for k in self.steps if k[0].startswith("sampled")][:-SAMPLERS]
            for old in forgotten:
                del self.steps[old]
        return self.steps[key]

    def _capture(self, step: Callable, arguments: tuple) -> Captured:
        try:
            return Captured(step, arguments, self.pool)
        except RuntimeError:
            self.pool = torch.cuda.graph_pool_handle()  # that of a failed capture cannot be used again
            raise

    def _function(self, part: str, nodes: int) -> Callable:
        """The step as a function, not captured."""
        engine = self.engine
        if self.on_gpu:
            whole = self._in_pieces(part == "prefill", nodes == 1)
        elif part == "prefill":
            whole = Prefill(engine.prefill, self.drafter, self.state)
        else:
            whole = Round(engine.verify, self.drafter, self.state, nodes)
        function = getattr(whole, part if part in ("look", "finish") else "forward")
        if self.on_gpu:
            if part == "finish" and engine.options.compile and function not in self._called:
                self._called.append(function)
                function(*self._arguments("finish", 1 if nodes == 1 else EXAMPLE))
            function = partial(function, nodes=nodes) if part in ("round", "look") else function
            return self.ring.publishing(function) if part == "round" else function
        if engine.options.compile:
            return compile_step(function, f"{part}_b{self.batch}_n{nodes}")
        return function

    def _in_pieces(self, prefill: bool, single: bool) -> Prefill | Round:
        """On a GPU one compilation serves all sizes but 1, for nodes cost little there, and layers alike are compiled
        once: the parts of a round, and the regions of the model, are pieces that CUDA's graph joins."""
        engine = self.engine
        if (prefill, single) not in self._pieces:
            parts = (engine.prefill if prefill else engine.verify), self.drafter, self.state
            whole = Prefill(*parts) if prefill else Round(*parts, None)
            if engine.options.compile:
                self._compile_pieces(whole, prefill, single)
            self._pieces[prefill, single] = whole
        return self._pieces[prefill, single]

    def _compile_pieces(self, whole: Prefill | Round, prefill: bool, single: bool) -> None:
        tag = f"b{self.batch}" + "_prefill" * prefill + "_single" * single
        model = compiled_regions(self.engine.prefill if prefill else self.engine.verify, tag)
        whole.prepare = compile_step(whole.prepare, f"prepare_{tag}", "cuda")
        if prefill:
            whole.model = model
        else:
            whole.verify = model
            for name in ("conclude", "finish") if self.drafter.fuses else ("accept", "settle", "outcome"):
                setattr(whole, name, compile_piece(getattr(whole, name), f"{name}_{tag}"))
            self.drafter.compile(tag)
        size = 1 if single else EXAMPLE
        whole.forward(*((size, PAGE) if prefill else (PAGE, size)))  # sizes that are EXAMPLE now may vary later

    def _arguments(self, part: str, nodes: int) -> tuple:
        """Arguments to try a step with."""
        if part != "finish":
            return (nodes or self.prefill_sizes[-1], PAGE) if part == "prefill" else (PAGE,)
        look = self._function("look", nodes) if self.on_gpu else self.step("look", nodes)
        _, *features = look(PAGE)
        path = torch.zeros(self.batch, nodes, dtype=torch.int64, device=self.engine.device)
        return path, path.clone(), torch.ones_like(path[:, 0]), features, PAGE

    def _seconds(self, step: Callable, arguments: tuple) -> float:
        """How long a step takes that has run before."""
        tick = time.perf_counter()
        outcome = step(*arguments)
        if self.on_gpu:
            torch.cuda.synchronize()
            tick = time.perf_counter()
            outcome = step(*arguments)
            torch.cuda.synchronize()
        del outcome
        return time.perf_counter() - tick

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Steps run inside leave no trace: what they write to the cache and the text lies beyond what is committed."""
        buffers = [*self.state.small_buffers(), *self.drafter.small_buffers(), *([self.ring.turn] if self.ring else [])]
        held = {buffer: buffer.clone() for buffer in buffers}
        try:
            self.drafter.mute()
            if self.ring:
                self.ring.turn.fill_(-1)
            yield
        finally:
            for buffer, value in held.items():
                buffer.copy_(value)
