"""Copies by one launch each: accepted paths, blocks of slots and rows of all caches, and outcomes for the host.

Import this module only where Triton is installed.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launching import address_table, on_gpu, op_with_kernel

UNITS = 1024
"""Units that a program copies; a unit is 1 to 8 bytes."""

# Move an accepted path's keys and values into place:
#
#     cache[b, :, lengths[b] + i] = cache[b, :, lengths[b] + path[b, i]]    for i < count[b]
#
# With 300 committed slots, the path [0, 1, 3] and count 3, slot 303 goes to slot 302; slots 300 and 301 are in place.


@op_with_kernel("compact", lambda caches, lengths, path, count: None, writes=("caches",))
def compact(caches: list[Tensor], lengths: Tensor, path: Tensor, count: Tensor) -> None:
    """Move the accepted nodes' slots of every cache, in plain PyTorch, which the op runs on a CPU.

    caches: [B, Hkv, S, D] each, contiguous; Hkv, S, D and dtype may differ.
    lengths: [B] int64; committed slots.
    path: [B, N] int64, N <= 64; accepted nodes, ascending, so that path[b, i] >= i.
    count: [B] int64; how many nodes of the path are accepted.
    """
    row, index = torch.nonzero(torch.arange(path.shape[1], device=path.device) < count[:, None], as_tuple=True)
    target, source = lengths[row] + index, lengths[row] + path[row, index]
    for cache in caches:
        cache[row, :, target] = cache[row, :, source]


@on_gpu(compact)
def launch(caches: list[Tensor], lengths: Tensor, path: Tensor, count: Tensor) -> None:
    """`compact` by the kernel."""
    batch, nodes = path.shape
    if nodes == 1 or not caches:
        return
    unit = min(cache.itemsize for cache in caches)  # bytes that are moved as one number
    sizes = [cache.shape[3] * cache.itemsize // unit for cache in caches]
    widest = max(sizes)
    block_d = min(triton.next_power_of_2(widest), 128)
    grid = (len(caches), batch * max(cache.shape[1] for cache in caches), triton.cdiv(widest, block_d))
    align = math.gcd(16, *sizes, *(cache.data_ptr() for cache in caches))
    rows = [(cache.data_ptr(), *cache.shape[1:3], size) for cache, size in zip(caches, sizes)]
    _compact[grid](
        address_table("compact", caches[0].device, rows), lengths, path.contiguous(), count, nodes, batch,
        DTYPE=getattr(tl, f"int{8 * unit}"), ALIGN=align,
        BLOCK_D=block_d, BLOCK_NODES=triton.next_power_of_2(nodes),
    )  # fmt: skip


@triton.jit(do_not_specialize=["nodes", "batch"])
def _compact(
    table,  # [caches, 4] int64: address, heads, slots, units of a slot
    lengths, path, count,  # [B], [B, nodes], [B] int64
    nodes, batch, DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr, BLOCK_NODES: tl.constexpr,
):  # fmt: skip
    """One program for a cache, a row of the batch, a KV head and BLOCK_D columns. Grid (caches, B * Hkv, columns)."""
    # The cache, which may have fewer heads than another.
    table += tl.program_id(0) * 4
    heads, slots, size = tl.load(table + 1), tl.load(table + 2), tl.multiple_of(tl.load(table + 3), ALIGN)
    if tl.program_id(1) >= batch * heads:
        return

    # The nodes that are not in place yet.
    row = tl.program_id(1) // heads
    number = tl.arange(0, BLOCK_NODES)
    accepted = number < tl.minimum(tl.load(count + row), nodes)
    source = tl.load(path + row * nodes + number, mask=accepted, other=0)
    moved = accepted & (source != number)

    # Move them.
    cache = tl.multiple_of(tl.load(table).to(tl.pointer_type(DTYPE)), ALIGN)
    cache += (tl.program_id(1) * slots + tl.load(lengths + row)) * size
    column = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = moved[:, None] & (column < size)[None, :]
    rows = tl.load(cache + source[:, None] * size + column[None, :], mask=mask)
    tl.debug_barrier()  # a slot may be both source and target: every load before any store
    tl.store(cache + number[:, None] * size + column[None, :], rows, mask=mask)


# Copy consecutive blocks of slots between a row of every cache and packed memory, all of them in one launch.
#
#     packed[n] = the slots (first + n) * slots to (first + n + 1) * slots - 1 of every cache, one cache after the other
#
# A block of 64 slots of two caches with 2 heads of 16 units each takes 2 * (2 * 64 * 16) = 4,096 units.


class BlockCopies:
    """Copies between rows of `tensors` and packed blocks.

    tensors: [B, Hkv, S, D] each, contiguous, of integers of one dtype, the unit. Their addresses must not change.
    slots: the slots of a block, in each of them.
    """

    def __init__(self, tensors: list[Tensor], slots: int):
        parts = [tensor.shape[1] * slots * tensor.shape[3] for tensor in tensors]
        begins = [sum(parts[:number]) for number in range(len(parts))]
        table = [
            (tensor.data_ptr(), tensor.shape[1], tensor.shape[2], tensor.shape[3], begin)
            for tensor, begin in zip(tensors, begins)
        ]
        self._table = torch.tensor(table, dtype=torch.int64, device=tensors[0].device)
        self._slots, self._heads = slots, max(tensor.shape[1] for tensor in tensors)
        self._longest = slots * max(tensor.shape[3] for tensor in tensors)

    def __call__(self, packed: Tensor, row: int, first: int, to_row: bool) -> None:
        """Copy the blocks of a row from block `first` on.

        packed: [n, units], contiguous, of the unit; on the device. to_row: True from `packed` to the row, False from
        the row to `packed`.
        """
        grid = len(packed), len(self._table) * self._heads, triton.cdiv(self._longest, UNITS)
        _copy_blocks[grid](
            packed, self._table, packed.shape[1], row, first, self._heads, SLOTS=self._slots, TO_ROW=to_row,
            STRIDE=UNITS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["units", "row", "first", "most_heads"])
def _copy_blocks(
    packed,  # [n, units]
    table,  # [caches, 5] int64: address, heads, slots of a row, units of a slot, first unit in a packed block
    units, row, first, most_heads, SLOTS: tl.constexpr, TO_ROW: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """One program for a block, a head of a cache and STRIDE of its units. Grid (n, caches * Hkv, units / STRIDE)."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1) % most_heads
    table += tl.program_id(1) // most_heads * 5
    heads, slots, size = tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    if head >= heads:
        return

    # The same units in the row and in the packed block.
    unit = tl.program_id(2) * STRIDE + tl.arange(0, STRIDE)
    mask = unit < SLOTS * size
    in_row = tl.load(table).to(packed.dtype) + ((row * heads + head) * slots + (first + block) * SLOTS) * size + unit
    in_block = packed + block * units + tl.load(table + 4) + head * SLOTS * size + unit
    if TO_ROW:
        tl.store(in_row, tl.load(in_block, mask=mask), mask=mask)
    else:
        tl.store(in_block, tl.load(in_row, mask=mask), mask=mask)


# Copy the first slots of a row of every cache to a row of other caches, all caches in one launch.
#
#     targets[c][to, :, :slots] = sources[c][row, :, :slots]    for every cache c


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
        grid = len(self._table), self._heads, triton.cdiv(slots * self._largest, UNITS)
        _copy_row[grid](self._table, row, to, slots, DTYPE=getattr(tl, f"int{8 * self._unit}"), BLOCK=UNITS)


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

    # The first slots of a head are contiguous.
    mask = unit < slots * size
    source = tl.load(table).to(tl.pointer_type(DTYPE)) + (row * heads + head) * tl.load(table + 3) * size
    target = tl.load(table + 1).to(tl.pointer_type(DTYPE)) + (to * heads + head) * tl.load(table + 4) * size
    tl.store(target + unit, tl.load(source + unit, mask=mask), mask=mask)


# Hand a round's outcome to the host: the last kernel of a round writes it to pinned memory.


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
    # The outcome into the slot of this turn.
    number = tl.load(turn)
    slot = slots + tl.where(number < 0, SLOTS, number % SLOTS) * width
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(slot + 1 + at, tl.load(outcome + at, mask=at < size), mask=at < size)

    # Then the turn's number, by which the host knows that all is there.
    tl.debug_barrier()  # every thread's stores come before the release by one of them
    if RELEASE:
        _store_release(slot, number + 1)
    else:  # interpreted
        tl.store(slot, number + 1)
    tl.store(turn, tl.where(number < 0, number, number + 1))
