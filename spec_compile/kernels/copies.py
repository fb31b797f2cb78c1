"""Copies by one launch each: accepted paths, pages of all caches, and outcomes for the host.

Import this module only where Triton is installed.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import ops
from .launching import address_table, on_gpu, op_with_kernel
from .primitives import place_of

UNITS = 1024
"""Units that a program copies; a unit is 1 to 8 bytes."""

# Move an accepted path's keys and values into place:
#
#     cache[b, :, lengths[b] + i] = cache[b, :, lengths[b] + path[b, i]]    for i < count[b]
#
# With 300 committed slots, the path [0, 1, 3] and count 3, slot 303 goes to slot 302; slots 300 and 301 are in place.


@op_with_kernel("compact", lambda caches, lengths, path, count, table=None: None, writes=("caches",))
def compact(caches: list[Tensor], lengths: Tensor, path: Tensor, count: Tensor, table: Tensor | None = None) -> None:
    """Move the accepted nodes' slots of every cache, in plain PyTorch, which the op runs on a CPU.

    caches: [P, Hkv, S, D] each, contiguous; Hkv, D and dtype may differ, and S without several pages a row.
    lengths: [B] int64; committed slots.
    path: [B, N] int64, N <= 64; accepted nodes, ascending, so that path[b, i] >= i.
    count: [B] int64; how many nodes of the path are accepted.
    table: [B, n] int32; the pages of each row, as in `attention.base.AttentionCall`.
    """
    row, index = torch.nonzero(torch.arange(path.shape[1], device=path.device) < count[:, None], as_tuple=True)
    target, source = lengths[row] + index, lengths[row] + path[row, index]
    if not ops.is_paged(table):
        table = torch.arange(len(path), device=path.device)[:, None]
    for cache in caches:
        size = cache.shape[2]
        moved = cache[table[row, source // size].long(), :, source % size]
        cache[table[row, target // size].long(), :, target % size] = moved


@on_gpu(compact)
def launch(caches: list[Tensor], lengths: Tensor, path: Tensor, count: Tensor, table: Tensor | None = None) -> None:
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
    pages = table.contiguous() if ops.is_paged(table) else None
    _compact[grid](
        address_table("compact", caches[0].device, rows), lengths, path.contiguous(), count, pages,
        nodes, batch, 1 if pages is None else pages.shape[1], DTYPE=getattr(tl, f"int{8 * unit}"), ALIGN=align,
        BLOCK_D=block_d, BLOCK_NODES=triton.next_power_of_2(nodes),
    )  # fmt: skip


@triton.jit(do_not_specialize=["nodes", "batch", "columns"])
def _compact(
    table,  # [caches, 4] int64: address, heads, slots, units of a slot
    lengths, path, count,  # [B], [B, nodes], [B] int64
    pages,  # [B, columns] int32, or None: row b is page b
    nodes, batch, columns, DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr, BLOCK_NODES: tl.constexpr,
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

    # Where they lie and where they go.
    length = tl.load(lengths + row)
    source, target = length + source, length + number
    first = tl.program_id(1) * slots
    if pages is not None:
        pages += row.to(tl.int64) * columns
        first = tl.program_id(1) % heads * slots
        source = place_of(pages, source, moved, heads, slots)
        target = place_of(pages, target, moved, heads, slots)

    # Move them.
    cache = tl.multiple_of(tl.load(table).to(tl.pointer_type(DTYPE)), ALIGN) + first * size
    column = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = moved[:, None] & (column < size)[None, :]
    rows = tl.load(cache + source[:, None] * size + column[None, :], mask=mask)
    tl.debug_barrier()  # a slot may be both source and target: every load before any store
    tl.store(cache + target[:, None] * size + column[None, :], rows, mask=mask)


# Copy whole pages of every pool to packed memory, or from there, all of them in one launch.


@on_gpu(ops.pack_pages)
def launch_pack(pools: list[Tensor], packed: Tensor, pages: Tensor, to_pages: bool) -> None:
    """`ops.pack_pages` by the kernel."""
    if not pools or not len(pages):
        return
    sizes = [pool[0].numel() for pool in pools]
    rows = [(pool.data_ptr(), size, sum(sizes[:number])) for number, (pool, size) in enumerate(zip(pools, sizes))]
    _pack_pages[(len(pages), len(pools), triton.cdiv(max(sizes), UNITS))](
        address_table("pack_pages", pools[0].device, rows), pages, packed, packed.stride(0), TO_PAGES=to_pages,
        STRIDE=UNITS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["units"])
def _pack_pages(
    table,  # [pools, 3] int64: address, units of a page, first unit in a packed page
    pages, packed,  # [n] int64, [n, units]
    units, TO_PAGES: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """One program for a page and STRIDE of its units in a pool. Grid (n, pools, units / STRIDE)."""
    number = tl.program_id(0).to(tl.int64)
    table += tl.program_id(1) * 3
    size, unit = tl.load(table + 1), tl.program_id(2) * STRIDE + tl.arange(0, STRIDE)
    # The same units in the pool and in the packed page.
    in_pool = tl.load(table).to(packed.dtype) + tl.load(pages + number) * size + unit
    in_packed = packed + number * units + tl.load(table + 2) + unit
    if TO_PAGES:
        tl.store(in_pool, tl.load(in_packed, mask=unit < size), mask=unit < size)
    else:
        tl.store(in_packed, tl.load(in_pool, mask=unit < size), mask=unit < size)


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
