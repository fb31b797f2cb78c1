"""`Call`: one generate() on a session, round by round."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..capture.loras import NO_ADAPTER
from ..outcome import Outcome
from ..tree import MAX_NODES
from .draft_length import ANY, STRIDE
from .flights import Flight, Flights, check_gained
from .own_prefill import prefill_draft
from .prefill_chunks import FIXED, chunks
from .request import Request
from .runtime import Runtime
from .session import Session
from .step_back import StepBack
from .steps.build import StepKind

log = logging.getLogger("spec_compile")


@dataclass(eq=False)
class CallRow:
    """A `flights.Rider` of a call. limit: tokens at which it ends."""

    row: int
    length: int
    limit: int
    is_over: bool
    most_nodes: int
    adapter_number: int = 0
    count: int | None = None
    hint: int | None = None

    @property
    def room(self) -> int:
        return self.limit - self.length - 1


class Call:
    """One generate(): its prompts, then its rounds.

    On a GPU the next round is launched before the outcome of the last has arrived, unless the host chooses tokens.
    rows: of the batch; empty before `start`.
    """

    def __init__(self, runtime: Runtime, session: Session, request: Request):
        self.runtime, self.session, self.request = runtime, session, request
        self.rows: list[CallRow] = []
        self._flights = Flights(runtime, trace=[])
        self._longest = max(request.max_lengths)
        self._kind = StepKind.LOOK if request.acceptor else StepKind.ROUND
        self._first: Tensor | None = None
        """[2, B] until it is read: the numbers of nodes and the hints of the first trees."""

    @property
    def is_over(self) -> bool:
        return all(row.is_over for row in self.rows)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row less one, as `State.lengths` has them."""
        return [row.length for row in self.rows]

    @property
    def counts(self) -> dict[int, int]:
        """Real nodes of the pending tree of each row that goes on."""
        return {row.row: row.count for row in self.rows if not row.is_over}

    def start(self) -> None:
        """Process the prompts, and propose the first trees."""
        session, request, state, drafter = self.session, self.request, self.session.state, self.session.drafter
        if max(map(len, request.prompts)) >= session.capacity:
            self._grow(0)
        if session.late and request.past is not None:
            session.steps.catch_up(session.steps.late_size(session.late), session.max_kv_len(session.capacity))
        session.late = 0
        if session.steps.ring is not None:
            session.steps.ring.begin()
        adapters = request.adapters or [NO_ADAPTER] * state.batch
        state.reset(request.prompts, request.min_lengths, request.max_lengths, request.eos, request.ids,
                    request.position_offsets, request.most_nodes, [each.index for each in adapters])  # fmt: skip
        state.seed.fill_(request.seed)
        torch.arange(state.batch, out=state.numbers)
        state.temperature.fill_(request.temperature)
        begins = self._take_past()
        session.texts = [list(prompt) for prompt in request.prompts]
        self.runtime.guard(drafter.start, state, request.prompts, request.references, request.share_text)
        missing = max(len(prompt) - 1 - begin for prompt, begin in zip(request.prompts, begins))
        prompt_sizes = self._chunks(missing)
        self._build_rounds(prompt_sizes)
        if request.features is not None and self.runtime.algorithm.remembers:
            prefill_draft(session, request.features, request.past.padding, begins, self._chunks(max(begins)))
        self._prefill(prompt_sizes, max(begins))
        begins_plain = request.first_logits is not None or self._begins_plain
        self._flights.pending = 1 if begins_plain else self.runtime.algorithm.plan.nodes
        if not begins_plain:
            session.steps.propose(session.max_kv_len(max(map(len, request.prompts))))
        else:
            state.root()
        self._first = torch.stack((state.tree_count, state.tree_hint))
        lengths = [len(prompt) - 1 for prompt in request.prompts]
        self.rows = [
            CallRow(row, length, limit, length + 1 >= limit, request.most_nodes, adapter.number)
            for row, (length, limit, adapter) in enumerate(zip(lengths, request.max_lengths, adapters))
        ]
        if self.runtime.on_gpu and request.host_acceptor is None:
            self._first = self._first.to("cpu", non_blocking=True)
        else:
            self._read_first()

    def launch(self) -> None:
        """Begin as many rounds as may be in flight."""
        request, session, flights = self.request, self.session, self._flights
        longest = max(self.lengths)
        active = [row for row in self.rows if not row.is_over]
        while flights.may_launch(active, on_host=request.host_acceptor is not None):
            if self._longest > session.capacity <= longest + 1 + flights.nodes:
                if len(flights):
                    break  # collect the rounds under way before growing
                self._grow(longest + MAX_NODES + self.runtime.algorithm.plan.lookahead_slots)
            nodes = None if request.first_logits is None else 1
            flights.launch(session, self._kind, active, longest, self._begin, nodes)
            session.late = flights.late

    def _begin(self, nodes: int, max_kv_len: int):
        """The `begin` of `Flights.launch`."""
        request = self.request
        if request.host_acceptor is None:
            return self.session.steps.launch(request.draw_in_round, nodes, max_kv_len)
        logits, request.first_logits = request.first_logits, None
        return self.session.steps.launch_on_host(request.host_acceptor, nodes, max_kv_len, logits)

    def collect(self) -> tuple[Flight, list[tuple[CallRow, Outcome]]]:
        """Wait for the oldest round. Returns it with the outcome of each row that goes on."""
        if self.request.check is not None:  # the first time, while the GPU computes and before any token counts
            check, self.request.check = self.request.check, None
            check()  # guard: check-before-tokens
        flight, outcomes = self._flights.collect()
        self._read_first()  # it has arrived, because its copy was launched before the round
        return flight, outcomes

    def learn(self, flight: Flight, outcomes: list[tuple[CallRow, Outcome]]) -> list[list[int]]:
        """Take in a round's outcomes. Returns the tokens that each row gained."""
        for _, outcome in outcomes:
            check_gained(outcome, self.runtime.verify.embedded)
        self._flights.learn(flight, outcomes)
        gains: list[list[int]] = [[] for _ in self.rows]
        for row, outcome in outcomes:
            gains[row.row] = outcome.gained
            self.session.texts[row.row] += outcome.gained
            row.length += len(outcome.gained)
            row.is_over = outcome.finished
        return gains

    def stop_rows(self) -> None:
        for number in self.request.stopped:
            if not self.rows[number].is_over:
                self.rows[number].is_over = True
                self.session.state.finished[number : number + 1].fill_(True)

    @property
    def _begins_plain(self) -> bool:
        """True if the first round will verify no drafts, so that none have to be made for it. The first rank says so
        for all, because each has measured other durations."""
        if self.runtime.guard.error is not None:
            return True
        policy, most = self.session.steps.policies[self._kind], self.request.most_nodes
        if not isinstance(policy, StepBack):
            return False
        buckets = [each.number * STRIDE + ANY for each in self.request.adapters or ()]
        (nodes,) = self.runtime.options.ranks.lead(lambda: [min(policy.choose_ahead(buckets), most)])
        return nodes == 1

    def _build_rounds(self, prompt_sizes: Sequence[int]) -> None:
        """Make the steps of prompts of these sizes, the first proposal, and the rounds of an algorithm of one size.

        Their trial runs would later overwrite drafts in the drafter's cache.
        """
        request, steps, sizes = self.request, self.session.steps, tuple[int, ...]()
        if self.runtime.algorithm.plan.sizes == "fixed":
            policy = steps.policies[self._kind]
            sizes = policy.sizes if policy.adaptive else policy.sizes[-1:]
            sizes = sizes if self.runtime.on_gpu else tuple({*sizes[:1], sizes[-1]})  # a CPU compiles others later
            sizes = sizes if request.most_nodes > 1 else (1,)
        kinds = (StepKind.ROUND,) if request.draw_in_round is None else ()
        kinds = kinds if request.host_acceptor is None else (StepKind.LOOK, StepKind.FINISH)
        proposal = steps.proposal_steps() if request.first_logits is None else []
        prompts = steps.prompt_steps(prompt_sizes) if prompt_sizes else []
        steps.make([*((kind, nodes) for nodes in sizes for kind in kinds), *proposal, *prompts])
        for nodes in () if kinds else sizes:
            steps.round(nodes, request.draw_in_round)

    def _grow(self, used: int) -> None:
        """Make room for the longest row; the first `used` slots of the caches are in use."""
        session, tokens = self.session, self._longest
        log.warning(
            "the cache of %d tokens a sequence is full and grows to %d, whose rounds are compiled anew; with "
            "speculate(model, max_cache_len=%d) it has the room from the start", session.capacity, tokens, tokens,
        )  # fmt: skip
        with session.growing(tokens, used):
            self._build_rounds(())

    def _take_past(self) -> list[int]:
        """Take over existing keys, values and states. Returns the tokens of each row that need no prefill."""
        request, state = self.request, self.session.state
        if request.past is None:
            return [0] * state.batch
        cached = [request.past.length - pad for pad in request.past.padding]
        can_step_back = request.features is None and not (request.has_unknown_tokens or self.runtime.verify.recurrences)
        if can_step_back:
            cached = [max(length + 1 - max(self.runtime.algorithm.ahead, 1), 0) for length in cached]
        fresh = self.runtime.algorithm.plan.fresh_tokens if can_step_back else 1
        begins = [max(min(length, len(prompt) - fresh), 0) for length, prompt in zip(cached, request.prompts)]
        if not self._draft_remembers(begins):
            return [0] * state.batch
        state.fill(request.past, begins)
        return begins

    def _draft_remembers(self, lengths: list[int]) -> bool:
        """True if the drafter's cache still has the prompts' first `lengths` tokens, or never can because they are
        unknown. Otherwise the prompts are processed again."""
        if not self.runtime.algorithm.remembers or self.request.has_unknown_tokens:
            return True
        ends, texts = [n + self.runtime.algorithm.ahead for n in lengths], self.session.texts
        if len(texts) != len(lengths):
            return False
        return all(text[:end] == prompt[:end] for end, text, prompt in zip(ends, texts, self.request.prompts))

    def _read_first(self) -> None:
        """Read the counts and hints of the first trees, once."""
        if self._first is not None:
            for row, count, hint in zip(self.rows, *self._first.tolist()):
                row.count, row.hint = count, hint
            self._first = None

    def _prefill(self, sizes: Sequence[int], done: int) -> None:
        """Process all prompt tokens but the last, in steps of these sizes, after the `done` tokens that the state has.

        Prompts of 9 and 6 tokens of which the state has 4 and 0: 5 tokens are missing, and slots up to 9 are visible.
        """
        for size in sizes:
            self.session.steps.prefill(size, self.session.max_kv_len(done + size))
            done += size

    def _chunks(self, tokens: int) -> list[int]:
        """Sizes of the prefill steps for `tokens` tokens of each prompt; see `prefill_chunks.chunks`."""
        sizes, limit = self.session.steps.prefill_sizes, self.request.prefill_chunk_size
        sizes = [size for size in sizes if size <= (limit or size)] or sizes[-1:]
        return [*chunks(tokens, sizes, FIXED[self.runtime.device.type])]
