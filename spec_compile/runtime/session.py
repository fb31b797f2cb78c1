"""A session: state, drafter and steps, compiled and on a GPU captured, for one batch size."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from ..compat import compile_step
from ..errors import UnsupportedModelError
from .cuda_graph import Captured, Ring
from .round import Prefill, Round
from .sampler import Sampler
from .sizes import SizePolicy
from .state import State
from .tree import MAX_NODES, ancestry

SPAN = 128
"""The part of the cache that is looked at on a CPU grows by this many slots."""
SAMPLERS = 32
"""Captured rounds that draw, kept for the settings used last."""
PREFILL_SIZES = {"cpu": (512, 128, 32), "cuda": (2048, 512, 128, 32)}
"""Tokens of each row that a prefill step takes."""


class Session:
    """Everything for one batch size. `engine`: see `engine.Engine`."""

    def __init__(self, engine, batch: int):
        self.engine, self.batch = engine, batch
        self.on_gpu = engine.device.type == "cuda"
        self.prefill_sizes = PREFILL_SIZES[engine.device.type]
        margin = MAX_NODES + self.prefill_sizes[0]
        slots = -(-(engine.capacity(batch) + margin) // SPAN) * SPAN
        self._check_memory(slots)
        self.drafter = engine.make_drafter(batch)
        self.state = State(engine.verify, batch, slots, engine.device, self.drafter.draws)
        self.policies = {part: SizePolicy(engine.sizes, engine.options.adaptive) for part in ("round", "look")}
        self.ring = Ring(batch, 5 + 2 * MAX_NODES) if self.on_gpu else None
        self.steps: dict[tuple[str, int], Callable] = {}
        self._compiled: dict[tuple[str, int], Callable] = {}

    def _check_memory(self, slots: int) -> None:
        """UnsupportedModelError if a GPU has no room for the cache."""
        if not self.on_gpu:
            return
        needed, (free, _) = slots * self.engine.token_bytes * self.batch, torch.cuda.mem_get_info(self.engine.device)
        free += torch.cuda.memory_reserved(self.engine.device) - torch.cuda.memory_allocated(self.engine.device)
        if needed > free:
            raise UnsupportedModelError(
                f"max_cache_len: a cache of {slots} tokens for {self.batch} sequences takes {needed / 1e9:.1f} GB, the "
                f"GPU has {free / 1e9:.1f} GB left; pass a smaller max_cache_len to speculate(), or fewer sequences"
            )

    def step(self, part: str, nodes: int = 0) -> Callable:
        """A function, made on first use: "prefill" of (size, span); "round" or "look" over `nodes` nodes, of span;
        "finish" of what was accepted (see `Round`). On a GPU the last three are captured graphs."""
        if (part, nodes) not in self.steps:
            self.steps[part, nodes] = self._build(part, nodes)
        return self.steps[part, nodes]

    def launch(self, sampler: Sampler | None, nodes: int, span: int) -> Callable[[], list[list[int]]]:
        """Begin a round, greedy or drawing; what is returned waits for it and gives its outcome. On a GPU nothing here
        waits."""
        step = self.step("round", nodes) if sampler is None else self._sampled(sampler, nodes)
        outcome = step(span)
        return outcome.tolist if self.ring is None else self.ring.send(outcome)

    def _build(self, part: str, nodes: int) -> Callable:
        engine, options = self.engine, self.engine.options
        captures = self.on_gpu and options.cuda_graphs and part != "prefill"
        step = self._function(part, nodes)
        if not (options.compile or captures):
            return step
        name = f"{part}_b{self.batch}" + (f"_n{nodes}" if nodes else "")
        engine.report(f"compiling {name}")
        begin = time.perf_counter()
        with torch.no_grad(), self._untouched():
            arguments = self._arguments(part, nodes)
            step(*arguments)
            if captures:
                step = Captured(step, arguments, engine.pool)
            if part in self.policies:
                self.policies[part].cost[nodes] = self._seconds(step, arguments)
        seconds = time.perf_counter() - begin
        engine.stats.seconds["compile"] += seconds
        engine.report(f"compiled {name} in {seconds:.1f} s")
        return step

    def _sampled(self, sampler: Sampler, nodes: int) -> Callable:
        """The round over `nodes` nodes that draws, a function of span; on a GPU captured for these processors."""
        key = f"sampled {sampler.key}", nodes
        if key not in self.steps:
            look, finish, state = self._function("look", nodes), self._function("finish", nodes), self.state

            def sampled(span: int):
                tree = state.tree(nodes)
                logits, *features = look(span)
                accepted = sampler(state, tree, *ancestry(tree.parents), logits)
                return finish(accepted.path, accepted.tokens, accepted.count, features)

            captures = self.on_gpu and self.engine.options.cuda_graphs
            with torch.no_grad(), self._untouched():
                self.steps[key] = Captured(sampled, (SPAN,), self.engine.pool) if captures else sampled
                self.policies["look"].cost[nodes] = self._seconds(self.steps[key], (SPAN,))
            forgotten = [k for k in self.steps if k[0].startswith("sampled")][:-SAMPLERS]
            for old in forgotten:
                del self.steps[old]
        return self.steps[key]

    def _function(self, part: str, nodes: int) -> Callable:
        """The step as a function, not captured. On a GPU one compilation serves all sizes but 1, for they cost the same
        there; on a CPU each size has its own."""
        engine, shared = self.engine, self.on_gpu and part in ("round", "look")
        if part == "prefill":
            function = Prefill(engine.prefill, self.drafter, self.state).forward
        else:
            whole = Round(engine.verify, self.drafter, self.state, None if self.on_gpu else nodes)
            function = {"round": whole.forward, "look": whole.look, "finish": whole.finish}[part]
        if engine.options.compile:
            key = part, min(nodes, 2) if self.on_gpu else nodes
            if key not in self._compiled:
                self._compiled[key] = compile_step(function, f"{part}_b{self.batch}_n{nodes}", engine.device.type)
            function = self._compiled[key]
        return partial(function, nodes=nodes) if shared else function

    def _arguments(self, part: str, nodes: int) -> tuple:
        """Arguments to try a step with."""
        if part != "finish":
            return (self.prefill_sizes[-1], SPAN) if part == "prefill" else (SPAN,)
        _, *features = self.step("look", nodes)(SPAN)
        path = torch.zeros(self.batch, nodes, dtype=torch.int64, device=self.engine.device)
        return path, path.clone(), torch.ones_like(path[:, 0]), features

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
        held = {buffer: buffer.clone() for module in (self.state, self.drafter) for buffer in module.small_buffers()}
        try:
            self.drafter.mute()
            yield
        finally:
            for buffer, value in held.items():
                buffer.copy_(value)
