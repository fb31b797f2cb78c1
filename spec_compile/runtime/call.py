"""`Call`: one generate() on a session, round by round."""

import logging
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..outcome import Outcome
from ..tree import MAX_NODES
from .draft_record import Group
from .past import Past
from .pipeline import InFlightRound, RoundPipeline, check_gained
from .prefill_chunks import FIXED, chunks
from .request import Prompt, Request, Sequence
from .runtime import Runtime
from .session import Session
from .steps import StepKind
from .verify.host import HostAcceptor
from .verify.sample import DrawInRound

log = logging.getLogger("spec_compile")


class Call:
    """One generate(): its prompts, then its rounds.

    On a GPU the next round is launched before the outcome of the last has arrived, unless the host chooses tokens.
    """

    runtime: Runtime
    session: Session

    def __init__(
        self, request: Request, sequences: list[Sequence], acceptor: HostAcceptor | DrawInRound | None = None,
        prompt: Prompt | None = None, past: Past | None = None, check: Callable[[], None] | None = None,
    ):  # fmt: skip
        """sequences: the rows. acceptor: accepts tokens; None accepts greedily inside the round (see `accept.Route`).
        prompt: the prompts of `sequences`; None if nobody has them as a tensor. past: has the first prompt tokens; its
        first logits need a `HostAcceptor`. check: raises if the model has changed; called once, while the GPU computes,
        before a token is given out."""
        self.request, self.sequences, self.past, self._check = request, sequences, past, check
        self._on_host = acceptor if isinstance(acceptor, HostAcceptor) else None
        self._in_round = acceptor if isinstance(acceptor, DrawInRound) else None
        self._kind = StepKind.LOOK if acceptor else StepKind.ROUND
        self.has_unknown_tokens = prompt is not None and prompt.has_unknown_tokens
        self._prompt_ids = None if prompt is None or any(prompt.padding) or self.has_unknown_tokens else prompt.ids
        self._position_offsets = None if prompt is None else prompt.position_offsets
        self._first_logits = None if past is None else past.first_logits
        self._longest = max(sequence.longest for sequence in sequences)
        self._is_started = False
        self._first: Tensor | None = None
        """[2, B] until it is read: the numbers of nodes and the hints of the first trees."""

    @property
    def prompts(self) -> list[list[int]]:
        return [sequence.prompt for sequence in self.sequences]

    @property
    def is_over(self) -> bool:
        return all(sequence.is_over for sequence in self.sequences)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row less one, as `State.lengths` has them; empty before `start`."""
        return [sequence.length for sequence in self.sequences] if self._is_started else []

    def start(self, runtime: Runtime, session: Session) -> None:
        """Process the prompts, and propose the first trees."""
        self.runtime, self.session, state, drafter = runtime, session, session.state, session.drafter
        self._pipeline = RoundPipeline(runtime, trace=[])
        request, sequences, prompts = self.request, self.sequences, self.prompts
        if max(map(len, prompts)) >= session.capacity:
            self._grow(0)

        # The drafter may be late by tokens of an earlier call.
        if session.late and self.past is not None:
            session.steps.catch_up(session.steps.late_size(session.late), session.max_kv_len(session.capacity))
        session.late = 0
        if session.steps.ring is not None:
            session.steps.ring.begin()

        # The buffers of this call.
        eos = [token for token in request.eos if 0 <= token < runtime.verify.vocab_size]
        state.reset(prompts, [each.shortest for each in sequences], [each.longest for each in sequences], eos,
                    self._prompt_ids, self._position_offsets, sequences[0].most_nodes,
                    [each.loaded.index for each in sequences])  # fmt: skip
        state.seed.fill_(request.seed)
        torch.arange(state.batch, out=state.numbers)
        state.temperature.fill_(request.temperature)
        begins = self._take_past()
        session.answers = [(sequence.prompt, sequence.tokens) for sequence in sequences]
        runtime.guard(drafter.start, state, prompts, request.references, request.share_text)

        # The prompts, and the first trees.
        prompt_sizes = self._chunks(max(len(prompt) - 1 - begin for prompt, begin in zip(prompts, begins)))
        self._build_rounds(prompt_sizes)
        if self.past is not None and self.past.features is not None and runtime.algorithm.remembers:
            session.prefill_draft(self.past.features, self.past.padding, begins, self._chunks(max(begins)))
        done = max(begins)  # prompts of 9 and 6 tokens, of which the state has 4 and 0: 5 more, and 9 slots are visible
        for size in prompt_sizes:
            session.steps.prefill(size, session.max_kv_len(done + size))
            done += size
        if self._first_logits is not None or self._begins_plain:
            self._pipeline.pending = 1
            state.root()
        else:
            self._pipeline.pending = runtime.algorithm.plan.nodes
            session.steps.propose(session.max_kv_len(max(map(len, prompts))))
        self._first = torch.stack((state.tree_count, state.tree_hint))
        for sequence in sequences:
            sequence.is_over = sequence.room <= 0
        self._is_started = True
        if runtime.on_gpu and self._on_host is None:
            self._first = self._first.to("cpu", non_blocking=True)
        else:
            self._read_first()

    def launch(self) -> None:
        """Begin as many rounds as may be in flight."""
        session, pipeline, longest = self.session, self._pipeline, max(self.lengths)
        active = [sequence for sequence in self.sequences if not sequence.is_over]
        while pipeline.may_launch(active, on_host=self._on_host is not None):
            if self._longest > session.capacity <= longest + 1 + pipeline.nodes:
                if len(pipeline):
                    break  # collect the rounds under way before growing
                self._grow(longest + MAX_NODES + self.runtime.algorithm.plan.lookahead_slots)
            nodes = None if self._first_logits is None else 1
            pipeline.launch(session, self._kind, active, longest, self._begin, nodes)
            session.late = pipeline.late

    def _begin(self, nodes: int, max_kv_len: int):
        """The `begin` of `RoundPipeline.launch`."""
        if self._on_host is None:
            return self.session.steps.launch(self._in_round, nodes, max_kv_len)
        logits, self._first_logits = self._first_logits, None
        return self.session.steps.launch_on_host(self._on_host, nodes, max_kv_len, logits)

    def collect(self) -> tuple[InFlightRound, list[tuple[Sequence, Outcome]]]:
        """Wait for the oldest round. Returns it with the outcome of each row that goes on."""
        if self._check is not None:  # the first time, while the GPU computes and before any token counts
            check, self._check = self._check, None
            check()  # guard: check-before-tokens
        in_flight, outcomes = self._pipeline.collect()
        self._read_first()  # it has arrived, because its copy was launched before the round
        return in_flight, outcomes

    def learn(self, in_flight: InFlightRound, outcomes: list[tuple[Sequence, Outcome]]) -> list[list[int]]:
        """Take in a round's outcomes. Returns the tokens that each row gained."""
        for _, outcome in outcomes:
            check_gained(outcome, self.runtime.verify.embedded)
        self._pipeline.learn(in_flight, outcomes)
        gains: list[list[int]] = [[] for _ in self.sequences]
        for sequence, outcome in outcomes:
            gains[sequence.row] = outcome.gained
            sequence.tokens += outcome.gained
            sequence.is_over = outcome.finished
        return gains

    def stop(self, rows: Iterable[int]) -> None:
        """Between two rounds: these rows need no more tokens."""
        for row in rows:
            if not self.sequences[row].is_over:
                self.sequences[row].is_over = True
                self.session.state.finished[row : row + 1].fill_(True)

    @property
    def _begins_plain(self) -> bool:
        """True if the first round will verify no drafts, so that none have to be made for it. The first rank says so
        for all, because each has measured other durations."""
        if self.runtime.guard.error is not None:
            return True
        policy, most = self.session.steps.policies[self._kind], self.sequences[0].most_nodes
        if not self.runtime.algorithm.plan.is_whole:
            return False
        numbers = [sequence.loaded.number for sequence in self.sequences]
        groups = [*map(Group, numbers)] if any(numbers) else []
        (nodes,) = self.runtime.options.ranks.lead(lambda: [min(policy.choose(groups), most)])
        return nodes == 1

    def _build_rounds(self, prompt_sizes: list[int]) -> None:
        """Make the steps of prompts of these sizes, the first proposal, and the rounds of an algorithm of one size.

        Their trial runs would later overwrite drafts in the drafter's cache.
        """
        steps, sizes = self.session.steps, tuple[int, ...]()
        if self.runtime.algorithm.plan.sizes == "fixed":
            policy = steps.policies[self._kind]
            sizes = policy.sizes if policy.adaptive else policy.sizes[-1:]
            sizes = sizes if self.runtime.on_gpu else tuple({*sizes[:1], sizes[-1]})  # a CPU compiles others later
            sizes = sizes if self.sequences[0].most_nodes > 1 else (1,)
        kinds = (StepKind.ROUND,) if self._in_round is None else ()
        kinds = kinds if self._on_host is None else (StepKind.LOOK, StepKind.FINISH)
        proposal = steps.proposal_steps() if self._first_logits is None else []
        prompts = steps.prompt_steps(prompt_sizes) if prompt_sizes else []
        steps.make([*((kind, nodes) for nodes in sizes for kind in kinds), *proposal, *prompts])
        for nodes in () if kinds else sizes:
            steps.round(nodes, self._in_round)

    def _grow(self, used: int) -> None:
        """Make room for the longest row; the first `used` slots of the caches are in use."""
        session, tokens = self.session, self._longest
        log.warning(
            "the cache of %d tokens a sequence is full and grows to %d, whose rounds are compiled anew; with "
            "speculate(model, max_cache_len=%d) it has the room from the start", session.capacity, tokens, tokens,
        )  # fmt: skip
        with session.growing(tokens, used):
            self._build_rounds([])

    def _take_past(self) -> list[int]:
        """Take over existing keys, values and states. Returns the tokens of each row that need no prefill."""
        state, algorithm, past = self.session.state, self.runtime.algorithm, self.past
        if past is None:
            return [0] * state.batch
        cached = [past.length - pad for pad in past.padding]
        can_step_back = past.features is None and not (self.has_unknown_tokens or self.runtime.verify.recurrences)
        if can_step_back:
            cached = [max(length + 1 - max(algorithm.ahead, 1), 0) for length in cached]
        fresh = algorithm.plan.fresh_tokens if can_step_back else 1
        begins = [max(min(length, len(prompt) - fresh), 0) for length, prompt in zip(cached, self.prompts)]
        if algorithm.remembers and not self.has_unknown_tokens:
            # The drafter's cache has the first tokens of the last call's texts. If the prompts begin otherwise, they
            # are processed again.
            texts = self.session.texts
            starts = [(text[: n + algorithm.ahead], prompt[: n + algorithm.ahead])
                      for n, text, prompt in zip(begins, texts, self.prompts)]  # fmt: skip
            if len(texts) != len(begins) or any(text != prompt for text, prompt in starts):
                return [0] * state.batch
        state.fill(past, begins)
        return begins

    def _read_first(self) -> None:
        """Read the counts and hints of the first trees, once."""
        if self._first is not None:
            for sequence, count, hint in zip(self.sequences, *self._first.tolist()):
                sequence.count, sequence.hint = count, hint
            self._first = None

    def _chunks(self, tokens: int) -> list[int]:
        """Sizes of the prefill steps for `tokens` tokens of each prompt; see `prefill_chunks.chunks`."""
        config, sizes = self.request.config, self.session.steps.prefill_sizes
        limit = None if config is None else config.prefill_chunk_size
        sizes = [size for size in sizes if size <= (limit or size)] or sizes[-1:]
        return [*chunks(tokens, sizes, FIXED[self.runtime.device.type])]
