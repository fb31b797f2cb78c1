"""The rows that decode: rounds over as many of them as are in use."""

from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..outcome import Outcome
from ..runtime.pipeline import InFlightRound, RoundPipeline, check_gained
from ..runtime.runtime import Runtime
from ..runtime.session import Session, StepKind
from ..runtime.verify.sample import DrawRows, RowSettings, accept_greedy
from ..tree import MAX_NODES, Accepted, Tree, ancestry
from .output import look_ahead
from .prefix_cache import LEAST, RowTexts
from .rows import Rows
from .sequence import BatchSequence


class DecodeRows(Rows):
    """Runs rounds over the sequences in its rows. On a GPU a round is launched while the one before it runs."""

    def __init__(self, runtime: Runtime, number: int, capacity: int):
        super().__init__(runtime, number, capacity)
        self.texts = RowTexts(number, capacity, has_states=bool(runtime.verify.recurrences))
        self.rounds_by_nodes: Counter[int] = Counter()
        self.pipeline = RoundPipeline[BatchSequence](runtime)
        self._settings = RowSettings()
        """All that any row so far was drawn with; rounds are captured for that, rather than anew for every mixture."""

    @property
    def is_busy(self) -> bool:
        return len(self.pipeline) > 0 or any(self.sequences)

    @property
    def round_seconds(self) -> float | None:
        """Seconds that the shortest round takes over the rows in use; None if nobody has measured it."""
        session = self.session(max((sequence.row for sequence in self.active), default=0) + 1)
        return min(session.policies[StepKind.ROUND].costs.measured.values(), default=None)

    def enter(self, sequence: BatchSequence) -> None:
        """A prompt that is done has been copied to row `sequence.row`."""
        self.sequences[sequence.row] = sequence
        self._settings = self._settings.merge(sequence.settings)
        self.state.finished[sequence.row].fill_(False)
        counts = sequence.weights == self.texts.weights and not sequence.has_pictures  # guard: texts-with-pictures
        if self.runtime.has_fixed_chunks:  # only keys and values from chunks serve others, and no states after them
            counts = counts and not (sequence.scores_prompt or self.runtime.verify.recurrences)
        self.texts.put(
            sequence.row, sequence.prompt if counts else None, sequence.scope, sequence.request.client,
            goes_on=not self.runtime.has_fixed_chunks,
        )  # fmt: skip
        self._hindsight("forget", sequence.row)

    def leave(self, sequence: BatchSequence) -> None:
        """A sequence is over. Its text stays for others that begin alike, until the row is used again."""
        state, row = self.state, sequence.row
        self.sequences[row] = None
        state.finished[row].fill_(True)
        # With clamped prompts the states of an answer differ from the states of a prompt.
        if sequence.is_whole and not self.runtime.verify.clamps_prompts:
            self.texts.has_ended[row] = True
        self.runtime.guard(self.all.drafter.leave, state, row, sequence.length, sequence.request.share_text)
        if self.texts.lengths[row] > LEAST:
            self.catch_up(sequence)
        self.runtime.records.keep()

    def catch_up(self, *left: BatchSequence) -> None:
        """Let the drafter process all tokens that it is late by, so that others can go on from what it has of a row.

        left: requests that have left their rows just now.
        """
        sequences = [*self.active, *left]
        if self.pipeline.late and self.runtime.algorithm.remembers:
            session = self.session(max(sequence.row for sequence in sequences) + 1)
            self.pipeline.catch_up(session, max(sequence.length for sequence in sequences))

    def used_slots(self, sequence: BatchSequence) -> int:
        rounds = 1 + len(self.pipeline)
        return sequence.length + 1 + rounds * MAX_NODES + self.runtime.algorithm.plan.lookahead_slots

    def moved(self, row: int, to: int) -> None:
        self.texts.move(row, to)
        self._hindsight("move", row, to)

    def launch(self) -> None:
        """Begin as many rounds as may be in flight."""
        sequences = self.active
        if not sequences:
            return
        on_host = any(sequence.is_on_host for sequence in sequences)
        kind = StepKind.LOOK if on_host or any(sequence.settings for sequence in sequences) else StepKind.ROUND
        longest, session = max(sequence.length for sequence in sequences), self.session(sequences[-1].row + 1)
        begin = partial(self._begin, session, kind, sequences, on_host)
        while self.pipeline.may_launch(sequences, on_host):
            self.pipeline.launch(session, kind, sequences, longest, begin)

    def _begin(
        self, session: Session, kind: StepKind, sequences: list[BatchSequence], on_host: bool, nodes: int,
        max_kv_len: int,
    ) -> Callable[[], list[list[int]]]:  # fmt: skip
        """Begin a round; see `RoundPipeline.launch`."""
        if on_host:
            return session.launch(partial(self._accept_rows, session, sequences), nodes, max_kv_len)
        return session.launch(DrawRows(self._settings) if kind is StepKind.LOOK else None, nodes, max_kv_len)

    def collect(self) -> list[BatchSequence]:
        """Wait for the round that was launched first; returns the sequences that gained tokens in it."""
        in_flight, outcomes = self.pipeline.collect()
        self.rounds_by_nodes[in_flight.nodes] += 1
        for sequence, outcome in outcomes:
            self._take(sequence, outcome, in_flight)
        self.pipeline.learn(in_flight, outcomes)
        if self.runtime.options.ranks.size > 1:
            self._end_alike([sequence for sequence, _ in outcomes])
        return [sequence for sequence, outcome in outcomes if outcome.gained or sequence.is_over]

    def _end_alike(self, sequences: list[BatchSequence]) -> None:
        """Give sequences the tokens and the end that they have on the first rank."""
        ranks = self.runtime.options.ranks
        verdicts = iter(ranks.lead(lambda: [n for each in sequences for n in (len(each.tokens), each.is_over)]))
        for sequence, length, is_over in zip(sequences, verdicts, verdicts):
            if not ranks.leads:
                del sequence.tokens[length:]
                if is_over:
                    sequence.finish("stop")

    def _take(self, sequence: BatchSequence, outcome: Outcome, in_flight: InFlightRound) -> None:
        """Give a sequence what a round has gained for its row."""
        drafted = min(in_flight.drafted or sequence.count or in_flight.nodes, in_flight.nodes, sequence.most_nodes) - 1
        sequence.speculation.count(drafted, max(len(outcome.path) - 1, 0), len(outcome.gained))
        before = len(sequence.tokens)
        try:
            if sequence.failure is not None:
                raise sequence.failure
            check_gained(outcome, self.runtime.verify.embedded)
            sequence.gain(outcome.gained)
            sequence.is_whole = outcome.finished and sum(sequence.speculation.per_step_tokens) == len(sequence.tokens)
        except Exception as error:  # its own criterion failed; the others go on
            sequence.fail(error)
        self.texts.extend(sequence.row, sequence.tokens[before:])

    def _accept_rows(self, session: Session, sequences: list[BatchSequence], tree: Tree, logits: Tensor) -> Accepted:
        """Accept the likeliest tokens, or in rows with an acceptor or settings the tokens that these choose."""
        device, state = logits.device, session.state
        # All rows at once, then those whose acceptors choose.
        ancestors, depth = ancestry(tree.parents)
        if any(sequence.settings for sequence in sequences):
            accepted = DrawRows(self._settings)(state, tree, ancestors, depth, logits)
        else:
            accepted = accept_greedy(tree, ancestors, depth, state.forbid_early_eos(logits, depth))
        ranks = self.runtime.options.ranks
        if ranks.leads:
            self._ask_acceptors(sequences, tree, logits, accepted)
        if ranks.size > 1:  # the others take over what the first one has chosen
            failed = [sequence.row for sequence in sequences if ranks.leads and sequence.failure is not None]
            parts = accepted.path, accepted.tokens, accepted.count
            numbers = ranks.lead(
                lambda: [len(failed), *failed, *torch.cat([each.flatten() for each in parts]).tolist()]
            )
            for row in numbers[1 : 1 + numbers[0]]:
                state.finished[row].fill_(True)
            chosen = torch.tensor(numbers[1 + numbers[0] :], device=device).split([each.numel() for each in parts])
            for part, values in zip(parts, chosen):
                part.copy_(values.view(part.shape))
        look_ahead(sequences, logits, accepted)
        return accepted

    def _ask_acceptors(self, sequences: list[BatchSequence], tree: Tree, logits: Tensor, accepted: Accepted) -> None:
        """Replace what was accepted of the rows that have an acceptor."""
        device, state = logits.device, self.state
        for sequence in sequences:
            if sequence.acceptor is None:
                continue
            row = sequence.row
            probs = None if tree.probs is None else tree.probs[row : row + 1]
            tokens, parents, real = (part[row : row + 1] for part in (tree.tokens, tree.parents, tree.real))
            try:
                result = sequence.acceptor(Tree(tokens, parents, real, probs), logits[row : row + 1])
                check_tokens(result.tokens, logits.shape[-1])  # guard: chosen-tokens
            except Exception as error:  # its own logits processor or criterion failed; the others go on
                sequence.failure = error
                state.finished[row].fill_(True)
                continue
            for part in ("path", "tokens", "count"):
                getattr(accepted, part)[row : row + 1] = getattr(result, part).to(device)

    def _hindsight(self, what: str, *rows: int) -> None:
        hindsight = self.all.policies[StepKind.ROUND].hindsight
        if hindsight is not None:
            getattr(hindsight, what)(*rows)


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """ValueError if a token is outside the vocabulary, which would end the rounds of all rows."""
    if not bool(((tokens >= 0) & (tokens < vocab_size)).all()):
        raise ValueError(f"logits_processor: its scores choose a token outside the vocabulary of {vocab_size} tokens")
