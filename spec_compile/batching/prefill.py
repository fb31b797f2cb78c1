"""Prompts are processed along with the rounds of other requests or between them, in rows of a cache that only they use.
When a prompt is done, its row moves to one of those that decode.
"""

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch

from ..runtime.round import STEP_COST, chunks
from ..runtime.runtime import Runtime
from ..runtime.session import MixedKind, Piece, Session, StepKind
from ..runtime.verify.sample import DrawInRound
from ..tree import MAX_NODES
from .rows import Rows
from .sequence import BatchSequence

PREFILL_ROWS = {"cpu": 1, "cuda": 16}
"""Prompts that are processed together at most: on a CPU their cost adds up, on a GPU they share reads of weights."""
TURN, ASIDE = 256, 8
"""Where there is one row for prompts: tokens of a prompt after which one of another client goes on, and prompts that
may wait for that."""
ABOUT = 1.5
"""A chunk that takes at most this many times as long as a round counts as one that takes as long."""
STEPS_OF_TOKENS = (256, 512, 1024)
"""Tokens of a step that holds a round and a piece of prompts: what products compute at once. 576 rows take as long as
768, and 512 about 0.6 of that."""
COMMON_STEP, BACKLOG = 512, 2
"""A step has more tokens than `COMMON_STEP`, and no drafts, only while prompts that may begin need `BACKLOG` of the
largest steps: rows that decode wait 1.8 times as long for 1,024 tokens, and prompts take 0.86 of the time."""
SLICE = 32
"""Tokens of a slice at most. Attention takes 128 rows at once: 32 tokens with 4 query heads for each KV head."""


class PrefillRows(Rows):
    """The sequences whose prompts are under way."""

    own_rows: Callable[["PrefillRows"], Any]
    """Makes `own`; `contrib.own_prefill` has it."""

    def __init__(self, runtime: Runtime, number: int, capacity: int, pool: Rows, piece: int = 0):
        """pool: the rows that decode, whose pages prompts are written to. piece: most tokens of a step in which prompts
        ride along with a round; 0: prompts and rounds take turns."""
        has_aside = number == 1 and not runtime.on_gpu and runtime.options.ranks.size == 1
        super().__init__(runtime, number, capacity, pool, are_dense=True, aside=ASIDE if has_aside else 0)
        self.step_sizes = sorted({*(size for size in STEPS_OF_TOKENS if size < piece), piece} - {0})
        """Tokens of a step with a piece of prompts, and of its round."""
        self._turn = 0
        """Tokens that were processed since the prompt in the only row has it."""
        self.backlog = 0
        """Tokens of waiting prompts for which there are free rows."""
        self.at_branch: Callable[[BatchSequence, int, Rows], None] = lambda *_: None
        """Called with a sequence, its processed tokens and these rows when its branch point is reached."""

    @property
    def begun(self) -> list[BatchSequence]:
        return [*self.active, *self.aside, *self.owned]

    @property
    def owned(self) -> list[BatchSequence]:
        return self.own.active if "own" in vars(self) else []

    @property
    def aside(self) -> list[BatchSequence]:
        """Prompts that were begun and wait for the only row that chunks run over."""
        return [sequence for sequence in self.sequences[self.number :] if sequence is not None]

    @cached_property
    def own(self) -> Any:
        """A row for what the model's own forward processes, one prompt at a time."""
        return self.own_rows(self)

    @property
    def is_full(self) -> bool:
        """True if no prompt may begin now, whoever sent it. Where prompts ride along, no more begin than fill a piece,
        so that the first one is done first."""
        is_enough = bool(self.step_sizes) and sum(self._missing()) >= self.step_sizes[-1]
        return is_enough or (self.number > 1 and not self.free)

    def make_room(self, sequence: BatchSequence) -> bool:
        """True if there is a row for this prompt now. If there is only one, a prompt of another client that has had
        its turn is set aside for it."""
        if sequence.request.process is not None and self.owned:
            return False
        if self.free:
            return True
        free = [row for row in range(self.number, len(self.sequences)) if self.sequences[row] is None]
        before = self.sequences[0] if free and self._turn >= TURN else None
        if before is None or before.request.client == sequence.request.client:
            return False
        self.shift(before, free[0])
        return True

    def resume(self, sequence: BatchSequence) -> None:
        """A prompt that was set aside goes on."""
        self.shift(sequence, 0)
        self._turn = 0

    def enter(
        self, sequence: BatchSequence, known: int, branch: int = 0, restore: Callable[[Rows, int], None] | None = None
    ) -> None:
        """Begin with a prompt, or with the text so far of a sequence that comes back; `sequence.pages` are its pages.

        known: its first tokens whose keys and values are in these pages. restore: copies the states after them, if
        there are any, to a row. branch: tokens after which `at_branch` is called, more than `known`; 0 for none.
        """
        sequence.row = row = self.free[0]
        self.sequences[row] = sequence
        sequence.done, sequence.stop, self._turn = known, branch or sequence.length, 0
        self.reuse(row)
        self.begin(sequence, self, row, lengths=known)
        if restore is not None:
            restore(self, row)
        if branch:
            self.state.prompt_lengths[row].fill_(branch + 1)

    def begin(self, sequence: BatchSequence, rows: Rows, row: int, **numbers: int) -> None:
        request, vocab, state = sequence.request, self.runtime.verify.vocab_size, rows.state
        if state.position_offsets is not None:  # keys are rotated by them, and serve others
            numbers["position_offsets"] = 0 if request.process is None else request.process.offset
        eos = [token for token in request.eos if 0 <= token < vocab]
        state.enter(row, sequence.text, eos, sequence.loaded.index, **numbers, **sequence.numbers())
        if sequence.tokens and state.kv.states.kinds:  # some clamp what belongs to a prompt
            state.kv.states.prompt_lengths[row].fill_(len(sequence.prompt))
        rows.place({sequence: sequence.pages})
        self.runtime.guard(rows.all.drafter.enter, row, request.share_text, request.references)

    def step(self, waiting: int, decoding: int, round_seconds: float | None) -> None:
        """Process a chunk of every prompt.

        waiting, decoding: see `choose_size`. round_seconds: what rounds cost now; None if nobody has measured it.
        """
        self.compact()
        missing = [tokens for tokens in self._missing() if tokens]
        if missing:
            session = self._active_session
            if any(sequence.needs_scores for sequence in self.active):
                size = self._score(session)
            else:
                size = self._chunk_size(missing, waiting, decoding, round_seconds)
                session.prefill(size, self.max_kv_len(session, size))
            self.advance({sequence: size for sequence in self.active})

    def ready(self, drafts: bool) -> list[BatchSequence]:
        """The prompts that are done, with their first trees if the next round may draft."""
        ready = [sequence for sequence in self.active if sequence.done == sequence.length]
        for sequence in ready:
            if sequence.tokens:  # random numbers go by the place in the answer
                self.state.prompt_lengths[sequence.row].fill_(len(sequence.prompt))
        if ready and drafts:
            session = self._active_session
            session.propose(session.max_kv_len(max(sequence.length + 1 for sequence in self.active)))
        elif ready:
            self.state.root()
        for sequence in [] if self.runtime.on_gpu else ready:
            sequence.count = int(self.state.tree_count[sequence.row])
            sequence.confidence = int(self.state.tree_confidence[sequence.row])
        return ready

    @property
    def rides(self) -> bool:
        """True if a piece of the prompts may ride along with the next round."""
        return bool(self.step_sizes) and any(self._missing()) and not any(each.needs_scores for each in self.active)

    @property
    def is_behind(self) -> bool:
        return sum(self._missing()) + self.backlog >= BACKLOG * self.step_sizes[-1]

    def piece(self, session: Session, kind: StepKind | DrawInRound, nodes: int) -> Piece | None:
        """The piece for a round of a session over `nodes` nodes that computes the most tokens of prompts for its cost;
        None if no step with one is captured.

        Beside 64 rows, prompts that miss 500 and 60 tokens have a piece of 448 tokens of the first one, in a step of
        512 tokens. Then they miss 52 and 60, and have a piece of 192 tokens, in a step of 256.
        """
        missing, cost = sum(self._missing()), STEP_COST[self.runtime.device.type] + session.batch * nodes
        made = [piece for piece in self.pieces(session.batch, nodes) if session.has(MixedKind(kind, piece), nodes)]
        # Longer steps are for a backlog, unless no shorter one has room for the round, too.
        longest = (self.step_sizes[-1] if self.is_behind else COMMON_STEP) - session.batch * nodes
        short = [piece for piece in made if piece.size <= longest]
        rate = lambda piece: min(missing, piece.size) / (cost + piece.size)  # noqa: E731
        return max(short or made[:1], key=rate, default=None)

    def pieces(self, rows: int, nodes: int) -> list[Piece]:
        """The pieces that may ride along with a round over `nodes` nodes of each of `rows` rows: in steps of all sizes
        that leave room for them, and with trees in a common step, or the smallest."""
        least = rows * nodes + MAX_NODES
        steps = [size for size in self.step_sizes if size >= least]
        steps = steps or [-(-least // STEPS_OF_TOKENS[0]) * STEPS_OF_TOKENS[0]]
        if nodes > 1:
            steps = [max((size for size in steps if size <= COMMON_STEP), default=steps[0])]
        unit = max(SLICE // nodes, 1) * nodes
        session = self.session(self.number)
        return [Piece(session, count, unit) for tokens in steps if (count := (tokens - rows * nodes) // unit)]

    def ride(self, piece: Piece) -> dict[BatchSequence, int]:
        """Fill a piece with slices of the prompts, first of the first ones, and tell the device. Returns the tokens of
        each prompt.

        A piece of 4 slices of 32 tokens, and prompts in rows 0 and 2 of which 100 tokens and none are known, and that
        miss 40 and 500: the slices begin at (0, 100), (0, 132), (2, 0) and (2, 32).
        """
        shares, slices = dict[BatchSequence, int](), list[tuple[int, int]]()
        for sequence in sorted(self.active, key=lambda each: each.turn):
            begins = range(sequence.done, sequence.stop, piece.unit)[: piece.number - len(slices)]
            slices += [(sequence.row, begin) for begin in begins]
            shares[sequence] = len(begins) * piece.unit
        slices += slices[-1:] * (piece.number - len(slices))  # the last one again does no harm
        sent = torch.tensor([*zip(*slices)], pin_memory=self.runtime.on_gpu)
        piece.prompts.slices[:, : piece.number].copy_(sent, non_blocking=True)
        return shares

    @property
    def _active_session(self) -> Session:
        return self.session(max(sequence.row for sequence in self.active) + 1)

    def _missing(self) -> list[int]:
        """The tokens that each prompt in a row still needs, up to its branch point if it has one."""
        return [sequence.stop - sequence.done for sequence in self.active]

    def advance(self, shares: dict[BatchSequence, int]) -> None:
        """As many next tokens of each of these prompts have been processed."""
        self._turn += max(shares.values())
        for sequence, size in shares.items():
            sequence.done = min(sequence.done + size, sequence.stop)
            if sequence.done == sequence.stop < sequence.length:  # its branch point; it goes on to its end
                self.at_branch(sequence, sequence.done, self)
                self.reuse(sequence.row)  # its states change in the next chunk
                self.state.prompt_lengths[sequence.row].fill_(sequence.length + 1)
                sequence.stop = sequence.length

    def max_kv_len(self, session: Session, size: int) -> int:
        """Visible slots of a step over the next `size` tokens of every prompt."""
        return session.max_kv_len(max(sequence.done for sequence in self.active) + size)

    def _score(self, session: Session) -> int:
        """Process a chunk of every prompt as rounds verify a chain of drafts, which gives the target's logits after
        each token; returns its size, the nodes of the largest round. The logits of one chunk exist at a time. The
        prompt [5, 8, 3] has scores of 8 and 3.
        """
        # A chain of the next tokens of each prompt takes the place of the pending trees.
        state, size = session.state, max(self.runtime.sizes[-1], 2)
        begin, device = self.max_kv_len(session, size), state.tokens.device
        number = torch.arange(size, device=device).repeat(session.batch, 1)
        tokens = state.tokens.gather(1, (state.lengths[:, None] + number).clamp(max=state.capacity - 1))
        state.set_trees(tokens, number - 1, torch.full_like(number[:, 0], size), torch.zeros_like(number[:, 0]))
        logits, *features = session.get(StepKind.LOOK, size)(begin)
        for sequence in self.active:
            if sequence.scores is not None and sequence.needs_scores:
                told = max(len(sequence.scores.prompt) - sequence.done, 0)  # before its row was taken
                known = sequence.prompt[sequence.done + 1 + told : sequence.done + 1 + size]
                if known:
                    sequence.scores.read_prompt(logits[sequence.row, told : told + len(known)], known)

        # States and the draft go on by the chunk.
        state.kv.states.commit(number, (state.prompt_lengths - 1 - state.lengths).clamp(0, size))
        session.get(StepKind.PREFILL)(size, begin, features)
        return size

    def _chunk_size(self, missing: list[int], waiting: int, decoding: int, round_seconds: float | None) -> int:
        """See `choose_size`. The first rank decides, because the others measure other times."""
        prefill_sizes, fixed = self.all.prefill_sizes, STEP_COST[self.runtime.device.type]
        if self.runtime.has_fixed_chunks:  # for the one prompt that a CPU processes at a time
            return next(chunks(missing[0], prefill_sizes, fixed))  # guard: fixed-chunks
        seconds = {width: session.prefill_seconds for width, session in self._sessions.items()}
        is_measured = round_seconds is not None and all(seconds.get(width) for width in self.widths)

        def cost(prompts: int, size: int) -> float:
            width = self.width(prompts)
            if not is_measured:  # a chunk and a round read the weights, and a chunk computes its tokens besides
                return fixed + width * size
            largest = max(seconds[width])  # of the steps that are captured; a larger one computes more of the same
            return seconds[width].get(size) or seconds[width][largest] * size / largest

        round_cost = round_seconds if is_measured and round_seconds else fixed
        sizes = [size for size in prefill_sizes if size.bit_count() == 1]  # few, for all may be timed
        decide = partial(choose_size, missing, waiting, decoding, sizes, cost, round_cost)
        return self.runtime.options.ranks.lead(lambda: [decide()])[0]

    def known(self, sequence: BatchSequence) -> int:
        """The first slots of a row that the target and the draft have written."""
        return max(sequence.done - max(self.runtime.algorithm.ahead - 1, 0), 0)

    def leave(self, sequence: BatchSequence) -> None:
        """Give up a prompt."""
        rows: Rows = self if sequence in self.sequences else self.own
        row, rows.sequences[sequence.row] = sequence.row, None
        try:
            rows.all.drafter.leave(rows.state, row, 0, False)
        finally:
            rows.vacate(row)


def choose_size(
    missing: list[int], waiting: int, decoding: int, sizes: list[int], cost: Callable[[int, int], float],
    round_cost: float,
) -> int:  # fmt: skip
    """The size of the next chunk: with it the most tokens are computed in the time until the next chunk.

    While a chunk is computed, all rows wait. While `decoding` rows decode, it takes about as long as a round, and
    longer only in proportion if more prompts wait than rows decode: rows that wait have their share of the time, as
    rows that decode have. With costs of 32 + size, 44 tokens take a chunk of 32 if nobody decodes, and of 64 otherwise.

    missing: tokens that each prompt under way still needs, above zero.
    waiting: free rows for which prompts wait. decoding: rows that decode. sizes: to choose from, descending.
    cost: gives a chunk's cost by (number of prompts, size). round_cost: a round's cost in the same unit.
    """
    prompts, between = len(missing), round_cost if decoding else 0.0
    if decoding:
        longest = ABOUT * max(round_cost * max(1, (prompts + waiting) / decoding), cost(prompts, sizes[-1]))
        sizes = [size for size in sizes if cost(prompts, size) <= longest]

    def rate(size: int) -> float:
        return sum(min(tokens, size) for tokens in missing) / (cost(prompts, size) + between)

    return max(reversed(sizes), key=rate)
