"""Token trees in tensors: ancestry as int64 bits. Parents come before children; node 0 is the root."""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_NODES = 64
"""Nodes of a tree, so that one int64 holds a node's ancestors."""


@dataclass
class Tree:
    """A batch of trees.

    tokens: [B, N] int64.
    parents: [B, N] int64; -1 for the root.
    real: [B, N] bool; True for nodes in use.
    probs: [B, N, V], if drafts were drawn at random; the distribution from which each node's children were drawn,
        without replacement, in the order of their numbers.
    """

    tokens: Tensor
    parents: Tensor
    real: Tensor
    probs: Tensor | None = None

    def cpu(self) -> "Tree":
        """The same trees on the CPU (`probs` stays where it is)."""
        return Tree(self.tokens.cpu(), self.parents.cpu(), self.real.cpu(), self.probs)


@dataclass
class Accepted:
    """The result of a verification of N nodes in B rows.

    path: [B, N] int64; nodes from the root down, of which the first `count` are accepted.
    tokens: [B, N] int64; the token after each node of the path. The first `count` are the tokens gained, with the bonus
        token last.
    count: [B] int64; at least 1.
    """

    path: Tensor
    tokens: Tensor
    count: Tensor

    def first(self, longest: int) -> tuple[Tensor, Tensor]:
        """Nodes and tokens [B, longest] of the paths ([B, 1] if N = 1). Entries from `count` on are undefined."""
        nodes = self.path.shape[1]
        places = torch.arange(1 if nodes == 1 else longest, device=self.path.device).clamp(max=nodes - 1)
        return self.path.index_select(1, places), self.tokens.index_select(1, places)


def without(tokens: Tensor, parents: Tensor, count: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Trees without nodes whose tokens are `limit` or more, and without everything below these; roots stay.

    tokens, parents: [B, N] int64, of which the first `count` [B] count. Returns the same three. With a limit of 9 the
    tokens [5, 9, 7, 4], parents [-1, 0, 0, 1] and count 4 become [5, 7, 0, 0], [-1, 0, ...] and 2.
    """
    number = torch.arange(tokens.shape[1], device=tokens.device)
    left_out = ((tokens >= limit) & (number > 0)) | (number >= count[:, None])
    bits = (left_out.to(torch.int64) << number).sum(dim=1, keepdim=True)
    kept = (ancestry(parents)[0] & bits) == 0
    order, place = (~kept).to(torch.int64).argsort(dim=1, stable=True), kept.cumsum(dim=1) - 1
    above = place.gather(1, parents.clamp(min=0).gather(1, order)).clamp(min=0).masked_fill(number == 0, -1)
    count = kept.sum(dim=1)
    return tokens.gather(1, order).masked_fill(number >= count[:, None], 0), above, count


def ancestry(parents: Tensor, most: int | None = None) -> tuple[Tensor, Tensor]:
    """parents [B, N] -> (ancestors [B, N] int64, depth [B, N] int64). Bit j of node i is set if j is i or above i.

    parents [-1, 0, 1, 0] give ancestors [0b0001, 0b0011, 0b0111, 0b1001] and depths [0, 1, 2, 1].
    most: an upper bound on N that is a constant, so that a graph for any N has a fixed number of passes.
    Pointer jumping: each pass doubles the number of generations seen, so log2(N) passes are enough.
    """
    nodes = parents.shape[1]
    above = parents.clamp(min=0)
    ancestors = (torch.ones_like(parents) << torch.arange(nodes, device=parents.device)) | 1
    depth = (parents >= 0).to(torch.int64)
    for _ in range(((most or nodes) - 1).bit_length()):
        ancestors = ancestors | ancestors.gather(1, above)
        depth = depth + depth.gather(1, above)
        above = above.gather(1, above)
    return ancestors, depth
