"""`BlockMemory`: memory for packed blocks, on the device of the rows and in its host."""

from bisect import bisect
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import torch
from torch import Tensor

from ..cache import zero_pages

SLAB = 1 << 28
"""Bytes of host memory that are taken at once, but at least those of a block."""


class BlockMemory:
    """Blocks of `units` numbers each: places below `on_device` on the device, and `in_host` more in host memory.

    Host memory is taken in slabs, one ahead of the blocks that are used. A process with much memory that nothing has
    written to could not fork. The slabs of a GPU's host are pinned. Pinning 256 MB takes about 0.1 s, so a thread does
    it.
    """

    def __init__(self, on_device: int, in_host: int, units: int, unit: torch.dtype, device: torch.device):
        self._units, self._unit = units, unit
        self._is_pinned = device.type == "cuda"
        places = on_device + in_host
        at_once = on_device if self._is_pinned else 0
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
            shape = end - begin, self._units
            if self._is_pinned:
                make = self._thread.submit(torch.empty, shape, dtype=self._unit, pin_memory=True).result
            else:
                blocks = zero_pages(shape, self._unit, torch.device("cpu"))
                make = lambda blocks=blocks: blocks  # noqa: E731
            self._slabs.append(make)
