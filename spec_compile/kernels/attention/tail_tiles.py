"""Tail tiles: which nodes of a tree attend together to the keys after the last whole chunk of the cache.

These keys are the last committed ones and then the node's own ancestors, so nodes of one path share them. A leaf is a
node that no later node sees. It owns the nodes of its path that no smaller leaf sees; they are next to each other on
the path. A tile is a leaf and up to `nodes_per_tile` of the nodes that it owns. In a tree a node sees the path up to
itself; in a block whose nodes all see each other it sees the whole path.

    parents = [-1, 0, 0, 1, 1]        ancestors = [0b1, 0b11, 0b101, 0b1011, 0b10011]
    leaf 2: path 0, 2, owns 0 and 2;  leaf 3: path 0, 1, 3, owns 1 and 3;  leaf 4: path 0, 1, 4, owns 4

`tail_tile_table` gives a row for each tile, here with two nodes a tile and N = 5:

    nodes on   first of the     nodes of   tiles of   nodes seen after
    the path   tile's nodes     the tile   the tree   the node itself    the path, padded with N
           2              0            2          3                  0   0  2  5  5  5
           3              1            2          3                  0   0  1  3  5  5
           3              2            1          3                  0   0  1  4  5  5
"""

import torch
from torch import Tensor

from ..launching import on_gpu, op_with_kernel

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU
    triton = None

COLUMNS = 5
"""Columns of a table before the path's."""
MAX_ROWS = 64
"""Rows of a tile, unless one node has more."""


def nodes_per_tile(group: int) -> int:
    """The most nodes of a tile. group: query heads of a KV head."""
    return max(MAX_ROWS // group, 1)


def tail_tiles(ancestors: Tensor | None, nodes_per_tile: int) -> Tensor | None:
    """The `tail_tile_table` of trees as [B, N * (5 + N)], a size that varies with N if sizes that N divides vary; None
    for a chain, which has no ancestors or one node."""
    if ancestors is None or ancestors.shape[1] == 1:
        return None
    return tail_tile_table(ancestors, nodes_per_tile).flatten(1)


def _empty_table(ancestors: Tensor, nodes_per_tile: int) -> Tensor:
    batch, nodes = ancestors.shape
    return ancestors.new_empty(batch, nodes, COLUMNS + nodes, dtype=torch.int32)


@op_with_kernel("tail_tile_table", _empty_table)
def tail_tile_table(ancestors: Tensor, nodes_per_tile: int) -> Tensor:
    """The tail tiles of trees: ancestors [B, N] int64 bits -> [B, N, 5 + N] int32, a row a tile as in the example.

    A tree has at most N tiles. Rows beyond them have 0 nodes; only their numbers of tiles and of nodes seen after the
    node itself mean something. The latter is 0, or N in a block whose nodes all see each other.
    """
    nodes = ancestors.shape[1]
    index = torch.arange(nodes, device=ancestors.device, dtype=torch.int32)
    sees = (ancestors[:, :, None] >> index & 1).bool()
    before = index[None, :] < index[:, None]  # [i, j]: j < i
    leaf = ~(sees & before).any(1)
    owner = torch.where(sees & leaf[:, :, None], index[:, None], nodes).amin(1)
    # For every node, as if it were a leaf: its path [B, N, N], and the nodes that it owns: their count and first depth.
    depth = (sees[:, :, None, :] & before).sum(3, dtype=torch.int32)
    path = torch.where(sees[:, :, :, None] & (depth[:, :, :, None] == index), index[:, None], nodes).amin(2)
    owned = owner[:, None, :] == index[:, None]
    count = owned.sum(2, dtype=torch.int32)
    first = torch.where(owned, depth, nodes).amin(2)
    # The tiles of all leaves in turn, as pairs [B, tile, leaf].
    tiles = (count + nodes_per_tile - 1) // nodes_per_tile
    begin = torch.where(before, tiles[:, None, :], 0).sum(2, dtype=torch.int32)
    number = index[:, None] - begin[:, None, :]
    belongs = (number >= 0) & (number < tiles[:, None, :])
    skipped = number * nodes_per_tile
    sizes = (count[:, None, :] - skipped).clamp(max=nodes_per_tile)
    length = sees.sum(2, dtype=torch.int32)[:, None, :].expand_as(sizes)
    facts = torch.stack([length, first[:, None, :] + skipped, sizes], 3)
    facts = torch.where(belongs[:, :, :, None], facts, 0).sum(2, dtype=torch.int32)
    of_tree = torch.stack([tiles.sum(1), (ancestors[:, 0] != 1) * nodes], 1).to(torch.int32)
    paths = torch.where(belongs[:, :, :, None], path[:, None], nodes).amin(2)
    return torch.cat([facts, of_tree[:, None].expand(-1, nodes, -1), paths.to(torch.int32)], 2)


@on_gpu(tail_tile_table)
def launch(ancestors: Tensor, nodes_per_tile: int) -> Tensor:
    """`tail_tile_table` by the kernel."""
    (batch, nodes), table = ancestors.shape, _empty_table(ancestors, nodes_per_tile)
    tail_tiles_kernel[(batch,)](
        ancestors.contiguous(), table, nodes, PER_TILE=nodes_per_tile, COLUMNS=COLUMNS,
        BLOCK=max(1 << (nodes - 1).bit_length(), 2), num_warps=4,
    )  # fmt: skip
    return table


if triton is not None:

    @triton.jit(do_not_specialize=["nodes"])
    def tail_tiles_kernel(
        ancestors_ptr,  # [B, N] int64
        out_ptr,  # [B, N, COLUMNS + N] int32, written
        nodes,
        PER_TILE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """`tail_tile_table` of one tree a program. Grid (B,).

        Shapes: [BLOCK], or pairs [BLOCK, BLOCK] of (leaf, node). Every node has a row of pairs as if it were a leaf;
        rows of other nodes count for nothing, because only leaves own nodes.
        """
        index = tl.arange(0, BLOCK)
        leaf, node = index[:, None], index[None, :]
        exists = index < nodes
        out_ptr += tl.program_id(0).to(tl.int64) * nodes * (COLUMNS + nodes)

        # Fill the table: tiles have no nodes, and paths are nothing but padding.
        path_at = out_ptr + leaf * (COLUMNS + nodes) + COLUMNS
        both = exists[:, None] & exists[None, :]
        tl.store(out_ptr + index * (COLUMNS + nodes) + 2, tl.zeros_like(index), mask=exists)
        tl.store(path_at + node, tl.zeros_like(leaf + node) + nodes, mask=both)

        # sees[i, j]: node i sees node j. depth[i, j]: the step of j on the path to i. reach[i]: nodes on that path.
        bits = tl.load(ancestors_ptr + tl.program_id(0).to(tl.int64) * nodes + index, mask=exists, other=0)
        sees = (((bits[:, None] >> node.to(tl.int64)) & 1) != 0) & both
        depth = tl.cumsum(sees.to(tl.int32), 1) - 1
        reach = tl.sum(sees.to(tl.int32), 1)
        is_seen = tl.max((sees & (leaf > node)).to(tl.int32), 0)

        # Each node belongs to the smallest leaf that sees it. A leaf is seen by no later node; `is_seen` has the nodes
        # along the second axis, and the sum moves them to the first.
        is_leaf = tl.sum(tl.where((leaf == node) & (is_seen == 0)[None, :], 1, 0), 1) != 0
        owner = tl.min(tl.where(sees & is_leaf[:, None], leaf, nodes), 0)
        owned = sees & (owner[None, :] == leaf)
        count = tl.sum(owned.to(tl.int32), 1)
        first = tl.min(tl.where(owned, depth, nodes), 1)

        # Number the tiles of all leaves in turn, and store them, first the first tile of every leaf.
        tiles = (count + PER_TILE - 1) // PER_TILE
        begin = tl.cumsum(tiles, 0) - tiles
        ahead = tl.where(tl.sum(tl.where(index == 0, bits, 0)) == 1, 0, nodes)
        tl.store(out_ptr + index * (COLUMNS + nodes) + 3, tl.zeros_like(index) + tl.sum(tiles), mask=exists)
        tl.store(out_ptr + index * (COLUMNS + nodes) + 4, tl.zeros_like(index) + ahead, mask=exists)
        tl.debug_barrier()  # the filling is stored before the tiles
        for number in range(0, tl.max(tiles)):
            belongs = (number < tiles) & exists
            row_ptr = out_ptr + (begin + number) * (COLUMNS + nodes)
            tl.store(row_ptr, reach, mask=belongs)
            tl.store(row_ptr + 1, first + number * PER_TILE, mask=belongs)
            tl.store(row_ptr + 2, tl.minimum(count - number * PER_TILE, PER_TILE), mask=belongs)
            tl.store(row_ptr[:, None] + COLUMNS + depth, node + tl.zeros_like(depth), mask=belongs[:, None] & sees)
