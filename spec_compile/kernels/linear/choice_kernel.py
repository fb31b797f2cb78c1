"""The choice of experts by a softmax of a router's logits, for the kernel of `route` and for the product's end.

Import this module only where Triton is installed. Sums are in pairs, so a row's weights have the same bits in every
kernel, whatever other rows there are.
"""

import triton
import triton.language as tl

from ..pairs import sum_in_pairs


@triton.jit
def choose(
    logits_ptr, weights_ptr, ids_ptr,  # [rows, experts] by its stride; [rows, TOP], written
    row, rows, stride, experts, TOP: tl.constexpr, AMONG: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """`route` of the rows row [ROWS] that exist. AMONG: an index of `product.AMONG`. BLOCK_E: experts, rounded up."""
    BLOCK_T: tl.constexpr = triton.next_power_of_2(TOP)
    expert, rank = tl.arange(0, BLOCK_E)[None, :], tl.arange(0, BLOCK_T)[None, :]
    at = logits_ptr + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * stride + expert
    value = tl.load(at, mask=expert < experts, other=-float("inf"), cache_modifier=".cg").to(tl.float32)
    if AMONG < 2:
        value = tl.exp(value - tl.max(value, 1)[:, None])
        value = tl.where(expert < experts, value / sum_in_pairs(value, ROWS, BLOCK_E)[:, None], -1.0)

    # Take the largest that is left, TOP times. Values become integers of the same order, because a warp finds the
    # largest integer in one instruction; adding 0.0 makes 0.0 and -0.0 equal.
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = tl.zeros([ROWS, BLOCK_T], tl.int32)
    ids = tl.zeros([ROWS, BLOCK_T], tl.int32)
    for each in tl.static_range(TOP):
        largest = tl.max(key, 1)[:, None]
        first = tl.min(tl.where(key == largest, expert, BLOCK_E), 1)[:, None]
        keys = tl.where(rank == each, largest, keys)
        ids = tl.where(rank == each, first, ids)
        key = tl.where(expert == first, -0x80000000, key)
    chosen = (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    chosen = tl.where(rank < TOP, chosen, -float("inf"))

    # The weights.
    if AMONG == 2:
        chosen = tl.exp(chosen - tl.max(chosen, 1)[:, None])
    if AMONG > 0:
        chosen = chosen / sum_in_pairs(tl.where(rank < TOP, chosen, 0.0), ROWS, BLOCK_T)[:, None]
    at, mask = row[:, None] * TOP + rank, (row < rows)[:, None] & (rank < TOP)
    tl.store(weights_ptr + at, chosen.to(weights_ptr.dtype.element_ty), mask=mask)
    tl.store(ids_ptr + at, ids.to(tl.int64), mask=mask)


@triton.jit
def choose_if_last(
    logits_ptr, choice, n, rows, experts, tiles, TOP: tl.constexpr, AMONG: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """After the stores of a tile's logits: `choose` for the rows n [BLOCK_N], by the program that stores the last of
    their tiles. The rows' counter is zero before and after."""
    weights_ptr, ids_ptr, arrived_ptr = choice
    counter = arrived_ptr + tl.program_id(0)
    tl.debug_barrier()  # every thread's stores come before the release by one of them
    if tl.atomic_add(counter, 1, sem="acq_rel") == tiles - 1:
        tl.store(counter, 0)
        choose(logits_ptr, weights_ptr, ids_ptr, n, rows, experts, experts, TOP, AMONG, BLOCK_N, BLOCK_E)
