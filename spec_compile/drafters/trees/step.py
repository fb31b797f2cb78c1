"""One forward of a draft while it grows a tree, and the children and chains that are made of its output.

Slots and depths are those of a draft whose slot t predicts the token after next (EAGLE, MTP): a node of depth d is fed
in slot d - 1 after the draft's committed ones. The root, whose children the logits at the last committed slot predict,
is not fed at all.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.top_logits import best_tokens


class Step(Protocol):
    """One forward of the draft over a block of R nodes."""

    def __call__(
        self, tokens: Tensor, hidden: Tensor, ancestors: Tensor, depth: Tensor, offset: int, wanted: int
    ) -> tuple[Tensor, Tensor]:
        """tokens [B, R] int64: ids of the target.
        hidden [B, R, C]: the draft's output at each node's parent.
        ancestors [B, R] int64: bit j of row i is set if i sees row j of the block, itself included.
        depth [R] int64: 1 for a child of the root; a node's position is that of the first free slot + depth - 1.
        offset: the block begins so many slots after the committed ones and sees all slots before it.
        wanted: rows whose logits are used.

        Returns the draft's output [B, R, C], and the logits [B, wanted, Vd] of the last `wanted` rows.
        """


def children(
    above: Tensor, logits: Tensor, ranks: int, temperature: float, draft_to_target: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scores and tokens [B, P * ranks] of the likeliest children of P nodes with scores [B, P], logits [B, P, Vd]."""
    batch, nodes, vocab = logits.shape
    scores, ids = best_tokens(logits.reshape(batch * nodes, vocab), ranks, temperature)
    scores = above[:, :, None] + scores.view(batch, nodes, ranks)
    tokens = ids if draft_to_target is None else draft_to_target[ids]
    return scores.view(batch, nodes * ranks), tokens.view(batch, nodes * ranks)


def feed(step: Step, token: Tensor, hidden: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """One node [B, 1] of a chain -> the draft's output [B, C] and logits [B, Vd]."""
    itself = torch.ones_like(token)
    hidden, logits = step(token, hidden[:, None], itself, token.new_full((1,), depth), depth - 1, 1)
    return hidden[:, 0], logits[:, 0]


def chain_parents(root: Tensor, nodes: int) -> Tensor:
    """Parents [B, N] of a chain: [-1, 0, 1, ...]."""
    return torch.arange(-1, nodes - 1, device=root.device).expand(root.shape[0], nodes)


def chain_scores(logprobs: Tensor) -> Tensor:
    """Scores [B, N] of a chain below its root, from the log-probabilities [B, N - 1] of its drafts."""
    return F.pad(logprobs.cumsum(dim=1), (1, 0))


def expected_drafts(scores: Tensor) -> Tensor:
    """How many drafts of each tree are expected to be accepted: [B] int64, from 0 to the depth of the tree.

    scores [B, N] float32: sums from the root, which is first, down to each node, of the logarithms of the chances that
    a draft is accepted if those above it are. Not a number counts as no chance.

    The expected number is the sum over all drafts of exp(score), rounded. A chain of drafts with chances of 0.9, 0.5
    and 0.5 has exp(score) = [0.9, 0.45, 0.225], which sum to 1.575: 2. It never exceeds the depth, because the chances
    of siblings sum to at most 1.
    """
    return scores[:, 1:].exp().nan_to_num(0.0).sum(dim=1).round().long()
