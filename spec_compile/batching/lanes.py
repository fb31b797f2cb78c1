"""Rows of one cache, over the first b of which rounds run, and the copying of a row to another place.

A captured round has fixed addresses. So there is a session for 1, 2, 4, ... rows, each over the first rows of the same
buffers, and rows that are in use are kept at the front: when few are left, the last of them is copied to a free one.
Copying a row of 1,000 tokens takes as long as reading them once in a round, and it happens once in a request.
"""

import torch

from ..cache import Cache
from ..drafting import caches
from ..runtime.runtime import Runtime
from ..runtime.session import Session


class Lanes:
    """`rows` rows of up to `capacity` tokens each, all of them idle at first."""

    def __init__(self, runtime: Runtime, rows: int, capacity: int):
        self.runtime, self.rows = runtime, rows
        self.all = Session(runtime, rows, capacity)
        self.all.state.finished.fill_(True)
        for row in range(rows):
            self.all.drafter.vacate(row)
        self.all.policies["look"].share(self.all.policies["round"])
        self.widths = [*(1 << power for power in range(rows.bit_length()) if 1 << power < rows), rows]
        """Numbers of rows for which there are rounds."""
        self._sessions = {rows: self.all}

    @property
    def state(self):
        """Of all rows."""
        return self.all.state

    @property
    def bytes(self) -> int:
        """Of keys and values, the draft's included."""
        return sum(tensor.nbytes for cache in self._caches() for tensor in cache.tensors)

    def width(self, rows: int) -> int:
        """The smallest width for the first `rows` rows."""
        return next(width for width in self.widths if width >= rows)

    def session(self, rows: int) -> Session:
        """The session over the first `rows` rows, or a few more; made on first use."""
        width = self.width(rows)
        if width not in self._sessions:
            self._sessions[width] = Session(self.runtime, width, self.all.capacity, self.all)
        return self._sessions[width]

    def copy_row(self, row: int, to: int, slots: int, target: "Lanes | None" = None) -> None:
        """Copy a row with its pending tree and the first `slots` slots of its caches to row `to` of `target` (None: of
        these lanes). The row itself is idle then."""
        target = target or self
        buffers = [[*lanes.state.small_buffers(), *lanes.all.drafter.row_buffers()] for lanes in (self, target)]
        for source, destination in zip(*buffers):
            width = min(source[row].numel(), destination[to].numel())  # texts may have room for more in one of them
            destination[to].view(-1)[:width].copy_(source[row].view(-1)[:width])
        self.copy_slots(row, to, slots, target)
        self.state.finished[row].fill_(True)
        self.all.drafter.vacate(row)

    def copy_slots(self, row: int, to: int, slots: int, target: "Lanes") -> None:
        """Copy the first `slots` slots of a row's caches to row `to` of `target`."""
        for source, destination in zip(self._caches(), target._caches()):
            views = [
                [tensor[index, :, :slots] for tensor in cache.tensors]
                for cache, index in ((destination, to), (source, row))
            ]
            torch._foreach_copy_(*views)

    def _caches(self) -> list[Cache]:
        return [self.state.kv, *caches(self.all.drafter)]
