"""`grow`: a chain, the dynamic tree of EAGLE-2 or a static tree, from a draft's likeliest tokens.

It knows nothing of the draft but its `Step`. All tensors have static shapes, so that it can be compiled and captured.
"""

import torch
from torch import Tensor

from ...kernels.ops import gather_rows
from ...tree import MAX_NODES
from .schedule import Schedule
from .static import StaticTree
from .step import Step, chain_parents, children, feed


def grow(
    schedule: Schedule | StaticTree,
    root: Tensor,
    logits: Tensor,
    hidden: Tensor,
    step: Step,
    draft_to_target: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The trees to be verified: tokens, parents [B, N] int64 and scores [B, N] float32.

    root [B]: the last committed tokens.
    logits [B, Vd], hidden [B, C]: the draft's output at the last committed slot.
    draft_to_target [Vd]: the target's id of each of the draft's, all different (None: they are the same).

    A score is the sum of log-probabilities down from the root, whose score is 0, so no child's is above its parent's.
    Parents come before children and siblings differ. The nodes of an EAGLE-2 tree go from the best score down, so its
    first n nodes are the tree of n nodes. ValueError if Vd is less than topk, or than the ranks of a static tree.
    """
    if isinstance(schedule, StaticTree):
        return schedule(root, logits, hidden, step, draft_to_target)
    return (_grow_chain if schedule.topk == 1 else _grow_tree)(schedule, root, logits, hidden, step, draft_to_target)


def highest(scores: Tensor, count: int) -> Tensor:
    """The columns [B, count] of the highest scores [B, M]; the first of equal ones comes first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def best_nodes(tokens: Tensor, above: Tensor, scores: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best of M numbered nodes, from the best down: tokens, parents [B, nodes] int64 and scores [B, nodes].

    tokens, scores [B, M]: the root is number 0.
    above [B, M]: the number of each node's parent, -1 for the root.

    A parent has a lower number than its children and no lower score. Among equal scores the lower number comes first,
    so no node comes before its parent. above = [-1, 0, 0, 2], scores = [0, -3, -1, -2] and nodes = 3 keep the numbers
    [0, 2, 3], whose parents are [-1, 0, 1].
    """
    kept = highest(scores, nodes)
    number = torch.arange(nodes, device=kept.device)
    parents = above.gather(1, kept)[:, :, None] == kept[:, None, :]
    parents = torch.where(number == 0, -1, torch.where(parents, number, 0).sum(dim=2))
    return tokens.gather(1, kept), parents, scores.gather(1, kept)


def _grow_chain(
    schedule: Schedule, root: Tensor, logits: Tensor, hidden: Tensor, step: Step, draft_to_target: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, scores = [root[:, None]], [torch.zeros(root.shape[0], 1, device=root.device)]
    for level in range(1, schedule.nodes):
        if level > 1:
            hidden, logits = feed(step, tokens[-1], hidden, level - 1)
        score, token = children(scores[-1], logits[:, None], 1, schedule.score_temperature, draft_to_target)
        tokens.append(token)
        scores.append(score)
    return torch.cat(tokens, dim=1), chain_parents(root, len(tokens)), torch.cat(scores, dim=1)


def _grow_tree(
    schedule: Schedule, root: Tensor, logits: Tensor, hidden: Tensor, step: Step, draft_to_target: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates are numbered level by level, the root being 0; the best of all are kept.

    Each level's `topk` best candidates are fed to the draft, in rows after those of the levels before. With topk = 2,
    rows [0, 1 | 2, 3] have the depths [1, 1 | 2, 2]; if rows 2 and 3 are children of row 1, their ancestors are
    [0b0110, 0b1010].
    """
    batch, topk, device = root.shape[0], schedule.topk, root.device
    number = torch.arange(MAX_NODES, device=device)
    tokens, scores = [root[:, None]], [torch.zeros(batch, 1, device=device)]
    above = [torch.full((batch, 1), -1, device=device)]  # number of each candidate's parent

    frontier = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # candidates that get children
    frontier_scores, hidden, logits = scores[0], hidden[:, None], logits[:, None]
    fed_tokens, fed_hidden = root.new_empty(batch, 0), hidden.new_empty(batch, 0, hidden.shape[2])
    ancestors = seen = root.new_empty(batch, 0)
    first = 1  # candidate of the level
    for level in range(1, schedule.num_steps + 1):
        below, ids = children(frontier_scores, logits, topk, schedule.score_temperature, draft_to_target)
        tokens.append(ids)
        scores.append(below)
        above.append(frontier.repeat_interleave(topk, dim=1))
        if level == schedule.num_steps:
            break
        best = highest(below, topk)
        frontier, frontier_scores = first + best, below.gather(1, best)
        first += below.shape[1]
        itself = torch.ones_like(best) << number[fed_tokens.shape[1] :][:topk]
        seen = itself if level == 1 else itself | seen.gather(1, best // topk)
        ancestors = torch.cat([ancestors, seen], dim=1)
        fed_tokens = torch.cat([fed_tokens, ids.gather(1, best)], dim=1)
        fed_hidden = torch.cat([fed_hidden, gather_rows(hidden, best // topk)], dim=1)
        depth = number[: fed_tokens.shape[1]] // topk + 1
        hidden, logits = step(fed_tokens, fed_hidden, ancestors, depth, 0, topk)
        hidden = hidden[:, -topk:]

    tokens, scores, above = (torch.cat(parts, dim=1) for parts in (tokens, scores, above))
    return best_nodes(tokens, above, scores, schedule.nodes)
