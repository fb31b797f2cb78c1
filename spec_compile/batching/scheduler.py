"""Between two rounds requests leave, wait, have their prompts processed, and enter, as far as there are pages."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import count

from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from ..cache import PAGE
from ..capture.loras import BASE, NO_ADAPTER, Loras
from ..capture.weights import WeightValues
from ..errors import log
from ..parallel.messages import pack, unpack
from ..runtime.compiled_steps import build_compiled
from ..runtime.engine import Engine
from ..runtime.runtime import Runtime
from ..runtime.verify.sample import RowSettings
from .decoding import DecodeRows
from .pages import OutOfPages, Pages, Sizes, choose_sizes, row_pages, wanted_slots, wanted_tokens
from .prefill import PrefillRows
from .prefix_cache import PrefixCache
from .sequence import BatchSequence, FollowerRequest, FollowerSequence, RoundChange

KEPT = 256
"""Tokens that an answer has gained whenever its text so far is kept for others. A text is read anew for that."""


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
        has_room = {BASE: True}
        passed = self._passed = list[BatchSequence]()
        for sequence in waiting:
            adapter = sequence.request.adapter or BASE
            if adapter not in has_room:
                has_room[adapter] = self._loras is not None and self._loras.has_room(adapter)
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
    """A request waits until a row and pages for its prompt are free; then its prompt is processed in chunks, and its
    row joins the next round. Clients take turns: a free row goes to the one with the fewest rows, and then to the one
    that has had no turn for the longest time. Within a client it is first come, first served. An error while a request
    enters, decodes or leaves ends that request only.

    A row takes pages as its text grows. If none is free, the row that was let in last is given up: its request waits in
    front of all others, and comes back with its text so far as a prompt. So the first one always goes on.
    """

    def __init__(self, runtime: Runtime, sizes: Sizes, weights: WeightValues, adapters: LoraSlots):
        """weights: tell whether keys and values of earlier requests still hold."""
        self.adapters = adapters
        self.slots, self.capacity = sizes.slots, sizes.capacity
        self.waiting: deque[BatchSequence] = deque()
        """Any thread may append to it."""
        self.pages = Pages(sizes.pages)
        self.decoder = DecodeRows(runtime, sizes.slots, sizes.capacity, sizes.pages)
        self.prefill = PrefillRows(runtime, sizes.prefill_rows, sizes.capacity, self.decoder, sizes.piece)
        self.prefixes = PrefixCache(runtime, self.decoder, weights, self.pages)
        self.prefill.at_branch = self.prefixes.keep
        self.ranks, self._runtime = runtime.options.ranks, runtime
        self.wanted: tuple = ()
        """As asked for: slots, of which memory may have allowed fewer, and three numbers of the config."""
        self.preemptions = 0
        self._turns: dict[str, int] = {}
        """By client the number of its last event: it came, had a turn, or left a row."""
        self._numbers = count(1)
        self._short: BatchSequence | None = None
        """The request that waits for pages, until some are given back."""
        self.check: Callable[[], None] = lambda: None
        """Raises if the model has changed."""
        self._unchecked: list[BatchSequence] = []
        """Requests that have entered since the last `check`."""
        self._news: list[BatchSequence] = []
        """Requests that have gained tokens or are over since the last step began."""
        self._told = RoundChange()
        """Told the other ranks, which repeat it before the next round."""

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.begun or len(self.decoder.pipeline))

    @property
    def begun(self) -> list[BatchSequence]:
        """The requests that have a row."""
        return [*self.prefill.begun, *self.decoder.active]

    @property
    def sequences(self) -> list[BatchSequence]:
        return [*self.waiting, *self.begun]

    def step(self) -> list[BatchSequence]:
        """Run a round, and what comes before it; returns the requests that gained tokens or are over."""
        # Requests leave and enter.
        self._news = []
        for sequence in self.prefill.owned:
            try:
                self.prefill.own.go_on()
            except Exception as error:  # of the model's own forward
                self.drop([sequence], error)
        self.prefill.compact()
        if self.ranks.size == 1:
            self._change()
        else:
            change = unpack(self.ranks.lead(lambda: pack(self._change())), RoundChange, "the requests of rank 0")
            if not self.ranks.leads:
                self._follow(change)

        # Prompts that do not ride along with rounds get a chunk each.
        if not self.prefill.active:
            self.decoder.compact()
        elif not self.decoder.pieces(self.prefill):
            decoding = len(self.decoder.active)
            waiting = min(len(self.waiting), self.slots - decoding - len(self.prefill.begun))
            self.prefill.step(waiting, decoding, self.decoder.round_seconds)
            self._join()

        # A round.
        self._launch()
        self._check_model()
        if len(self.decoder.pipeline):
            self._news += self.decoder.collect()
        for sequence in self._news:
            if sequence.is_over:
                self._free(sequence)

        # Long answers are kept while their rows go on; states are kept only at ends.
        for sequence in [] if self._runtime.verify.recurrences else self.decoder.active:
            known = self.decoder.known(sequence)
            if known >= sequence.kept + KEPT:
                self.prefixes.keep(sequence, known, self.decoder)
        return self._news

    def _launch(self) -> None:
        """Begin as many rounds as may be in flight. Prompts that are done by one join the next."""
        if self.prefill.rides:
            free = self.slots - len(self.begun)
            self.prefill.backlog = sum(sequence.length for sequence in [*self.waiting][:free])
        while self.decoder.launch(self.prefill):
            self._join()

    def _join(self) -> None:
        """Prompts that are done join the rows that decode."""
        for sequence in self.prefill.ready(drafts=self.decoder.pipeline.pending > 1):
            try:
                if not (sequence.tokens and self._runtime.verify.clamps_prompts):  # what it is has states of an answer
                    self.prefixes.keep(sequence, sequence.length, self.prefill)
                self.prefill.shift(sequence, self.decoder.free[0], self.decoder)
                self.decoder.enter(sequence)
            except Exception as error:
                self.drop([sequence], error)

    def warmup(self, settings: RowSettings | None = None) -> None:
        """Compile and capture what rounds and prompts of all widths need.

        settings: how tokens are drawn by default; None if they are not. Rounds that draw by other kinds of settings are
        captured when a request comes, and take no prompts with them.
        """
        self.decoder.merge(settings)

        def build() -> None:
            for width in self.prefill.widths:
                session = self.prefill.session(width)
                session.make([*session.prompt_steps(), *session.proposal_steps()])
            for width in self.decoder.widths:
                self.decoder.session(width).make(self.decoder.steps(width, self.prefill), is_ahead=True)

        build_compiled(self._runtime, build)

    def clear(self, error: BaseException) -> None:
        self.drop(self.sequences, error)
        while len(self.decoder.pipeline):
            self.decoder.collect()

    def drop(self, sequences: list[BatchSequence], error: BaseException | None = None) -> None:
        """End these requests, as cancelled or by an error."""
        for sequence in sequences:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            self._free(sequence)
            sequence.finish("cancelled") if error is None else sequence.fail(error)
            self._told.left.append(sequence.request_id)
        self._news += sequences

    def _free(self, sequence: BatchSequence) -> None:
        """Take the row of a request that is over, if it has one, and its adapter."""
        self._turns[sequence.request.client] = next(self._numbers)
        self._take_row(sequence)  # its text is kept as one of its adapter
        self.adapters.release(sequence)  # guard: adapters-are-freed

    def _take_row(self, sequence: BatchSequence, is_over: bool = True) -> None:
        """Take the row of a request, if it has one, and its pages.

        Rounds in flight may still write to these pages, after what is kept of them, which the host knows. Whoever gets
        them writes later, because all launches are in one stream.
        """
        try:
            if sequence in self.prefill.begun:
                self.prefill.leave(sequence)
                self.prefixes.keep(sequence, self.prefill.known(sequence), self.prefill)
            elif sequence in self.decoder.sequences:
                self.decoder.leave(sequence, is_over)
                self.prefixes.keep(sequence, sequence.length - self.decoder.late, self.decoder)
        except Exception:  # of the drafter: the row is free, and the answer is what it is
            log.exception("request %s: its row was left with an error", sequence.request_id)
        finally:
            if self.ranks.leads:
                self.pages.release(sequence.pages)
            sequence.pages, sequence.kept, self._short = [], 0, None

    def _check_model(self) -> None:
        """Let requests that have entered fail in their first round if the model has changed."""
        try:
            if self._unchecked:
                self.check()
        except Exception as error:
            for sequence in self._unchecked:
                sequence.failure = error
        self._unchecked.clear()

    def _change(self) -> RoundChange:
        """Give pages to rows that grow, let cancelled requests leave, and others enter as far as there are rows and
        pages. Returns what the other ranks have to repeat."""
        # Rows that are there come before those that enter.
        self._told = RoundChange()
        self._grow()
        if self.waiting and self._runtime.on_gpu and self.ranks.size == 1:
            self._launch()  # rounds to compute while the host lets requests in
        self.drop([sequence for sequence in self.sequences if sequence.is_cancelled])
        self._admit()
        return self._told

    def _follow(self, change: RoundChange) -> None:
        """Repeat the change of the first rank."""
        by_name = {sequence.request_id: sequence for sequence in self.sequences}
        for name in change.preempted:
            self._take_row(by_name[name], is_over=False)
        for name, pages in change.grown.items():
            by_name[name].pages += pages
        self.decoder.place({by_name[name]: pages for name, pages in change.grown.items()})
        self.drop([sequence for sequence in self.sequences if sequence.request_id in change.left])
        for told in change.entered:
            sequence = FollowerSequence(told)
            if told.partial is not None:
                self.decoder.copy_page(told.partial, sequence.pages[told.known // PAGE])
            self.prefill.enter(sequence, told.known)

    # --- pages

    def _grow(self) -> None:
        """Give the rows that decode the pages that they may write until the next step, in the order in which they were
        let in. If too few are free, rows wait for the rounds in flight, and then others give up theirs."""
        grown: dict[BatchSequence, list[int]] = {}
        for sequence, missing in sorted(self.decoder.lacking(), key=lambda each: each[0].turn):
            if sequence in self.waiting:  # its row was taken
                continue
            if not self._make_free(missing, sequence):
                break
            grown[sequence] = self.pages.take(missing)
            sequence.pages += grown[sequence]
        self.decoder.place(grown)
        self._told.grown = {sequence.request_id: pages for sequence, pages in grown.items()}

    def _make_free(self, count: int, sequence: BatchSequence) -> bool:
        """True if `count` pages are free for a row that decodes. Rows that were let in later are given up for it. While
        rounds are in flight, no row is taken, because their tokens would be lost."""
        while self.pages.free < count:
            if len(self.decoder.pipeline):
                return False
            # The row that was let in last; one without others can never grow.
            last = max(self.begun, key=lambda each: each.turn)
            if last is sequence and len(self.begun) == 1:
                self.drop([sequence], self._too_long(sequence, len(sequence.pages) + count))
                return False
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _preempt(self, sequence: BatchSequence) -> None:
        """Take the row of a request, which waits in front of all others until it comes back."""
        self._take_row(sequence, is_over=False)
        sequence.row, sequence.count, sequence.confidence = -1, None, None
        self.waiting.appendleft(sequence)
        self._told.preempted.append(sequence.request_id)
        self.preemptions += 1

    def _too_long(self, sequence: BatchSequence, pages: int) -> OutOfPages:
        return OutOfPages(
            f"a text of {sequence.length + 1} tokens takes {pages} pages of {PAGE} tokens with its next rounds, and "
            f"there are {self.pages.usable}; ask for more by num_blocks or max_memory_percent"
        )

    # --- whose turn it is

    def _admit(self) -> None:
        """Begin with the prompts of waiting requests, as far as there are rows and pages."""
        self.prefixes.distrusts_weights |= not self.begun
        while (sequence := self._next()) is not None and self.prefill.make_room(sequence):
            if sequence in self.prefill.aside:
                self._turns[sequence.request.client] = next(self._numbers)
                self.prefill.resume(sequence)
                continue
            try:
                # Its adapter decides which kept prefixes serve it.
                if sequence.loaded is NO_ADAPTER:
                    self.adapters.take(sequence)
                needed = row_pages(self._runtime, sequence.length + 1)
                known = self.prefixes.admit(sequence, needed)
                if known is None and not self.begun:
                    raise self._too_long(sequence, needed)
                if known is None:
                    self._short = sequence
                    continue
                self.waiting.remove(sequence)
                self._turns[sequence.request.client] = next(self._numbers)
                if not sequence.turn:
                    sequence.admit(next(self._numbers))
                    sequence.speculation.reused_prompt_tokens = known.tokens
                self._unchecked.append(sequence)
                if (own := sequence.request.process) is not None and known.tokens < own.until:
                    self.prefill.own.process(sequence, known.tokens)
                    continue
                self.prefill.enter(sequence, known.tokens, known.branch, known.states)
                self._told.entered.append(FollowerRequest.of(sequence, known.tokens, known.partial))
            except Exception as error:  # its own processor, criterion or picture failed
                self.drop([sequence], error)

    def _next(self) -> BatchSequence | None:
        """The request whose prompt begins or goes on next, once a row is free for it; None if there is none."""
        if self.prefill.is_full or not (self.waiting or self.prefill.aside):
            return None
        # The client with the fewest rows is first, then the one whose last event is the longest ago.
        begun, waiting = self.begun, [*self.waiting]
        clients = dict.fromkeys(sequence.request.client for sequence in (*begun, *waiting))
        self._turns = {client: self._turns.get(client) or next(self._numbers) for client in clients}
        rows = Counter(sequence.request.client for sequence in begun)

        def order(sequence: BatchSequence) -> tuple[int, int]:
            rows[sequence.request.client] += 1
            return rows[sequence.request.client], self._turns[sequence.request.client]

        sequences = self.prefill.aside
        if len(begun) < self.slots:
            first = next((sequence for sequence in waiting if sequence.turn), None)  # its row was taken
            first = first or self.adapters.next(sorted(waiting, key=order))  # guard: row-turns
            sequences += [] if first in (None, self._short) else [first]
        return min(sequences, key=lambda sequence: self._turns[sequence.request.client], default=None)


def take_scheduler(engine: Engine, config: ContinuousBatchingConfig, hints: WorkloadHints | None = None) -> Scheduler:
    """The scheduler that an earlier manager has left, if it has enough slots and as many pages as are asked for, or a
    new one."""
    runtime, slots = engine.runtime, wanted_slots(engine.runtime, config, hints)
    memory = wanted_tokens(config), config.max_memory_percent, config.max_batch_tokens
    idle, engine.idle_batch = engine.idle_batch, None
    if idle is not None and idle.wanted[1:] == memory:
        if slots in (idle.slots, idle.wanted[0]) or (config.max_requests_per_batch is None and idle.slots > slots):
            return idle
    del idle  # its memory first
    sizes = Sizes(*runtime.options.ranks.lead(lambda: [*choose_sizes(runtime, config, hints)]))
    scheduler = Scheduler(runtime, sizes, WeightValues(engine.weights.slots), LoraSlots(engine.loras, sizes.slots))
    scheduler.wanted = slots, *memory
    engine.batches.add(scheduler)
    return scheduler
