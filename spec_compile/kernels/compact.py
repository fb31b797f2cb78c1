"""Move the accepted path's keys and values into place, every layer in one launch.

Import this module only where Triton is installed.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor


@torch.library.custom_op("spec_compile::compact", mutates_args=("caches",), device_types="cpu")
def compact(caches: list[Tensor], lengths: Tensor, path: Tensor, count: Tensor) -> None:
    """Move slot lengths[b] + path[b, i] of every cache to slot lengths[b] + i, for all i < count[b].

    caches: each [B, Hkv, S, D] contiguous, Hkv, D and dtype its own; lengths, count [B], path [B, N] int64, path
    ascending with path[b, i] >= i, N <= 64. What runs on a CPU, and what it means anywhere.
    """
    row, index = torch.nonzero(torch.arange(path.shape[1], device=path.device) < count[:, None], as_tuple=True)
    target, source = lengths[row] + index, lengths[row] + path[row, index]
    for cache in caches:
        cache[row, :, target] = cache[row, :, source]


@compact.register_fake
def _(caches, lengths, path, count):
    return None


_tables: dict[tuple, Tensor] = {}
"""Address, heads, slots and units a slot of each cache of a list, on the device. Kept: captured graphs read them."""


def _table(caches: list[Tensor], sizes: list[int]) -> Tensor:
    key = (caches[0].device, *((cache.data_ptr(), *cache.shape[1:3], size) for cache, size in zip(caches, sizes)))
    if key not in _tables:
        if caches[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("spec_compile::compact must run once with these caches before a graph is captured")
        _tables[key] = torch.tensor(key[1:], dtype=torch.int64, device=caches[0].device)
    return _tables[key]


@compact.register_kernel("cuda")
def launch(caches: list[Tensor], lengths: Tensor, path: Tensor, count: Tensor) -> None:
    """`compact` by the kernel."""
    batch, nodes = path.shape
    if nodes == 1 or not caches:
        return
    unit = min(cache.itemsize for cache in caches)  # in which all of them are moved
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
    table, lengths, path, count, nodes, batch,
    DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr, BLOCK_NODES: tl.constexpr,
):  # fmt: skip
    """One program for a cache, a batch row, a KV head and BLOCK_D columns."""
    table += tl.program_id(0) * 4
    heads, slots, size = tl.load(table + 1), tl.load(table + 2), tl.multiple_of(tl.load(table + 3), ALIGN)
    if tl.program_id(1) >= batch * heads:
        return
    row = tl.program_id(1) // heads
    number = tl.arange(0, BLOCK_NODES)
    accepted = number < tl.minimum(tl.load(count + row), nodes)
    source = tl.load(path + row * nodes + number, mask=accepted, other=0)
    moved = accepted & (source != number)
    cache = tl.multiple_of(tl.load(table).to(tl.pointer_type(DTYPE)), ALIGN)
    cache += (tl.program_id(1) * slots + tl.load(lengths + row)) * size
    column = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = moved[:, None] & (column < size)[None, :]
    rows = tl.load(cache + source[:, None] * size + column[None, :], mask=mask)
    tl.debug_barrier()  # a slot may be both source and target: every load before any store
    tl.store(cache + number[:, None] * size + column[None, :], rows, mask=mask)
