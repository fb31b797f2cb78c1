"""The walk of a kernel over a tree: every node behind its parent, and when a state is kept to be resumed.

A program holds one state. It comes to the children of a node in the order of the sizes of their subtrees. So a leaf
reads the state of its parent without leading it on. A state is kept only for a second child that has children itself;
of those all but the last have less than half of the nodes below, so few states are kept at a time (`slots`).
"""

import torch
from torch import Tensor

from .base import is_ancestor, parents_of

COLUMNS = 5
"""Of a table. By step: the node; the slot of its parent's state, or -1 (the program holds it); whether the node has
children, so that its state is needed; the slot in which its state is kept, or -1. By node: its parent, or -1."""


def slots(nodes: int) -> int:
    """States that a walk over this many nodes keeps at a time, at most."""
    count = 0
    while nodes >= 5:  # a node, and two children that have a child each
        nodes, count = (nodes - 1) // 2, count + 1
    return count


@torch.library.custom_op("spec_compile::tree_walk", mutates_args=(), device_types="cpu")
def tree_walk(ancestors: Tensor) -> Tensor:
    """ancestors [B, N] int64 bits, N <= 64 -> the walks over these trees [B, 5, N] int32, see `COLUMNS`."""
    sees, parents = is_ancestor(ancestors), parents_of(ancestors)
    size = sees.sum(dim=1)
    node = torch.arange(ancestors.shape[1], device=ancestors.device)
    # Pairs [B, i, j] of siblings: whether j comes before i, or i before j.
    siblings = (parents[:, :, None] == parents[:, None]) & (node[:, None] != node)
    order = size * len(node) + node
    later = siblings & (order[:, None] < order[:, :, None])
    sooner = siblings & ~later
    # Behind its parent stand the subtrees of the siblings before it.
    skipped, has_later = (later * size[:, None]).sum(dim=2), sooner.any(dim=2)
    step = (sees * (skipped[:, None] + 1)).sum(dim=2) - 1
    # While a node's last child is walked over, nobody needs the node's own state.
    slot = (sees & has_later[:, None]).sum(dim=2)
    leads = size > 1
    is_resumed = (later & leads[:, None]).any(dim=2)
    resumed = torch.where(is_resumed, slot - has_later.long(), -1)
    branches = ((parents[:, None] == node[:, None]) & leads[:, None]).sum(dim=2)
    kept = torch.where(branches > 1, slot, -1)
    by_node = torch.stack([node.expand_as(step), resumed, leads.long(), kept], dim=1)
    by_step = torch.empty_like(by_node).scatter_(2, step[:, None].expand_as(by_node), by_node)
    return torch.cat([by_step, parents[:, None]], dim=1).int()


@tree_walk.register_fake
def _(ancestors):
    batch, nodes = ancestors.shape
    return ancestors.new_empty(batch, COLUMNS, nodes, dtype=torch.int32)


@tree_walk.register_kernel("cuda")
def launch(ancestors: Tensor) -> Tensor:
    """`tree_walk` by the kernel."""
    from .walk_kernel import walk_kernel  # needs Triton

    batch, nodes = ancestors.shape
    walk = ancestors.new_empty(batch, COLUMNS, nodes, dtype=torch.int32)
    walk_kernel[(batch,)](
        ancestors.contiguous(), walk, nodes, BLOCK=max(1 << (nodes - 1).bit_length(), 2), num_warps=4
    )  # fmt: skip
    return walk
