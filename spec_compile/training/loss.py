"""Distillation from the target's distribution, without the logits of all rows in memory at a time."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

LOGITS = 1 << 26
"""Elements in a block of logits."""


def soft_cross_entropy(
    states: Tensor, weight: Tensor, teacher: Callable[[slice], Tensor], row_weights: Tensor
) -> Tensor:
    """The weighted sum over rows of the cross entropy of softmax(states weight^T) with the teacher's distribution.

    It is -sum_r row_weights[r] * sum_v softmax(teacher)[r, v] * log_softmax(states weight^T)[r, v].

    states [R, H] and weight [V, H] get gradients: computed in autocast's dtype, weight's summed in the dtype of weight.
    teacher: a function from a slice of the rows to the teacher's logits [n, V] of it. row_weights [R].
    Returns a scalar.
    """
    device = states.device.type
    if torch.is_autocast_enabled(device):
        states = states.to(torch.get_autocast_dtype(device))
    return _SoftCrossEntropy.apply(states, weight, teacher, row_weights)


class _SoftCrossEntropy(torch.autograd.Function):
    """The forward computes the gradients too, block by block of rows, and the backward only scales them."""

    @staticmethod
    def forward(ctx, states, weight, teacher, row_weights):
        needs_states, needs_weight = ctx.needs_input_grad[:2]
        matrix = weight.to(states.dtype)
        loss = row_weights.new_zeros(())
        grads = torch.empty_like(states) if needs_states else None
        weight_grad = torch.zeros_like(weight) if needs_weight else None
        for rows in blocks(len(states), len(weight)):
            logits = F.linear(states[rows], matrix)
            log_shares = logits.log_softmax(-1, dtype=row_weights.dtype)
            teacher_shares = teacher(rows).softmax(-1, dtype=row_weights.dtype)
            loss -= (row_weights[rows] * (teacher_shares * log_shares).sum(-1)).sum()
            # The gradient with respect to the logits is (shares of the student - shares of the teacher) * row weight.
            pull = log_shares.exp_().sub_(teacher_shares).mul_(row_weights[rows, None]).to(states.dtype)
            if needs_states:
                grads[rows] = pull @ matrix
            if needs_weight:
                weight_grad += pull.t() @ states[rows]
        ctx.save_for_backward(grads, weight_grad)
        return loss

    @staticmethod
    def backward(ctx, scale):
        grads, weight_grad = ctx.saved_tensors
        return (
            None if grads is None else grads * scale.to(grads.dtype),
            None if weight_grad is None else weight_grad * scale.to(weight_grad.dtype),
            None,
            None,
        )


def blocks(rows: int, width: int) -> list[slice]:
    """Slices of `rows` rows, at least one slice, each with at most `LOGITS` elements if a row has `width`."""
    size = max(1, LOGITS // width)
    return [slice(begin, begin + size) for begin in range(0, max(1, rows), size)]
