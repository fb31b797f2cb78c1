"""Hand a round's outcome to the host: the last kernel of a round writes it to pinned memory.

Import this module only where Triton is installed.
"""

import triton
import triton.language as tl
from torch import Tensor


def publish(outcome: Tensor, slots: Tensor, turn: Tensor) -> None:
    """Write `outcome` to slots[turn % S, 1:], then set slots[turn % S, 0] to turn + 1, then add 1 to `turn`.

    A host that reads turn + 1 in column 0 also reads the outcome after it. With S = 2, turns 0, 1 and 2 write slots 0,
    1 and 0 with the numbers 1, 2 and 3. A negative turn writes slot S and stays.

    outcome: int64, any shape.
    slots: [S + 1, 1 + width] int64, pinned host memory.
    turn: [1] int64 on the device.
    """
    _publish[(1,)](
        outcome.contiguous(), slots, turn, outcome.numel(), slots.stride(0),
        SLOTS=len(slots) - 1, BLOCK=128, RELEASE=outcome.is_cuda, num_warps=1,
    )  # fmt: skip


@triton.jit
def _store_release(address, value):
    """Store to the host's memory after all earlier stores of this warp. (GPUs have no atomics in a host's memory.)"""
    tl.inline_asm_elementwise(
        "st.release.sys.global.b64 [$1], $2; mov.u32 $0, 0;",
        "=r,l,l",
        [address.to(tl.int64), value],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["size", "width"])
def _publish(
    outcome, slots, turn,  # [size], [SLOTS + 1, width], [1]; int64
    size, width, SLOTS: tl.constexpr, BLOCK: tl.constexpr, RELEASE: tl.constexpr,
):  # fmt: skip
    """`publish` by one program."""
    number = tl.load(turn)
    slot = slots + tl.where(number < 0, SLOTS, number % SLOTS) * width
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(slot + 1 + at, tl.load(outcome + at, mask=at < size), mask=at < size)
    tl.debug_barrier()  # every thread's stores come before the release by one of them
    if RELEASE:
        _store_release(slot, number + 1)
    else:  # interpreted
        tl.store(slot, number + 1)
    tl.store(turn, tl.where(number < 0, number, number + 1))
