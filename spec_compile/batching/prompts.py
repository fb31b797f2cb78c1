"""Prompts that are processed in chunks beside the rounds of other requests, in lanes of their own.

A prompt never touches the rows that decode. When it is done, its row is copied to one of them.
"""

from functools import cached_property

import torch

from ..cache import PAGE
from ..runtime.own_prefill import prefill_draft
from ..runtime.prefill_chunks import FIXED, chunks
from ..runtime.runtime import Runtime
from .job import Job
from .lanes import Lanes

ROWS = {"cpu": 1, "cuda": 4}
"""Prompts that are processed together: on a CPU their cost adds up, on a GPU the weights are read once for all."""
BESIDE = {"cpu": 32, "cuda": 128}
"""Tokens of each prompt that a chunk may have while other requests decode. On a GPU such a chunk takes about as long as
a round."""


class Prompts:
    """The requests whose prompts are under way."""

    def __init__(self, runtime: Runtime, rows: int, capacity: int):
        self.runtime = runtime
        self.lanes = Lanes(runtime, rows, capacity)
        self.jobs: list[Job | None] = [None] * rows
        self._done = [0] * rows
        """Tokens of each row whose keys and values are known."""

    @property
    def active(self) -> list[Job]:
        return [job for job in self.jobs if job is not None]

    @property
    def has_room(self) -> bool:
        return None in self.jobs

    def enter(self, job: Job, source: Lanes, row: int, known: int) -> None:
        """Begin with a prompt. Row `row` of `source` has keys and values of its first `known` tokens."""
        job.row = to = self.jobs.index(None)
        self.jobs[to], self._done[to] = job, known
        self._begin(job, self.lanes, to, lengths=known)
        if known:
            source.copy_slots(row, to, known, self.lanes)
        job.speculation.reused_prompt_tokens = known

    def _begin(self, job: Job, lanes: Lanes, row: int, **numbers: int) -> None:
        ids = torch.tensor(job.prompt)
        if self.runtime.on_gpu:
            ids = ids.pin_memory()
        vocab = self.runtime.verify.vocab_size
        eos = [token for token in job.eos if 0 <= token < vocab]
        lanes.state.enter(row, ids, eos, **numbers, **job.numbers())
        lanes.all.drafter.enter(row, job.share_text)

    def process(self, job: Job, target: Lanes, to: int) -> None:
        """Have the model's own forward process a prompt with pictures, and copy it to row `to` of the lanes that
        decode."""
        past, features, offset = job.prepared.process(self.runtime.algorithm.plan.taps)
        lanes, done = self._one_lane, len(job.prompt) - 1
        state, session = lanes.state, lanes.all
        self._begin(job, lanes, 0, **({} if state.position_offsets is None else {"position_offsets": offset}))
        if features is not None and self.runtime.algorithm.remembers:
            sizes = [*chunks(done, session.prefill_sizes, FIXED[self.runtime.device.type])]
            prefill_draft(session, features, past.padding, [done], sizes, self._max_kv_len)
        state.fill(past, [done])
        job.row = 0
        self._propose(session, [job])
        self._copy(job, lanes, target, to)

    @cached_property
    def _one_lane(self) -> Lanes:
        """Of prompts with pictures, one at a time."""
        return Lanes(self.runtime, 1, self.lanes.state.capacity)

    def step(self, others_decode: bool) -> list[Job]:
        """Process a chunk of every prompt, and propose the first trees of those that are done, which are returned."""
        missing = {job: len(job.prompt) - 1 - self._done[job.row] for job in self.active}
        sizes = self.lanes.all.prefill_sizes
        if others_decode:
            sizes = [size for size in sizes if size <= BESIDE[self.runtime.device.type]] or sizes[-1:]
        session = self.lanes.session(max(job.row for job in missing) + 1)
        needed = min((tokens for tokens in missing.values() if tokens > 0), default=0)
        if needed:
            size = min((size for size in sizes if size >= needed), default=sizes[0])
            session.prefill(size, self._max_kv_len(max(self._done[job.row] for job in missing) + size))
            for job in missing:
                self._done[job.row] = min(self._done[job.row] + size, len(job.prompt) - 1)
        ready = [job for job in missing if self._done[job.row] == len(job.prompt) - 1]
        if ready:
            self._propose(session, ready)
        return ready

    def _propose(self, session, ready: list[Job]) -> None:
        session.propose(self._max_kv_len(max(len(job.prompt) for job in (*self.active, *ready))))
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

    def drop(self, job: Job) -> None:
        """Give up a prompt."""
        self.lanes.all.drafter.leave(self.lanes.state, job.row, 0, False)
        self.jobs[job.row] = None

    def _max_kv_len(self, slots: int) -> int:
        needed = slots + self.runtime.algorithm.plan.lookahead_slots
        return min(-(-needed // PAGE) * PAGE, self.lanes.state.capacity)
