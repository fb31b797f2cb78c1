"""`StaticTree`: a token tree of one shape, which does not depend on the draft (EAGLE-1, arXiv:2401.15077)."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from ...errors import check_int
from ...kernels.top_logits import MAX_K
from ...tree import MAX_NODES
from .step import Step, children

EAGLE1_CHILDREN = {
    (): 4,
    **{(0,): 3, (1,): 2, (2,): 2, (3,): 1},
    **{(0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1},
    **{(0, 0, 0): 3, (0, 0, 0, 0): 2},
}
EAGLE1_CHOICES = [(*path, rank) for path, count in EAGLE1_CHILDREN.items() for rank in range(count)]
"""The tree of 25 drafts, 26 nodes, of EAGLE-1 (Li et al. 2024, arXiv:2401.15077): paths of child ranks."""


def _sorted_paths(choices: Collection[Sequence[int]]) -> list[tuple[int, ...]]:
    """The path of child ranks of every node below the root, shortest first; (0, 2) is the third likeliest child of the
    root's likeliest. TypeError or ValueError unless each of `choices` is there once, and its parent too."""
    if not isinstance(choices, Collection) or any(isinstance(p, str) or not isinstance(p, Sequence) for p in choices):
        raise TypeError(f'tree_choices must be paths of child ranks ([[0], [0, 1]]) or "eagle1", not {choices!r}')
    for rank in (rank for path in choices for rank in path):
        check_int("a rank in tree_choices", rank, 0, MAX_K - 1)
    paths = sorted(map(tuple, choices), key=lambda path: (len(path), path))
    check_int("the number of tree_choices", len(paths), 1, MAX_NODES - 1, "paths of a static tree")
    known = {(), *paths}
    if len(known) != len(paths) + 1:
        raise ValueError("tree_choices must hold every path once, and no empty path (the root)")
    for path in paths:
        if path[:-1] not in known:
            raise ValueError(f"tree_choices must hold the parent of every path: add {list(path[:-1])}, of {list(path)}")
    return paths


class StaticTree(nn.Module):
    """A tree of one shape, as EAGLE-1 grows it: a node's children are its likeliest tokens, by the ranks in `choices`.

    Its tables are buffers, so move it to the draft's device. A level's candidates are the `ranks` likeliest tokens of
    each node of the level before that has children. picked: the candidates that are nodes. inner: the nodes that have
    children. above: the parents of those, among the nodes before that have children. The choices (0,), (1,), (1, 0) and
    (1, 2) give the parents [-1, 0, 0, 2, 2], at level 1 picked [0, 1] of 2 ranks and inner [1], at level 2 picked
    [0, 2] of 3 ranks.
    """

    def __init__(self, choices: Collection[Sequence[int]] = tuple(EAGLE1_CHOICES)):
        """`choices`: see `_sorted_paths`."""
        super().__init__()
        paths = _sorted_paths(choices)
        number = {path: place for place, path in enumerate([(), *paths])}
        self.nodes, self.num_steps = len(number), len(paths[-1])
        self._table("parents", [-1, *(number[path[:-1]] for path in paths)])

        parents = [()]  # nodes of the level before that have children
        fed = {}  # nodes that are fed to the draft, and their rows
        self.widths, self.ranks = [], []
        for level in range(1, self.num_steps + 1):
            level_paths = [path for path in paths if len(path) == level]
            inner = [path for path in level_paths if any(other[:-1] == path for other in paths)]
            ranks = 1 + max(path[-1] for path in level_paths)
            self._table(f"picked_{level}", [parents.index(path[:-1]) * ranks + path[-1] for path in level_paths])
            self._table(f"inner_{level}", [level_paths.index(path) for path in inner])
            self._table(f"above_{level}", [parents.index(path[:-1]) for path in inner])
            self.widths.append(len(inner))
            self.ranks.append(ranks)
            for path in inner:
                fed[path] = len(fed)
            parents = inner
        seen = [sum(1 << fed[path[:end]] for end in range(1, len(path) + 1)) for path in fed]
        self._table("ancestors", seen)
        self._table("depth", [len(path) for path in fed])
        self.fed = len(fed)

    def _table(self, name: str, values: list[int]) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)

    def forward(
        self, root: Tensor, logits: Tensor, hidden: Tensor, step: Step, draft_to_target: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `grow`. Scores are at temperature 1."""
        batch, device = root.shape[0], root.device
        tokens, scores = [root[:, None]], [torch.zeros(batch, 1, device=device)]
        fed_tokens, fed_hidden = root.new_empty(batch, 0), hidden.new_empty(batch, 0, hidden.shape[1])
        above, hidden, logits = scores[0], hidden[:, None], logits[:, None]
        for level, (width, ranks) in enumerate(zip(self.widths, self.ranks), 1):
            inner, picked = getattr(self, f"inner_{level}"), getattr(self, f"picked_{level}")
            below, ids = (x.index_select(1, picked) for x in children(above, logits, ranks, 1.0, draft_to_target))
            tokens.append(ids)
            scores.append(below)
            if width:
                above = below.index_select(1, inner)
                fed_tokens = torch.cat([fed_tokens, ids.index_select(1, inner)], dim=1)
                fed_hidden = torch.cat([fed_hidden, hidden.index_select(1, getattr(self, f"above_{level}"))], dim=1)
                rows = fed_tokens.shape[1]
                ancestors = self.ancestors[:rows].expand(batch, rows)
                hidden, logits = step(fed_tokens, fed_hidden, ancestors, self.depth[:rows], 0, width)
                hidden = hidden[:, -width:]
        return torch.cat(tokens, dim=1), self.parents.expand(batch, -1), torch.cat(scores, dim=1)
