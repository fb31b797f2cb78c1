"""Copy the first slots of a row of every cache to a row of other caches, all caches in one launch.

    targets[c][to, :, :slots] = sources[c][row, :, :slots]    for every cache c

Import this module only where Triton is installed.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Units that a program copies; a unit is 1 to 8 bytes."""


class RowCopies:
    """Copies rows of `sources` to rows of `targets`.

    sources: [B, Hkv, S, D] each, contiguous.
    targets: likewise; B and S may differ from the source's. The addresses of both must not change.
    """

    def __init__(self, sources: list[Tensor], targets: list[Tensor]):
        slot_bytes = [source.shape[3] * source.itemsize for source in sources]
        self._unit = math.gcd(8, *slot_bytes)
        """Bytes that are moved as one number."""
        sizes = [size // self._unit for size in slot_bytes]
        self._heads, self._largest = max(source.shape[1] for source in sources), max(sizes)
        table = [
            (source.data_ptr(), target.data_ptr(), source.shape[1], source.shape[2], target.shape[2], size)
            for source, target, size in zip(sources, targets, sizes)
        ]
        self._table = torch.tensor(table, dtype=torch.int64, device=sources[0].device)

    def __call__(self, row: int, to: int, slots: int) -> None:
        """Copy the first `slots` slots of row `row` of every source to row `to` of its target."""
        grid = len(self._table), self._heads, triton.cdiv(slots * self._largest, BLOCK)
        _copy_row[grid](self._table, row, to, slots, DTYPE=getattr(tl, f"int{8 * self._unit}"), BLOCK=BLOCK)


@triton.jit(do_not_specialize=["row", "to", "slots"])
def _copy_row(
    table,  # [caches, 6] int64: addresses of source and target, heads, slots of source and target, units of a slot
    row, to, slots, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for a cache, a KV head and BLOCK units of its contiguous slots. Grid (caches, Hkv, units / BLOCK)."""
    table += tl.program_id(0) * 6
    heads, size = tl.load(table + 2), tl.load(table + 5)
    head, unit = tl.program_id(1), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    if head >= heads:
        return
    mask = unit < slots * size
    source = tl.load(table).to(tl.pointer_type(DTYPE)) + (row * heads + head) * tl.load(table + 3) * size
    target = tl.load(table + 1).to(tl.pointer_type(DTYPE)) + (to * heads + head) * tl.load(table + 4) * size
    tl.store(target + unit, tl.load(source + unit, mask=mask), mask=mask)
