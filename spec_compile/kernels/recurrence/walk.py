"""The walk of a kernel over a tree: every node after its parent, and the steps at which a state is kept and resumed.

A program holds one state. It comes to the children of a node in ascending order of the sizes of their subtrees. A leaf
only reads the state of its parent. A state is kept in memory only if two children of its node have children themselves;
then the program resumes it for each of them but the first. All subtrees of these except the last have less than half
of the nodes below, so few states are kept at a time (`slots`).

    parents = [-1, 0, 0, 1, 2]: node 0 has the children 1 and 2, node 1 has 3, node 2 has 4

    step                          0   1   2   3   4
    node                          0   1   3   2   4
    slot of the parent's state   -1  -1  -1   0  -1    -1: the program holds it
    node has children             1   1   0   1   0
    slot that keeps its state     0  -1  -1  -1  -1    -1: none
    parent (by node)             -1   0   0   1   2
"""

import torch
from torch import Tensor

from ..launching import on_gpu, op_with_kernel
from .kinds import is_ancestor, parents_of

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU
    triton = None

COLUMNS = 5
"""The five lists of the example. All but the last are in the order of the steps."""


def slots(nodes: int) -> int:
    """The most states that a walk over this many nodes keeps at a time."""
    count = 0
    while nodes >= 5:  # a node, and two children that have a child each
        nodes, count = (nodes - 1) // 2, count + 1
    return count


def _empty_walk(ancestors: Tensor) -> Tensor:
    return ancestors.new_empty(len(ancestors), COLUMNS, ancestors.shape[1], dtype=torch.int32)


@op_with_kernel("tree_walk", _empty_walk)
def tree_walk(ancestors: Tensor) -> Tensor:
    """ancestors [B, N] int64 bits, N <= 64 -> the walks over these trees [B, COLUMNS, N] int32."""
    sees, parents = is_ancestor(ancestors), parents_of(ancestors)
    size = sees.sum(dim=1)
    node = torch.arange(ancestors.shape[1], device=ancestors.device)
    # Pairs [B, i, j] of siblings. later: i comes after j; sooner: i comes before j.
    siblings = (parents[:, :, None] == parents[:, None]) & (node[:, None] != node)
    order = size * len(node) + node
    later = siblings & (order[:, None] < order[:, :, None])
    sooner = siblings & ~later
    # A node's step: its ancestors and itself, and the subtrees of the siblings that come before each of these.
    skipped, has_later = (later * size[:, None]).sum(dim=2), sooner.any(dim=2)
    step = (sees * (skipped[:, None] + 1)).sum(dim=2) - 1
    # A slot is free again during the walk over a node's last child, which is the last to need the node's state.
    slot = (sees & has_later[:, None]).sum(dim=2)
    leads = size > 1
    is_resumed = (later & leads[:, None]).any(dim=2)
    resumed = torch.where(is_resumed, slot - has_later.long(), -1)
    branches = ((parents[:, None] == node[:, None]) & leads[:, None]).sum(dim=2)
    kept = torch.where(branches > 1, slot, -1)
    by_node = torch.stack([node.expand_as(step), resumed, leads.long(), kept], dim=1)
    by_step = torch.empty_like(by_node).scatter_(2, step[:, None].expand_as(by_node), by_node)
    return torch.cat([by_step, parents[:, None]], dim=1).int()


@on_gpu(tree_walk)
def launch(ancestors: Tensor) -> Tensor:
    """`tree_walk` by the kernel."""
    batch, nodes = ancestors.shape
    walk = _empty_walk(ancestors)
    walk_kernel[(batch,)](ancestors.contiguous(), walk, nodes, BLOCK=max(1 << (nodes - 1).bit_length(), 2), num_warps=4)
    return walk


if triton is not None:

    @triton.jit(do_not_specialize=["nodes"])
    def walk_kernel(
        ancestors_ptr,  # [B, nodes] int64
        out_ptr,  # [B, 5, nodes] int32, written
        nodes,
        BLOCK: tl.constexpr,
    ):  # fmt: skip
        """`tree_walk` of one tree a program. Grid (B,).

        Shapes: [BLOCK], or pairs [BLOCK, BLOCK] of nodes (i, j). A number of each node is needed along both axes of
        pairs: x_i [BLOCK] is along i, and x_j along j.
        """
        index = tl.arange(0, BLOCK)
        i, j = index[:, None], index[None, :]
        ancestors_ptr += tl.program_id(0).to(tl.int64) * nodes
        out_ptr += tl.program_id(0).to(tl.int64) * nodes * 5

        # sees: i sees j; seen: j sees i. Parents, and sizes of subtrees. Nodes that do not exist see only themselves.
        bits = tl.load(ancestors_ptr + index, mask=index < nodes, other=0)
        sees = (((bits[:, None] >> j.to(tl.int64)) & 1) != 0) | (i == j)
        seen = (((bits[None, :] >> i.to(tl.int64)) & 1) != 0) | (i == j)
        parent_i = tl.max(tl.where(sees & (j < i), j, -1), 1)
        parent_j = tl.max(tl.where(seen & (i < j), i, -1), 0)
        size_i, size_j = tl.sum(seen.to(tl.int32), 1), tl.sum(sees.to(tl.int32), 0)

        # Siblings; the root has none. later: i comes after j; sooner: i comes before j.
        siblings = (parent_i[:, None] == parent_j[None, :]) & (i != j) & (parent_i[:, None] >= 0)
        later = siblings & ((size_j * BLOCK + index)[None, :] < (size_i * BLOCK + index)[:, None])
        sooner = siblings & ~later

        # A node's step: its ancestors and itself, and the subtrees of the siblings that come before each of these.
        skipped_j = tl.sum(tl.where(sooner, size_i[:, None], 0), 0)
        has_later_i, has_later_j = tl.max(sooner.to(tl.int32), 1), tl.max(later.to(tl.int32), 0)
        step = tl.sum(tl.where(sees, skipped_j[None, :] + 1, 0), 1) - 1
        slot = tl.sum(tl.where(sees, has_later_j[None, :], 0), 1)
        is_resumed = tl.max((later & (size_j > 1)[None, :]).to(tl.int32), 1)
        branches = tl.sum(((parent_j[None, :] == i) & (size_j > 1)[None, :]).to(tl.int32), 1)

        # The four lists by step, and the parents by node.
        mask = index < nodes
        tl.store(out_ptr + step, index, mask=mask)
        tl.store(out_ptr + nodes + step, tl.where(is_resumed != 0, slot - has_later_i, -1), mask=mask)
        tl.store(out_ptr + 2 * nodes + step, (size_i > 1).to(tl.int32), mask=mask)
        tl.store(out_ptr + 3 * nodes + step, tl.where(branches > 1, slot, -1), mask=mask)
        tl.store(out_ptr + 4 * nodes + index, parent_i, mask=mask)

    @triton.jit
    def resume(tile, walk_ptr, kept_at, tokens, step, SIZE: tl.constexpr):
        """The state that the node of a step follows from: `tile`, which the program holds, or a slot's.

        walk_ptr: [COLUMNS, tokens], of a row of the batch. kept_at: the addresses of a program's first slot, of SIZE
        numbers.
        """
        resumed = tl.load(walk_ptr + tokens + step)
        if resumed >= 0:
            tile = tl.load(kept_at + resumed * SIZE)
        return tile

    @triton.jit
    def keep(tile, walk_ptr, kept_at, tokens, step, SIZE: tl.constexpr):
        """Keep the state after a step in its slot, if a later child needs it. Arguments: see `resume`."""
        kept = tl.load(walk_ptr + 3 * tokens + step)
        if kept >= 0:
            tl.store(kept_at + kept * SIZE, tile)
            tl.debug_barrier()  # a lane may read what another has stored
