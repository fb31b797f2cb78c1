"""The kernel of `tree_walk`: the whole table of one tree by one program.

Import this module only where Triton is installed. Shapes: N = BLOCK, the power of two that holds the nodes; pairs
[N, N] are (i, j), and what is known of a node stands along both axes.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["nodes"])
def walk_kernel(ancestors_ptr, out_ptr, nodes, BLOCK: tl.constexpr):
    """out [B, 5, nodes] int32 from ancestors [B, nodes] int64. Grid (B,)."""
    index = tl.arange(0, BLOCK)
    i, j = index[:, None], index[None, :]
    ancestors_ptr += tl.program_id(0).to(tl.int64) * nodes
    out_ptr += tl.program_id(0).to(tl.int64) * nodes * 5

    # Whether i sees j, and j sees i; parents, and sizes of subtrees. What does not exist sees itself alone.
    bits = tl.load(ancestors_ptr + index, mask=index < nodes, other=0)
    sees = (((bits[:, None] >> j.to(tl.int64)) & 1) != 0) | (i == j)
    seen = (((bits[None, :] >> i.to(tl.int64)) & 1) != 0) | (i == j)
    parent_i = tl.max(tl.where(sees & (j < i), j, -1), 1)
    parent_j = tl.max(tl.where(seen & (i < j), i, -1), 0)
    size_i, size_j = tl.sum(seen.to(tl.int32), 1), tl.sum(sees.to(tl.int32), 0)

    # Pairs of siblings: whether j comes before i, or i before j. The root has none.
    siblings = (parent_i[:, None] == parent_j[None, :]) & (i != j) & (parent_i[:, None] >= 0)
    later = siblings & ((size_j * BLOCK + index)[None, :] < (size_i * BLOCK + index)[:, None])
    sooner = siblings & ~later

    # Behind its parent stand the subtrees of the siblings before it.
    skipped_j = tl.sum(tl.where(sooner, size_i[:, None], 0), 0)
    has_later_i, has_later_j = tl.max(sooner.to(tl.int32), 1), tl.max(later.to(tl.int32), 0)
    step = tl.sum(tl.where(sees, skipped_j[None, :] + 1, 0), 1) - 1
    slot = tl.sum(tl.where(sees, has_later_j[None, :], 0), 1)
    is_resumed = tl.max((later & (size_j > 1)[None, :]).to(tl.int32), 1)
    branches = tl.sum(((parent_j[None, :] == i) & (size_j > 1)[None, :]).to(tl.int32), 1)

    mask = index < nodes
    tl.store(out_ptr + step, index, mask=mask)
    tl.store(out_ptr + nodes + step, tl.where(is_resumed != 0, slot - has_later_i, -1), mask=mask)
    tl.store(out_ptr + 2 * nodes + step, (size_i > 1).to(tl.int32), mask=mask)
    tl.store(out_ptr + 3 * nodes + step, tl.where(branches > 1, slot, -1), mask=mask)
    tl.store(out_ptr + 4 * nodes + index, parent_i, mask=mask)
