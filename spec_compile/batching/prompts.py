"""Prompts are processed in chunks between the rounds of other requests, in lanes of their own.

A prompt never touches the rows that decode. When it is done, its row is copied to one of them.
"""

from collections.abc import Callable
from functools import cached_property, partial

import torch

from ..runtime.own_prefill import prefill_draft
from ..runtime.prefill_chunks import FIXED, chunks
from ..runtime.runtime import Runtime
from ..runtime.session import Session
from ..runtime.steps.build import StepKind
from .chunk_size import choose_size
from .job import Job
from .lanes import Lanes
from .rows import Rows

CopySlots = Callable[[Lanes, int], None]
"""Copies keys and values to the first slots of a row of these lanes."""
LANES = {"cpu": 1, "cuda": 16}
"""Prompts that are processed together at most: on a CPU their cost adds up, on a GPU the weights are read once for
all."""
TURN, ASIDE = 256, 8
"""Tokens of a prompt after which one of another client goes on if there is one lane, and prompts that may wait so."""


class Prompts(Rows):
    """The requests whose prompts are under way."""

    def __init__(self, runtime: Runtime, rows: int, capacity: int):
        super().__init__(Lanes(runtime, rows, capacity, are_dense=True))
        self.runtime = runtime
        self._done = [0] * rows
        """Tokens of each row whose keys and values are known."""
        self._stops = [0] * rows
        """Tokens of each row after which no chunk goes on: all but the last one, or before those the branch."""
        self.aside: dict[Job, tuple[int, int, int]] = {}
        """Prompts that were begun and wait for the one lane: the row of each in `_aside`, its `_done` and `_stops`."""
        self._turn = 0
        """Tokens that were processed since the prompt in the one lane has it."""
        self.at_branch: Callable[[Job, Lanes, int, int], None] = lambda *_: None
        """Called with a prompt, these lanes, its row and its tokens so far when its branch is reached."""

    @property
    def begun(self) -> list[Job]:
        """The prompts in the lanes and those that wait aside."""
        return [*self.active, *self.aside]

    @cached_property
    def _aside(self) -> Lanes:
        return Lanes(self.runtime, ASIDE, self.lanes.state.capacity)

    def make_room(self, job: Job) -> bool:
        """True if there is a lane for this prompt now. If there is only one, a prompt of another client that has had
        its turn is set aside for it."""
        if self.has_room:
            return True
        before = self.jobs[0]
        is_due = self._turn >= TURN and before is not None and before.client != job.client
        if len(self.jobs) > 1 or self.runtime.options.ranks.size > 1 or not is_due or len(self.aside) == ASIDE:
            return False
        assert before is not None
        to = min({*range(ASIDE)} - {row for row, _, _ in self.aside.values()})
        self.lanes.copy_row(0, to, min(self.used_slots(before), self.lanes.state.capacity), self._aside)
        self.aside[before], self.jobs[0] = (to, self._done[0], self._stops[0]), None
        return True

    def resume(self, job: Job) -> None:
        """A prompt that was set aside goes on."""
        row, self._done[0], self._stops[0] = self.aside.pop(job)
        self.jobs[0], job.row, self._turn = job, 0, 0
        self._aside.copy_row(row, 0, min(self.used_slots(job), self.lanes.state.capacity), self.lanes)

    def enter(self, job: Job, known: int, copy: CopySlots, branch: int = 0) -> None:
        """Begin with a prompt.

        copy: copies the keys and values of its first `known` tokens, if there are any. branch: tokens after which
        `at_branch` is called, more than `known`; 0 for none.
        """
        job.row = to = self.free_row()
        self.jobs[to], self._done[to], self._stops[to] = job, known, branch or len(job.prompt) - 1
        self._turn = 0
        self.lanes.reuse(to)
        self._begin(job, self.lanes, to, lengths=known)
        if known:
            copy(self.lanes, to)
        if branch:
            self.lanes.state.prompt_lengths[to].fill_(branch + 1)
        job.speculation.reused_prompt_tokens = known

    def _begin(self, job: Job, lanes: Lanes, row: int, **numbers: int) -> None:
        vocab = self.runtime.verify.vocab_size
        eos = [token for token in job.eos if 0 <= token < vocab]
        lanes.state.enter(row, job.prompt, eos, job.loaded.index, **numbers, **job.numbers())
        self.runtime.guard(lanes.all.drafter.enter, row, job.share_text, job.references)

    def process(self, job: Job, target: Lanes, to: int) -> None:
        """Have the model's own forward process a prompt with pictures, and copy it to row `to` of the lanes that
        decode."""
        past, features, offset = job.prepared.process(self.runtime.algorithm.plan.taps)
        lanes, done = self._one_lane, len(job.prompt) - 1
        state, session = lanes.state, lanes.all
        self._begin(job, lanes, 0, **({} if state.position_offsets is None else {"position_offsets": offset}))
        if features is not None and self.runtime.algorithm.remembers:
            sizes = [*chunks(done, session.steps.prefill_sizes, FIXED[self.runtime.device.type])]
            prefill_draft(session, features, past.padding, [done], sizes)
        state.fill(past, [done])
        job.row = 0
        self._propose(session, [job])
        self._copy(job, lanes, target, to)

    @cached_property
    def _one_lane(self) -> Lanes:
        """Lanes for prompts with pictures, one at a time."""
        return Lanes(self.runtime, 1, self.lanes.state.capacity)

    def step(self, waiting: int, decoding: int, round_seconds: float | None) -> list[Job]:
        """Process a chunk of every prompt, and propose the first trees of those that are done, which are returned.

        waiting, decoding: see `choose_size`. round_seconds: what rounds cost now; None if nobody has measured it.
        """
        self.compact()
        session = self.lanes.session(max(job.row for job in self.active) + 1)
        missing = [self._stops[job.row] - self._done[job.row] for job in self.active]
        if any(missing):
            if any(job.scores_prompt for job in self.active):
                size = self._score(session)
            else:
                size = self._chunk_size([tokens for tokens in missing if tokens], waiting, decoding, round_seconds)
                session.steps.prefill(size, self._max_kv_len(session, size))
            self._turn += size
            for job in self.active:
                self._done[job.row] = min(self._done[job.row] + size, self._stops[job.row])
                if self._done[job.row] == self._stops[job.row] < len(job.prompt) - 1:
                    self._leave_branch(job)
        ready = [job for job in self.active if self._done[job.row] == len(job.prompt) - 1]
        if ready:
            self._propose(session, ready)
        return ready

    def _leave_branch(self, job: Job) -> None:
        """A prompt that has reached its branch goes on to its end."""
        row = job.row
        self.at_branch(job, self.lanes, row, self._done[row])
        self.lanes.reuse(row)  # its states change in the next chunk
        self.lanes.state.prompt_lengths[row].fill_(len(job.prompt))
        self._stops[row] = len(job.prompt) - 1

    def _max_kv_len(self, session: Session, size: int) -> int:
        """Visible slots of a step over the next `size` tokens of every prompt."""
        return session.max_kv_len(max(self._done[job.row] for job in self.active) + size)

    def _score(self, session: Session) -> int:
        """Process a chunk of every prompt as rounds verify a chain of drafts, which gives the target's logits after
        each token; returns its size, that of the largest round.

        The logits of one chunk exist at a time. The logits after token i of a prompt tell the log-probability of token
        i + 1, so the prompt [5, 8, 3] has scores of 8 and 3.
        """
        state, size = session.state, max(self.runtime.sizes[-1], 2)
        begin, device = self._max_kv_len(session, size), state.tokens.device
        number = torch.arange(size, device=device).repeat(session.batch, 1)
        tokens = state.tokens.gather(1, (state.lengths[:, None] + number).clamp(max=state.capacity - 1))
        state.set_trees(tokens, number - 1, torch.full_like(number[:, 0], size), torch.zeros_like(number[:, 0]))
        logits, *features = session.steps.get(StepKind.LOOK, size)(begin)
        for job in self.active:
            done = self._done[job.row]
            known = job.prompt[done + 1 : done + 1 + size]
            if job.scores is not None and job.scores_prompt and known:
                job.scores.read_prompt(logits[job.row, : len(known)], known)
        state.kv.states.commit(number, (state.prompt_lengths - 1 - state.lengths).clamp(0, size))
        session.steps.get(StepKind.PREFILL)(size, begin, features)
        return size

    def _chunk_size(self, missing: list[int], waiting: int, decoding: int, round_seconds: float | None) -> int:
        """See `choose_size`. The first rank decides, because the others measure other times. Fixed chunks are those of
        the one prompt that a CPU processes at a time."""
        lanes, fixed = self.lanes, FIXED[self.runtime.device.type]
        if self.runtime.has_fixed_chunks:
            (tokens,) = missing
            return next(chunks(tokens, lanes.all.steps.prefill_sizes, fixed))  # guard: fixed-chunks
        is_measured = round_seconds is not None and all(lanes.prefill_seconds(width) for width in lanes.widths)

        def cost(prompts: int, size: int) -> float:
            width = lanes.width(prompts)
            if not is_measured:  # a chunk and a round read the weights once, and a chunk computes its tokens besides
                return fixed + width * size
            measured = lanes.prefill_seconds(width)
            largest = max(measured)  # of the steps that are captured; a larger one computes more of the same
            return measured.get(size) or measured[largest] * size / largest

        sizes = [size for size in lanes.all.steps.prefill_sizes if size.bit_count() == 1]  # few, for all may be timed
        round_cost = round_seconds if is_measured else fixed
        decide = partial(choose_size, missing, waiting, decoding, sizes, cost, round_cost)
        return self.runtime.options.ranks.lead(lambda: [decide()])[0]

    def used_slots(self, job: Job) -> int:
        return self._done[job.row] + self.runtime.algorithm.plan.lookahead_slots

    def moved(self, row: int, to: int) -> None:
        self._done[to], self._stops[to] = self._done[row], self._stops[row]

    def _propose(self, session, ready: list[Job]) -> None:
        session.steps.propose(session.max_kv_len(max(len(job.prompt) for job in (*self.active, *ready))))
        if not self.runtime.on_gpu:
            state = session.state
            for job in ready:
                job.count, job.hint = int(state.tree_count[job.row]), int(state.tree_hint[job.row])

    def move(self, job: Job, target: Lanes, to: int) -> None:
        """Copy a prompt that is done to row `to` of the lanes that decode."""
        self.jobs[job.row] = None
        self._copy(job, self.lanes, target, to)

    def _copy(self, job: Job, lanes: Lanes, target: Lanes, to: int) -> None:
        slots = len(job.prompt) + self.runtime.sizes[-1] + self.runtime.algorithm.plan.lookahead_slots
        lanes.copy_row(job.row, to, min(slots, lanes.state.capacity), target)
        job.row = to

    def leave(self, job: Job) -> None:
        """Give up a prompt."""
        lanes, row = self.lanes, job.row
        if job in self.aside:
            lanes, (row, _, _) = self._aside, self.aside.pop(job)
        else:
            self.jobs[row] = None
        lanes.all.drafter.leave(lanes.state, row, 0, False)
