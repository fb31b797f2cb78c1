"""A session: the buffers of one batch size, and the steps over them."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..cache import PAGE
from ..drafting import caches
from ..tree import MAX_NODES
from .prefill_chunks import SIZES
from .runtime import Runtime
from .state import State
from .steps import StepKind, Steps


class Session:
    """Everything for `batch` sequences of up to `capacity` tokens."""

    def __init__(self, runtime: Runtime, batch: int, capacity: int | None = None, larger: "Session | None" = None):
        """capacity: None gives `Runtime.capacity`. larger: a session whose first rows this one shares."""
        self.runtime, self.batch = runtime, batch
        self.capacity = capacity or runtime.capacity(batch)
        slots = PAGE if larger else self._slots(self.capacity)
        runtime.check_memory(batch, slots)
        self.drafter = runtime.algorithm.drafter(batch, slots)
        self.state = State(runtime.verify, batch, slots, runtime.device, runtime.algorithm.plan)
        if larger is not None:
            self.state.share(larger.state)
            self.drafter.share(larger.drafter)
        self.answers: list[tuple[list[int], list[int]]] = []
        """Prompt and answer of each row in the last call, which the drafter's cache has, too."""
        self.late = 0
        """Most tokens of these answers that the drafter is late by."""
        self.is_growing = False
        self.steps = Steps(runtime, self.state, self.drafter, larger and larger.steps)

    @property
    def texts(self) -> list[list[int]]:
        """Prompt and answer of each row in the last call."""
        return [prompt + answer for prompt, answer in self.answers]

    def _slots(self, tokens: int) -> int:
        """Slots for `tokens` tokens and for all that a step writes after them, in whole pages."""
        return -(-(tokens + MAX_NODES + SIZES[self.runtime.device.type][0]) // PAGE) * PAGE

    def max_kv_len(self, slots: int) -> int:
        """Visible slots of a step that needs the first `slots`, and the drafter's lookahead: whole pages, so that 100
        slots and 5 for the drafter give 128."""
        needed = slots + self.runtime.algorithm.plan.lookahead_slots
        return min(-(-needed // PAGE) * PAGE, self.state.capacity)

    @contextmanager
    def growing(self, tokens: int, used: int) -> Iterator[None]:
        """Make room for `tokens` tokens a sequence. Inside, steps may be built, on a GPU all anew; at the end the first
        `used` slots of every cache are copied."""
        slots = self._slots(tokens)
        self.runtime.check_memory(self.batch, slots, "max_new_tokens")
        if self.runtime.on_gpu:
            torch.cuda.synchronize(self.runtime.device)
        self.capacity, self.is_growing = tokens, True
        self.steps.grow()
        rows_of_keys = [self.state.kv, *caches(self.drafter)]
        before = [cache.resize(slots) for cache in rows_of_keys]
        self.state.resize(slots)
        self.drafter.resize(slots)
        if not used:
            self.answers = []
        yield
        for cache, tensors in zip(rows_of_keys, before):
            for new, old in zip(cache.tensors, tensors):
                new[:, :, :used] = old[:, :, :used]
        self.is_growing = False

    def prefill_draft(self, features: list[Tensor], padding: list[int], begins: list[int], sizes: list[int]) -> None:
        """Let only the draft process the first `begins` [B] tokens of each prompt, which the target has processed.

        features: see `Past`. padding: on the left of each row [B]. sizes: tokens of each step.
        """
        rows = [
            nn.utils.rnn.pad_sequence(
                [values[pad : pad + begin] for values, pad, begin in zip(feature, padding, begins)], batch_first=True
            )
            for feature in features
        ]  # without padding on the left
        rows = [nn.functional.pad(row, (0, 0, 0, sum(sizes) - row.shape[1])) for row in rows]
        self.state.lengths.zero_()
        done = 0
        for size in sizes:
            chunk = [row[:, done : done + size].contiguous() for row in rows]
            self.steps.get(StepKind.PREFILL)(size, self.max_kv_len(done + size), chunk)
            done += size
