"""Token trees in tensors: ancestry as int64 bits. Parents come before children; node 0 is the root."""

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_NODES = 64
"""Nodes of a tree, so that one int64 holds a node's ancestors."""


@dataclass
class Tree:
    """A batch of trees. tokens, parents [B, N] int64 (parent of the root: -1); real [B, N] bool: slots in use.

    probs [B, N, V], if the drafts were drawn at random: the distribution from which each node's children were drawn,
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
    """The result of a verification, B rows of N slots.

    path [B, N]: tree nodes from the root down, the first ``count`` of them accepted. tokens [B, N]: the token that
    follows each node of the path, so that the first ``count`` of them are what this round adds (the last is the bonus
    token). count [B]: at least 1.
    """

    path: Tensor
    tokens: Tensor
    count: Tensor

    def first(self, longest: int) -> tuple[Tensor, Tensor]:
        """Nodes and tokens [B, L] of paths of at most L = `longest` (1 in a tree of one node); behind `count`: any."""
        nodes = self.path.shape[1]
        places = torch.arange(1 if nodes == 1 else longest, device=self.path.device).clamp(max=nodes - 1)
        return self.path.index_select(1, places), self.tokens.index_select(1, places)


def ancestry(parents: Tensor, most: int | None = None) -> tuple[Tensor, Tensor]:
    """parents [B, N] -> (ancestors [B, N] int64 with bit j set if j is i or above i, depth [B, N] of each node).

    most: an upper bound on N that is known without looking (a graph for many N has one number of passes).
    Pointer jumping: each pass doubles the number of generations seen, so log2(N) passes do.
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
