"""Tail tiles: which nodes of a tree attend together to the keys behind the last whole chunk of the cache.

Those keys are the last committed ones and the node's own ancestors, in the order of their positions. Nodes of one path
share them. A leaf is a node that no later node sees; it owns the nodes of its path that no smaller leaf sees, which lie
side by side on the path. A tile is a leaf and up to `nodes_per_tile` of the nodes that it owns. In a tree a node sees
what comes before it on the path; in a block whose nodes all see each other it sees the whole path.
"""

import torch
from torch import Tensor

COLUMNS = 5
"""Columns of a table before those of the path."""
ROWS = 64
"""Rows of a tile at most, unless one node has more."""


def nodes_per_tile(group: int) -> int:
    """Nodes of a tile at most. group: query heads of a KV head."""
    return max(ROWS // group, 1)


def tail_tiles(ancestors: Tensor | None, nodes_per_tile: int) -> Tensor | None:
    """The tail tiles of trees as `tail_tile_table`. None for a chain: where there are no ancestors, or one node."""
    if ancestors is None or ancestors.shape[1] == 1:
        return None
    return tail_tile_table(ancestors, nodes_per_tile)


@torch.library.custom_op("spec_compile::tail_tile_table", mutates_args=(), device_types="cpu")
def tail_tile_table(ancestors: Tensor, nodes_per_tile: int) -> Tensor:
    """The tail tiles of trees, of which there are no more than nodes.

    ancestors [B, N] int64 as in `call.Call`. -> [B, N, 5 + N] int32, a tile a row: the number of nodes on the path;
    the place on it of the first of the tile's nodes; how many nodes the tile has (0: there is no such tile, and its
    other numbers but the next mean nothing); how many tiles the tree has; how many nodes of the path behind its own
    place a node sees (0 or N); the path, filled up with N.
    """
    nodes = ancestors.shape[1]
    index = torch.arange(nodes, device=ancestors.device, dtype=torch.int32)
    sees = (ancestors[:, :, None] >> index & 1).bool()
    before = index[None, :] < index[:, None]  # [i, j]: j < i
    leaf = ~(sees & before).any(1)
    owner = torch.where(sees & leaf[:, :, None], index[:, None], nodes).amin(1)
    # Of every node as if it were a leaf: its path [B, N, N], and how deep what it owns lies on it.
    depth = (sees[:, :, None, :] & before).sum(3, dtype=torch.int32)
    path = torch.where(sees[:, :, :, None] & (depth[:, :, :, None] == index), index[:, None], nodes).amin(2)
    owned = owner[:, None, :] == index[:, None]
    count = owned.sum(2, dtype=torch.int32)
    first = torch.where(owned, depth, nodes).amin(2)
    # Tiles of all leaves in turn: [B, tile, leaf].
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


@tail_tile_table.register_fake
def _(ancestors, nodes_per_tile):
    batch, nodes = ancestors.shape
    return ancestors.new_empty(batch, nodes, COLUMNS + nodes, dtype=torch.int32)


@tail_tile_table.register_kernel("cuda")
def launch(ancestors: Tensor, nodes_per_tile: int) -> Tensor:
    """`tail_tile_table` by the kernel."""
    from .tail_tiles_kernel import tail_tiles_kernel  # needs Triton

    batch, nodes = ancestors.shape
    table = ancestors.new_empty(batch, nodes, COLUMNS + nodes, dtype=torch.int32)
    tail_tiles_kernel[(batch,)](
        ancestors.contiguous(), table, nodes, PER_TILE=nodes_per_tile, COLUMNS=COLUMNS,
        BLOCK=max(1 << (nodes - 1).bit_length(), 2), num_warps=4,
    )  # fmt: skip
    return table
