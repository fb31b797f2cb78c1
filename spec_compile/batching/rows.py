"""Rows of a batch, over the first b of which rounds run, and the moving of a row to another place."""

from itertools import count, takewhile

import torch
from torch import Tensor

from ..runtime.compiled_steps import rows_vary
from ..runtime.runtime import Runtime
from ..runtime.session import Session, StepKind
from ..runtime.state import State
from .sequence import BatchSequence

FEW = 64
"""Rows up to which a wider round costs little more, because it reads the same weights."""


class Rows:
    """Rows of up to `capacity` tokens each, all of them idle at first, and the sequences that lie in them.

    A captured round has fixed addresses, so there is a session for 1, 4, 16, ... rows, each over the first rows of the
    same buffers, and rows in use are kept at the front: with sequences in rows 0 and 5, the one in row 5 moves to row
    1, and rounds run over 4 rows instead of 16. Keys and values stay in their pages: only a row's small buffers are
    copied, its row of the page table among them. An idle row writes to page 0, which nobody sees.
    """

    def __init__(
        self, runtime: Runtime, number: int, capacity: int, pool: "Rows | int", are_dense: bool = False, aside: int = 0
    ):  # fmt: skip
        """pool: the rows whose pages these `number` rows use, too, or the number of new pages. are_dense: whether each
        width is twice the one before, also where steps are captured for each. aside: further rows, which no step has.
        """
        self.runtime, self.number, total = runtime, number, number + aside
        self.sequences: list[BatchSequence | None] = [None] * total
        self.all: Session = Session(runtime, total, capacity, pool=pool.all if isinstance(pool, Rows) else pool)
        self.all.state.finished.fill_(True)
        for row in range(total):
            self.all.drafter.vacate(row)
        # All rounds share what they learn of gains. Sessions of other widths do so when they are made.
        self.all.policies[StepKind.LOOK].share(self.all.policies[StepKind.ROUND])
        # Where one compiled step serves any number of rows, a width costs a capture only, so there are more of them.
        is_cheap = rows_vary(runtime) or not runtime.options.compile
        growth = 2 if is_cheap and (are_dense or not runtime.options.compile) else 4
        few = takewhile(lambda width: width < min(number, FEW), (growth**power for power in count()))
        many = takewhile(lambda width: width < number, (FEW << power for power in count()))
        self.widths = [*few, *many, number]
        """Numbers of rows for which there are rounds: 1, 4, 16, 64, 128, 256, say."""
        self._sessions = {total: self.all}
        self._views: dict[int, list[Tensor]] = {}
        self.reads: dict[int, torch.cuda.Event] = {}
        """By row: the end of copies of its states that another stream makes."""

    @property
    def active(self) -> list[BatchSequence]:
        return [sequence for sequence in self.sequences[: self.number] if sequence is not None]

    @property
    def free(self) -> list[int]:
        """The rows that nobody uses, first those that no other stream reads, either."""
        free = [row for row, sequence in enumerate(self.sequences[: self.number]) if sequence is None]
        return sorted(free, key=self.is_read)

    def compact(self) -> None:
        """Move the last rows to free ones that no other stream reads, if fewer rows will do then."""
        width = self.width(max(len(self.active), 1))
        for sequence in self.active[::-1]:
            to = next(iter(self.free), self.number)
            if sequence.row < width or to >= width or self.is_read(to):
                return
            self.shift(sequence, to)

    def shift(self, sequence: BatchSequence, to: int, target: "Rows | None" = None) -> None:
        """Move a sequence to another row, of `target` (None: of these rows)."""
        self.move_row(sequence.row, to, target)
        self.sequences[sequence.row], sequence.row = None, to
        (target or self).sequences[to] = sequence

    @property
    def state(self) -> State:
        return self.all.state

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

    # --- pages

    def place(self, new: dict[BatchSequence, list[int]]) -> None:
        """Tell the rows of these sequences the last of their pages, all of them in one copy.

        A sequence in row 3 has the pages [5, 2, 9]: {sequence: [9]} sets table[3, 2] to 9.
        """
        entries = [
            (sequence.row, number, page)
            for sequence, pages in new.items()
            for number, page in enumerate(pages, len(sequence.pages) - len(pages))
        ]
        if entries:
            self.state.set_pages(entries)

    def copy_page(self, page: int, to: int) -> None:
        """Copy a page in every cache to another one."""
        tensors = self.cache_tensors()
        _copy([tensor[page] for tensor in tensors], [tensor[to] for tensor in tensors])

    def vacate(self, row: int) -> None:
        """Let nothing that is launched from now on write to the pages of a row or lead its states on: it is idle."""
        self.state.finished[row].fill_(True)
        self.state.lengths[row].zero_()
        self.state.late[row].zero_()  # guard: late-rows
        self.state.prompt_lengths[row].zero_()  # guard: states-of-idle-rows
        self.state.kv.table[row].zero_()  # guard: pages-of-idle-rows

    def move_row(self, row: int, to: int, target: "Rows | None" = None) -> None:
        """Move a row with its pending tree, its states and its pages to row `to` of `target` (None: of these rows).
        The row itself is idle then."""
        target = target or self
        target.reuse(to)  # guard: rows-being-copied
        _copy(self._row_views(row), target._row_views(to))
        self.vacate(row)
        self.all.drafter.vacate(row)

    def is_read(self, row: int) -> bool:
        return row in self.reads and not self.reads[row].query()

    def reuse(self, row: int) -> None:
        """Have all that is launched from now on wait until no other stream reads a row; the host does not wait."""
        if end := self.reads.pop(row, None):
            end.wait()

    def _row_views(self, row: int) -> list[Tensor]:
        """Flat views of a row of every small buffer and of its states. They are kept, because making them takes longer
        than a copy."""
        if row not in self._views:
            buffers = *self.state.small_buffers(), *self.all.drafter.row_buffers(), *self.state_tensors()
            self._views[row] = [buffer[row].view(-1) for buffer in buffers]
        return self._views[row]

    def cache_tensors(self) -> list[Tensor]:
        """Keys, values and scales of all pages in every layer."""
        return [tensor for cache in self.all.caches for tensor in cache.tensors]

    def state_tensors(self) -> list[Tensor]:
        """The states of all rows in every recurrence."""
        return [cache.states[number][0] for cache in self.all.caches for number in range(len(cache.states.kinds))]


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    """Copy each tensor to one of its shape, all of a dtype in one launch."""
    for dtype in {source.dtype for source in sources}:
        alike = [number for number, source in enumerate(sources) if source.dtype == dtype]
        torch._foreach_copy_([targets[number] for number in alike], [sources[number] for number in alike])
