"""`BlockMemory`: memory for packed blocks, on the device of the rows and in its host."""

from bisect import bisect
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch
from torch import Tensor

from ..cache import zero_pages

SLAB = 1 << 28
"""Bytes of pinned memory that are taken at once, but at least those of a block."""


class BlockMemory:
    """Blocks of `units` numbers each: places below `on_device` on the device, and `in_host` more in host memory.

    On a CPU all are pages that take memory when they are written. In the host of a GPU they are pinned slabs. Pinning
    256 MB takes about 0.1 s, so a thread does it, one slab ahead of the blocks that are used.
    """

    def __init__(self, on_device: int, in_host: int, units: int, unit: torch.dtype, device: torch.device):
        self._units, self._unit = units, unit
        places = on_device + in_host
        at_once = on_device if device.type == "cuda" else places
        blocks = zero_pages((at_once, units), unit, device) if at_once else torch.empty(0, units, dtype=unit)
        self._slabs = [lambda: blocks]
        """Functions that give each slab [n, units]."""
        self._bounds = [0, *range(at_once, places, max(1, SLAB // (units * unit.itemsize))), places]
        """Slab i has the places from bounds[i] to bounds[i + 1] - 1."""
        self._begins = {*self._bounds}
        self._thread = ThreadPoolExecutor(1, "spec_compile pinned memory")
        self._take(2)

    def pieces(self, places: Sequence[int], most: int) -> Iterator[tuple[slice, Tensor]]:
        """As few views [n, units] as possible of the blocks at these places, of at most `most` blocks, each with its
        part of `places`.

        The places [3, 4, 9] give (0:2, blocks 3 and 4) and (2:3, block 9).
        """
        begin = 0
        for index, place in enumerate(places):
            is_followed = places[index + 1 : index + 2] == [place + 1] and place + 1 not in self._begins
            if is_followed and index + 1 - begin < most:
                continue
            slab = bisect(self._bounds, place) - 1
            self._take(slab + 2)
            first = places[begin] - self._bounds[slab]
            yield slice(begin, index + 1), self._slabs[slab]()[first : first + index + 1 - begin]
            begin = index + 1

    def _take(self, slabs: int) -> None:
        """Have the first slabs made, as far as there are so many."""
        for begin, end in [*pairwise(self._bounds)][len(self._slabs) : slabs]:
            pinned = dict(dtype=self._unit, pin_memory=True)
            self._slabs.append(self._thread.submit(torch.empty, end - begin, self._units, **pinned).result)
