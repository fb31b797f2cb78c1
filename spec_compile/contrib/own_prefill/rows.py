"""`OwnRows`: the row in which the model's own forward processes prompts, one at a time."""

from collections.abc import Iterator

from ...batching.prefill import PrefillRows
from ...batching.rows import Rows
from ...batching.sequence import BatchSequence
from ...runtime.prompt import Past
from ...runtime.round import STEP_COST, chunks


class OwnRows(Rows):
    """A prompt is here until its pieces are processed, at most one between two rounds. Then it goes on in a row of
    `PrefillRows` with what follows, such as its answer so far."""

    def __init__(self, prefill: PrefillRows):
        super().__init__(prefill.runtime, 1, prefill.all.capacity, prefill)
        self._prefill = prefill
        self._pieces: Iterator[Past] = iter(())

    def process(self, sequence: BatchSequence, known: int) -> None:
        """Begin with a prompt whose first `known` tokens are in its pages already; its first piece is processed now."""
        self.vacate(0)
        self.sequences[0], sequence.row, sequence.done = sequence, 0, known
        self._prefill.begin(sequence, self, 0, lengths=known)
        self._pieces = sequence.request.process.pieces(self.state, known, self.runtime.algorithm.plan.taps)
        self.go_on()

    def go_on(self) -> None:
        """Process one more piece. After the last one the prompt leaves, once a row is free for it."""
        (sequence,) = self.active
        if (past := next(self._pieces, None)) is not None:
            count = past.length - sequence.done
            self.state.prompt_lengths.fill_(past.length + 1)
            if past.features is not None and self.runtime.algorithm.remembers:
                sizes = [*chunks(count, self.all.prefill_sizes, STEP_COST[self.runtime.device.type])]
                self.all.prefill_draft(past, sizes, sequence.done)
            self.state.fill(past, [past.length])
            sequence.done = past.length
        if sequence.done >= sequence.request.process.end and self._prefill.free:
            self.shift(sequence, self._prefill.free[0], self._prefill)
            sequence.stop = sequence.length
            self._prefill.state.prompt_lengths[sequence.row].fill_(sequence.length + 1)
