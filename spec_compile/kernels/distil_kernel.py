"""`training.loss.distil` in one kernel, which reads logits twice and writes their gradient over them.

    loss = row_weight * (logsumexp(student) - sum over tokens of softmax(teacher) * student)
    gradient = row_weight * (softmax(student) - softmax(teacher))

Import this module only where Triton is installed. PyTorch's own operations pass over a block of logits a dozen times,
mostly in float32, which takes as long as the matrix products that make the logits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 8
"""Logits that a program reads at a time, and its warps; not tuned."""
LEAST = tl.constexpr(-1e30)
"""Stands for minus infinity, because minus infinity minus itself is NaN."""


def launch(logits: Tensor, teacher: Tensor, shared: Tensor, row_weights: Tensor) -> tuple[Tensor, Tensor]:
    """`training.loss.distil` with the same arguments; the gradient is written over `logits`."""
    logits, teacher = (values if values.stride(1) == 1 else values.contiguous() for values in (logits, teacher))
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        _distil[(len(logits),)](
            logits, teacher, shared, row_weights.contiguous(), losses, logits.shape[1], logits.stride(0),
            teacher.stride(0), BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return losses.to(row_weights.dtype), logits


@triton.jit
def _distil(
    logits_ptr, teacher_ptr,  # [R, size], [P, size], by their strides; the gradient replaces the logits
    shared_ptr, weights_ptr,  # [R]: the teacher's row of each row, and the row's weight
    losses_ptr,  # [R] float32, written
    size, stride_logits, stride_teacher, BLOCK: tl.constexpr,
):  # fmt: skip
    """The loss and gradient of one row a program. Grid (R)."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_logits
    teacher_ptr += tl.load(shared_ptr + row) * stride_teacher
    row_weight = tl.load(weights_ptr + row).to(tl.float32)
    lanes = tl.arange(0, BLOCK)

    # Pass 1. Each lane keeps, for the logits that it reads, the maximum m and the sum z of exp(logit - m), of student
    # and teacher each, and the sum of exp(teacher - m) * student.
    student_m = tl.full([BLOCK], LEAST, tl.float32)
    teacher_m = tl.full([BLOCK], LEAST, tl.float32)
    student_z = tl.zeros([BLOCK], tl.float32)
    teacher_z = tl.zeros([BLOCK], tl.float32)
    product = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, size, BLOCK):
        inside = begin + lanes < size
        student = tl.load(logits_ptr + begin + lanes, mask=inside, other=LEAST).to(tl.float32)
        teacher = tl.load(teacher_ptr + begin + lanes, mask=inside, other=LEAST).to(tl.float32)
        larger = tl.maximum(student_m, student)
        student_z = student_z * tl.exp(student_m - larger) + tl.exp(student - larger)
        student_m = larger
        larger = tl.maximum(teacher_m, teacher)
        shrink, share = tl.exp(teacher_m - larger), tl.exp(teacher - larger)
        teacher_z = teacher_z * shrink + share
        product = product * shrink + tl.where(inside, share * student, 0.0)
        teacher_m = larger

    # Join the lanes. A lane that has read nothing has m = LEAST, so its sums are scaled by 0.
    student_max, teacher_max = tl.max(student_m, axis=0), tl.max(teacher_m, axis=0)
    student_log = student_max + tl.log(tl.sum(student_z * tl.exp(student_m - student_max), axis=0))
    scale = tl.exp(teacher_m - teacher_max)
    teacher_sum = tl.sum(teacher_z * scale, axis=0)
    teacher_log = teacher_max + tl.log(teacher_sum)
    tl.store(losses_ptr + row, row_weight * (student_log - tl.sum(product * scale, axis=0) / teacher_sum))

    # Pass 2. The gradient is (share of the student - share of the teacher) * row weight.
    for begin in range(0, size, BLOCK):
        inside = begin + lanes < size
        student = tl.load(logits_ptr + begin + lanes, mask=inside, other=LEAST).to(tl.float32)
        teacher = tl.load(teacher_ptr + begin + lanes, mask=inside, other=LEAST).to(tl.float32)
        pull = (tl.exp(student - student_log) - tl.exp(teacher - teacher_log)) * row_weight
        tl.store(logits_ptr + begin + lanes, pull.to(logits_ptr.dtype.element_ty), mask=inside)
