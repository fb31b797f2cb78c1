"""Copies of pages and states in host memory, and the way there and back."""

from bisect import bisect
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from math import gcd
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..cache import zero_pages
from ..kernels import ops
from .rows import Rows

SLAB = 1 << 26
"""Bytes of host memory that are taken at once, or more if a page has more."""
PLACE_BYTES = 1 << 16
"""Bytes of a place for a model without attention, whose pages have no contents."""
STAGED = 1 << 25
"""Bytes that are on their way between pages and the host of a GPU at most; more if a page has more."""


class PageCopies:
    """Copies pages of a pool, and states of rows, to host memory and back.

    GPU: all copies run on a separate stream, which orders writes and reads of host memory, and the host waits for none.
    They come after all that is launched for rounds. Rounds wait for copies to pages, and before they write to a page
    whose copy may be under way.
    """

    def __init__(self, rows: Rows, host_bytes: int):
        """rows: have the pool. host_bytes: of host memory, in places of a page each."""
        self._device = rows.runtime.device
        # The parts of a page lie packed, in the widest integers that all slots and states divide into.
        pools, states = rows.cache_tensors(), rows.state_tensors()
        sizes = [pool.shape[3] * pool.itemsize for pool in pools] + [state[0].nbytes for state in states]
        self._unit = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[gcd(8, *sizes)]
        self._pools = [pool.view(self._unit) for pool in pools]
        self._sizes = [state[0].nbytes // self._unit.itemsize for state in states]
        units = sum(pool[0].numel() for pool in self._pools) or PLACE_BYTES // self._unit.itemsize
        self.page_bytes = units * self._unit.itemsize
        self.state_places = -(-sum(self._sizes) // units)
        """Places that the states of a row take."""
        self._most = max(1, STAGED // self.page_bytes)
        self._stream = torch.cuda.Stream(self._device) if rows.runtime.on_gpu else None
        self.memory = HostMemory(host_bytes // self.page_bytes, units, self._unit, self._stream is not None)
        self._views: WeakKeyDictionary[Rows, list[Tensor]] = WeakKeyDictionary()
        with self.aside():
            staged = self._most if host_bytes and self._stream is not None else 0
            self._staged = torch.empty(staged, units, dtype=self._unit, device=self._device)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """On a GPU a context of the copies' stream, after all that is launched for rounds."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Have rounds that are launched from now on wait for the copies so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def pages(self, pages: list[int], places: list[int], to_pages: bool) -> None:
        """Copy pages to these places in host memory, or from there."""
        for part, packed in self.memory.pieces(places, self._most) if self._pools else ():
            staged = packed if self._stream is None else self._staged[: len(packed)]
            if to_pages:
                staged.copy_(packed, non_blocking=True)  # nothing if they are one
            numbers = torch.tensor(pages[part], pin_memory=self._stream is not None)
            ops.pack_pages(self._pools, staged, numbers.to(self._device, non_blocking=True), to_pages)
            if not to_pages:
                packed.copy_(staged, non_blocking=True)

    def save_states(self, rows: Rows, row: int, places: Sequence[int]) -> None:
        """Copy the states of a row to places in host memory. The row must not change until `Rows.reads` allows it."""
        with self.aside():
            states = self._empty_states()
            torch._foreach_copy_(self._parts(states), self._row(rows, row))
            if self._stream is not None:
                rows.reads[row] = self._stream.record_event()
            for part, packed in self.memory.pieces(places, len(places)):
                packed.copy_(states[part], non_blocking=True)

    def load_states(self, places: Sequence[int]) -> Tensor:
        """The states [n, units] at n places in host memory, on the device."""
        with self.aside():
            states = self._empty_states()
            for part, packed in self.memory.pieces(places, len(places)):
                states[part].copy_(packed, non_blocking=True)
        return states

    def restore(self, states: Tensor, rows: Rows, row: int) -> None:
        """Copy states [n, units] to a row."""
        with self.aside():
            torch._foreach_copy_(self._row(rows, row), self._parts(states))
        self.wait()

    def _empty_states(self) -> Tensor:
        units = self.page_bytes // self._unit.itemsize
        return torch.empty(self.state_places, units, dtype=self._unit, device=self._device)

    def _parts(self, states: Tensor) -> list[Tensor]:
        return [*states.view(-1)[: sum(self._sizes)].split(self._sizes)]

    def _row(self, rows: Rows, row: int) -> list[Tensor]:
        if rows not in self._views:
            self._views[rows] = [state.view(len(state), -1).view(self._unit) for state in rows.state_tensors()]
        return [state[row] for state in self._views[rows]]


class HostMemory:
    """Blocks of `units` numbers each at `places` places in host memory.

    It is taken in slabs, one ahead of the blocks that are used: a process with much memory that nothing has written to
    could not fork. On a GPU's host a thread pins them, 64 MB in about 25 ms.
    """

    def __init__(self, places: int, units: int, unit: torch.dtype, is_pinned: bool):
        self.most, self._units, self._unit, self._is_pinned = places, units, unit, is_pinned
        self._bounds = [*range(0, places, max(1, SLAB // (units * unit.itemsize))), places]
        """Slab i has the places from bounds[i] to bounds[i + 1] - 1."""
        self._begins = {*self._bounds}
        self._slabs: list[Tensor] = []
        self._free: list[int] = []
        self._thread = ThreadPoolExecutor(1, "spec_compile pinned memory")
        self._next: Future[Tensor] | None = None
        self._grow()

    @property
    def ready(self) -> int:
        """The places that there is memory for by now."""
        return self._bounds[len(self._slabs)]

    @property
    def free(self) -> int:
        """The places that can be taken."""
        if not self._free:
            self._grow()
        return len(self._free)

    @property
    def used(self) -> int:
        return self.ready - len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` places, of which as many are free: those that were given back last, or the next ones of a slab."""
        return [self._free.pop() for _ in range(count)]

    def give(self, places: Sequence[int]) -> None:
        self._free += places[::-1]

    def pieces(self, places: Sequence[int], most: int) -> Iterator[tuple[slice, Tensor]]:
        """As few views [n, units] as possible of the blocks at these places, of at most `most` blocks, each with its
        part of `places`: [3, 4, 9] give (0:2, blocks 3 and 4) and (2:3, block 9)."""
        begin = 0
        for index, place in enumerate(places):
            is_followed = places[index + 1 : index + 2] == [place + 1] and place + 1 not in self._begins
            if is_followed and index + 1 - begin < most:
                continue
            slab = bisect(self._bounds, place) - 1
            first = places[begin] - self._bounds[slab]
            yield slice(begin, index + 1), self._slabs[slab][first : first + index + 1 - begin]
            begin = index + 1

    def _grow(self) -> None:
        """Take over the next slab if it is there, or wait for the first one, and have the one after it made."""
        if self._next is not None and (self._next.done() or not self._slabs):
            slab, self._next = self._next.result(), None
            begin, end = self.ready, self.ready + len(slab)
            self._slabs.append(slab)
            self._free[:0] = range(begin, end)[::-1]
        if self._next is None and self.ready < self.most:
            shape = self._bounds[len(self._slabs) + 1] - self.ready, self._units
            if self._is_pinned:
                self._next = self._thread.submit(torch.empty, shape, dtype=self._unit, pin_memory=True)
            else:
                self._next = Future()
                self._next.set_result(zero_pages(shape, self._unit, torch.device("cpu")))
