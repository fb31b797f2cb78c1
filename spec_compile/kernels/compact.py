"""Move the accepted path's keys and values into place, all layers in one launch.

    cache[b, :, lengths[b] + i] = cache[b, :, lengths[b] + path[b, i]]    for i < count[b]

With 300 committed slots, the path [0, 1, 3] and count 3, slot 303 goes to slot 302; slots 300 and 301 are in place.

Import this module only where Triton is installed.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .plain import on_gpu


@torch.library.custom_op("spec_compile::compact", mutates_args=("caches",), device_types="cpu")
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


@compact.register_fake
def _(caches, lengths, path, count):
    return None


_tables: dict[tuple, Tensor] = {}
"""Tables [caches, 4] on the device: address, heads, slots, units of a slot. Kept, because captured graphs read them."""


def _table(caches: list[Tensor], sizes: list[int]) -> Tensor:
    key = (caches[0].device, *((cache.data_ptr(), *cache.shape[1:3], size) for cache, size in zip(caches, sizes)))
    if key not in _tables:
        if caches[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("spec_compile::compact must run once with these caches before a graph is captured")
        _tables[key] = torch.tensor(key[1:], dtype=torch.int64, device=caches[0].device)
    return _tables[key]


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
    _compact[grid](
        _table(caches, sizes), lengths, path.contiguous(), count, nodes, batch,
        DTYPE=getattr(tl, f"int{8 * unit}"), ALIGN=align,
        BLOCK_D=block_d, BLOCK_NODES=triton.next_power_of_2(nodes),
    )  # fmt: skip


@triton.jit(do_not_specialize=["nodes", "batch"])
def _compact(
    table,  # [caches, 4] int64, see `_tables`
    lengths, path, count,  # [B], [B, nodes], [B] int64
    nodes, batch, DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr, BLOCK_NODES: tl.constexpr,
):  # fmt: skip
    """One program for a cache, a row of the batch, a KV head and BLOCK_D columns. Grid (caches, B * Hkv, columns)."""
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
