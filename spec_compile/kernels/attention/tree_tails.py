"""The part of tree attention behind the last whole chunk of the cache: a tail tile (see `tail_tiles`).

Import this module only where Triton is installed. Shapes as in `tree_kernels`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..rounding import as_read
from .chunk import attend_to_chunk, score
from .tree_tile import load_queries, prefetch_slots, store_nothing, store_part


@triton.jit
def _path_nodes(path_ptr, nodes, reach, step):
    """Which node is at each step of a path [C]; N where there is none. path_ptr: the path [N], whose end is marked, so
    that nothing waits for `reach`; None: the nodes in their order, `reach` of them."""
    if path_ptr is None:
        node = tl.where((step >= 0) & (step < reach), step, nodes)
    else:
        node = tl.load(path_ptr + step, mask=(step >= 0) & (step < nodes), other=nodes)
    return node


@triton.jit
def _load_path(
    key_cache_ptr, value_cache_ptr, node, nodes, length, capacity, start, column,
    CHUNK: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The keys [C, BLOCK_DK] and values [C, BLOCK_DV] of the positions from `start` on, which are committed below
    `length` and `node` [C] from there on, and their slots [C]."""
    dk, dv = tl.arange(0, BLOCK_DK), column + tl.arange(0, BLOCK_DV)
    position = start + tl.arange(0, CHUNK)
    committed = position < length
    slot = tl.where(committed, position, length + node)
    stored = (committed | (node < nodes)) & (slot < capacity)
    mask = stored[:, None] & (dk < DK)[None, :]
    keys = tl.load(key_cache_ptr + slot[:, None] * DK + dk[None, :], mask=mask, other=0.0)
    mask = stored[:, None] & (dv < DV)[None, :]
    values = tl.load(value_cache_ptr + slot[:, None] * DV + dv[None, :], mask=mask, other=0.0)
    return keys, values, slot


@triton.jit
def _attend_to_path(
    query, keys, values, node, slot, scales_ptr, positions_ptr, nodes, length, capacity, start, last, position, slope,
    inner, outer,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The chunk that `_load_path` has loaded. last [M]: where on the path the last node is that each row sees."""
    key_position = start + tl.arange(0, CHUNK)
    step = key_position - length
    committed, new = step < 0, node < nodes
    seen = step[None, :] <= last[:, None]
    if WINDOW is not None or slope is not None:
        new_position = tl.load(positions_ptr + node, mask=new, other=0).to(tl.int32)
        key_position = tl.where(committed, key_position, new_position)
    if WINDOW is not None:
        seen = seen & (position[:, None] - key_position[None, :] < WINDOW)
    stored = ((committed | new) & (slot < capacity))[:, None]
    keys = as_read(keys, scales_ptr, slot, stored, 0, query.dtype)
    values = as_read(values, scales_ptr, slot, stored, 1, query.dtype)
    scores = score(query, keys, PRECISION)
    return attend_to_chunk(scores, values, seen, slope, key_position, position, inner, outer, SOFTCAP, PRECISION)


@triton.jit
def attend_to_tail(
    q_ptr, key_cache_ptr, value_cache_ptr, scales_ptr, path_ptr, positions_ptr, slopes_ptr, parts_ptr, sums_ptr,
    stride_qh, stride_qn, nodes, length, capacity, edge, part, tail, column, inner, outer,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr,
    PARTS: tl.constexpr, PER_TILE: tl.constexpr, COLUMNS: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tail tile, or a part of its rows: all chunks from `edge` on, into the parts from `part` on, also those behind
    this path that another path of the batch may have. All is loaded as early as it can be, because what a tail takes is
    one latency after the other.

    path_ptr: the tile's path in the table of `tail_tiles`, behind the COLUMNS before it; None: the nodes in their
    order. The other pointers: of this row of the batch and KV head.
    """
    TILE_PARTS: tl.constexpr = (PER_TILE * GROUP + BLOCK_M - 1) // BLOCK_M
    index = tail % TILE_PARTS * BLOCK_M + tl.arange(0, BLOCK_M)
    member, head = index // GROUP, index % GROUP
    first = tail // TILE_PARTS * PER_TILE
    count = tl.minimum(PER_TILE, nodes - first)
    reach = first + count
    if path_ptr is not None:
        reach = tl.load(path_ptr - COLUMNS)
        first = tl.load(path_ptr - COLUMNS + 1)
        count = tl.load(path_ptr - COLUMNS + 2)
    if count * GROUP <= tail % TILE_PARTS * BLOCK_M:
        return
    path, loaded = (), ()
    for number in tl.static_range(PARTS):
        step = edge + number * CHUNK - length + tl.arange(0, CHUNK)
        path += (_path_nodes(path_ptr, nodes, reach, step),)
    real, rank = member < count, first + member
    node, last = rank, rank
    if path_ptr is not None:
        node = tl.load(path_ptr + rank, mask=real, other=0)
        last = rank + tl.load(path_ptr - COLUMNS + 4)
    last = tl.minimum(last, reach - 1)
    position, slope = node, None
    if WINDOW is not None or slopes_ptr is not None:
        position = tl.load(positions_ptr + node, mask=real, other=1 << 30).to(tl.int32)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head, mask=real, other=0.0)
    if EARLY:
        prefetch_slots(key_cache_ptr, edge, length, DK, BLOCK_DK, CHUNK)
        prefetch_slots(value_cache_ptr + column, edge, length, DV, BLOCK_DV, CHUNK)
        gdc_wait()

    for number in tl.static_range(PARTS):
        chunk = _load_path(
            key_cache_ptr, value_cache_ptr, path[number], nodes, length, capacity, edge + number * CHUNK, column,
            CHUNK, DK, BLOCK_DK, DV, BLOCK_DV,
        )  # fmt: skip
        loaded += (chunk,)
    query = load_queries(q_ptr + head * stride_qh + node * stride_qn, real, DK, BLOCK_DK)
    for number in tl.static_range(PARTS):
        start = edge + number * CHUNK
        if start < length + reach:
            keys, values, slot = loaded[number]
            acc, peak, total = _attend_to_path(
                query, keys, values, path[number], slot, scales_ptr, positions_ptr, nodes, length, capacity, start,
                last, position, slope, inner, outer, SOFTCAP, WINDOW, CHUNK, PRECISION,
            )  # fmt: skip
            store_part(
                parts_ptr, sums_ptr, part + number, nodes * GROUP, node * GROUP + head, real, column, acc, peak, total,
                DV,
            )  # fmt: skip
        elif start < length + nodes:
            store_nothing(sums_ptr, part + number, nodes * GROUP, node * GROUP + head, real)
