"""Trees over a block of drafts whose tokens depend on those before them, as in DFlash 2, DSpark and Domino."""

from typing import Protocol

import torch
from torch import Tensor

from ...kernels.ops import gather_rows
from ...kernels.top_logits import MAX_K
from .grow import best_nodes, highest


class Follow(Protocol):
    """The candidates at one place of a block after each of W nodes at the place before."""

    def __call__(self, place: int, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """previous [B, W] int64: the nodes' tokens.
        state [B, W, C]: carried over the tokens before them.

        Returns log-probabilities [B, W, K] of the place's candidates, none above 0, and the state [B, W, C] after the
        nodes.
        """


def grow_lattice(
    root: Tensor, tokens: Tensor, follow: Follow, state: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The best trees of `nodes` nodes, the root included, over K candidates at each of P places.

    root [B].
    tokens [B, P, K] int64: the candidates, different at each place.
    state [B, C]: of the root.

    A node's score is the sum of log-probabilities on its path. Only the best nodes - 1 - p paths go on at place p: a
    node there needs its p ancestors in the tree, so that many better neighbours leave no room for it, nor for anything
    below it.

    Returns tokens, parents [B, nodes] int64 and scores [B, nodes] float32, from the best node down.
    """
    _, places, count = tokens.shape
    level, state = root[:, None], state[:, None]  # the nodes at the place before
    scores = torch.zeros_like(level, dtype=torch.float32)
    levels = [(level, torch.full_like(level, -1), scores)]
    first = 0  # number of the level's first node
    for place in range(min(places, nodes - 1)):
        logprobs, state = follow(place, level, state)
        totals = (scores[:, :, None] + logprobs).flatten(1)
        kept = highest(totals, min(totals.shape[1], nodes - 1 - place))
        parents, above = kept // count, first + kept // count
        first += level.shape[1]
        level, scores = tokens[:, place].gather(1, kept % count), totals.gather(1, kept)
        state = gather_rows(state, parents)
        levels.append((level, above, scores))
    return best_nodes(*(torch.cat(parts, dim=1) for parts in zip(*levels)), nodes)


@torch.library.custom_op("spec_compile::lattice_tree", mutates_args=())
def lattice_tree(root: Tensor, tokens: Tensor, logprobs: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """`grow_lattice` for candidates that depend only on the token before.

    logprobs [B, P, K, K] float32: entry [p, a, b] is that of candidate b after candidate a of the place before; the
    first place has those after the root in row 0.
    The other arguments, and the results, are those of `grow_lattice`. ValueError for more than 16 candidates, or fewer
    nodes than asked for.
    """
    places, count = tokens.shape[1:]
    if count > MAX_K or nodes > sum(count**depth for depth in range(places + 1)):
        raise ValueError(
            f"nodes: {count} candidates at each of {places} places, at most {MAX_K} of them, are too few for {nodes}"
        )
    if root.is_cuda:
        from ...kernels.lattice import launch  # needs Triton

        return launch(root, tokens, logprobs, nodes)
    return grow_table(root, tokens, logprobs, nodes)


@lattice_tree.register_fake
def _(root, tokens, logprobs, nodes):
    ids, parents = (root.new_empty(root.shape[0], nodes) for _ in range(2))
    return ids, parents, logprobs.new_empty(root.shape[0], nodes)


def grow_table(root: Tensor, tokens: Tensor, logprobs: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """`lattice_tree` in plain PyTorch."""

    def follow(place: int, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if place == 0:
            return logprobs[:, 0, :1], state
        candidate = (tokens[:, place - 1, None] == previous[:, :, None]).int().argmax(dim=2)
        return logprobs[:, place].gather(1, candidate[:, :, None].expand(-1, -1, tokens.shape[2])), state

    return grow_lattice(root, tokens, follow, logprobs.new_empty(len(root), 0), nodes)
