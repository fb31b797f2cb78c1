"""Keys that each slot has drafted itself, joined to causal attention: a kernel for the forward, one for the backward.

    score_i = scale * q . key_i                        joint = log(e^total + sum_i e^score_i)
    out = e^(total - joint) * causal + sum_i e^(score_i - joint) * value_i

`train.attention.join` and `join_backward` are the plain forms; their operations pass over the drafted keys and
values several times, in products as large as these. Import this module only where Triton is installed.

Shapes: B rows, H heads, T slots, D head size, i drafted steps. A kernel sees a head of a slot as one of B * T * H rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS, WARPS = 2048, 4
"""Elements of queries that a program reads at a time, and its warps; not tuned."""


def join(q: Tensor, keys: Tensor, values: Tensor, causal: Tensor, total: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`train.attention.join` for 16 or 32 bits; total is float32. The output is [B, T, H, D] in memory."""
    batch, heads, slots, size = q.shape
    q, causal, total = _rows(q), _rows(causal), total.contiguous()
    out, joint = torch.empty_like(q), torch.empty_like(total)
    rows = batch * slots * heads
    block, width = _block(size)
    if rows:
        _join[(triton.cdiv(rows, block),)](
            q, keys, values, causal, total, out, joint, scale, rows, heads, slots, len(keys),
            SIZE=size, WIDTH=width, ROWS=block, num_warps=WARPS,
        )  # fmt: skip
    return out.transpose(1, 2), joint


def join_backward(
    grad: Tensor, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, joint: Tensor, dq: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`train.attention.join_backward` for 16 or 32 bits; joint is float32."""
    batch, heads, slots, size = q.shape
    grad, q, out, dq, joint = _rows(grad), _rows(q), _rows(out), _rows(dq), joint.contiguous()
    joint_dq, dkeys, dvalues = torch.empty_like(q), torch.empty_like(keys), torch.empty_like(values)
    rows = batch * slots * heads
    block, width = _block(size)
    if rows:
        _join_backward[(triton.cdiv(rows, block),)](
            grad, q, keys, values, out, joint, dq, joint_dq, dkeys, dvalues, scale, rows, heads, slots, len(keys),
            SIZE=size, WIDTH=width, ROWS=block, num_warps=WARPS,
        )  # fmt: skip
    return joint_dq.transpose(1, 2), dkeys, dvalues


def _rows(heads: Tensor) -> Tensor:
    """[B, H, T, D] -> [B, T, H, D], contiguous. The results of projections and flash kernels need no copy."""
    return heads.transpose(1, 2).contiguous()


def _block(size: int) -> tuple[int, int]:
    """The rows of a program, and the power of two that holds a head of `size`."""
    width = triton.next_power_of_2(size)
    return max(1, ELEMENTS // width), width


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
