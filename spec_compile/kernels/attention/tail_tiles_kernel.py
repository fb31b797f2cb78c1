"""The kernel of `tail_tiles`: the whole table of one tree by one program.

Import this module only where Triton is installed. Shapes: N = BLOCK, the power of two that holds the nodes; pairs
[N, N] are (leaf, node). Only nodes that are leaves own any, so the rows of others count for nothing.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["nodes"])
def tail_tiles_kernel(
    ancestors_ptr, out_ptr, nodes, PER_TILE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out [B, nodes, COLUMNS + nodes] int32 from ancestors [B, nodes] int64. Grid (B,)."""
    index = tl.arange(0, BLOCK)
    leaf, node = index[:, None], index[None, :]
    exists = index < nodes
    out_ptr += tl.program_id(0).to(tl.int64) * nodes * (COLUMNS + nodes)

    # Tiles that do not exist have no nodes, and a path is filled up with `nodes`.
    path_at = out_ptr + leaf * (COLUMNS + nodes) + COLUMNS
    both = exists[:, None] & exists[None, :]
    tl.store(out_ptr + index * (COLUMNS + nodes) + 2, tl.zeros_like(index), mask=exists)
    tl.store(path_at + node, tl.zeros_like(leaf + node) + nodes, mask=both)

    # Which nodes each node sees, and how deep each lies on its path; a leaf is seen by no later node.
    bits = tl.load(ancestors_ptr + tl.program_id(0).to(tl.int64) * nodes + index, mask=exists, other=0)
    sees = (((bits[:, None] >> node.to(tl.int64)) & 1) != 0) & both
    depth = tl.cumsum(sees.to(tl.int32), 1) - 1
    reach = tl.sum(sees.to(tl.int32), 1)
    is_seen = tl.max((sees & (leaf > node)).to(tl.int32), 0)

    # Each node belongs to the smallest leaf that sees it.
    is_leaf = tl.sum(tl.where((leaf == node) & (is_seen == 0)[None, :], 1, 0), 1) != 0  # the same along the other axis
    owner = tl.min(tl.where(sees & is_leaf[:, None], leaf, nodes), 0)
    owned = sees & (owner[None, :] == leaf)
    count = tl.sum(owned.to(tl.int32), 1)
    first = tl.min(tl.where(owned, depth, nodes), 1)

    # The tiles of all leaves in turn.
    tiles = (count + PER_TILE - 1) // PER_TILE
    begin = tl.cumsum(tiles, 0) - tiles
    ahead = tl.where(tl.sum(tl.where(index == 0, bits, 0)) == 1, 0, nodes)
    tl.store(out_ptr + index * (COLUMNS + nodes) + 3, tl.zeros_like(index) + tl.sum(tiles), mask=exists)
    tl.store(out_ptr + index * (COLUMNS + nodes) + 4, tl.zeros_like(index) + ahead, mask=exists)
    tl.debug_barrier()  # what fills the table up is stored before what it is written over with
    for number in range(0, tl.cdiv(nodes, PER_TILE)):
        belongs = (number < tiles) & exists
        row_ptr = out_ptr + (begin + number) * (COLUMNS + nodes)
        tl.store(row_ptr, reach, mask=belongs)
        tl.store(row_ptr + 1, first + number * PER_TILE, mask=belongs)
        tl.store(row_ptr + 2, tl.minimum(count - number * PER_TILE, PER_TILE), mask=belongs)
        tl.store(row_ptr[:, None] + COLUMNS + depth, node + tl.zeros_like(depth), mask=belongs[:, None] & sees)
