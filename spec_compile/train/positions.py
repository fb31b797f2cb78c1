"""Weights of a block's positions in the loss. Drafts are accepted from left to right up to the first error.

Option ``per_position_loss_weight``, named as in speculators:

- "fixed-exp-decay": weights that only depend on the position, such as DFlash's (arXiv:2602.06036, equation 4)
- "dpace": w_k = sum over m >= k of prod over i <= m of q~_i, where q~ = (1 - ALPHA) q + ALPHA and q_i is the draft's
  probability of the target's choice (D-PACE: Wu et al., arXiv:2605.18810, equations 7 to 9)
- "first-error": fixed weights, and more for the position that ends the accepted prefix of a block
- "chain": fixed weights, and more by the gradient of the expected accepted length, mean over m of prod over i <= m of
  q_i, which is 1/J * sum over m >= k of that product for the log-probability of position k

The last two are the first-error focal loss and the chain loss of "Teaching Diffusion to Speculate Left-to-Right"
(Whalen et al., arXiv:2606.11552). All weights are constants for the gradient.

A chain is the positions of a block, or the steps that are unrolled from one slot. Shapes: C chains, T positions, R rows
of the loss.
"""

from functools import cached_property

import torch
from torch import Tensor

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


def first_errors(right: Tensor, counted: Tensor) -> Tensor:
    """The first counted position of each chain whose draft is not right, [C, T] bool.

    right: [C, T] bool; the draft's likeliest token is the target's choice
    """
    wrong = counted & ~right
    return wrong & (wrong.cumsum(1) == 1)


class PositionWeights:
    """The weights of rows, which are not known before the draft's probabilities are."""

    def __init__(self, name: str, fixed: Tensor, chains: Tensor, positions: Tensor):
        """name: one of `NAMES`, but not `FIXED`
        fixed: [R] on the draft's device; weights by position, 0 for a row that shall not count
        chains, positions: [R] int64, on the CPU; of each row. Chains ascend.
        """
        self.name, self.fixed = name, fixed
        self.chains, self.positions = chains.unique_consecutive(return_inverse=True)[1], positions

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """`chains` and `positions` on the device."""
        return self.chains.to(self.fixed.device), self.positions.to(self.fixed.device)

    @cached_property
    def longest(self) -> int:
        """Positions of a chain at most."""
        return int(self.positions.max()) + 1

    @cached_property
    def extra(self) -> Tensor:
        """The weight of a chain's additional term, a scalar."""
        count = int(self.chains[-1]) + 1 if len(self.chains) else 1
        return EXTRA * self.fixed.sum() / count

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
        right: [r] bool; see `first_errors`
        """
        fixed = self.fixed[rows]
        if not len(fixed):
            return fixed
        chains, positions = (place[rows] for place in self.places)
        at = chains - chains[0], positions
        shape = int(self.chains[rows][-1] - self.chains[rows][0]) + 1, self.longest
        counted = torch.zeros(shape, dtype=torch.bool, device=fixed.device).index_put(at, fixed > 0)
        if self.name == "first-error":
            errors = first_errors(torch.zeros_like(counted).index_put(at, right), counted)
            return fixed + self.extra * errors[at]
        q = torch.zeros(shape, dtype=fixed.dtype, device=fixed.device).index_put(at, probabilities.to(fixed.dtype))
        if self.name == "dpace":
            return dpace(q, counted)[at]
        lengths = counted.sum(1, keepdim=True).clamp(min=1)
        return fixed + self.extra * (dpace(q, counted, alpha=0.0) / lengths)[at]
