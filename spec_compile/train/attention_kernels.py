"""Kernels of attention in training; `train.attention` has their plain forms. Import it only with Triton installed."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.card import card_of

# Attention of blocks of slots to a context and to themselves: one kernel for the forward, three for the backward.
#
#     score[s, c] = scale * q_s . key_c          c: a position of the context before the anchor of s's block, or a slot
#                                                   of the block (if causal, not after s)
#     out_s = sum over c of e^(score[s, c] - total_s) * value_c          total_s = log(sum over c of e^score[s, c])
#
# Shapes: B rows, H query heads, Hkv key-value heads, n blocks of T slots, S = n * T, L positions of the context, D size
# of a head. Anchors ascend in each row, so neighbouring blocks read about the same stretch of the context.

TILE, WIDE_TILE, WARPS = 64, 32, 4
"""The most slots, and keys, that a program has in registers at a time, with heads of up to 128 and wider ones; its
warps. Not tuned."""
TILES = 9
"""A program has as many tiles of keys, values, queries or gradients in shared memory at most."""


def forward_blocks(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, anchors: Tensor, size: int, scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out [B, H, S, D], total [B, H, S] float32) for the arguments of `train.attention.plain_block_attention`."""
    q, k, v, keys, values = (heads.contiguous() for heads in (q, k, v, keys, values))
    batch, heads, slots, _ = q.shape
    out, total = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
    constants = _constants(q, k.shape[1], causal)
    _attend_blocks[(triton.cdiv(slots, constants["QUERIES"]), batch * heads)](
        q, k, v, keys, values, anchors, out, total, scale, slots, keys.shape[2], anchors.shape[1], size, **constants
    )
    return out, total


def backward_blocks(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, anchors: Tensor, size: int,
    scale: float, causal: bool, out: Tensor, total: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, keys and values. grad: of out. Others as in `forward_blocks`."""
    grad, q, k, v, keys, values = (heads.contiguous() for heads in (grad, q, k, v, keys, values))
    batch, heads, slots, _ = q.shape
    length, blocks, kv_heads = keys.shape[2], anchors.shape[1], k.shape[1]
    # The mean of grad . value under a slot's shares, which the softmax's derivative subtracts.
    mean = (grad.float() * out.float()).sum(-1)
    dq, dk, dv, dkeys, dvalues = (torch.empty_like(heads) for heads in (q, k, v, keys, values))
    constants, known = _constants(q, kv_heads, causal), (anchors, total, mean)
    tile = constants["KEYS"]
    _backward_queries[(triton.cdiv(slots, tile), batch * heads)](
        grad, q, k, v, keys, values, *known, dq, scale, slots, length, blocks, size, **constants
    )
    constants["BLOCKS"] = triton.next_power_of_2(blocks)
    for own, rows, given, made in ((True, slots, (k, v), (dk, dv)), (False, length, (keys, values), (dkeys, dvalues))):
        _backward_keys[(triton.cdiv(rows, tile), batch * kv_heads)](
            grad, q, *given, *known, *made, scale, slots, rows, blocks, size, OWN=own, **constants
        )
    return dq, dk, dv, dkeys, dvalues


def _constants(q: Tensor, kv_heads: int, causal: bool) -> dict:
    heads, size, memory = q.shape[1], q.shape[3], card_of(q.device).memory
    width = triton.next_power_of_2(max(size, 16))
    tile = TILE if width <= 128 else WIDE_TILE
    while tile > 16 and TILES * tile * width * q.element_size() > memory > 0:
        tile //= 2
    return {
        "HEADS": heads, "SHARED": heads // kv_heads, "SIZE": size, "WIDTH": width, "CAUSAL": causal, "QUERIES": tile,
        "KEYS": tile, "num_warps": WARPS,
    }  # fmt: skip


@triton.jit
def _load(ptr, head, row, rows, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Rows [n, WIDTH] of a head among heads [rows, SIZE] of all rows of the batch; zeros outside."""
    lanes = tl.arange(0, WIDTH)
    mask = (row < rows)[:, None] & (lanes < SIZE)[None, :]
    ptr += rows.to(tl.int64) * head * SIZE
    return tl.load(ptr + row[:, None].to(tl.int64) * SIZE + lanes[None, :], mask=mask, other=0.0)


@triton.jit
def _store(ptr, values, head, row, rows, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Write rows [n, WIDTH] of a head among heads [rows, SIZE] of all rows of the batch."""
    lanes = tl.arange(0, WIDTH)
    mask = (row < rows)[:, None] & (lanes < SIZE)[None, :]
    ptr += rows.to(tl.int64) * head * SIZE
    tl.store(ptr + row[:, None].to(tl.int64) * SIZE + lanes[None, :], values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _is_seen(slot, anchor, key, rows, size, OWN: tl.constexpr, CAUSAL: tl.constexpr):
    """[queries, keys]: True where a slot sees a slot of its block (OWN), or a position of the context."""
    if OWN:
        seen = (slot // size)[:, None] == (key // size)[None, :]
        if CAUSAL:
            seen = seen & (slot[:, None] >= key[None, :])
    else:
        seen = key[None, :] < anchor[:, None]
    return seen & (key < rows)[None, :]


@triton.jit
def _anchor_of(anchors_ptr, slot, slots, blocks, size):
    """The anchor of each slot's block, [n]; 0 for slots that do not exist."""
    return tl.load(anchors_ptr + slot // size, mask=slot < slots, other=0)


@triton.jit
def _key_tile(
    keys_ptr, values_ptr, head, begin, slot, anchor, rows, size,
    OWN: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Keys and values of a head from `begin` on, and [queries, KEYS]: True where a slot sees them."""
    place = begin + tl.arange(0, KEYS)
    key = _load(keys_ptr, head, place, rows, SIZE, WIDTH)
    value = _load(values_ptr, head, place, rows, SIZE, WIDTH)
    return key, value, _is_seen(slot, anchor, place, rows, size, OWN, CAUSAL)


@triton.jit
def _query_tile(grad_ptr, q_ptr, total_ptr, mean_ptr, head, slot, slots, SIZE: tl.constexpr, WIDTH: tl.constexpr):
    """Queries of a head's slots, the gradient of their outputs, and `total` and `mean` of each."""
    q = _load(q_ptr, head, slot, slots, SIZE, WIDTH)
    grad = _load(grad_ptr, head, slot, slots, SIZE, WIDTH)
    row = slots.to(tl.int64) * head + slot
    total = tl.load(total_ptr + row, mask=slot < slots, other=0.0)
    return q, grad, total, tl.load(mean_ptr + row, mask=slot < slots, other=0.0)


@triton.jit
def _gather(q, key, value, seen, scale, mixed, largest, z):
    """Add keys [KEYS, WIDTH] to the running softmax of queries [QUERIES, WIDTH]."""
    score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
    score = tl.where(seen, score, -float("inf"))
    larger = tl.maximum(largest, tl.max(score, axis=1))
    safe = tl.where(larger == -float("inf"), 0.0, larger)  # a slot that has seen nothing so far
    shrink, share = tl.exp(largest - safe), tl.exp(score - safe[:, None])
    mixed = mixed * shrink[:, None] + tl.dot(share.to(value.dtype), value, input_precision="ieee")
    return mixed, larger, z * shrink + tl.sum(share, axis=1)


@triton.jit(do_not_specialize=["slots", "length", "blocks"])
def _attend_blocks(
    q_ptr, k_ptr, v_ptr,  # [B, H, S, SIZE], [B, Hkv, S, SIZE] (k and v)
    keys_ptr, values_ptr, anchors_ptr,  # [B, Hkv, L, SIZE] (keys and values), [B, n] int64
    out_ptr, total_ptr,  # [B, H, S, SIZE], [B, H, S] float32, written
    scale, slots, length, blocks, size,
    HEADS: tl.constexpr, SHARED: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """QUERIES slots of a head a program. Grid (S / QUERIES, B * H)."""
    first, head = tl.program_id(0) * QUERIES, tl.program_id(1)
    kv_head, anchors_ptr = head // SHARED, anchors_ptr + head // HEADS * blocks
    slot, last = first + tl.arange(0, QUERIES), tl.minimum(first + QUERIES, slots) - 1
    q = _load(q_ptr, head, slot, slots, SIZE, WIDTH)
    anchor = _anchor_of(anchors_ptr, slot, slots, blocks, size)
    mixed = tl.zeros([QUERIES, WIDTH], tl.float32)
    largest, z = tl.full([QUERIES], -float("inf"), tl.float32), tl.zeros([QUERIES], tl.float32)

    # The context up to the anchor of the program's last block, and then the slots of the program's blocks.
    rows, start, end = length, 0, tl.minimum(tl.load(anchors_ptr + last // size), length).to(tl.int32)
    for own in tl.static_range(2):
        if own:
            keys_ptr, values_ptr, rows = k_ptr, v_ptr, slots
            start, end = first // size * size, (last // size + 1) * size
        for begin in range(start, end, KEYS):
            key, value, seen = _key_tile(
                keys_ptr, values_ptr, kv_head, begin, slot, anchor, rows, size, own, SIZE, WIDTH, CAUSAL, KEYS
            )
            mixed, largest, z = _gather(q, key, value, seen, scale, mixed, largest, z)

    # Divide by the sum.
    z = tl.where(slot < slots, z, 1.0)
    _store(out_ptr, mixed / z[:, None], head, slot, slots, SIZE, WIDTH)
    tl.store(total_ptr + slots.to(tl.int64) * head + slot, largest + tl.log(z), mask=slot < slots)


@triton.jit
def _derive(grad, q, key, value, seen, scale, total, mean):
    """Shares and derivatives of the scores, both [QUERIES, KEYS] float32."""
    score = tl.dot(q, tl.trans(key), input_precision="ieee") * scale
    share = tl.where(seen, tl.exp(score - total[:, None]), 0.0)
    pull = tl.dot(grad, tl.trans(value), input_precision="ieee")
    return share, share * (pull - mean[:, None]) * scale


@triton.jit(do_not_specialize=["slots", "length", "blocks"])
def _backward_queries(
    grad_ptr, q_ptr, k_ptr, v_ptr, keys_ptr, values_ptr, anchors_ptr,  # out's gradient; others as in `_attend_blocks`
    total_ptr, mean_ptr, dq_ptr,  # [B, H, S] float32 (total and mean), [B, H, S, SIZE], written
    scale, slots, length, blocks, size,
    HEADS: tl.constexpr, SHARED: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The gradients of QUERIES slots of a head a program. Grid (S / QUERIES, B * H)."""
    first, head = tl.program_id(0) * QUERIES, tl.program_id(1)
    kv_head, anchors_ptr = head // SHARED, anchors_ptr + head // HEADS * blocks
    slot, last = first + tl.arange(0, QUERIES), tl.minimum(first + QUERIES, slots) - 1
    q, grad, total, mean = _query_tile(grad_ptr, q_ptr, total_ptr, mean_ptr, head, slot, slots, SIZE, WIDTH)
    anchor = _anchor_of(anchors_ptr, slot, slots, blocks, size)
    dq = tl.zeros([QUERIES, WIDTH], tl.float32)

    # The context up to the anchor of the program's last block, and then the slots of the program's blocks.
    rows, start, end = length, 0, tl.minimum(tl.load(anchors_ptr + last // size), length).to(tl.int32)
    for own in tl.static_range(2):
        if own:
            keys_ptr, values_ptr, rows = k_ptr, v_ptr, slots
            start, end = first // size * size, (last // size + 1) * size
        for begin in range(start, end, KEYS):
            key, value, seen = _key_tile(
                keys_ptr, values_ptr, kv_head, begin, slot, anchor, rows, size, own, SIZE, WIDTH, CAUSAL, KEYS
            )
            _, dscore = _derive(grad, q, key, value, seen, scale, total, mean)
            dq += tl.dot(dscore.to(key.dtype), key, input_precision="ieee")
    _store(dq_ptr, dq, head, slot, slots, SIZE, WIDTH)


@triton.jit(do_not_specialize=["slots", "rows", "blocks"])
def _backward_keys(
    grad_ptr, q_ptr, keys_ptr, values_ptr, anchors_ptr, total_ptr, mean_ptr,  # as in `_backward_queries`; k, v with OWN
    dkeys_ptr, dvalues_ptr,  # [B, Hkv, rows, SIZE], written
    scale, slots, rows, blocks, size,
    HEADS: tl.constexpr, SHARED: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, OWN: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The gradients of KEYS keys and values of slots (OWN) or of the context a program, from the heads that share them.
    Grid (rows / KEYS, B * Hkv)."""
    first, kv_head = tl.program_id(0) * KEYS, tl.program_id(1)
    place = first + tl.arange(0, KEYS)
    key = _load(keys_ptr, kv_head, place, rows, SIZE, WIDTH)
    value = _load(values_ptr, kv_head, place, rows, SIZE, WIDTH)
    dk, dv = tl.zeros([KEYS, WIDTH], tl.float32), tl.zeros([KEYS, WIDTH], tl.float32)
    anchors_ptr += kv_head // (HEADS // SHARED) * blocks
    if OWN:
        start, end = first // size * size, ((tl.minimum(first + KEYS, slots) - 1) // size + 1) * size
    else:
        # The first blocks' anchors are not after the first key, so that they see none of these keys.
        number = tl.arange(0, BLOCKS)
        anchors = tl.load(anchors_ptr + number, mask=number < blocks, other=first + 1)
        start, end = tl.sum((anchors <= first).to(tl.int32)) * size, slots
    for head in range(kv_head * SHARED, (kv_head + 1) * SHARED):
        for begin in range(start, end, QUERIES):
            slot = begin + tl.arange(0, QUERIES)
            q, grad, total, mean = _query_tile(grad_ptr, q_ptr, total_ptr, mean_ptr, head, slot, slots, SIZE, WIDTH)
            anchor = _anchor_of(anchors_ptr, slot, slots, blocks, size)
            seen = _is_seen(slot, anchor, place, rows, size, OWN, CAUSAL) & (slot < slots)[:, None]
            share, dscore = _derive(grad, q, key, value, seen, scale, total, mean)
            dv += tl.dot(tl.trans(share.to(grad.dtype)), grad, input_precision="ieee")
            dk += tl.dot(tl.trans(dscore.to(q.dtype)), q, input_precision="ieee")
    _store(dkeys_ptr, dk, kv_head, place, rows, SIZE, WIDTH)
    _store(dvalues_ptr, dv, kv_head, place, rows, SIZE, WIDTH)


# Keys that each slot has drafted itself, joined to causal attention: a kernel for the forward, one for the backward.
#
#     score_i = scale * q . key_i                        joint = log(e^total + sum_i e^score_i)
#     out = e^(total - joint) * causal + sum_i e^(score_i - joint) * value_i
#
# The plain forms pass over the drafted keys and values several times, in products as large as these.
#
# Shapes: B rows, H heads, T slots, D head size, i drafted steps. A kernel has B * T * H rows: one slot of a head each.

ELEMENTS = 2048
"""Elements of queries that a program reads at a time; not tuned."""


def join(q: Tensor, keys: Tensor, values: Tensor, causal: Tensor, total: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`train.attention.join` for 16 or 32 bits; total is float32. The output is [B, T, H, D] in memory."""
    q, causal, total = _rows(q), _rows(causal), total.contiguous()
    out, joint = torch.empty_like(q), torch.empty_like(total)
    _launch(_join, (q, keys, values, causal, total, out, joint), scale)
    return out.transpose(1, 2), joint


def join_backward(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, joint: Tensor, dq: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`train.attention.join_backward` for 16 or 32 bits; joint is float32."""
    grad, q, out, dq, joint = _rows(grad), _rows(q), _rows(out), _rows(dq), joint.contiguous()
    joint_dq, dkeys, dvalues = torch.empty_like(q), torch.empty_like(keys), torch.empty_like(values)
    _launch(_join_backward, (grad, q, keys, values, out, joint, dq, joint_dq, dkeys, dvalues), scale)
    return joint_dq.transpose(1, 2), dkeys, dvalues


def _rows(heads: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, H, D], contiguous. The results of projections and flash kernels need no copy."""
    return heads.transpose(1, 2).contiguous()


def _launch(kernel, tensors: tuple[Tensor, ...], scale: float) -> None:
    """Run a kernel of rows. tensors: its arguments, of which the third is [i, B, T, H, D]."""
    steps, batch, slots, heads, size = tensors[2].shape
    rows, width = batch * slots * heads, triton.next_power_of_2(size)
    block = max(1, ELEMENTS // width)
    if rows:
        kernel[(triton.cdiv(rows, block),)](
            *tensors, scale, rows, heads, slots, steps, SIZE=size, WIDTH=width, ROWS=block, num_warps=WARPS
        )


@triton.jit
def _rows_of_program(rows, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """The program's rows [ROWS], True for those that exist [ROWS], the lanes of a row [WIDTH], and the mask of both."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, WIDTH)
    inside = row < rows
    return row, inside, lanes, inside[:, None] & (lanes < SIZE)[None, :]


@triton.jit
def _cell_of_sum(row, heads, slots):
    """The index in [B, H, T], the order of log-sum-exps, of a row of [B, T, H]."""
    head, slot = row % heads, row // heads
    return (slot // slots * heads + head) * slots + slot % slots


@triton.jit(do_not_specialize=["rows", "heads", "slots", "steps"])
def _join(
    q_ptr, keys_ptr, values_ptr,  # [rows, SIZE], [steps, rows, SIZE] (keys and values)
    causal_ptr, total_ptr,  # [rows, SIZE], [B, H, T] float32: causal attention and its log-sum-exp
    out_ptr, joint_ptr,  # [rows, SIZE], [B, H, T] float32, written
    scale, rows, heads, slots, steps, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program. Grid (rows / ROWS)."""
    row, inside, lanes, mask = _rows_of_program(rows, SIZE, WIDTH, ROWS)
    cell = row[:, None] * SIZE + lanes[None, :]

    # Begin with the causal part: its log-sum-exp is taken for its maximum, so its sum of exponentials is 1.
    q = tl.load(q_ptr + cell, mask=mask, other=0.0).to(tl.float32) * scale
    mixed = tl.load(causal_ptr + cell, mask=mask, other=0.0).to(tl.float32)
    sum_cell = _cell_of_sum(row, heads, slots)
    largest = tl.load(total_ptr + sum_cell, mask=inside, other=0.0)
    z = tl.full([ROWS], 1.0, tl.float32)

    # Each drafted step adds one key to a running softmax.
    drafted = row
    for _step in range(steps):
        cell_of_step = drafted[:, None] * SIZE + lanes[None, :]
        key = tl.load(keys_ptr + cell_of_step, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(values_ptr + cell_of_step, mask=mask, other=0.0).to(tl.float32)
        score = tl.sum(q * key, axis=1)
        larger = tl.maximum(largest, score)
        shrink, share = tl.exp(largest - larger), tl.exp(score - larger)
        mixed = mixed * shrink[:, None] + value * share[:, None]
        z = z * shrink + share
        largest = larger
        drafted += rows

    # Divide by the joint sum.
    tl.store(out_ptr + cell, (mixed / z[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(joint_ptr + sum_cell, largest + tl.log(z), mask=inside)


@triton.jit(do_not_specialize=["rows", "heads", "slots", "steps"])
def _join_backward(
    grad_ptr, q_ptr, keys_ptr, values_ptr, out_ptr, joint_ptr,  # the gradient of out; others as in `_join`
    dq_ptr,  # [rows, SIZE]: the causal part's gradient of q
    joint_dq_ptr, dkeys_ptr, dvalues_ptr,  # [rows, SIZE], [steps, rows, SIZE] (keys and values), written
    scale, rows, heads, slots, steps, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows a program: joint_dq = dq + the drafted keys' gradient of q. Grid (rows / ROWS)."""
    row, inside, lanes, mask = _rows_of_program(rows, SIZE, WIDTH, ROWS)
    cell = row[:, None] * SIZE + lanes[None, :]

    # The mean of grad . value over all keys, causal ones too, weighted by their shares, is grad . out.
    grad = tl.load(grad_ptr + cell, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + cell, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(grad * out, axis=1)
    q = tl.load(q_ptr + cell, mask=mask, other=0.0).to(tl.float32)
    joint_dq = tl.load(dq_ptr + cell, mask=mask, other=0.0).to(tl.float32)
    joint = tl.load(joint_ptr + _cell_of_sum(row, heads, slots), mask=inside, other=0.0)

    # The softmax's derivative is share * (grad . value - mean). Each drafted key has only one query.
    drafted = row
    for _step in range(steps):
        cell_of_step = drafted[:, None] * SIZE + lanes[None, :]
        key = tl.load(keys_ptr + cell_of_step, mask=mask, other=0.0).to(tl.float32)
        value = tl.load(values_ptr + cell_of_step, mask=mask, other=0.0).to(tl.float32)
        share = tl.exp(tl.sum(q * key, axis=1) * scale - joint)
        dscore = share * (tl.sum(grad * value, axis=1) - mean) * scale
        joint_dq += dscore[:, None] * key
        tl.store(dkeys_ptr + cell_of_step, (dscore[:, None] * q).to(dkeys_ptr.dtype.element_ty), mask=mask)
        tl.store(dvalues_ptr + cell_of_step, (share[:, None] * grad).to(dvalues_ptr.dtype.element_ty), mask=mask)
        drafted += rows

    tl.store(joint_dq_ptr + cell, joint_dq.to(joint_dq_ptr.dtype.element_ty), mask=mask)
