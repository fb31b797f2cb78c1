"""`Session`: the buffers of one batch size, and the steps over them."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from functools import cached_property, partial
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..cache import PAGE, ROUNDED, Cache
from ..compile.replay import Captured, CaptureError, OutcomeRing
from ..compile.start import timed
from ..drafting import Drafter, caches, use_pages
from ..kernels.attention import BACKENDS
from ..kernels.ops import gather_rows, places
from ..kernels.together import compile_together
from ..outcome import WIDEST
from ..tree import MAX_NODES, Accepted, Tree, ancestry
from .compiled_steps import CompiledSteps, untouched
from .draft_budget import KNEES, DraftBudget, VaryingTreeBudget, WholeTreeBudget
from .draft_record import Hindsight
from .prompt import Past
from .round import PREFILL_SIZES, RidingVerify
from .runtime import Runtime
from .state import LATE_SIZES, State
from .verify.sample import DrawInRound

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE as Pool

SAMPLERS = 32  # number of rounds that draw to keep, the newest ones
TRIALS = 5  # runs of a step; the shortest is its cost
FEW = 4  # a round may verify one in FEW nodes of a tree
MANY_ROWS = KNEES["cuda"] // 2  # rows of a round on a GPU from which fewer nodes save much of it
# Largest prefill, in tokens of all rows, that is captured; a larger one takes longer than its launches.
CAPTURED_TOKENS = 2048
MOST_SLICES = 64  # slices of a piece of prompts at most


class StepKind(Enum):
    """The kinds of steps.

    PREFILL: a chunk of the prompts; a function of (size, max_kv_len).
    ROUND: a greedy round; a function of max_kv_len.
    LOOK, FINISH: `Round.look` and `Round.finish`, between which tokens are accepted.
    PROPOSE: the first trees of a call; a function of max_kv_len.
    CATCH_UP: the drafter processes the tokens that it is late by, up to a size; a function of max_kv_len.
    """

    PREFILL = "prefill"
    ROUND = "round"
    LOOK = "look"
    FINISH = "finish"
    PROPOSE = "propose"
    CATCH_UP = "catch up"


SWITCH = (StepKind.PROPOSE, StepKind.CATCH_UP)  # between a plain round and one that drafts; the first size counts


class Piece(NamedTuple):
    """Slices of prompts, `number` of `unit` tokens each: `Session.slices` of the prompts' session, whose rows have
    pages of the same pool."""

    prompts: "Session"
    number: int
    unit: int

    @property
    def size(self) -> int:
        return self.number * self.unit


class MixedKind(NamedTuple):
    """The kind of a round, greedy or one that draws, that takes a piece of prompts with it."""

    round: StepKind | DrawInRound
    piece: Piece

    @property
    def value(self) -> str:
        return f"{self.round.value}_p{self.piece.number}x{self.piece.unit}"


Kind = StepKind | DrawInRound | MixedKind  # a `DrawInRound` is the kind of a round that draws


class Session:
    """Everything for `batch` sequences of up to `capacity` tokens: buffers, drafter, and the steps over them. A step is
    a function, which is made, tried, measured and on a GPU captured on first use.

    policies: choose the sizes of greedy rounds (ROUND) and of others (LOOK).
    prefill_seconds: duration of a captured prefill, by its size.
    answers: prompt and answer of each row in the last call, which the drafter's cache has, too.
    late: most tokens of these answers that the drafter is late by.
    owed: prompts that it has to process before: the size of each chunk, `State.lengths` before it, and its features.
    made: the steps so far, oldest first.
    """

    graph_pool: "Pool | None"

    def __init__(
        self, runtime: Runtime, batch: int, capacity: int | None = None, larger: "Session | None" = None,
        pool: "Session | int | None" = None,
    ):  # fmt: skip
        """capacity: None gives `Runtime.capacity`. larger: a session whose first rows this one shares. pool: a session
        whose pages the rows may have, or the number of pages of a new one, scratch included; None: see `_make_room`."""
        # The buffers.
        self.runtime, self.batch, plan = runtime, batch, runtime.algorithm.plan
        self.capacity = capacity or runtime.capacity(batch)
        slots = ROUNDED if larger or pool else self._slots(self.capacity)
        runtime.check_memory(batch, -(-pool * PAGE // batch) if isinstance(pool, int) else slots)
        self.drafter = runtime.algorithm.drafter(batch, ROUNDED)
        self.state = State(runtime.verify, batch, ROUNDED, runtime.device, plan)
        if larger is not None:
            self.state.share(larger.state)
            self.drafter.share(larger.drafter)
        if pool is not None:
            pages = repeat(pool) if isinstance(pool, int) else [cache.tensors for cache in pool.caches]
            use_pages(self._slots(self.capacity), pages, self.state, self.drafter)
        elif larger is None:
            self._make_room(slots)
        self.answers: list[tuple[list[int], list[int]]] = []
        self.late, self.is_growing = 0, False
        self.owed: list[tuple[int, Tensor, list[Tensor]]] = []

        # Policies choose the sizes of steps.
        self.prefill_sizes = PREFILL_SIZES[runtime.device.type]
        self.prefill_seconds: dict[int, float] = {}
        hindsight, rows = None if runtime.on_gpu else Hindsight(self.state), (batch, KNEES[runtime.device.type])

        def budget(kind: StepKind) -> DraftBudget:
            if plan.is_whole:
                sizes = [*self._few_nodes(), plan.nodes] if plan.nodes > 1 else []
                record = runtime.records[kind.value]
                return WholeTreeBudget(sizes, runtime.options.adaptive, *rows, record, plan.next_nodes)
            return VaryingTreeBudget(runtime.sizes, plan.sizes == "adaptive", *rows, hindsight=hindsight)

        self.policies = {kind: budget(kind) for kind in (StepKind.ROUND, StepKind.LOOK)}
        if larger is not None:
            for policy in self.policies.values():
                policy.share(larger.policies[StepKind.ROUND])

        # The steps.
        check_peers = runtime.options.ranks.check_peers
        self.ring = OutcomeRing(batch * WIDEST, runtime.device, check_peers) if runtime.on_gpu else None
        self.captures = runtime.on_gpu and runtime.options.cuda_graphs
        # Only one session has rounds under way at a time, so that a smaller and a larger one share memory.
        self.graph_pool = larger.graph_pool if larger else torch.cuda.graph_pool_handle() if runtime.on_gpu else None
        self.made: dict[tuple[Kind, int], Callable] = {}
        self._forgotten = set[tuple[Kind, int]]()
        self._switch: dict[StepKind, float] = {}
        self._compiled = CompiledSteps(runtime, self.state, self.drafter)
        self._adoptions = runtime.parts.adoptions

    @property
    def caches(self) -> list[Cache]:
        """The target's and the draft's, which have the same table."""
        return [*caches(self.state), *caches(self.drafter)]

    def _slots(self, tokens: int) -> int:
        """Slots for `tokens` tokens and for all that a step writes after them, a multiple of `ROUNDED`."""
        return -(-(tokens + MAX_NODES + PREFILL_SIZES[self.runtime.device.type][0]) // ROUNDED) * ROUNDED

    def max_kv_len(self, slots: int) -> int:
        """Visible slots of a step that needs the first `slots`, and the drafter's lookahead: a multiple of
        `ROUNDED`, so that 100 slots and 5 for the drafter give 128."""
        needed = slots + self.runtime.algorithm.plan.lookahead_slots
        return min(-(-needed // ROUNDED) * ROUNDED, self.state.capacity)

    @contextmanager
    def growing(self, tokens: int, used: int) -> Iterator[None]:
        """Make room for `tokens` tokens a sequence. Inside, steps may be built, on a GPU all anew; at the end the first
        `used` slots of every cache are copied."""
        slots = self._slots(tokens)
        self.runtime.check_memory(self.batch, slots, "max_new_tokens")
        self.capacity, self.is_growing = tokens, True
        if self.runtime.on_gpu:
            torch.cuda.synchronize(self.runtime.device)
            self.made.clear()
        before = [(cache.tensors, cache.table) for cache in self.caches]
        self._make_room(slots)
        if not used:
            self.answers = []
        yield
        slot = torch.arange(used, device=self.runtime.device).expand(self.batch, -1)
        for cache, (tensors, table) in zip(self.caches, before):
            for new, old in zip(cache.tensors, tensors):
                new[places(new, slot, cache.table)] = old[places(old, slot, table)]
        self.is_growing = False

    def _make_room(self, slots: int) -> None:
        """Replace all caches by empty ones of `slots` slots a row, in one page each; or in pages in order if the plan
        says so: the table of 2 rows of 128 slots is [[1, 2], [3, 4]]."""
        if self.runtime.algorithm.plan.paged:
            pages = 1 + self.batch * slots // PAGE
            use_pages(slots, repeat(pages), self.state, self.drafter)
            self.state.kv.table.copy_(torch.arange(1, pages).view(self.batch, -1))
        else:
            for cache in self.caches:
                cache.resize(slots)
            self.state.resize(slots)
            self.drafter.resize(slots)

    def prefill_draft(self, past: Past, sizes: list[int], known: int = 0) -> None:
        """Let only the draft process the tokens after `known` of each prompt, which the target has processed, in chunks
        of these sizes. Nothing after a row's last token is seen."""
        begin = torch.tensor(past.padding, device=self.runtime.device)[:, None]
        self.state.lengths.fill_(known)
        for size, end in zip(sizes, accumulate(sizes)):
            columns = begin + torch.arange(end - size, end, device=begin.device)
            chunk = [gather_rows(each, columns.clamp(max=each.shape[1] - 1)) for each in past.features or ()]
            self.get(StepKind.PREFILL)(size, self.max_kv_len(known + end), chunk)

    def _few_nodes(self) -> list[int]:
        """A number of nodes between one and a whole tree, if a round over them costs much less than one over all, and
        does not have to be compiled before it runs.

        On a GPU nodes are almost free, unless rows are many, or each node reads other experts.
        """
        runtime, nodes = self.runtime, self.runtime.algorithm.plan.nodes
        costs_by_node = runtime.has_experts or self.batch * nodes > MANY_ROWS
        runs_at_once = runtime.cold_start is not None or not runtime.options.compile
        return [max(2, nodes // FEW)] if (costs_by_node if runtime.on_gpu else runs_at_once) else []

    def renew(self) -> None:
        """Before a call: forget captured steps whose parts have changed from eager to compiled since."""
        if self._adoptions != self.runtime.parts.adoptions:
            self._adoptions = self.runtime.parts.adoptions
            if self.runtime.on_gpu:
                torch.cuda.synchronize(self.runtime.device)
                self._forgotten |= self.made.keys()
                for known in (self.made, self.prefill_seconds, self._switch):
                    known.clear()
                for policy in self.policies.values():
                    policy.costs.measured.clear()

    def get(self, kind: Kind, nodes: int = 0) -> Callable:
        """A step as a function, made on first use. On a GPU it is a captured graph, except a PREFILL of any size.

        nodes: the nodes of a round; the one size of a PREFILL, or 0 for any size; the size of a CATCH_UP.
        """
        if self._only_asks:
            return self._function(kind, nodes)
        if (kind, nodes) not in self.made:
            self.make([(kind, nodes)])
        return self.made[kind, nodes]

    def make(self, steps: Iterable[tuple[Kind, int]], is_ahead: bool = False) -> None:
        """Make several steps, as `get` takes them, unless they are made. Their kernels compile side by side.

        is_ahead: no call waits, so that rounds are measured even if they run without being compiled first.
        """
        new = [step for step in dict.fromkeys(steps) if step not in self.made]
        if self._only_asks:
            for step in new:
                self._function(*step)
            return
        self._compile_kernels(new)
        self.made.update((step, self._make(*step)) for step in new)
        if is_ahead or self.captures or (self.runtime.options.compile and self.runtime.cold_start is None):
            for kind in self.policies:
                self._measure(kind)
        drawn = [step for step in self.made if isinstance(getattr(step[0], "round", step[0]), DrawInRound)]
        for old in drawn[:-SAMPLERS]:
            del self.made[old]

    def has(self, kind: Kind, nodes: int) -> bool:
        """True if a step runs without being captured first, or was captured before its parts changed."""
        return not self.captures or (kind, nodes) in self.made or (kind, nodes) in self._forgotten

    def prefill(self, size: int, max_kv_len: int, puts_off: bool = False) -> None:
        """Process the next `size` tokens of every row's prompt. puts_off: the drafter processes them only in `pay`."""
        step = self.get(StepKind.PREFILL, self._prefill_key(size))
        if puts_off:
            self.owed.append((size, self.state.lengths.clone(), step(size, max_kv_len, None, False)))
        else:
            step(size, max_kv_len)

    def pay(self) -> bool:
        """Let the drafter process the prompts that `prefill` has put off. Returns False if there are none."""
        owed, self.owed = self.owed, []
        for size, lengths, features in owed:
            with self.state.rewound():
                self.state.lengths.copy_(lengths)  # guard: put-off-prompts
                self.get(StepKind.PREFILL)(size, self.max_kv_len(int(lengths.max()) + size), features)
        return bool(owed)

    def prompt_steps(self, sizes: Iterable[int] = ()) -> list[tuple[Kind, int]]:
        """The steps that process prompts in chunks of these sizes; without sizes, all of them."""
        return [(StepKind.PREFILL, self._prefill_key(size)) for size in sizes or self.prefill_sizes]

    def propose(self, max_kv_len: int) -> None:
        """Propose the first trees of a call; the rounds propose all others."""
        (self.get(StepKind.PROPOSE) if self.captures else self._propose)(max_kv_len)

    def catch_up(self, late: int, longest: int) -> None:
        """Let the drafter process the `late` tokens or fewer that it is late by. longest: of `State.lengths`."""
        size = next(size for size in LATE_SIZES[self.runtime.device.type] if size >= late)
        self.get(StepKind.CATCH_UP, size)(self.max_kv_len(longest + size))

    def proposal_steps(self, late: int = 32) -> list[tuple[Kind, int]]:
        """The steps that a proposal needs, to be made before a round is under way.

        late: tokens, one of `LATE_SIZES`, that the drafter may be late by; for more a step is made when they are there.
        """
        catches_up = self.runtime.algorithm.plan.is_whole and self.policies[StepKind.ROUND].adaptive
        sizes = [size for size in LATE_SIZES[self.runtime.device.type] if catches_up and size <= late]
        return [(StepKind.PROPOSE, 0), *((StepKind.CATCH_UP, size) for size in sizes)] if self.captures else []

    def _propose(self, max_kv_len: int) -> None:
        self.state.root()
        self.runtime.guard(self.drafter.propose, self.state, max_kv_len)

    def _prefill_key(self, size: int) -> int:
        captured = self.captures and size * self.batch <= CAPTURED_TOKENS
        backend = BACKENDS.get(self.runtime.prefill.backend)  # None: no layer attends
        return size if captured and (backend is None or backend.prompts_captured) else 0

    def launch(
        self, acceptor: Callable[[Tree, Tensor], Accepted] | DrawInRound | None, nodes: int, max_kv_len: int,
        logits: Tensor | None = None, piece: "Piece | None" = None,
    ) -> Callable[[], list[list[int]]]:  # fmt: skip
        """Begin a round without waiting for a GPU. The result waits, and returns the outcome.

        acceptor: None takes the likeliest tokens. A function of the trees and of the target's logits [B, N, V] after
            every node accepts tokens on the host, between two halves of the round, and does wait.
        logits: [B, V] of the root, if known; the first half is then skipped.
        piece: a piece of prompts that rides along with a round whose tokens the host does not choose.
        """
        if acceptor is None or isinstance(acceptor, DrawInRound):
            kind = acceptor or StepKind.ROUND
            outcome = self.get(kind if piece is None else MixedKind(kind, piece), nodes)(max_kv_len)
            return outcome.tolist if self.ring is None else self.ring.expect(outcome.shape)
        look, finish = self.get(StepKind.LOOK, nodes), self.get(StepKind.FINISH, nodes)  # building them runs them
        if logits is None:
            logits, *features = look(max_kv_len)
            states: AbstractContextManager = nullcontext()
        else:
            target, logits, taps = self.runtime.verify, logits[:, None], self.runtime.algorithm.plan.taps
            features = [logits.new_zeros(*logits.shape[:2], target.hidden_size, dtype=target.dtype) for _ in taps]
            states = self.state.kv.states.kept()  # they include the root already
        accepted = acceptor(self.state.tree(nodes), logits)
        parts = [part.to(logits.device) for part in (accepted.path, accepted.tokens, accepted.count)]
        with states:
            return finish(*parts, features, max_kv_len).tolist

    @property
    def _only_asks(self) -> bool:
        """True if calls ask for parts, and run nothing."""
        return self.runtime.cold_start is not None and self.runtime.cold_start.only_asks

    def _is_captured(self, kind: Kind, nodes: int) -> bool:
        sizes: dict[Kind, int] = {StepKind.PREFILL: nodes, StepKind.CATCH_UP: self._prefill_key(nodes)}
        return self.captures and sizes.get(kind, 1) > 0

    def _compile_kernels(self, steps: list[tuple[Kind, int]]) -> None:
        """Compile the kernels of steps that will be captured."""
        captured = [step for step in steps if self._is_captured(*step)]
        if not captured:
            return
        self.runtime.say(f"compiling kernels of {', '.join(kind.value for kind, _ in captured)}")
        with self._untouched(*(kind for kind, _ in captured)):
            compile_together(*(partial(self._function(*step), *self._arguments(*step)) for step in captured))

    def _make(self, kind: Kind, nodes: int) -> Callable:
        """Make, try and capture a step, and measure it unless it is a round of a policy, without a trace."""
        runtime, captures = self.runtime, self._is_captured(kind, nodes)
        if not (captures or isinstance(kind, DrawInRound)) and (
            runtime.cold_start is not None or not runtime.options.compile
        ):
            return self._function(kind, nodes)
        name = f"{kind.value}_b{self.batch}" + (f"_n{nodes}" if nodes else "")
        runtime.say(f"compiling {name}")
        begin = time.perf_counter()
        with self._untouched(kind):
            step, arguments = self._function(kind, nodes), self._arguments(kind, nodes)
            step(*arguments)
            if captures:
                step = self._capture(step, arguments)
            if isinstance(kind, DrawInRound):
                seconds = min(self._seconds(step, arguments) for _ in range(TRIALS))
                self.policies[StepKind.LOOK].costs.measured[nodes] = seconds
            elif kind in SWITCH and captures and kind not in self._switch:
                self._switch[kind] = min(self._seconds(step, arguments) for _ in range(TRIALS))
                for policy in self.policies.values():
                    policy.costs.switch = sum(self._switch.values())
            elif kind is StepKind.PREFILL and captures:
                self.prefill_seconds[nodes] = min(self._seconds(step, arguments) for _ in range(TRIALS))
        runtime.say(f"compiled {name} in {time.perf_counter() - begin:.1f} s")
        return step

    def _capture(self, step: Callable, arguments: tuple) -> Captured:
        try:
            return Captured(step, arguments, self.graph_pool)
        except CaptureError as error:
            self.graph_pool = torch.cuda.graph_pool_handle()
            raise RuntimeError(
                "a step cannot be captured in a CUDA graph, for something in the model waits for the GPU or is not "
                f"allowed there; pass cuda_graphs=False to speculate(). It was: {error}"
            ) from error

    @cached_property
    def slices(self) -> Tensor:
        """[2, n] int64; the row of each slice of a piece, and the slot at which it begins."""
        slices = torch.zeros(2, MOST_SLICES, dtype=torch.int64, device=self.runtime.device)
        slices[1] = self.state.capacity - MAX_NODES  # the first row has no page there while steps are made
        return slices

    @cached_property
    def slice_drafter(self) -> Drafter:
        """A drafter with a row for each of the `slices`, which lie in pages of this session's. Captured steps read its
        buffers, and do not keep them."""
        drafter = self.runtime.algorithm.drafter(MOST_SLICES, ROUNDED)
        use_pages(self.state.capacity, (cache.tensors for cache in caches(self.drafter)), drafter)
        return drafter

    def _function(self, kind: Kind, nodes: int, verify: Callable | None = None) -> Callable:
        """The step as a function, compiled if that is asked for, and not captured. verify: in place of the round's."""
        if isinstance(kind, DrawInRound):
            return self._published(self._drawing(kind, nodes, verify))
        if isinstance(kind, MixedKind):
            (prompts, number, unit), verify = kind.piece, self._compiled.round(nodes).verify
            drafter = self.runtime.algorithm.drafter(number, ROUNDED) if self.runtime.algorithm.remembers else None
            if drafter is not None:
                drafter.share(prompts.slice_drafter)
            riding = RidingVerify(verify, prompts._compiled.prefill(), prompts.slices[:, :number], unit, drafter)
            return self._function(kind.round, nodes, riding)
        match kind:
            case StepKind.PREFILL:
                return self._compiled.prefill()
            case StepKind.FINISH:
                return self._compiled.finish(nodes).finish
            case StepKind.PROPOSE:
                return self._propose
            case StepKind.CATCH_UP:
                return partial(self._compiled.prefill().catch_up, size=nodes)
            case StepKind.LOOK:
                return partial(self._compiled.round(nodes).look, nodes=nodes, verify=verify)
            case StepKind.ROUND:
                return self._published(partial(self._compiled.round(nodes).forward, nodes=nodes, verify=verify))

    def _drawing(self, sampler: DrawInRound, nodes: int, verify: Callable | None) -> Callable[[int], Tensor]:
        """A round whose tokens are drawn between its halves."""
        look, state = self._function(StepKind.LOOK, nodes, verify), self.state
        finish = self._function(StepKind.FINISH, nodes)

        def drawing(max_kv_len: int) -> Tensor:
            tree = state.tree(nodes)
            logits, *features = look(max_kv_len)
            accepted = sampler(state, tree, *ancestry(tree.parents), logits)
            return finish(accepted.path, accepted.tokens, accepted.count, features, max_kv_len)

        return drawing

    def _published(self, round_: Callable[[int], Tensor]) -> Callable[[int], Tensor]:
        return round_ if self.ring is None else self.ring.publishing(round_)

    def _arguments(self, kind: Kind, nodes: int) -> tuple:
        if kind is StepKind.FINISH:
            return self._compiled.accepted(self._compiled.round(nodes), nodes, ROUNDED)
        return (nodes or self.prefill_sizes[-1], ROUNDED) if kind is StepKind.PREFILL else (ROUNDED,)

    def _measure(self, kind: StepKind) -> None:
        """Tell the policy the costs of rounds of every size that is made, if it lacks one. They run in turn, TRIALS
        times, so that other processes slow all of them alike."""
        steps = {nodes: step for (other, nodes), step in self.made.items() if other is kind}
        measured = self.policies[kind].costs.measured
        if steps.keys() <= measured.keys():
            return
        with self._untouched(kind):
            times = [{n: self._seconds(step, (ROUNDED,)) for n, step in steps.items()} for _ in range(TRIALS)]
        measured.update({nodes: min(trial[nodes] for trial in times) for nodes in steps})

    def _seconds(self, step: Callable, arguments: tuple) -> float:
        """The duration of a step that has run before, over different tokens: equal tokens would go to the same experts
        of a mixture, so that many would cost as much as one."""
        self.state.draw_tree()
        if self.runtime.on_gpu:
            torch.cuda.synchronize()
        tick = time.perf_counter()
        outcome = step(*arguments)
        if self.runtime.on_gpu:
            torch.cuda.synchronize()
        del outcome
        return time.perf_counter() - tick

    @contextmanager
    def _untouched(self, *kinds: Kind) -> Iterator[None]:
        """A context of steps of these kinds that leave no trace. Their time counts as time of compiling."""
        seconds = self.runtime.stats.seconds
        with timed(seconds, "compile"), torch.no_grad(), self.runtime.ranks_apart(), ExitStack() as stack:
            stack.enter_context(untouched(self.state, self.drafter, self.ring))
            for each in {kind.piece.prompts for kind in kinds if isinstance(kind, MixedKind)}:
                stack.enter_context(untouched(each.state, each.drafter))
            yield
