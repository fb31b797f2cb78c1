"""Prompts that are processed in chunks beside the rounds of other requests, in lanes of their own.

A prompt never touches the rows that decode. When it is done, its row is copied to one of them.
"""

import torch

from ..cache import PAGE
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
        ids = torch.tensor(job.prompt)
        if self.runtime.on_gpu:
            ids = ids.pin_memory()
        vocab = self.runtime.verify.vocab_size
        eos = [token for token in job.eos if 0 <= token < vocab]
        self.lanes.state.enter(to, ids, eos, lengths=known, **job.numbers())
        self.lanes.all.drafter.enter(to, job.share_text)
        if known:
            source.copy_slots(row, to, known, self.lanes)
        job.speculation.reused_prompt_tokens = known

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
        session.propose(self._max_kv_len(max(len(job.prompt) for job in self.active)))
        if not self.runtime.on_gpu:
            state = session.state
            for job in ready:
                job.count, job.hint = int(state.tree_count[job.row]), int(state.tree_hint[job.row])

    def move(self, job: Job, target: Lanes, to: int) -> None:
        """Copy a prompt that is done to row `to` of the lanes that decode."""
        slots = len(job.prompt) + self.runtime.sizes[-1] + self.runtime.algorithm.plan.lookahead_slots
        self.lanes.copy_row(job.row, to, min(slots, self.lanes.state.capacity), target)
        self.jobs[job.row] = None
        job.row = to

    def drop(self, job: Job) -> None:
        """Give up a prompt."""
        self.lanes.all.drafter.leave(self.lanes.state, job.row, 0, False)
        self.jobs[job.row] = None

    def _max_kv_len(self, slots: int) -> int:
        needed = slots + self.runtime.algorithm.plan.lookahead_slots
        return min(-(-needed // PAGE) * PAGE, self.lanes.state.capacity)
