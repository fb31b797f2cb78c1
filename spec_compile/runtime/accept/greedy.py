"""Accept: which drafted tokens the target would have chosen itself."""

import torch
from torch import Tensor

from ...compat import argmax
from ...tree import Accepted, Tree


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
