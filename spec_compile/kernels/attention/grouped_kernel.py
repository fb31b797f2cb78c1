"""The kernels of `grouped`: parts of the slots side by side, then their sum. Import it only where Triton is installed.

Row r of a KV head is head r // N of its group and token r % N. With two heads a group and N = 3, row 4 is the second
head of token 1.
"""

import triton
import triton.language as tl

from .partial_softmax import attend_to_chunk, fold, fold_row, score


@triton.jit(do_not_specialize=["nodes", "slots", "share", "rows"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr,  # [B, H, N, Dk], [B, Hkv, S, Dk], [B, Hkv, S, Dv] by their strides
    mask_ptr,  # [B, 1, N, S] bools by its strides; None: every row sees all slots
    sums_ptr, peaks_ptr,  # float32 [B * Hkv, parts, rows, Dv] and [B * Hkv, parts, 2, rows], written
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_mb, stride_mn, stride_ms, nodes, slots, share, rows, scale,
    KV_HEADS: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The partial softmax of all rows over `share` slots. Grid (parts, B * Hkv)."""
    # The rows' queries [BLOCK_M, BLOCK_DK].
    part, pair = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, kv_head = pair // KV_HEADS, pair % KV_HEADS
    row, dk, dv = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    head, node = kv_head * (rows // nodes) + row // nodes, row % nodes
    q_ptr += batch * stride_qb + head[:, None] * stride_qh + node[:, None] * stride_qn
    query = tl.load(q_ptr + dk[None, :], mask=(row < rows)[:, None] & (dk < DK)[None, :], other=0.0)
    k_ptr += batch * stride_kb + kv_head * stride_kh
    v_ptr += batch * stride_vb + kv_head * stride_vh

    # One block of slots after the other; a block that no row sees is not read.
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    peak, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, slots), BLOCK_N):
        slot = (start + tl.arange(0, BLOCK_N)).to(tl.int64)
        seen = (row < rows)[:, None] & (slot < slots)[None, :]
        if mask_ptr is not None:
            shown = mask_ptr + batch * stride_mb + node[:, None] * stride_mn + slot[None, :] * stride_ms
            seen = seen & (tl.load(shown, mask=seen, other=0) != 0)  # guard: mask
        if tl.max(tl.max(seen.to(tl.int32), 1), 0) > 0:
            inside = (slot < slots)[:, None]
            keys = tl.load(k_ptr + slot[:, None] * stride_ks + dk[None, :], mask=inside & (dk < DK)[None, :], other=0.0)
            of_value = slot[:, None] * stride_vs + dv[None, :]
            values = tl.load(v_ptr + of_value, mask=inside & (dv < DV)[None, :], other=0.0)
            scores = score(query, keys, PRECISION)
            next_acc, next_peak, next_total = attend_to_chunk(
                scores, values, seen, None, slot, node, 0.0, scale * 1.4426950408889634, False, PRECISION
            )
            acc, peak, total = fold(acc, peak, total, next_acc, next_peak, next_total)

    # The part.
    at = pair * tl.num_programs(0) + part
    stored = (row < rows)[:, None] & (dv < DV)[None, :]
    tl.store(sums_ptr + (at * rows + row)[:, None] * DV + dv[None, :], acc, mask=stored)
    tl.store(peaks_ptr + at * 2 * rows + row, peak, mask=row < rows)
    tl.store(peaks_ptr + (at * 2 + 1) * rows + row, total, mask=row < rows)


@triton.jit(do_not_specialize=["nodes", "parts"])
def merge_kernel(
    sums_ptr, peaks_ptr, out_ptr,  # as `attend_kernel` has written them; [B, N, H, Dv], written
    nodes, parts, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """The sum of all parts of a row, from the first to the last, over its total. Grid (rows, B * Hkv)."""
    row, pair, rows = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    dv = tl.arange(0, BLOCK_DV)
    acc, peak, total = tl.zeros([BLOCK_DV], tl.float32), float("-inf"), 0.0
    for part in range(parts):
        at = pair * parts + part
        next_acc = tl.load(sums_ptr + (at * rows + row) * DV + dv, mask=dv < DV, other=0.0)
        next_peak = tl.load(peaks_ptr + at * 2 * rows + row)
        next_total = tl.load(peaks_ptr + (at * 2 + 1) * rows + row)
        acc, peak, total = fold_row(acc, peak, total, next_acc, next_peak, next_total)
    batch, head = pair // KV_HEADS, pair % KV_HEADS * GROUP + row // nodes
    at = ((batch * nodes + row % nodes) * (KV_HEADS * GROUP) + head) * DV
    out = tl.where(total > 0, acc / tl.where(total > 0, total, 1.0), 0.0)  # guard: nothing-is-seen
    tl.store(out_ptr + at + dv, out, mask=dv < DV)
