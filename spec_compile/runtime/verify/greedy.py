"""Greedy acceptance inside a round, and the path down a tree by the tokens chosen at all nodes."""

import torch
from torch import Tensor

from ...compat import argmax
from ...tree import Accepted, Tree


def accept_greedy(tree: Tree, ancestors: Tensor, depth: Tensor, logits: Tensor) -> Accepted:
    """Follow the target's likeliest tokens down each tree.

    ancestors, depth: [B, N] int64, see `tree.ancestry`. logits: [B, N, V] of the target after every node.
    """
    return follow(tree, ancestors, depth, argmax(logits))


def follow(tree: Tree, ancestors: Tensor, depth: Tensor, choice: Tensor) -> Accepted:
    """The path from the root to the deepest node that was chosen with all its ancestors.

    ancestors, depth: [B, N] int64, see `tree.ancestry`. choice: [B, N] int64, the token chosen after each node.
    Siblings are distinct, so at most one path matches: tokens [7, 4, 9, 5], parents [-1, 0, 0, 2] and choice
    [9, 1, 5, 3] give path [0, 2, 3] (count 3) and tokens [9, 5, 3].
    """
    nodes = tree.tokens.shape[1]
    if nodes == 1:
        return Accepted(torch.zeros_like(choice), choice, torch.ones_like(choice[:, 0]))
    number = torch.arange(nodes, device=choice.device)
    is_chosen = tree.real & (choice.gather(1, tree.parents.clamp(min=0)) == tree.tokens)  # guard: accepted-slots
    is_chosen = is_chosen | (number == 0)  # the root is committed already
    chosen_bits = (is_chosen.to(torch.int64) << number).sum(dim=1, keepdim=True)
    on_path = (ancestors & chosen_bits) == ancestors  # guard: accepted-path
    count = torch.where(on_path, depth, -1).amax(dim=1) + 1  # guard: accepted-count
    at_depth = on_path[:, None, :] & (depth[:, None, :] == number[:, None])  # [B, depth, node], one node a depth
    path = torch.where(at_depth, number, 0).sum(dim=2)
    return Accepted(path, choice.gather(1, path), count)
