"""Distillation from the target's distribution, without the logits of all rows in memory at a time."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .data import move

LOGITS = {"cpu": 1 << 20, "cuda": 1 << 27}
"""Elements in a block of logits. On a CPU a block stays in the cache."""


def soft_cross_entropy(
    states: Tensor,
    weight: Tensor,
    teachers: Tensor,
    teacher_logits: Callable[[Tensor], Tensor],
    row_weights: Tensor,
) -> Tensor:
    """The weighted sum over rows of the cross entropy of softmax(states weight^T) with the teacher's distribution.

    It is -sum_r row_weights[r] * sum_v softmax(teacher)[r, v] * log_softmax(states weight^T)[r, v].

    states: [R, H]; gets a gradient, computed in autocast's dtype
    weight: [V, H]; gets a gradient, computed in autocast's dtype and summed in the dtype of weight
    teachers: [R] int64, ascending, on the CPU; the position of each row's teacher. Rows of a teacher share its logits.
    teacher_logits: a function from positions [n], on the device, to logits [n, V]
    row_weights: [R]

    Returns a scalar.
    """
    device = states.device.type
    if torch.is_autocast_enabled(device):
        states = states.to(torch.get_autocast_dtype(device))
    return _SoftCrossEntropy.apply(states, weight, teachers, teacher_logits, row_weights)


class _SoftCrossEntropy(torch.autograd.Function):
    """The forward computes the gradients too, block by block of rows, and the backward only scales them."""

    @staticmethod
    def forward(ctx, states, weight, teachers, teacher_logits, row_weights):
        needs_states, needs_weight = ctx.needs_input_grad[:2]
        matrix = weight.to(states.dtype)
        # Each row's teacher is counted on the CPU, so that nothing waits for a GPU.
        positions, shared = teachers.unique_consecutive(return_inverse=True)
        losses = []
        device_positions, device_shared = move(positions, states.device), move(shared, states.device)
        grads = torch.empty_like(states) if needs_states else None
        weight_grad = torch.zeros_like(weight) if needs_weight else None
        for rows in blocks(len(states), len(weight), states.device):
            first, last = shared[rows][[0, -1]].tolist() if len(shared) else (0, -1)
            teacher = teacher_logits(device_positions[first : last + 1])
            logits = F.linear(states[rows], matrix)
            loss, pull = distil(logits, teacher, device_shared[rows] - first, row_weights[rows])
            losses.append(loss)
            if needs_states:
                torch.mm(pull, matrix, out=grads[rows])
            if needs_weight:
                weight_grad += pull.t() @ states[rows]
        ctx.save_for_backward(grads, weight_grad)
        return torch.cat(losses).sum()

    @staticmethod
    def backward(ctx, scale):
        grads, weight_grad = ctx.saved_tensors
        return (
            None if grads is None else grads * scale.to(grads.dtype),
            None if weight_grad is None else weight_grad * scale.to(weight_grad.dtype),
            None,
            None,
            None,
        )


def distil(logits: Tensor, teacher: Tensor, shared: Tensor, row_weights: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each row, [R] in the dtype of row_weights, and its gradient with respect to the logits, [R, V].

    logits: [R, V]; may be overwritten
    teacher: [n, V]
    shared: [R] int64; each row's row of `teacher`
    row_weights: [R]
    """
    if logits.device.type == "cuda" and logits.dtype != torch.float64:
        from ..kernels.distil_kernel import launch

        return launch(logits, teacher, shared, row_weights)
    log_shares = logits.log_softmax(-1, dtype=row_weights.dtype)
    teacher_shares = teacher.softmax(-1, dtype=row_weights.dtype)[shared]
    losses = (teacher_shares * log_shares).sum(-1) * -row_weights
    # The gradient is (shares of the student - shares of the teacher) * row weight.
    pull = log_shares.exp_().sub_(teacher_shares).mul_(row_weights[:, None])
    return losses, pull.to(logits.dtype)


def likeliest(states: Tensor, weight: Tensor) -> Tensor:
    """The likeliest token of each row, int64 [R], by the logits states weight^T. states [R, H], weight [V, H]."""
    parts = blocks(len(states), len(weight), states.device)
    return torch.cat([F.linear(states[rows], weight).argmax(-1) for rows in parts])


def blocks(rows: int, width: int, device: torch.device) -> list[slice]:
    """Slices of `rows` rows, at least one slice, each with at most `LOGITS` elements if a row has `width`."""
    size = max(1, LOGITS[device.type] // width)
    return [slice(begin, begin + size) for begin in range(0, max(1, rows), size)]
