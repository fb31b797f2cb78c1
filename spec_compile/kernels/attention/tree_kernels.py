"""The kernel of tree attention: spans of the cache, or one tail tile, for a tile of rows.

Import this module only where Triton is installed. A row is one query head of one node, its number node * GROUP + head
of the group. The slots below `edge`, the last multiple of CHUNK that is not above the committed length, are read by
spans (`tree_spans`); what lies behind, the last committed slots and the tree itself, by tail tiles (`tree_tails`). Both
form the partial softmax of one chunk of keys at a time with the same code (`chunk`). Shapes: M = BLOCK_M rows of a
tile, C = CHUNK keys, BLOCK_D* a head size or, of values, a part of it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from .tree_spans import attend_to_spans
from .tree_tails import attend_to_tail


@triton.jit(do_not_specialize=["nodes", "spans"])
def tree_kernel(
    q_ptr, key_cache_ptr, value_cache_ptr, scales_ptr, lengths_ptr, tiles_ptr, positions_ptr, slopes_ptr, parts_ptr,
    sums_ptr, stride_qb, stride_qh, stride_qn, stride_p, nodes, capacity, spans, inner, outer,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr, FIRST: tl.constexpr, MOST: tl.constexpr, PARTS: tl.constexpr, PER_TILE: tl.constexpr,
    COLUMNS: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Partial softmaxes of tail tiles into the first PARTS parts, of spans into those behind them, the last one first.
    Grid (B * Hkv, groups of spans * tiles of rows + tail tiles, blocks of Dv): tail tiles begin first, because they
    take longest, and programs that have nothing to do are the last. inner, outer: factors of the scores in and behind
    tanh. TOGETHER: see `_attend_to_slots`.
    """
    TILE_PARTS: tl.constexpr = (PER_TILE * GROUP + BLOCK_M - 1) // BLOCK_M
    if EARLY:
        gdc_launch_dependents()  # the merge may take its place on the GPU, and wait there
    pair = tl.program_id(0).to(tl.int64)
    batch, kv_head = pair // KV_HEADS, pair % KV_HEADS
    program, column = tl.program_id(1), tl.program_id(2) * BLOCK_DV
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    tails, path_ptr = tl.cdiv(nodes, PER_TILE) * TILE_PARTS, tiles_ptr
    if tiles_ptr is not None:
        path_ptr += (batch * nodes + tl.minimum(program // TILE_PARTS, nodes - 1)) * (COLUMNS + nodes) + COLUMNS
        tails = tl.load(path_ptr - COLUMNS + 3) * TILE_PARTS
    edge = length // CHUNK * CHUNK
    q_ptr += batch * stride_qb + kv_head * GROUP * stride_qh
    key_cache_ptr += pair * capacity * DK
    value_cache_ptr += pair * capacity * DV
    positions_ptr += batch * stride_p
    if scales_ptr is not None:
        scales_ptr += pair * capacity * 2
    if slopes_ptr is not None:
        slopes_ptr += kv_head * GROUP
    part, row_tiles = pair * (PARTS + spans), tl.cdiv(nodes * GROUP, BLOCK_M)
    if program < tails:
        attend_to_tail(
            q_ptr, key_cache_ptr, value_cache_ptr, scales_ptr, path_ptr, positions_ptr, slopes_ptr, parts_ptr, sums_ptr,
            stride_qh, stride_qn, nodes, length, capacity, edge, part, program, column, inner, outer, SOFTCAP, WINDOW,
            GROUP, BLOCK_M, CHUNK, PARTS, PER_TILE, COLUMNS, DK, BLOCK_DK, DV, BLOCK_DV, PRECISION, EARLY,
        )  # fmt: skip
    else:
        program -= tails
        attend_to_spans(
            q_ptr, key_cache_ptr, value_cache_ptr, scales_ptr, positions_ptr, slopes_ptr, parts_ptr, sums_ptr,
            stride_qh, stride_qn, nodes, length, edge, part + PARTS, program // row_tiles, program % row_tiles, column,
            inner, outer, SOFTCAP, WINDOW, GROUP, BLOCK_M, CHUNK, FIRST, MOST, DK, BLOCK_DK, DV, BLOCK_DV, PRECISION,
            EARLY, TOGETHER,
        )  # fmt: skip
