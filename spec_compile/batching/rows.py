"""Rows of one cache, over the first b of which rounds run, and the copying of a row to another place.

A captured round has fixed addresses. So there is a session for 1, 4, 16, ... rows, each over the first rows of the same
buffers, and rows that are in use are kept at the front: when few are left, the last of them is copied to a free one.
Copying a row of 1,000 tokens takes as long as reading them once in a round, and it happens once in a request.
"""

from collections.abc import Callable
from itertools import count, takewhile
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..cache import PAGE, Cache
from ..drafting import caches
from ..runtime.compiled_steps import rows_vary
from ..runtime.runtime import Runtime
from ..runtime.session import Session, StepKind
from ..runtime.state import State
from .sequence import BatchSequence

CopySlots = Callable[["Rows", int], None]
"""Copies keys and values to the first slots of a row of these rows."""


class Rows:
    """Rows of up to `capacity` tokens each, all of them idle at first, and the sequences that lie in them.

    Rounds run over the first rows of a cache, so rows in use are kept at the front. With widths of 1, 4 and 16 rows and
    sequences in rows 0 and 5, the one in row 5 moves to row 1, and rounds run over 4 rows instead of 16.
    """

    def __init__(self, runtime: Runtime, number: int, capacity: int, are_dense: bool = False):
        """number: of rows. are_dense: whether each width is twice the one before, also where steps are captured for
        each."""
        self.runtime = runtime
        self.sequences: list[BatchSequence | None] = [None] * number
        self.all = Session(runtime, number, capacity)
        self.all.state.finished.fill_(True)
        for row in range(number):
            self.all.drafter.vacate(row)
        # All rounds share what they learn of gains. Sessions of other widths do so when they are made.
        self.all.policies[StepKind.LOOK].share(self.all.policies[StepKind.ROUND])
        # Where one compiled step serves any number of rows, a width costs a capture only, so there are more of them.
        is_cheap = rows_vary(runtime) or not runtime.options.compile
        growth = 2 if is_cheap and (are_dense or not runtime.options.compile) else 4
        self.widths = [*takewhile(lambda width: width < number, (growth**power for power in count())), number]
        """Numbers of rows for which there are rounds."""
        self._sessions = {number: self.all}
        self._small_views: dict[int, list[Tensor]] = {}
        self._large_views: dict[tuple[int, int], list[Tensor]] = {}
        self._row_copies: WeakKeyDictionary[Rows, Callable[[int, int, int], None]] = WeakKeyDictionary()
        """On a GPU, by the rows that are copied to."""
        self.reads: dict[int, torch.cuda.Event] = {}
        """By row: the end of copies out of it that another stream makes."""

    @property
    def active(self) -> list[BatchSequence]:
        return [sequence for sequence in self.sequences if sequence is not None]

    @property
    def has_room(self) -> bool:
        return None in self.sequences

    def free_row(self) -> int:
        """The first row that nobody uses, if possible one that no other stream reads, either."""
        free = [row for row, sequence in enumerate(self.sequences) if sequence is None]
        return next((row for row in free if not self.is_read(row)), free[0])

    def compact(self) -> None:
        """Move the last rows to free ones that no other stream reads, if fewer rows will do then."""
        width = self.width(max(len(self.active), 1))
        for sequence in self.active[::-1]:
            row, to = sequence.row, self.free_row() if self.has_room else len(self.sequences)
            if row < width or to >= width or self.is_read(to):
                return
            self.copy_row(row, to, min(max(self.used_slots(sequence), 1), self.state.capacity))
            self.moved(row, to)
            self.sequences[row], self.sequences[to], sequence.row = None, sequence, to

    def used_slots(self, sequence: BatchSequence) -> int:
        """Slots of the caches that a sequence uses in its row."""
        raise NotImplementedError

    def moved(self, row: int, to: int) -> None:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return self.all.state

    @property
    def bytes(self) -> int:
        """Bytes of keys and values, with the draft's, and of states."""
        return sum(tensor.nbytes for cache in self._caches() for tensor in cache.argument)

    def width(self, rows: int) -> int:
        """The smallest width for the first `rows` rows."""
        return next(width for width in self.widths if width >= rows)

    def session(self, rows: int) -> Session:
        """The session over the first `rows` rows, or a few more; made on first use."""
        width = self.width(rows)
        if width not in self._sessions:
            self._sessions[width] = Session(self.runtime, width, self.all.capacity, self.all)
        self._sessions[width].renew()
        return self._sessions[width]

    def prefill_seconds(self, width: int) -> dict[int, float]:
        """See `Session`; empty for a width that has not been used."""
        return self._sessions[width].prefill_seconds if width in self._sessions else {}

    def copy_row(self, row: int, to: int, slots: int, target: "Rows | None" = None) -> None:
        """Copy a row with its pending tree, its states and the first `slots` slots of its caches to row `to` of
        `target` (None: of these rows). The row itself is idle then."""
        target = target or self
        target.reuse(to)  # guard: rows-being-copied
        originals, copies = self._small(row), target._small(to)
        for index, (source, destination) in enumerate(zip(originals, copies)):
            if source.shape != destination.shape:  # texts may have room for more in one of them
                width = min(len(source), len(destination))
                originals[index], copies[index] = source[:width], destination[:width]
        _copy(originals, copies)
        self.copy_slots(row, to, slots, target)
        self.state.finished[row].fill_(True)
        self.all.drafter.vacate(row)

    def is_read(self, row: int) -> bool:
        return row in self.reads and not self.reads[row].query()

    def reuse(self, row: int) -> None:
        """Have all that is launched from now on wait until no other stream reads a row; the host does not wait."""
        if end := self.reads.pop(row, None):
            end.wait()

    def copy_slots(self, row: int, to: int, slots: int, target: "Rows") -> None:
        """Copy the states of a row and the first `slots` slots of its caches, and perhaps more, to row `to` of
        `target`."""
        _copy(self._states(row), target._states(to))
        if not self.cache_tensors():
            return  # a model without attention
        if self.runtime.on_gpu:
            if target not in self._row_copies:
                from ..kernels.copies import RowCopies  # needs Triton

                self._row_copies[target] = RowCopies(self.cache_tensors(), target.cache_tensors())
            self._row_copies[target](row, to, slots)
        else:
            slots = min(max(PAGE, 1 << (slots - 1).bit_length()), self.state.capacity, target.state.capacity)
            torch._foreach_copy_(target._large(to, slots), self._large(row, slots))

    # A copy takes less time than the making of views to be copied, of which a model with 30 layers needs hundreds. So
    # they are kept; what they are views of stays where it is as long as these rows.

    def _small(self, row: int) -> list[Tensor]:
        """Flat views of a row of every small buffer."""
        if row not in self._small_views:
            buffers = *self.state.small_buffers(), *self.all.drafter.row_buffers()
            self._small_views[row] = [buffer[row].view(-1) for buffer in buffers]
        return [*self._small_views[row]]

    def _large(self, row: int, slots: int) -> list[Tensor]:
        """Views of the first `slots` slots of a row in every cache."""
        if (row, slots) not in self._large_views:
            self._large_views[row, slots] = [tensor[row, :, :slots] for tensor in self.cache_tensors()]
        return self._large_views[row, slots]

    def _states(self, row: int) -> list[Tensor]:
        return [state for cache in self._caches() for state in cache.states.row(row)]

    def cache_tensors(self) -> list[Tensor]:
        """Keys, values and scales of all rows in every layer."""
        return [tensor for cache in self._caches() for tensor in cache.tensors]

    def state_tensors(self) -> list[Tensor]:
        """The states of all rows in every recurrence."""
        return [cache.states[number][0] for cache in self._caches() for number in range(len(cache.states.kinds))]

    def _caches(self) -> list[Cache]:
        return [self.state.kv, *caches(self.all.drafter)]


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy each tensor to one of its shape, all of a dtype in one launch."""
    for dtype in {source.dtype for source in sources}:
        alike = [number for number, source in enumerate(sources) if source.dtype == dtype]
        torch._foreach_copy_([targets[number] for number in alike], [sources[number] for number in alike])
