"""A session: the buffers of one batch size, and the steps that run over them."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
from torch import Tensor

from ..cache import PAGE
from ..drafting import caches
from ..kernels.attention import BACKENDS
from ..outcome import WIDEST
from ..tree import MAX_NODES, ancestry
from . import prefill_chunks
from .accept.draw import DrawInRound
from .draft_length import SizePolicy
from .hindsight import Hindsight
from .request import Request
from .runtime import Runtime
from .state import State
from .steps.capture import Captured, CaptureError, OutcomeRing
from .steps.pieces import Pieces
from .steps.untouched import untouched

SAMPLERS = 32
"""Captured rounds that draw, kept for the settings used last."""
TRIALS = 5
"""Runs of a step of which the shortest says what it costs."""
CAPTURED_TOKENS = 2048
"""A step with a prompt is captured up to so many tokens of all rows; that of more takes longer than launching it."""


class Session:
    """Everything for `batch` sequences of up to `capacity` tokens."""

    def __init__(self, runtime: Runtime, batch: int, capacity: int | None = None, larger: "Session | None" = None):
        """capacity: None: see `Runtime.capacity`. larger: a session whose first rows this one runs over, in place of
        rows of its own."""
        self.runtime, self.batch, plan = runtime, batch, runtime.algorithm.plan
        self.capacity = capacity or runtime.capacity(batch)
        self.prefill_sizes = prefill_chunks.SIZES[runtime.device.type]
        slots = PAGE if larger else self._slots(self.capacity)
        runtime.check_rows(batch)
        runtime.check_memory(batch, slots)
        self.drafter = runtime.algorithm.drafter(batch, slots)
        self.state = State(runtime.verify, batch, slots, runtime.device, plan.nodes if plan.draws else 0)
        if larger is not None:
            self.state.share(larger.state)
            self.drafter.share(larger.drafter)
        hindsight = None if runtime.on_gpu else Hindsight(self.state)
        self.policies = {
            part: SizePolicy(runtime.sizes, plan.sizes == "adaptive", hindsight, batch) for part in ("round", "look")
        }
        if larger is not None:
            for policy in self.policies.values():
                policy.share(larger.policies["round"])
        check_peers = runtime.options.ranks.check_peers
        self.ring = OutcomeRing(batch * WIDEST, runtime.device, check_peers) if runtime.on_gpu else None
        self.texts: list[list[int]] = []
        """What each row was in the last call, prompt and output: of these the drafter's own cache knows."""
        self.steps: dict[tuple[str, int], Callable] = {}
        self.prefill_seconds: dict[int, float] = {}
        """What a captured step with a prompt costs, by its size."""
        self.captures = runtime.on_gpu and runtime.options.cuda_graphs
        # Rounds of one session at a time are under way, so that those of the larger one may use the same memory.
        self.pool = larger.pool if larger else torch.cuda.graph_pool_handle() if runtime.on_gpu else None
        self.is_growing = False
        self._pieces = Pieces(runtime, self.state, self.drafter)

    def _slots(self, tokens: int) -> int:
        """Slots for so many tokens and for what a step writes behind them."""
        return -(-(tokens + MAX_NODES + self.prefill_sizes[0]) // PAGE) * PAGE

    @contextmanager
    def growing(self, tokens: int, used: int) -> Iterator[None]:
        """Make room for `tokens` tokens a sequence. Inside, steps may be built, on a GPU all of them anew; then the
        first `used` slots of every cache are taken over."""
        slots = self._slots(tokens)
        self.runtime.check_memory(self.batch, slots, "max_new_tokens")
        if self.runtime.on_gpu:
            torch.cuda.synchronize(self.runtime.device)
            self.steps.clear()
        self.capacity, self.is_growing = tokens, True
        rows_of_keys = [self.state.kv, *caches(self.drafter)]
        before = [cache.resize(slots) for cache in rows_of_keys]
        self.state.resize(slots)
        self._pieces.grow()
        if not used:
            self.texts = []
        yield
        for cache, tensors in zip(rows_of_keys, before):
            for new, old in zip(cache.tensors, tensors):
                new[:, :, :used] = old[:, :, :used]
        self.is_growing = False

    def step(self, part: str, nodes: int = 0) -> Callable:
        """A step as a function, made on first use. On a GPU it is a captured graph, but for a "prefill" of any size.

        part: "prefill", a function of (size, max_kv_len), where `nodes` is the one size it serves, or 0 for all sizes;
        "round", "look" or "propose", functions of max_kv_len; "finish", a function of what was accepted (see `Round`).
        """
        if (part, nodes) not in self.steps:
            self.steps[part, nodes] = self._build(part, nodes)
        return self.steps[part, nodes]

    def prefill(self, size: int, max_kv_len: int) -> None:
        """Process the next `size` tokens of every row's prompt."""
        self.step("prefill", self._prefill_key(size))(size, max_kv_len)

    def build_prefill(self) -> None:
        """Make all that `prefill` needs."""
        for size in self.prefill_sizes:
            self.step("prefill", self._prefill_key(size))

    def propose(self, max_kv_len: int) -> None:
        """Propose the first trees of a call; the rounds propose all others."""
        (self.step("propose") if self.captures else self._propose)(max_kv_len)

    def build_proposal(self) -> None:
        """Make all that `propose` needs."""
        if self.captures:
            self.step("propose")

    def _propose(self, max_kv_len: int) -> None:
        self.state.root()
        self.drafter.propose(self.state, max_kv_len)

    def _prefill_key(self, size: int) -> int:
        captured = self.captures and size * self.batch <= CAPTURED_TOKENS
        backend = BACKENDS.get(self.runtime.prefill.backend)  # None: no layer attends
        return size if captured and (backend is None or backend.prompts_captured) else 0

    def build(self, nodes: int, request: Request) -> None:
        """Make the steps of the rounds of a request over `nodes` nodes."""
        if request.host_acceptor is None:
            self._round(nodes, request.draw_in_round)
        else:
            for half in ("look", "finish"):
                self.step(half, nodes)

    def _round(self, nodes: int, sampler: DrawInRound | None) -> Callable:
        return self.step("round", nodes) if sampler is None else self._sampled(sampler, nodes)

    def launch(self, sampler: DrawInRound | None, nodes: int, max_kv_len: int) -> Callable[[], list[list[int]]]:
        """Begin a round, greedy or drawing; what is returned waits for it and gives its outcome. On a GPU nothing here
        waits."""
        outcome = self._round(nodes, sampler)(max_kv_len)
        return outcome.tolist if self.ring is None else self.ring.expect(outcome.shape)

    def _build(self, part: str, nodes: int) -> Callable:
        """The step, tried once; it leaves no trace."""
        runtime, captures = self.runtime, self.captures and (part != "prefill" or nodes > 0)
        if not (runtime.options.compile or captures):
            return self._function(part, nodes)
        name = f"{part}_b{self.batch}" + (f"_n{nodes}" if nodes else "")
        runtime.say(f"compiling {name}")
        begin = time.perf_counter()
        with torch.no_grad(), runtime.ranks_apart(), self._untouched():
            step, arguments = self._function(part, nodes), self._arguments(part, nodes)
            step(*arguments)
            if captures:
                step = self._capture(step, arguments)
            if part in self.policies:
                self._measure(part, {nodes: step})
            elif part == "prefill" and captures:
                self.prefill_seconds[nodes] = min(self._seconds(step, arguments) for _ in range(TRIALS))
        seconds = time.perf_counter() - begin
        runtime.stats.seconds["compile"] += seconds
        runtime.say(f"compiled {name} in {seconds:.1f} s")
        return step

    def _sampled(self, sampler: DrawInRound, nodes: int) -> Callable:
        """The round over `nodes` nodes that draws, a function of max_kv_len; on a GPU captured for these processors."""
        key = f"sampled {sampler.key}", nodes
        if key not in self.steps:
            with torch.no_grad(), self._untouched():
                look, finish, state = self._function("look", nodes), self._function("finish", nodes), self.state

            def sampled(max_kv_len: int) -> Tensor:
                tree = state.tree(nodes)
                logits, *features = look(max_kv_len)
                accepted = sampler(state, tree, *ancestry(tree.parents), logits)
                return finish(accepted.path, accepted.tokens, accepted.count, features, max_kv_len)

            sampled = self.ring.publishing(sampled) if self.runtime.on_gpu else sampled
            with torch.no_grad(), self.runtime.ranks_apart(), self._untouched():
                self.steps[key] = self._capture(sampled, (PAGE,)) if self.captures else sampled
                self.policies["look"].cost[nodes] = min(self._seconds(self.steps[key], (PAGE,)) for _ in range(TRIALS))
            forgotten = [k for k in self.steps if k[0].startswith("sampled")][:-SAMPLERS]
            for old in forgotten:
                del self.steps[old]
        return self.steps[key]

    def _capture(self, step: Callable, arguments: tuple) -> Captured:
        try:
            return Captured(step, arguments, self.pool)
        except CaptureError as error:
            self.pool = torch.cuda.graph_pool_handle()
            raise RuntimeError(
                "a step cannot be captured in a CUDA graph, for something in the model waits for the GPU or is not "
                f"allowed there; pass cuda_graphs=False to speculate(). It was: {error}"
            ) from error

    def _function(self, part: str, nodes: int) -> Callable:
        """The step as a function, compiled where it is to be, and not captured."""
        if part == "prefill":
            return self._pieces.prefill()
        if part == "finish":
            return self._pieces.finish(nodes).finish
        if part == "propose":
            return self._propose
        round_ = self._pieces.round(nodes)
        function = partial(round_.look if part == "look" else round_.forward, nodes=nodes)
        return self.ring.publishing(function) if part == "round" and self.ring is not None else function

    def _arguments(self, part: str, nodes: int) -> tuple:
        """Arguments to try a step with."""
        if part == "finish":
            return self._pieces.accepted(self._pieces.round(nodes), nodes, PAGE)
        return (nodes or self.prefill_sizes[-1], PAGE) if part == "prefill" else (PAGE,)

    def _measure(self, part: str, new: dict[int, Callable]) -> None:
        """Tell the policy what the rounds of every size cost, the `new` ones included. They run in turn, several times
        over, so that other processes slow all of them alike."""
        steps = {nodes: step for (name, nodes), step in self.steps.items() if name == part} | new
        times = [
            {nodes: self._seconds(step, self._arguments(part, nodes)) for nodes, step in steps.items()}
            for _ in range(TRIALS)
        ]
        self.policies[part].cost.update({nodes: min(trial[nodes] for trial in times) for nodes in steps})

    def _seconds(self, step: Callable, arguments: tuple) -> float:
        """How long a step takes that has run before, over tokens that differ: equal ones would go to the same experts
        of a mixture, and any number of them would cost what one does."""
        self.state.draw_tree()
        if self.runtime.on_gpu:
            torch.cuda.synchronize()
        tick = time.perf_counter()
        outcome = step(*arguments)
        if self.runtime.on_gpu:
            torch.cuda.synchronize()
        del outcome
        return time.perf_counter() - tick

    def _untouched(self) -> AbstractContextManager[None]:
        return untouched(self.state, self.drafter, self.ring)
