"""Accept: which drafted tokens the target would have chosen itself."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..compat import argmax
from .tree import Tree


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


def accept_greedy(tree: Tree, ancestors: Tensor, depth: Tensor, logits: Tensor) -> Accepted:
    """Follow the target's own argmax down the tree: the deepest node all of whose ancestors it would have chosen.

    Siblings are distinct, so at most one path matches. logits [B, N, V].
    """
    return follow(tree, ancestors, depth, argmax(logits))


def follow(tree: Tree, ancestors: Tensor, depth: Tensor, choice: Tensor) -> Accepted:
    """Go down the tree from the root along the tokens chosen at its nodes: choice [B, N] follows each node."""
    nodes = tree.tokens.shape[1]
    if nodes == 1:
        return Accepted(torch.zeros_like(choice), choice, torch.ones_like(choice[:, 0]))
    number = torch.arange(nodes, device=choice.device)
    chosen = tree.real & (choice.gather(1, tree.parents.clamp(min=0)) == tree.tokens)
    chosen = chosen | (number == 0)
    bits = (chosen.to(torch.int64) << number).sum(dim=1, keepdim=True)
    whole = (ancestors & bits) == ancestors
    count = torch.where(whole, depth, -1).amax(dim=1) + 1
    at_depth = whole[:, None, :] & (depth[:, None, :] == number[:, None])  # one node a depth, as siblings are distinct
    path = torch.where(at_depth, number, 0).sum(dim=2)
    return Accepted(path, choice.gather(1, path), count)
