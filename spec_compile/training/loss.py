"""Distillation from the target's distribution without a matrix of logits of all rows."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

LOGITS = 1 << 26
"""Numbers in a block of logits."""


def soft_cross_entropy(
    states: Tensor, weight: Tensor, teacher: Callable[[slice], Tensor], row_weights: Tensor
) -> Tensor:
    """-sum over rows r of row_weights[r] * sum over v of softmax(teacher)[r, v] * log_softmax(states weight^T)[r, v].

    states [R, H] and weight [V, H] get gradients (in the autocast dtype, summed in weight's own); teacher gives the
    logits [n, V] of a slice of the rows; row_weights [R].
    """
    kind = states.device.type
    if torch.is_autocast_enabled(kind):
        states = states.to(torch.get_autocast_dtype(kind))
    return _SoftCrossEntropy.apply(states, weight, teacher, row_weights)


class _SoftCrossEntropy(torch.autograd.Function):
    """Forward goes through blocks of rows and leaves the gradients, so that backward has only to scale them."""

    @staticmethod
    def forward(ctx, states, weight, teacher, row_weights):
        needs_states, needs_weight = ctx.needs_input_grad[:2]
        matrix = weight.to(states.dtype)
        loss = row_weights.new_zeros(())
        grads = torch.empty_like(states) if needs_states else None
        weight_grad = torch.zeros_like(weight) if needs_weight else None
        for here in blocks(len(states), len(weight)):
            logits = F.linear(states[here], matrix)
            log_shares = logits.log_softmax(-1, dtype=row_weights.dtype)
            wanted = teacher(here).softmax(-1, dtype=row_weights.dtype)
            loss -= (row_weights[here] * (wanted * log_shares).sum(-1)).sum()
            pull = log_shares.exp_().sub_(wanted).mul_(row_weights[here, None]).to(states.dtype)
            if needs_states:
                grads[here] = pull @ matrix
            if needs_weight:
                weight_grad += pull.t() @ states[here]
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
    """Slices of `rows` rows, at least one, of each of which `width` numbers are held at once."""
    size = max(1, LOGITS // width)
    return [slice(begin, begin + size) for begin in range(0, max(1, rows), size)]
