"""`Call`: one generate() on a session, round by round."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor

from ..cache import PAGE
from ..outcome import Outcome, unpack
from ..tree import MAX_NODES
from .accept.random_numbers import NO_PROBABILITIES
from .own_prefill import prefill_draft
from .prefill_chunks import FIXED, chunks
from .request import Request
from .runtime import Runtime
from .session import Session

log = logging.getLogger("spec_compile")

AHEAD = 2
"""Rounds in flight on a GPU."""


class Call:
    """What the host knows of one generate(): how long its rows are, and which trees are to be verified next.

    On a GPU the next round is launched before the outcome of the last is there, unless its tokens are chosen on the
    host. lengths: tokens of each row less one, as `State.lengths` has them; empty before `start`.
    """

    def __init__(self, runtime: Runtime, session: Session, request: Request):
        self.runtime, self.session, self.request = runtime, session, request
        self.lengths: list[int] = []
        self._policy = session.policies["look" if request.acceptor else "round"]
        self._ahead = 1 if request.host_acceptor or not runtime.on_gpu else AHEAD
        self._longest = max(request.max_lengths)
        self._flying: deque[tuple[int, Callable[[], list[list[int]]]]] = deque()
        """Rounds that were launched: the number of nodes, and what waits for the outcome."""
        self._gains: list[list[int]] = []
        self._first: Tensor | None = None
        """[2, B] on the CPU, until it is read: the numbers of nodes and the hints of the first trees."""
        self._counts: list[int] = []
        self._hints: list[int] = []
        self._digest = 0
        """Of all outcomes so far, which every rank must have alike."""

    @property
    def is_over(self) -> bool:
        """Whether every row has finished."""
        return all(self._finished)

    @property
    def active(self) -> list[int]:
        """The rows that have not finished."""
        return [row for row, done in enumerate(self._finished) if not done]

    @property
    def counts(self) -> dict[int, int]:
        """Real nodes of the pending tree of each unfinished row."""
        return {row: self._counts[row] for row in self.active}

    def start(self) -> None:
        """Process the prompts, and propose the first trees."""
        session, request, state, drafter = self.session, self.request, self.session.state, self.session.drafter
        if max(map(len, request.prompts)) >= session.capacity:
            self._grow(0)
        if session.ring is not None:
            session.ring.begin()
        state.reset(request.prompts, request.min_lengths, request.max_lengths, request.eos, request.ids,
                    request.position_offsets)  # fmt: skip
        state.seed.fill_(request.seed)
        torch.arange(state.batch, out=state.numbers)
        state.temperature.fill_(request.temperature)
        begins = self._take_past()
        session.texts = [list(prompt) for prompt in request.prompts]
        drafter.start(state, request.prompts, request.references, request.share_text)
        self._build_rounds()
        if request.features is not None and self.runtime.algorithm.remembers:
            sizes = [*self._chunks(max(begins))]
            prefill_draft(session, request.features, request.past.padding, begins, sizes, self._max_kv_len)
        self._prefill(begins)
        if request.first_logits is None:
            session.propose(self._max_kv_len(max(map(len, request.prompts))))
        else:
            state.root()
        first = torch.stack((state.tree_count, state.tree_hint))
        self._first = first.to("cpu", non_blocking=self._ahead > 1)
        if self._ahead == 1:
            self._read_first()
        self.lengths = [len(prompt) - 1 for prompt in request.prompts]
        self._finished = [length + 1 >= limit for length, limit in zip(self.lengths, request.max_lengths)]

    def launch(self) -> None:
        """Begin as many rounds as may be in flight."""
        request, session, active = self.request, self.session, self.active
        room = max(request.max_lengths[row] - self.lengths[row] - 1 for row in active)
        while len(self._flying) < min(self._ahead, room):
            if self._longest > session.capacity <= max(self.lengths) + 1 + sum(nodes for nodes, _ in self._flying):
                if self._flying:
                    break  # what is on its way first
                self._grow(max(self.lengths) + MAX_NODES + self.runtime.algorithm.plan.lookahead_slots)
            (nodes,) = self.runtime.options.ranks.lead(lambda: [self._choose_nodes(active)], check=self._digest)
            max_kv_len = self._max_kv_len(max(self.lengths) + nodes)
            if request.host_acceptor is None:
                self._flying.append((nodes, session.launch(request.draw_in_round, nodes, max_kv_len)))
            else:
                self._flying.append((nodes, self._chosen(nodes, max_kv_len)))

    def _choose_nodes(self, active: list[int]) -> int:
        """How many nodes the next round verifies."""
        if self.request.first_logits is not None or not self.request.drafts:
            return 1
        if self._flying or self._first is not None:
            return self._policy.choose_ahead()
        return self._policy.choose([self._counts[row] for row in active], [self._hints[row] for row in active])

    def collect(self) -> tuple[int, list[Outcome]]:
        """Wait for the round that was launched first: its number of nodes, and what came of each row."""
        if self.request.check is not None:  # the first time, while the GPU computes and before any token counts
            check, self.request.check = self.request.check, None
            check()
        nodes, read = self._flying.popleft()
        outcomes = [unpack(row) for row in read()]
        self._read_first()  # it has arrived, because its copy was launched before the round
        return nodes, outcomes

    def learn(self, nodes: int, outcomes: list[Outcome], seconds: float) -> list[list[int]]:
        """Take a round's outcomes in; returns the tokens that each row gained."""
        active, stats = self.active, self.runtime.stats
        offered = [self._counts[row] for row in active], [self._hints[row] for row in active]
        gains, paths = [[] for _ in outcomes], []
        for row in active:
            outcome = outcomes[row]
            self._digest = hash((self._digest, outcome.finished, *outcome.gained, *outcome.tokens, *outcome.parents))
            if -1 in outcome.gained:
                raise RuntimeError(NO_PROBABILITIES)
            gains[row] = outcome.gained
            paths.append(outcome.path[1:])
            self.session.texts[row] += outcome.gained
            self.lengths[row] += len(outcome.gained)
            self._finished[row], self._counts[row], self._hints[row] = outcome[1:4]
            stats.count_depths(outcome.depth, len(outcome.path) - 1)
        self._policy.learn(nodes, *offered, paths, None if self.runtime.on_gpu else seconds)
        stats.trace = self._gains  # a call inside this one has put its own there
        stats.count_round(nodes, [len(tokens) for tokens in gains], len(active))
        return gains

    def stop_rows(self) -> None:
        """Finish the rows that the caller has ended."""
        for row in self.request.stopped:
            if not self._finished[row]:
                self._finished[row] = True
                self.session.state.finished[row : row + 1].fill_(True)

    def _build_rounds(self) -> None:
        """Make the first proposal, and the rounds of an algorithm that has one size: made later, they would run over
        drafts that the drafter's cache holds."""
        if self.runtime.algorithm.plan.sizes == "fixed":
            self.session.build(self.runtime.sizes[-1] if self.request.drafts else 1, self.request)
        if self.request.first_logits is None:
            self.session.build_proposal()

    def _grow(self, used: int) -> None:
        """Make room for the longest row that was asked for; the first `used` slots of the caches are in use."""
        session, tokens = self.session, self._longest
        log.warning(
            "the cache of %d tokens a sequence is full and grows to %d, whose rounds are compiled anew; with "
            "speculate(model, max_cache_len=%d) it has the room from the start", session.capacity, tokens, tokens,
        )  # fmt: skip
        with session.growing(tokens, used):
            self._build_rounds()

    def _take_past(self) -> list[int]:
        """Take over keys, values and states that exist already; returns how many tokens of each row need no prefill."""
        request, state = self.request, self.session.state
        if request.past is None:
            return [0] * state.batch
        cached = [request.past.length - pad for pad in request.past.padding]
        begins = [min(length, len(prompt) - 1) for length, prompt in zip(cached, request.prompts)]
        if not self._draft_remembers(begins):
            return [0] * state.batch
        state.fill(request.past, begins)
        return begins

    def _draft_remembers(self, lengths: list[int]) -> bool:
        """Whether a drafter's own cache has, from the call before, what `request.past` has of the target's, or cannot
        have it because nobody knows the tokens. Else the prompts are processed again."""
        if not self.runtime.algorithm.remembers or self.request.has_unknown_tokens:
            return True
        texts = self.session.texts
        if len(texts) != len(lengths):
            return False
        return all(text[: n + 1] == prompt[: n + 1] for n, text, prompt in zip(lengths, texts, self.request.prompts))

    def _read_first(self) -> None:
        """Learn what the first trees have."""
        if self._first is not None:
            (self._counts, self._hints), self._first = self._first.tolist(), None

    def _chosen(self, nodes: int, max_kv_len: int) -> Callable[[], list[list[int]]]:
        """A round whose tokens the request chooses; the first logits may be known already."""
        session, request = self.session, self.request
        look, finish = session.step("look", nodes), session.step("finish", nodes)  # building them runs them
        logits, features, request.first_logits = request.first_logits, [], None
        is_known = logits is not None
        if logits is None:
            logits, *features = look(max_kv_len)
        else:
            target = self.runtime.verify
            unseen = logits.new_zeros(len(logits), 1, target.hidden_size, dtype=target.dtype)
            logits, features = logits[:, None], [unseen] * len(self.runtime.algorithm.plan.taps)
        accepted = request.host_acceptor(session.state.tree(nodes), logits)
        accepted = [part.to(logits.device) for part in (accepted.path, accepted.tokens, accepted.count)]
        with session.state.kv.states.kept() if is_known else nullcontext():  # they are behind the root already
            outcome = finish(*accepted, features, max_kv_len)
        return outcome.tolist

    def _max_kv_len(self, slots: int) -> int:
        """Slots of the cache for a step to look at, that needs the first `slots` and those that a drafter may use."""
        needed = slots + self.runtime.algorithm.plan.lookahead_slots
        return min(-(-needed // PAGE) * PAGE, self.session.state.capacity)

    def _prefill(self, begins: list[int]) -> None:
        """Keys and values of every prompt token but the last, beyond the first `begins` [B] that the state has."""
        done = max(begins)
        missing = max(len(prompt) - 1 - begin for prompt, begin in zip(self.request.prompts, begins))
        for size in self._chunks(missing):
            self.session.prefill(size, self._max_kv_len(done + size))
            done += size

    def _chunks(self, tokens: int) -> Iterator[int]:
        """Sizes of the steps for so many tokens of each prompt."""
        sizes, limit = self.session.prefill_sizes, self.request.prefill_chunk_size
        sizes = [size for size in sizes if size <= (limit or size)] or sizes[-1:]
        return chunks(tokens, sizes, FIXED[self.runtime.device.type])
