"""Between two rounds requests leave, wait, have their prompts processed, and enter. How many there is memory for."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import count

import torch
from transformers.generation.continuous_batching.utils import WorkloadHints

from ..capture.loras import BASE, NO_ADAPTER, Loras
from ..capture.weights import WeightValues
from ..parallel.messages import pack, unpack
from ..runtime.compiled_steps import build_compiled
from ..runtime.engine import Engine
from ..runtime.runtime import PrefixBudget, Runtime
from ..runtime.session import StepKind
from ..runtime.state import MOST_LATE
from .decoding import DecodeRows
from .prefill import PREFILL_ROWS, PrefillRows
from .prefix_cache import PrefixIndex
from .ranks import FollowerRequest, FollowerSequence, RoundChange
from .sequence import BatchSequence

log = logging.getLogger("spec_compile")

MOST = {"cpu": 16, "cuda": 64}
"""Slots unless the user says how many: beyond, rounds cost arithmetic."""
SHARE = 0.8
"""Share of a GPU's free memory that slots and rows of prefill may take."""
PREFILL_SHARE = 0.05
"""Share of that for rows of prefill beyond `FEWEST_PREFILL_ROWS`. If a row takes more, the model is so large that few
prompts keep the GPU busy."""
FEWEST_PREFILL_ROWS = 4


class LoraSlots:
    """Gives requests their LoRA adapters, from their admission to their end, and says whose turn it is.

    A request waits until its adapter has a slot, and others go past it, but at most `most` that have an adapter
    themselves. After that only requests without an adapter do, so that a slot becomes free. With one slot and most = 2,
    requests for the adapters a b a a a are let in as a a a b a.
    """

    def __init__(self, loras: Loras | None, most: int):
        """loras: the adapters of the model; None: requests choose none."""
        self._loras, self._most = loras, most
        self._passed: list[BatchSequence] = []
        """Requests that the one that `next` has found goes past."""

    def next(self, waiting: Sequence[BatchSequence]) -> BatchSequence | None:
        """The first request that can be let in; None if there is none."""
        if self._loras is None:
            return waiting[0] if waiting else None
        has_room = {BASE: True}
        passed = self._passed = list[BatchSequence]()
        for sequence in waiting:
            adapter = sequence.request.adapter or BASE
            if adapter not in has_room:
                has_room[adapter] = self._loras.has_room(adapter)
            is_due = any(other.passed >= self._most for other in passed)
            if has_room[adapter] and (adapter == BASE or not is_due):
                return sequence
            passed.append(sequence)
        return None

    def take(self, sequence: BatchSequence) -> None:
        """Give a request that `next` has found its adapter; see `Loras.take` for what is raised."""
        if self._loras is not None:
            adapter = sequence.request.adapter or BASE
            for other in self._passed:
                other.passed += adapter != BASE
            sequence.loaded = self._loras.take(adapter)

    def release(self, sequence: BatchSequence) -> None:
        if self._loras is not None:
            self._loras.release(sequence.loaded)
            sequence.loaded = NO_ADAPTER


class Scheduler:
    """A request waits until a row is free for it; then its prompt is processed in chunks, at most one between two
    rounds, and its row joins the next round. Clients take turns: a free row goes to the one with the fewest rows, and
    then to the one that has had no turn for the longest time. Within a client it is first come, first served. An error
    while a request enters, decodes or leaves ends that request only."""

    def __init__(
        self, runtime: Runtime, slots: int, capacity: int, prefill_rows: int, weights: WeightValues,
        adapters: LoraSlots,
    ):  # fmt: skip
        """slots, capacity: requests that decode at once, and tokens that each may have.
        prefill_rows: prompts that are processed at once.
        weights: tell whether keys and values of earlier requests still hold."""
        self.adapters = adapters
        self.slots, self.capacity = slots, capacity
        self.waiting: deque[BatchSequence] = deque()
        """Any thread may append to it."""
        self.prefill = PrefillRows(runtime, prefill_rows, capacity)
        self.decoder = DecodeRows(runtime, slots, capacity)
        self.prefixes = PrefixIndex(runtime, self.decoder, weights)
        self.prefill.at_branch = self.prefixes.keep_prompt
        self.ranks = runtime.options.ranks
        self._turns: dict[str, int] = {}
        """By client the number of its last event: it came, had a turn, or left a row."""
        self._numbers = count(1)
        self.check: Callable[[], None] = lambda: None
        """Raises if the model has changed."""
        self._unchecked: list[BatchSequence] = []
        """Requests that have entered since the last `check`."""

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting) or bool(self.prefill.begun) or self.decoder.is_busy

    @property
    def sequences(self) -> list[BatchSequence]:
        return [*self.waiting, *self.prefill.begun, *self.decoder.active]

    def step(self) -> list[BatchSequence]:
        """Run a round, and what comes before it; returns the requests that gained tokens or are over."""
        # Requests leave and enter.
        news: list[BatchSequence] = []
        if self.ranks.size == 1:
            if self.waiting and self.prefill.runtime.on_gpu:  # rounds to compute while the host lets requests in
                self.decoder.launch()
            self._change(news)
        else:
            change = unpack(self.ranks.lead(lambda: pack(self._change(news))), RoundChange, "the requests of rank 0")
            if not self.ranks.leads:  # repeat the change
                self.drop([each for each in self.sequences if each.request_id in change.left])
                for told in change.entered:
                    copy = self.prefixes.copy_row(told.row, told.known)
                    self.prefill.enter(FollowerSequence(told), told.known, copy)

        # Prompts get a chunk each, and those that are done join the rows that decode.
        if self.prefill.active:
            decoding = len(self.decoder.active)
            waiting = min(len(self.waiting), self.slots - decoding - len(self.prefill.begun))
            for sequence in self.prefill.step(waiting, decoding, self.decoder.round_seconds):
                try:
                    self.prefixes.keep_prompt(sequence, self.prefill, sequence.row, len(sequence.prompt) - 1)
                    self.prefill.move(sequence, self.decoder, self.decoder.free_row())
                    self.decoder.enter(sequence)
                except Exception as error:
                    news += self.drop([sequence], error)
        else:
            self.decoder.compact()

        # A round.
        self.decoder.launch()
        self._check_model()
        if len(self.decoder.pipeline):
            news += self.decoder.collect()
        for sequence in news:
            if sequence.is_over:
                self._free(sequence)
        return news

    def warmup(self) -> None:
        """Compile and capture what rounds and prompts of all widths need."""
        build_compiled(self.prefill.runtime, self._build)

    def _build(self) -> None:
        for width in self.prefill.widths:
            session = self.prefill.session(width)
            session.make([*session.prompt_steps(), *session.proposal_steps()])
        for width in self.decoder.widths:
            session = self.decoder.session(width)
            rounds = [(StepKind.ROUND, nodes) for nodes in session.policies[StepKind.ROUND].sizes]
            session.make([*rounds, *(session.proposal_steps(MOST_LATE) if self.decoder.pipeline.tree_size else [])])

    def clear(self, error: BaseException) -> None:
        self.drop(self.sequences, error)
        while len(self.decoder.pipeline):
            self.decoder.collect()

    def drop(self, sequences: list[BatchSequence], error: BaseException | None = None) -> list[BatchSequence]:
        """End these requests, as cancelled or by an error."""
        for sequence in sequences:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            self._free(sequence)
            sequence.finish("cancelled") if error is None else sequence.fail(error)
        return sequences

    def _free(self, sequence: BatchSequence) -> None:
        """Take the row of a request that is over, if it has one, and its adapter."""
        self.adapters.release(sequence)  # guard: adapters-are-freed
        self._turns[sequence.request.client] = next(self._numbers)
        row = sequence.row
        try:
            if sequence in self.prefill.begun:
                self.prefill.leave(sequence)
            elif sequence in self.decoder.sequences:
                self.decoder.leave(sequence)
                self.prefixes.keep(row)
        except Exception:  # of the drafter: the row is free, and the answer is what it is
            log.exception("request %s: its row was left with an error", sequence.request_id)

    def _check_model(self) -> None:
        """Let requests that have entered fail in their first round if the model has changed. A GPU computes in the
        time that this takes."""
        if self._unchecked:
            try:
                self.check()
            except Exception as error:
                for sequence in self._unchecked:
                    sequence.failure = error
            self._unchecked.clear()

    def _change(self, news: list[BatchSequence]) -> RoundChange:
        """Let cancelled requests leave, and others enter as far as there are rows. Requests that are over go to `news`.

        Returns who has left and who has entered, for the other ranks.
        """
        cancelled = [sequence for sequence in self.sequences if sequence.is_cancelled]
        news += self.drop(cancelled)
        return RoundChange([sequence.request_id for sequence in cancelled], self._admit(news))

    def _admit(self, news: list[BatchSequence]) -> list[FollowerRequest]:
        """Begin with the prompts of waiting requests, as far as there are rows. Requests that fail go to `news`."""
        entered: list[FollowerRequest] = []
        self.prefixes.distrusts_weights |= not (self.prefill.begun or self.decoder.active)
        while (sequence := self._next()) is not None and self.prefill.make_room(sequence):
            self._turns[sequence.request.client] = next(self._numbers)
            if sequence in self.prefill.aside:
                self.prefill.resume(sequence)
                continue
            self.waiting.remove(sequence)
            try:
                self.adapters.take(sequence)
                sequence.admit()
                self._unchecked.append(sequence)
                row, known, copy, branch = self.prefixes.find(sequence)
                sequence.weights = self.decoder.texts.weights
                if (own := sequence.request.process) is not None:
                    self.prefill.process(sequence, own, self.decoder, self.decoder.free_row())
                    self.decoder.enter(sequence)
                else:
                    self.prefill.enter(sequence, known, copy, branch)
                    entered.append(FollowerRequest.of(sequence, row, known))
            except Exception as error:  # its own processor, criterion or picture failed
                news += self.drop([sequence], error)
        return entered

    def _next(self) -> BatchSequence | None:
        """The request whose prompt begins or goes on next, once a row is free for it; None if there is none."""
        if not (self.waiting or self.prefill.aside):
            return None
        # The client with the fewest rows is first, then the one whose last event is the longest ago.
        begun, waiting = [*self.prefill.begun, *self.decoder.active], [*self.waiting]
        clients = dict.fromkeys(sequence.request.client for sequence in (*begun, *waiting))
        self._turns = {client: self._turns.get(client) or next(self._numbers) for client in clients}
        rows = Counter(sequence.request.client for sequence in begun)

        def order(sequence: BatchSequence) -> tuple[int, int]:
            rows[sequence.request.client] += 1
            return rows[sequence.request.client], self._turns[sequence.request.client]

        first = self.adapters.next(sorted(waiting, key=order)) if len(begun) < self.slots else None  # guard: row-turns
        sequences = [*self.prefill.aside, *([] if first is None else [first])]
        return min(sequences, key=lambda sequence: self._turns[sequence.request.client], default=None)


def take_scheduler(engine: Engine, requested: int | None, hints: WorkloadHints | None = None) -> Scheduler:
    """The scheduler that an earlier manager has left, if it has enough slots, or a new one.

    requested, hints: see `choose_slots`.
    """
    ranks = engine.runtime.options.ranks
    slots, capacity, prefill_rows = ranks.lead(lambda: choose_slots(engine.runtime, requested, hints))
    idle, engine.idle_batch = engine.idle_batch, None
    if idle is not None and (idle.slots == slots or (requested is None and idle.slots > slots)):
        return idle
    del idle  # its memory first
    weights, adapters = WeightValues(engine.weights.slots), LoraSlots(engine.loras, slots)
    scheduler = Scheduler(engine.runtime, slots, capacity, prefill_rows, weights, adapters)
    engine.batches.add(scheduler)
    return scheduler


def choose_slots(runtime: Runtime, requested: int | None, hints: WorkloadHints | None = None) -> tuple[int, int, int]:
    """Slots, tokens of each, and prompts that are processed at once.

    requested: slots that the user asks for; None leaves it to the memory.
    Raises ValueError if `requested` is below 1.
    """
    if requested is not None and requested < 1:
        raise ValueError(f"max_requests_per_batch: expected at least 1, got {requested}")
    slots = requested or MOST[runtime.device.type]
    if requested is None and hints is not None and hints.num_requests:
        slots = min(slots, 1 << (hints.num_requests - 1).bit_length())
    capacity, prefill_rows = runtime.capacity(slots), PREFILL_ROWS[runtime.device.type]
    if runtime.on_gpu:
        prefixes = PrefixBudget.of(runtime).device
        free = SHARE * torch.cuda.mem_get_info(runtime.device)[0] - prefixes
        row_bytes = runtime.token_bytes * (capacity + 2048) + runtime.verify.row_bytes
        if prefixes and free < row_bytes:
            raise ValueError(
                f"prefix_cache_bytes: {prefixes / 1e9:.2f} GB leave no memory for a row of {row_bytes / 1e9:.2f} GB; "
                "ask for less, or use prefix_cache_host_bytes"
            )
        prefill_rows = min(prefill_rows, max(FEWEST_PREFILL_ROWS, int(PREFILL_SHARE * free / row_bytes)))
        if requested is None:
            slots = max(1, min(slots, int(free / row_bytes) - prefill_rows))
    return slots, capacity, min(prefill_rows, slots)
