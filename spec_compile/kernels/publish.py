"""Hand a round's outcome to the host: the last kernel of a round writes it to pinned memory.

Import this module only where Triton is installed.
"""

import triton
import triton.language as tl
from torch import Tensor


def publish(outcome: Tensor, slots: Tensor, turn: Tensor) -> None:
    """Write `outcome`, any shape int64, to slots[turn % S, 1:], then set slots[.., 0] to turn + 1, and add 1 to `turn`.

    slots [S + 1, 1 + width] int64, pinned host memory; turn [1] int64 on the device. Whoever sees the number in column
    0 sees what was written before it. While `turn` is negative everything goes to the last slot and it stays.
    """
    _publish[(1,)](outcome.contiguous(), slots, turn, outcome.numel(), slots.stride(0), SLOTS=len(slots) - 1, BLOCK=512)


@triton.jit(do_not_specialize=["size", "width"])
def _publish(outcome, slots, turn, size, width, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.load(turn)
    slot = slots + tl.where(number < 0, SLOTS, number % SLOTS) * width
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(slot + 1 + at, tl.load(outcome + at, mask=at < size), mask=at < size)
    tl.debug_barrier()  # every thread's stores come before the release by one of them
    tl.atomic_xchg(slot, number + 1, sem="release", scope="sys")
    tl.store(turn, tl.where(number < 0, number, number + 1))
