"""The keys that each slot has drafted itself, joined to causal attention: one kernel for each direction.

Import this module only where Triton is installed. `training.attention.join` and `join_backward` say what is computed;
PyTorch's own operations pass over the drafted keys and values several times, in products that are as large as they.

Shapes: B rows, H heads, T slots, D head size, i drafted steps. A kernel sees a head of a slot as one of B * T * H rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS, WARPS = 2048, 4
"""Elements of a query that a program reads at a time, and its warps. They have not been tuned."""


def join(q: Tensor, keys: Tensor, values: Tensor, causal: Tensor, total: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `training.attention.join`, for 16 or 32 bits; total is float32. The output lies as [B, T, H, D] in memory."""
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
    """As `training.attention.join_backward`, for 16 or 32 bits; joint is float32."""
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
    """[B, H, T, D] -> [B, T, H, D], contiguous: no copy of what a projection or a flash kernel has written."""
    return heads.transpose(1, 2).contiguous()


def _block(size: int) -> tuple[int, int]:
    """The rows of a program, and the power of two that holds a head of `size`."""
    width = triton.next_power_of_2(size)
    return max(1, ELEMENTS // width), width


@triton.jit
def _rows_of_program(rows, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """The program's rows and which of them there are, [ROWS]; the lanes of a row [WIDTH]; and the mask of both."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, WIDTH)
    inside = row < rows
    return row, inside, lanes, inside[:, None] & (lanes < SIZE)[None, :]


@triton.jit
def _cell_of_sum(row, heads, slots):
    """Where the sums of exponentials [B, H, T] have a row of [B, T, H]."""
    head, slot = row % heads, row // heads
    return (slot // slots * heads + head) * slots + slot % slots


@triton.jit(do_not_specialize=["rows", "heads", "slots", "steps"])
def _join(
    q_ptr, keys_ptr, values_ptr, causal_ptr, total_ptr, out_ptr, joint_ptr, scale, rows, heads, slots, steps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program for ROWS rows of q, causal, out [rows, SIZE], keys, values [steps, rows, SIZE], and of total, joint."""
    row, inside, lanes, mask = _rows_of_program(rows, SIZE, WIDTH, ROWS)
    cell = row[:, None] * SIZE + lanes[None, :]

    # The causal part begins: its maximum stands for its log-sum-exp, so that its sum of exponentials is 1.
    q = tl.load(q_ptr + cell, mask=mask, other=0.0).to(tl.float32) * scale
    mixed = tl.load(causal_ptr + cell, mask=mask, other=0.0).to(tl.float32)
    sum_cell = _cell_of_sum(row, heads, slots)
    largest = tl.load(total_ptr + sum_cell, mask=inside, other=0.0)
    z = tl.full([ROWS], 1.0, tl.float32)

    # Each drafted step adds one key, as in any softmax that is computed on the way.
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

    # All become shares of the joint sum.
    tl.store(out_ptr + cell, (mixed / z[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(joint_ptr + sum_cell, largest + tl.log(z), mask=inside)


@triton.jit(do_not_specialize=["rows", "heads", "slots", "steps"])
def _join_backward(
    grad_ptr, q_ptr, keys_ptr, values_ptr, out_ptr, joint_ptr, dq_ptr, joint_dq_ptr, dkeys_ptr, dvalues_ptr, scale,
    rows, heads, slots, steps, SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program for ROWS rows, with shapes as in `_join`; dq [rows, SIZE] is the causal part's, joint_dq is whole."""
    row, inside, lanes, mask = _rows_of_program(rows, SIZE, WIDTH, ROWS)
    cell = row[:, None] * SIZE + lanes[None, :]

    # The mean of the values' pulls under all shares, the causal ones too, is the pull of the output.
    grad = tl.load(grad_ptr + cell, mask=mask, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + cell, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(grad * out, axis=1)
    q = tl.load(q_ptr + cell, mask=mask, other=0.0).to(tl.float32)
    joint_dq = tl.load(dq_ptr + cell, mask=mask, other=0.0).to(tl.float32)
    joint = tl.load(joint_ptr + _cell_of_sum(row, heads, slots), mask=inside, other=0.0)

    # The softmax's derivative: share * (pull of the value - mean). Each drafted key has one query alone.
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
