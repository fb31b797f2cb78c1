"""Trees over a block of drafts: any token of a place may follow any of the place before."""

import torch
from torch import Tensor, nn

from .lattice import lattice_tree


class BlockTree(nn.Module):
    """The best trees of `nodes` nodes, the root included, over the `topk` likeliest tokens of each of `places` places.

    A node is the ranks of the tokens on its path: (0, 2) is the third likeliest token of place 1 after the likeliest of
    place 0. Its score, the sum of their log-probabilities, falls with every rank and with its depth. So the paths whose
    ranks are nowhere higher score at least as much, and so do their beginnings: (0, 2) is preceded by (0,), (0, 0) and
    (0, 1). A node with `nodes` or more such paths is never among the best. The few nodes that remain are known in
    advance, parents first. Move the module to the draft's device: its tables are buffers.
    """

    def __init__(self, places: int, topk: int, nodes: int):
        """ValueError if there are not as many nodes."""
        super().__init__()
        self.nodes, self.topk = nodes, topk
        paths = _candidates(places, topk, nodes - 1)
        if len(paths) < nodes - 1:
            raise ValueError(
                f"num_draft_tokens must be at most {len(paths) + 1}, the nodes of a tree of {topk} tokens at each of "
                f"{places} places and the root, not {nodes}: lower it, or raise topk or block_size"
            )
        number = {path: place for place, path in enumerate(paths)}
        deepest = len(paths[-1])
        ranks = [[*path, *[topk] * (deepest - len(path))] for path in paths]  # topk: no more of the path
        self._table("ranks", list(zip(*ranks)))
        self._table("above", [number.get(path[:-1], -1) for path in paths])
        self._table("last", [(len(path) - 1) * topk + path[-1] for path in paths])

    def _table(self, name: str, values: list) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)

    def forward(self, root: Tensor, scores: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """root [B]; scores (none above 0) and tokens [B, places, topk], likeliest first -> tokens, parents [B, nodes]
        int64 and scores [B, nodes] float32, from the best node down.

        If nodes have equal scores, any of them may be in the tree, or come first.
        """
        if scores.is_cuda:  # one launch; a sort of all candidates takes many
            after_any = scores[:, :, None].expand(-1, -1, self.topk, -1)
            return lattice_tree(root, tokens, after_any, self.nodes)
        scores = torch.cat([scores, torch.zeros_like(scores[:, :, :1])], dim=2)
        totals = scores[:, 0].index_select(1, self.ranks[0])
        for place in range(1, len(self.ranks)):  # in this order no sum is above that of its parent
            totals = totals + scores[:, place].index_select(1, self.ranks[place])
        kept = totals.sort(dim=1, descending=True, stable=True).indices[:, : self.nodes - 1]
        parents = self.above[kept][:, :, None] == kept[:, None, :]
        parents = torch.where(parents, torch.arange(1, self.nodes, device=kept.device), 0).sum(dim=2)
        root, first = root[:, None], torch.zeros_like(root)[:, None]
        return (
            torch.cat([root, tokens.flatten(1).gather(1, self.last[kept])], dim=1),
            torch.cat([first - 1, parents], dim=1),
            torch.cat([first.to(totals.dtype), totals.gather(1, kept)], dim=1),
        )


def _candidates(places: int, topk: int, count: int) -> list[tuple[int, ...]]:
    """The paths that may be among the `count` best, the short ones first.

    At depth d there are ``(r_1 + 1) * ... * (r_d + 1)`` paths whose ranks are nowhere above those of (r_1, ..., r_d):
    below (0, 2) there are 1 at depth 1 and 3 at depth 2, itself included, so it needs a `count` of 4.
    """
    candidates, level = [], [((), 1, 0)]
    for _ in range(places):
        level = [
            ((*path, rank), alike * (rank + 1), before + alike * (rank + 1))
            for path, alike, before in level
            for rank in range(topk)
            if before + alike * (rank + 1) <= count
        ]
        candidates += [path for path, _, _ in level]
    return candidates
