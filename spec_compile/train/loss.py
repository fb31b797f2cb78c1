"""Distillation from the target's distribution, block by block of logits, and the weights of a draft's positions."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .data import move

LOGITS = {"cpu": 1 << 20, "cuda": 1 << 27}
"""Elements in a block of logits. On a CPU a block stays in the cache."""
Products = Sequence[tuple[Tensor, Tensor]]
"""Pairs of states [R, H] and a matrix [V, H]. Logits are the sum of the products states matrix^T."""

# Weights of a block's positions in the loss. Drafts are accepted from left to right up to the first error.
#
# Option ``per_position_loss_weight``, named as in speculators:
#
# - "fixed-exp-decay": weights that only depend on the position, such as DFlash's (arXiv:2602.06036, equation 4)
# - "dpace": w_k = sum over m >= k of prod over i <= m of q~_i, where q~ = (1 - ALPHA) q + ALPHA and q_i is the draft's
#   probability of the target's choice (D-PACE: Wu et al., arXiv:2605.18810, equations 7 to 9)
# - "first-error": fixed weights, and more for the position that ends the accepted prefix of a block
# - "chain": fixed weights, and more by the gradient of the expected accepted length, mean over m of prod over i <= m of
#   q_i, which is 1/J * sum over m >= k of that product for the log-probability of position k
#
# The last two are the first-error focal loss and the chain loss of "Teaching Diffusion to Speculate Left-to-Right"
# (Whalen et al., arXiv:2606.11552). All weights are constants for the gradient.
#
# A chain is the positions of a block, or the steps that are unrolled from one slot. Shapes: C chains, T positions, R
# rows of the loss.

FIXED, DPACE = "fixed-exp-decay", "dpace"
NAMES = (FIXED, DPACE, "first-error", "chain")
ALPHA = 0.5
"""Smoothing of probabilities in D-PACE."""
EXTRA = 1.0
"""The weight of the first-error or chain term, where the fixed weights of a chain have 1 on average."""


def dpace(probabilities: Tensor, counted: Tensor, alpha: float = ALPHA) -> Tensor:
    """The weights [C, T] of D-PACE, 0 for a position that is not counted; the accepted length passes through it.

    probabilities: [C, T]; of the target's choices
    counted: [C, T] bool

    Probabilities [1, 0.5] and alpha = 0 give weights [1 + 0.5, 0.5].
    """
    reached = torch.where(counted, (1 - alpha) * probabilities + alpha, 1.0).cumprod(1) * counted
    return reached.flip(1).cumsum(1).flip(1) * counted


class PositionWeights:
    """The weights of rows, which are not known before the draft's probabilities are."""

    def __init__(self, name: str, fixed: Tensor, chains: Tensor, positions: Tensor):
        """name: one of `NAMES`, but not `FIXED`
        fixed: [R] on the draft's device; weights by position, 0 for a row that shall not count
        chains, positions: [R] int64, on the CPU; of each row. Chains ascend.
        """
        self.name, self.fixed = name, fixed
        self.chains = chains.unique_consecutive(return_inverse=True)[1]
        self.places = move(self.chains, fixed.device), move(positions, fixed.device)
        # The longest chain, and the weight of a chain's additional term, a scalar.
        self.longest = int(positions.max()) + 1 if len(positions) else 0
        self.extra = EXTRA * fixed.sum() / (int(self.chains[-1]) + 1 if len(chains) else 1)

    def blocks(self, size: int) -> list[slice]:
        """Slices of about `size` rows, each with whole chains; at least one slice.

        Chains [0, 0, 1, 1, 2] and size 3 give rows 0 to 1, 2 to 3 and 4.
        """
        ends = torch.cat([self.chains.bincount().cumsum(0), torch.tensor([len(self.chains)])]).tolist()
        slices, begin, last = [], 0, 0
        for end in ends:
            if end - begin > size and last > begin:
                slices.append(slice(begin, last))
                begin = last
            last = end
        return [*slices, slice(begin, last)]

    def __call__(self, rows: slice, probabilities: Tensor, right: Tensor) -> Tensor:
        """The weights [r] of rows that are whole chains.

        probabilities: [r]; of the target's choices
        right: [r] bool; the draft's likeliest token is the target's choice
        """
        fixed = self.fixed[rows]
        if not len(fixed):
            return fixed
        chains, positions = (place[rows] for place in self.places)
        at = chains - chains[0], positions
        shape = int(self.chains[rows][-1] - self.chains[rows][0]) + 1, self.longest
        counted = torch.zeros(shape, dtype=torch.bool, device=fixed.device).index_put(at, fixed > 0)
        if self.name == "first-error":
            # More for the first counted position of each chain whose draft is not right.
            wrong = counted & ~torch.zeros_like(counted).index_put(at, right)
            return fixed + self.extra * (wrong & (wrong.cumsum(1) == 1))[at]
        q = torch.zeros(shape, dtype=fixed.dtype, device=fixed.device).index_put(at, probabilities.to(fixed.dtype))
        if self.name == "dpace":
            return dpace(q, counted)[at]
        lengths = counted.sum(1, keepdim=True).clamp(min=1)
        return fixed + self.extra * (dpace(q, counted, alpha=0.0) / lengths)[at]


class Distilled(NamedTuple):
    """The result of `distil_all`.

    loss: a scalar with a gradient
    overlaps: [R]; the probability that a draft is accepted, sum over v of min(p_v, q_v); empty if the mix has no L1
    weights: [R]; of the rows in the loss
    """

    loss: Tensor
    overlaps: Tensor
    weights: Tensor


class Mix(NamedTuple):
    """A row's loss: cross_entropy * H(p, q) + l1 * sum over v of |p_v - q_v|, of target p and draft q."""

    cross_entropy: float = 1.0
    l1: float = 0.0


CROSS_ENTROPY = Mix()


def distil_all(
    products: Products, teachers: Tensor, teacher_logits: Callable[[Tensor], Tensor],
    row_weights: Tensor | PositionWeights, mix: Mix = CROSS_ENTROPY,
) -> Distilled:  # fmt: skip
    """The weighted sum over rows of the distance of the draft's distribution from the teacher's.

    products: the draft's. States get gradients, computed in autocast's dtype; so do matrices that need one, summed in
        their own dtype
    teachers: [R] int64, on the CPU; the position of each row's teacher. Rows of a block share a teacher's logits
    teacher_logits: a function from positions [n], on the device, to logits [n, V]
    row_weights: [R], or weights that depend on the draft's probabilities; these are divided by their sum
    """
    device = products[0][0].device.type
    flat = [values for pair in products for values in pair]
    if torch.is_autocast_enabled(device):
        flat[::2] = [states.to(torch.get_autocast_dtype(device)) for states in flat[::2]]
    return Distilled(*_Distil.apply(teachers, teacher_logits, row_weights, mix, *flat))


class _Distil(torch.autograd.Function):
    """The forward computes the gradients too, block by block of rows, and the backward only scales them."""

    @staticmethod
    def forward(ctx, teachers, teacher_logits, row_weights, mix, *flat):
        states, matrices = flat[::2], flat[1::2]
        device, words = states[0].device, len(matrices[0])
        cast = [matrix.to(part.dtype) for part, matrix in zip(states, matrices)]
        grads = [
            None if not needed else torch.empty_like(values) if number % 2 == 0 else torch.zeros_like(values)
            for number, (needed, values) in enumerate(zip(ctx.needs_input_grad[4:], flat))
        ]
        is_open = isinstance(row_weights, PositionWeights)
        size = rows_in_block(words, device)
        parts = row_weights.blocks(size) if is_open else blocks(len(teachers), words, device)
        losses, overlaps, weights = [], [], []
        for rows, positions, shared in _with_teachers(parts, teachers, device):
            teacher = teacher_logits(positions)
            logits = _logits([part[rows] for part in states], cast)
            row_weight = row_weights(rows, *confidence(logits, teacher, shared)) if is_open else row_weights[rows]
            loss, pull, overlap = distil(logits, teacher, shared, row_weight, mix)
            for collected, values in ((losses, loss), (overlaps, overlap), (weights, row_weight)):
                collected.append(values)
            for number, (part, matrix) in enumerate(zip(states, cast)):
                of_states, of_matrix = grads[2 * number : 2 * number + 2]
                if of_states is not None:
                    torch.mm(pull, matrix, out=of_states[rows])
                if of_matrix is not None:
                    of_matrix += pull.t() @ part[rows]
        total, weights = torch.cat(losses).sum(), torch.cat(weights)
        ctx.scale = 1 / weights.sum().clamp(min=1e-9) if is_open else None
        ctx.save_for_backward(*grads)
        if is_open:
            total, weights = total * ctx.scale, weights * ctx.scale
        overlaps = torch.cat(overlaps)
        ctx.mark_non_differentiable(overlaps, weights)
        return total, overlaps, weights

    @staticmethod
    def backward(ctx, scale, *others):
        scale = scale if ctx.scale is None else scale * ctx.scale
        grads = (None if grad is None else grad * scale.to(grad.dtype) for grad in ctx.saved_tensors)
        return None, None, None, None, *grads


def _with_teachers(parts: list[slice], teachers: Tensor, device: torch.device) -> Iterator[tuple]:
    """(rows, their teachers' positions [n], ascending, each row's index among these [r]) for each slice of rows."""
    # They are counted on the CPU and moved together, so that nothing waits for a GPU.
    found = [teachers[rows].unique(return_inverse=True) for rows in parts]
    positions, shared = (move(torch.cat(values), device) for values in zip(*found))
    return zip(parts, positions.split([len(own) for own, _ in found]), (shared[rows] for rows in parts))


def _logits(states: list[Tensor], matrices: list[Tensor]) -> Tensor:
    logits = F.linear(states[0], matrices[0])
    for part, matrix in zip(states[1:], matrices[1:]):
        logits = torch.addmm(logits, part, matrix.t())
    return logits


def confidence(logits: Tensor, teacher: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
    """The draft's probability of the target's likeliest token, [R] float32, and if it is the draft's, too, [R] bool.

    The arguments are the first of `distil`.
    """
    choices = teacher.argmax(-1)[shared]
    if logits.device.type == "cuda" and logits.dtype != torch.float64:
        from .distil_kernel import confidence as launch

        return launch(logits, choices)
    chosen = logits.gather(1, choices[:, None])[:, 0]
    wide = chosen.dtype if chosen.dtype == torch.float64 else torch.float32
    return (chosen.to(wide) - logits.to(wide).logsumexp(-1)).exp(), chosen >= logits.amax(-1)


def distil(
    logits: Tensor, teacher: Tensor, shared: Tensor, row_weights: Tensor, mix: Mix = CROSS_ENTROPY
) -> tuple[Tensor, Tensor, Tensor]:
    """(losses, pull, overlaps): the loss of each row, [R] in the dtype of row_weights, its gradient with respect to the
    logits, [R, V], and the `Distilled.overlaps` of the rows.

    logits: [R, V]; may be overwritten
    teacher: [n, V]
    shared: [R] int64; each row's row of `teacher`
    row_weights: [R]
    """
    if logits.device.type == "cuda" and logits.dtype != torch.float64:
        from .distil_kernel import launch

        return launch(logits, teacher, shared, row_weights, *mix)
    log_shares = logits.log_softmax(-1, dtype=row_weights.dtype)
    teacher_shares = teacher.softmax(-1, dtype=row_weights.dtype)[shared]
    losses = (teacher_shares * log_shares).sum(-1) * -mix.cross_entropy
    # The gradient of the cross entropy is (shares of the student - shares of the teacher) * row weight.
    shares = log_shares.exp_()
    difference = shares - teacher_shares
    if not mix.l1:
        pull = difference.mul_(row_weights[:, None] * mix.cross_entropy)
        return losses * row_weights, pull.to(logits.dtype), losses[:0]
    # The gradient of the L1 distance is share * (sign - mean of the signs), by the derivative of the softmax.
    distance, signs = difference.abs().sum(-1), difference.sign()
    pull = mix.cross_entropy * difference + mix.l1 * shares * (signs - (shares * signs).sum(-1, keepdim=True))
    losses = (losses + mix.l1 * distance) * row_weights
    return losses, (pull * row_weights[:, None]).to(logits.dtype), 1 - distance / 2


def likeliest(products: Products) -> Tensor:
    """The likeliest token of each row, int64 [R]."""
    states, matrices = zip(*products)
    parts = blocks(len(states[0]), len(matrices[0]), states[0].device)
    return torch.cat([_logits([part[rows] for part in states], list(matrices)).argmax(-1) for rows in parts])


def blocks(rows: int, width: int, device: torch.device) -> list[slice]:
    """Slices of `rows` rows, at least one slice, each with at most `LOGITS` elements if a row has `width`."""
    size = rows_in_block(width, device)
    return [slice(begin, begin + size) for begin in range(0, max(1, rows), size)]


def rows_in_block(width: int, device: torch.device) -> int:
    """Rows of `width` elements in a block of logits, at least 1."""
    return max(1, LOGITS[device.type] // width)
