"""`train.loss.distil` in one kernel, which reads logits twice and writes their gradient over them.

    loss = row_weight * (logsumexp(student) - sum over tokens of softmax(teacher) * student)
    gradient = row_weight * (softmax(student) - softmax(teacher))

With an L1 distance it reads them once more. With q = softmax(student), p = softmax(teacher):

    loss += row_weight * l1 * sum over tokens of |q - p|
    gradient += row_weight * l1 * q * (sign(q - p) - sum over tokens of q * sign(q - p))

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


def launch(
    logits: Tensor, teacher: Tensor, shared: Tensor, row_weights: Tensor, cross_entropy: float = 1.0, l1: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """`train.loss.distil` with the same arguments, the fields of `Mix` last; the gradient is written over `logits`."""
    logits, teacher = (values if values.stride(1) == 1 else values.contiguous() for values in (logits, teacher))
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    overlaps = torch.empty_like(losses) if l1 else losses[:0]
    if len(logits):
        _distil[(len(logits),)](
            logits, teacher, shared, row_weights.contiguous(), losses, overlaps, logits.shape[1], logits.stride(0),
            teacher.stride(0), cross_entropy, l1, HAS_L1=l1 != 0, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return losses.to(row_weights.dtype), logits, overlaps


def confidence(logits: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]:
    """The probability of each row's token, [R] float32, and True where no other is likelier, [R] bool.

    logits: [R, V]
    choices: [R] int64
    """
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    probabilities = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    right = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    if len(logits):
        _confidence[(len(logits),)](
            logits, choices, probabilities, right, logits.shape[1], logits.stride(0), BLOCK=BLOCK, num_warps=WARPS
        )
    return probabilities, right


@triton.jit
def _add(m, z, values):
    """Each lane's maximum m and sum z of exp(value - m), with one more value."""
    larger = tl.maximum(m, values)
    return larger, z * tl.exp(m - larger) + tl.exp(values - larger)


@triton.jit
def _confidence(
    logits_ptr,  # [R, size], by its stride
    choices_ptr,  # [R]
    probabilities_ptr, right_ptr,  # [R], written
    size, stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """softmax(logits)[choice] of one row a program, and logits[choice] >= max(logits). Grid (R)."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    lanes = tl.arange(0, BLOCK)
    m = tl.full([BLOCK], LEAST, tl.float32)
    z = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, size, BLOCK):
        values = tl.load(logits_ptr + begin + lanes, mask=begin + lanes < size, other=LEAST).to(tl.float32)
        m, z = _add(m, z, values)
    largest = tl.max(m, axis=0)
    # A lane that has read nothing has m = LEAST, so its sum is scaled by 0.
    total = tl.sum(z * tl.exp(m - largest), axis=0)
    chosen = tl.load(logits_ptr + tl.load(choices_ptr + row)).to(tl.float32)
    tl.store(probabilities_ptr + row, tl.exp(chosen - largest) / total)
    tl.store(right_ptr + row, chosen >= largest)


@triton.jit
def _distil(
    logits_ptr, teacher_ptr,  # [R, size], [P, size], by their strides; the gradient replaces the logits
    shared_ptr, weights_ptr,  # [R]: the teacher's row of each row, and the row's weight
    losses_ptr, overlaps_ptr,  # [R] float32, written; overlaps only with HAS_L1
    size, stride_logits, stride_teacher, cross_entropy, l1, HAS_L1: tl.constexpr, BLOCK: tl.constexpr,
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
        student_m, student_z = _add(student_m, student_z, student)
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
    loss = cross_entropy * (student_log - tl.sum(product * scale, axis=0) / teacher_sum)

    # The L1 distance, and the mean sign under the student.
    mean_sign = 0.0
    if HAS_L1:
        distances = tl.zeros([BLOCK], tl.float32)
        signs = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, size, BLOCK):
            inside = begin + lanes < size
            student = tl.load(logits_ptr + begin + lanes, mask=inside, other=LEAST).to(tl.float32)
            teacher = tl.load(teacher_ptr + begin + lanes, mask=inside, other=LEAST).to(tl.float32)
            share = tl.exp(student - student_log)
            difference = share - tl.exp(teacher - teacher_log)
            distances += tl.abs(difference)
            signs += tl.where(difference > 0, share, tl.where(difference < 0, -share, 0.0))
        distance, mean_sign = tl.sum(distances, axis=0), tl.sum(signs, axis=0)
        tl.store(overlaps_ptr + row, 1 - distance / 2)
        loss += l1 * distance
    tl.store(losses_ptr + row, row_weight * loss)

    # Pass 2. The gradient of the cross entropy is (share of the student - share of the teacher) * row weight.
    for begin in range(0, size, BLOCK):
        inside = begin + lanes < size
        student = tl.load(logits_ptr + begin + lanes, mask=inside, other=LEAST).to(tl.float32)
        teacher = tl.load(teacher_ptr + begin + lanes, mask=inside, other=LEAST).to(tl.float32)
        share = tl.exp(student - student_log)
        difference = share - tl.exp(teacher - teacher_log)
        pull = cross_entropy * difference
        if HAS_L1:
            sign = tl.where(difference > 0, 1.0, tl.where(difference < 0, -1.0, 0.0))
            pull += l1 * share * (sign - mean_sign)
        tl.store(logits_ptr + begin + lanes, (pull * row_weight).to(logits_ptr.dtype.element_ty), mask=inside)
