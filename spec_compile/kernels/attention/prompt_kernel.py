"""The kernel of attention for a causal chunk larger than any tree, as prompts come in.

The chunk is in the cache already, after the committed slots, so a tile of rows attends to the cache only. A row is one
query head of one token (node). Keys are summed as in `tree_kernel`: by chunks of CHUNK keys, chunks by the spans of the
row's own position (`spans`), and spans from the first to the last (`ordered_spans`). So a token's output has the bits
that it has as a node of a tree.

Import this module only where Triton is installed. Shapes: M = BLOCK_M rows of a tile, BLOCK_D* a head size or, of
values, a part of it.
"""

import triton
import triton.language as tl

from .ordered_spans import attend_in_order, no_softmax
from .partial_softmax import fold
from .spans import span_log2


@triton.jit(do_not_specialize=["nodes"])
def prompt_kernel(
    q_ptr,  # [B, H, N, Dk] by its strides
    key_cache_ptr, value_cache_ptr, scales_ptr,  # [B, Hkv, S, Dk], [B, Hkv, S, Dv], [B, Hkv, S, 2] or None
    lengths_ptr, positions_ptr, sinks_ptr, slopes_ptr,  # [B], [B, N] by its stride, [H] or None, [H] or None
    out_ptr,  # [B, N, H, Dv], written
    stride_qb, stride_qh, stride_qn, stride_p, nodes, capacity,
    inner, outer,  # factors of the scores inside and outside tanh
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr, FIRST: tl.constexpr, MOST: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of rows attends to all that it sees. Grid (tiles, B * Hkv, blocks of Dv); MOST is 0 with a window."""
    # This program's rows [M]: nodes and heads. Tiles that see most begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    pair, column = tl.program_id(1).to(tl.int64), tl.program_id(2) * BLOCK_DV
    batch, kv_head = pair // KV_HEADS, pair % KV_HEADS
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node, head = row // GROUP, kv_head * GROUP + row % GROUP
    real, first_node = row < nodes * GROUP, tile * BLOCK_M // GROUP
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    key_cache_ptr += pair * capacity * DK
    value_cache_ptr += pair * capacity * DV
    positions_ptr += batch * stride_p
    if scales_ptr is not None:
        scales_ptr += pair * capacity * 2

    # The slots that the tile sees, begin .. end; all rows see those below `common`. The sizes of the rows' spans.
    last_node = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, nodes - 1)
    begin, end = tl.zeros_like(length), tl.minimum(length + last_node + 1, capacity)
    common = tl.minimum(length + first_node + 1, end) // CHUNK * CHUNK
    log2, _ = span_log2(length + tl.minimum(node, nodes - 1), FIRST, MOST)
    least, _ = span_log2(length + first_node, FIRST, MOST)
    position, slope = node, None
    if WINDOW is not None or slopes_ptr is not None:
        position = tl.load(positions_ptr + node, mask=real, other=1 << 30).to(tl.int32)
    if slopes_ptr is not None:
        slope = tl.load(slopes_ptr + head, mask=real, other=0.0)
    if WINDOW is not None:
        # Positions ascend in a chunk, so the window of its tokens can be counted in slots.
        lowest = tl.minimum(tl.min(position, 0) - WINDOW + 1, length)
        lowest = tl.where(lowest < length, lowest, length + first_node - WINDOW + 1)
        begin = tl.maximum(lowest, 0) // CHUNK * CHUNK
        common = begin

    # Attend to the slots that all rows see, then to the others.
    dk = tl.arange(0, BLOCK_DK)[None, :]
    row_ptr = q_ptr + batch * stride_qb + head[:, None] * stride_qh + node[:, None] * stride_qn
    query = tl.load(row_ptr + dk, mask=real[:, None] & (dk < DK), other=0.0)
    done, span = no_softmax(BLOCK_M, BLOCK_DV), no_softmax(BLOCK_M, BLOCK_DV)
    if WINDOW is None and slopes_ptr is None:
        done, span = attend_in_order(
            query, key_cache_ptr, value_cache_ptr, scales_ptr, positions_ptr, done, span, begin, common, log2, least,
            node, position, slope, length, column, inner, outer,
            SOFTCAP, WINDOW, False, CHUNK, DK, BLOCK_DK, DV, BLOCK_DV, PRECISION,
        )  # fmt: skip
        begin = common
    done, span = attend_in_order(
        query, key_cache_ptr, value_cache_ptr, scales_ptr, positions_ptr, done, span, begin, end, log2, least,
        node, position, slope, length, column, inner, outer,
        SOFTCAP, WINDOW, True, CHUNK, DK, BLOCK_DK, DV, BLOCK_DV, PRECISION,
    )  # fmt: skip
    acc, peak, total = fold(done[0], done[1], done[2], span[0], span[1], span[2])

    # A sink is a key without a value.
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        acc, peak, total = fold(acc, peak, total, tl.zeros_like(acc), tl.ceil(sink), tl.zeros_like(total))
        total += tl.exp2(sink - peak)
    dv = column + tl.arange(0, BLOCK_DV)
    at = out_ptr + batch * nodes * (KV_HEADS * GROUP * DV) + (node * (KV_HEADS * GROUP) + head)[:, None] * DV
    tl.store(at + dv[None, :], acc / total[:, None], mask=real[:, None] & (dv < DV)[None, :])
