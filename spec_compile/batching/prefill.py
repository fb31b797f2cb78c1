"""Prompts are processed in chunks between the rounds of other requests, in rows of a cache that only they use.

A prompt never touches the rows that decode. When it is done, its row is copied to one of them.
"""

from collections.abc import Callable
from functools import cached_property, partial

import torch

from ..runtime.request import OwnPrefill
from ..runtime.round import STEP_COST, chunks
from ..runtime.runtime import Runtime
from ..runtime.session import Session, StepKind
from .rows import CopySlots, Rows
from .sequence import BatchSequence

PREFILL_ROWS = {"cpu": 1, "cuda": 16}
"""Prompts that are processed together at most: on a CPU their cost adds up, on a GPU the weights are read once for
all."""
TURN, ASIDE = 256, 8
"""Where there is one row for prompts: tokens of a prompt after which one of another client goes on, and prompts that
may wait for that."""
ABOUT = 1.5
"""A chunk that takes at most this many times as long as a round counts as one that takes as long."""
STEPS = 4
"""Prompts that need more chunks of the largest size are not planned to their ends."""


class PrefillRows(Rows):
    """The sequences whose prompts are under way."""

    def __init__(self, runtime: Runtime, number: int, capacity: int):
        super().__init__(runtime, number, capacity, are_dense=True)
        self._done = [0] * number
        """Per row: tokens whose keys and values are known."""
        self._stops = [0] * number
        """Per row: stop prefill here. len(prompt) - 1, or the branch point if it comes first."""
        self.aside: dict[BatchSequence, tuple[int, int, int]] = {}
        """Prompts that were begun and wait for the only row: the row of each in `_aside`, its `_done` and `_stops`."""
        self._turn = 0
        """Tokens that were processed since the prompt in the only row has it."""
        self.at_branch: Callable[[BatchSequence, Rows, int, int], None] = lambda *_: None
        """Called with a sequence, these rows, its row and its tokens so far when its branch point is reached."""

    @property
    def begun(self) -> list[BatchSequence]:
        """The prompts in the rows and those that wait aside."""
        return [*self.active, *self.aside]

    @cached_property
    def _aside(self) -> Rows:
        return Rows(self.runtime, ASIDE, self.state.capacity)

    @cached_property
    def _with_pictures(self) -> Rows:
        """A row for prompts with pictures, one at a time."""
        return Rows(self.runtime, 1, self.state.capacity)

    def make_room(self, sequence: BatchSequence) -> bool:
        """True if there is a row for this prompt now. If there is only one, a prompt of another client that has had
        its turn is set aside for it."""
        if self.has_room:
            return True
        before = self.sequences[0]
        is_due = self._turn >= TURN and before is not None and before.request.client != sequence.request.client
        if len(self.sequences) > 1 or self.runtime.options.ranks.size > 1 or not is_due or len(self.aside) == ASIDE:
            return False
        assert before is not None
        to = min({*range(ASIDE)} - {row for row, _, _ in self.aside.values()})
        self.copy_row(0, to, min(self.used_slots(before), self.state.capacity), self._aside)
        self.aside[before], self.sequences[0] = (to, self._done[0], self._stops[0]), None
        return True

    def resume(self, sequence: BatchSequence) -> None:
        """A prompt that was set aside goes on."""
        row, self._done[0], self._stops[0] = self.aside.pop(sequence)
        self.sequences[0], sequence.row, self._turn = sequence, 0, 0
        self._aside.copy_row(row, 0, min(self.used_slots(sequence), self.state.capacity), self)

    def enter(self, sequence: BatchSequence, known: int, copy: CopySlots, branch: int = 0) -> None:
        """Begin with a prompt.

        copy: copies the keys and values of its first `known` tokens, if there are any. branch: tokens after which
        `at_branch` is called, more than `known`; 0 for none.
        """
        sequence.row = to = self.free_row()
        self.sequences[to], self._done[to], self._stops[to] = sequence, known, branch or len(sequence.prompt) - 1
        self._turn = 0
        self.reuse(to)
        self._begin(sequence, self, to, lengths=known)
        if known:
            copy(self, to)
        if branch:
            self.state.prompt_lengths[to].fill_(branch + 1)
        sequence.speculation.reused_prompt_tokens = known

    def _begin(self, sequence: BatchSequence, rows: Rows, row: int, **numbers: int) -> None:
        request, vocab = sequence.request, self.runtime.verify.vocab_size
        eos = [token for token in request.eos if 0 <= token < vocab]
        rows.state.enter(row, sequence.prompt, eos, sequence.loaded.index, **numbers, **sequence.numbers())
        self.runtime.guard(rows.all.drafter.enter, row, request.share_text, request.references)

    def process(self, sequence: BatchSequence, own: OwnPrefill, target: Rows, to: int) -> None:
        """Have the model's own forward process a prompt with pictures, and copy it to row `to` of `target`."""
        past, offset = own(self.runtime.algorithm.plan.taps)
        rows, done = self._with_pictures, len(sequence.prompt) - 1
        state, session = rows.state, rows.all
        self._begin(sequence, rows, 0, **({} if state.position_offsets is None else {"position_offsets": offset}))
        if past.features is not None and self.runtime.algorithm.remembers:
            sizes = [*chunks(done, session.prefill_sizes, STEP_COST[self.runtime.device.type])]
            session.prefill_draft(past.features, past.padding, [done], sizes)
        state.fill(past, [done])
        sequence.row = 0
        self._propose(session, [sequence])
        self._copy(sequence, rows, target, to)

    def step(self, waiting: int, decoding: int, round_seconds: float | None) -> list[BatchSequence]:
        """Process a chunk of every prompt, and propose the first trees of those that are done, which are returned.

        waiting, decoding: see `choose_size`. round_seconds: what rounds cost now; None if nobody has measured it.
        """
        # A chunk of every prompt.
        self.compact()
        session = self.session(max(sequence.row for sequence in self.active) + 1)
        missing = [self._stops[sequence.row] - self._done[sequence.row] for sequence in self.active]
        if any(missing):
            if any(sequence.scores_prompt for sequence in self.active):
                size = self._score(session)
            else:
                size = self._chunk_size([tokens for tokens in missing if tokens], waiting, decoding, round_seconds)
                session.prefill(size, self._max_kv_len(session, size))
            self._turn += size
            for sequence in self.active:
                row, last = sequence.row, len(sequence.prompt) - 1
                self._done[row] = min(self._done[row] + size, self._stops[row])
                if self._done[row] == self._stops[row] < last:  # its branch point; it goes on to its end
                    self.at_branch(sequence, self, row, self._done[row])
                    self.reuse(row)  # its states change in the next chunk
                    self.state.prompt_lengths[row].fill_(len(sequence.prompt))
                    self._stops[row] = last

        # The first trees of those that are done.
        ready = [sequence for sequence in self.active if self._done[sequence.row] == len(sequence.prompt) - 1]
        if ready:
            self._propose(session, ready)
        return ready

    def _max_kv_len(self, session: Session, size: int) -> int:
        """Visible slots of a step over the next `size` tokens of every prompt."""
        return session.max_kv_len(max(self._done[sequence.row] for sequence in self.active) + size)

    def _score(self, session: Session) -> int:
        """Process a chunk of every prompt as rounds verify a chain of drafts, which gives the target's logits after
        each token; returns its size, the nodes of the largest round.

        The logits of one chunk exist at a time. The logits after token i of a prompt tell the log-probability of token
        i + 1, so the prompt [5, 8, 3] has scores of 8 and 3.
        """
        # A chain of the next tokens of each prompt takes the place of the pending trees.
        state, size = session.state, max(self.runtime.sizes[-1], 2)
        begin, device = self._max_kv_len(session, size), state.tokens.device
        number = torch.arange(size, device=device).repeat(session.batch, 1)
        tokens = state.tokens.gather(1, (state.lengths[:, None] + number).clamp(max=state.capacity - 1))
        state.set_trees(tokens, number - 1, torch.full_like(number[:, 0], size), torch.zeros_like(number[:, 0]))
        logits, *features = session.get(StepKind.LOOK, size)(begin)
        for sequence in self.active:
            done = self._done[sequence.row]
            known = sequence.prompt[done + 1 : done + 1 + size]
            if sequence.scores is not None and sequence.scores_prompt and known:
                sequence.scores.read_prompt(logits[sequence.row, : len(known)], known)

        # States and the draft go on by the chunk.
        state.kv.states.commit(number, (state.prompt_lengths - 1 - state.lengths).clamp(0, size))
        session.get(StepKind.PREFILL)(size, begin, features)
        return size

    def _chunk_size(self, missing: list[int], waiting: int, decoding: int, round_seconds: float | None) -> int:
        """See `choose_size`. The first rank decides, because the others measure other times. Fixed chunks belong to the
        one prompt that a CPU processes at a time."""
        prefill_sizes, fixed = self.all.prefill_sizes, STEP_COST[self.runtime.device.type]
        if self.runtime.has_fixed_chunks:
            (tokens,) = missing
            return next(chunks(tokens, prefill_sizes, fixed))  # guard: fixed-chunks
        is_measured = all(self.prefill_seconds(width) for width in self.widths)
        round_cost = round_seconds if round_seconds is not None and is_measured else fixed

        def cost(prompts: int, size: int) -> float:
            width = self.width(prompts)
            if (
                round_seconds is None or not is_measured
            ):  # a chunk and a round read the weights once, and a chunk computes its tokens besides
                return fixed + width * size
            measured = self.prefill_seconds(width)
            largest = max(measured)  # of the steps that are captured; a larger one computes more of the same
            return measured.get(size) or measured[largest] * size / largest

        sizes = [size for size in prefill_sizes if size.bit_count() == 1]  # few, for all may be timed
        decide = partial(choose_size, missing, waiting, decoding, sizes, cost, round_cost)
        return self.runtime.options.ranks.lead(lambda: [decide()])[0]

    def used_slots(self, sequence: BatchSequence) -> int:
        return self._done[sequence.row] + self.runtime.algorithm.plan.lookahead_slots

    def moved(self, row: int, to: int) -> None:
        self._done[to], self._stops[to] = self._done[row], self._stops[row]

    def _propose(self, session: Session, ready: list[BatchSequence]) -> None:
        longest = max(len(sequence.prompt) for sequence in (*self.active, *ready))
        session.propose(session.max_kv_len(longest))
        if not self.runtime.on_gpu:
            state = session.state
            for sequence in ready:
                row = sequence.row
                sequence.count, sequence.confidence = int(state.tree_count[row]), int(state.tree_confidence[row])

    def move(self, sequence: BatchSequence, target: Rows, to: int) -> None:
        """Copy a prompt that is done to row `to` of `target`."""
        self.sequences[sequence.row] = None
        self._copy(sequence, self, target, to)

    def _copy(self, sequence: BatchSequence, rows: Rows, target: Rows, to: int) -> None:
        slots = len(sequence.prompt) + self.runtime.sizes[-1] + self.runtime.algorithm.plan.lookahead_slots
        rows.copy_row(sequence.row, to, min(slots, rows.state.capacity), target)
        sequence.row = to

    def leave(self, sequence: BatchSequence) -> None:
        """Give up a prompt."""
        rows: Rows = self
        row = sequence.row
        if sequence in self.aside:
            rows, (row, _, _) = self._aside, self.aside.pop(sequence)
        else:
            self.sequences[row] = None
        rows.all.drafter.leave(rows.state, row, 0, False)


def choose_size(
    missing: list[int], waiting: int, decoding: int, sizes: list[int], cost: Callable[[int, int], float],
    round_cost: float,
) -> int:  # fmt: skip
    """The size of the next chunk.

    While a chunk is computed, all rows wait. While a round is computed, the rows of the prompts that are not done wait.
    So that size is taken with which the rows lose the least time until all prompts are done. While `decoding` rows
    decode, a chunk takes about as long as a round, and longer only in proportion if more prompts wait than rows decode:
    rows that wait have their share of the time, as rows that decode have.

    missing: tokens that each prompt under way still needs, above zero.
    waiting: free rows for which prompts wait.
    decoding: rows that decode.
    sizes: the sizes to choose from, descending.
    cost: gives a chunk's cost by (number of prompts, size).
    round_cost: a round's cost in the same unit.
    """
    prompts = len(missing)
    if decoding:
        longest = ABOUT * max(round_cost * max(1, (prompts + waiting) / decoding), cost(prompts, sizes[-1]))
        sizes = [size for size in sizes if cost(prompts, size) <= longest]
    if max(missing) > STEPS * sizes[0]:
        return max(sizes, key=lambda size: sum(min(tokens, size) for tokens in missing) / cost(prompts, size))

    def lost(missing: list[int], size: int) -> float:
        """For each row, if all further chunks have this size."""
        total = 0.0
        while missing:
            total += cost(len(missing), size)
            missing = [tokens - size for tokens in missing if tokens > size]
            total += round_cost * len(missing) / (prompts + decoding)
        return total

    def least(first: int) -> float:
        """For each row, if the next chunk has the size `first`."""
        rest = [tokens - first for tokens in missing if tokens > first]
        later = [size for size in sizes if rest and STEPS * size >= max(rest)]
        waiting = round_cost * len(rest) / (prompts + decoding)
        return cost(prompts, first) + waiting + min((lost(rest, size) for size in later), default=0.0)

    return min(reversed(sizes), key=least)
