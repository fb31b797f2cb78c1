"""The trees that a draft grows become those that the next round verifies.

`propose_grown` grows them level by level. `BlockProposer` makes them of the drafts of a block, which one forward gives:
any token of a place may follow any token of the place before. A `BlockTree` scores each draft by its place,
`grow_lattice` and `lattice_tree` also by the draft before it. On a GPU one kernel grows both kinds of trees.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from ...kernels.ops import gather_rows
from ...kernels.top_logits import MAX_K, best_tokens
from ...runtime.state import State
from .grow import (
    Schedule,
    StaticTree,
    Step,
    best_nodes,
    chain_parents,
    chain_scores,
    draw_chain,
    expected_drafts,
    grow,
    highest,
)


def propose_full(
    state: State, tokens: Tensor, parents: Tensor, scores: Tensor | None = None, probs: Tensor | None = None
) -> None:
    """Propose trees all of whose nodes are in use. The arguments: see `State.propose`.

    The confidence is the number of drafts that `scores` expect to be accepted. Without scores, as for drawn drafts, it
    is 0: the number of verified nodes may depend on it, and a drawn token that decides whether it is verified is no
    longer distributed as the draft says.
    """
    count = torch.full_like(tokens[:, 0], tokens.shape[1])
    confidence = torch.zeros_like(count) if scores is None else expected_drafts(scores)
    state.propose(tokens, parents, count, confidence, probs, scores)


def propose_grown(
    state: State,
    schedule: Schedule | StaticTree,
    draws: bool,
    logits: Tensor,
    hidden: Tensor,
    step: Step,
    draft_to_target: Tensor | None = None,
    nodes: int | None = None,
) -> None:
    """Grow trees (see `grow`), or chains that are drawn, below the last committed tokens and propose them.

    logits [B, Vd], hidden [B, C]: the draft's output at the last committed slot.
    draft_to_target [Vd]: see `grow`.
    nodes: see `Drafter.propose`.
    """
    root = state.tree_tokens[:, 0].clone()
    if draws:
        place = state.lengths + 1 - state.prompt_lengths
        tokens, parents, probs = draw_chain(
            schedule, root, logits, hidden, step, state.temperature, state.seed, state.numbers, place,
            state.is_eos.shape[1], draft_to_target,
        )  # fmt: skip
        return propose_full(state, tokens, parents, probs=probs)
    schedule = schedule.first(nodes) if isinstance(schedule, Schedule) else schedule
    propose_full(state, *grow(schedule, root, logits, hidden, step, draft_to_target))


class BlockProposer(nn.Module):
    """Proposes chains or trees over the places of a block, whose logits a draft gives in one forward. The token of a
    place does not depend on the tokens of the others.

    places: drafts of a block.
    topk: tokens of each place that are looked at (1: chains).
    nodes: size of a tree, the root included; ValueError if there are not as many.
    draws: True if a chain's tokens are drawn when the target's are.
    temperature: divides the logits of the probabilities by which a tree's nodes are chosen.

    Move it to the draft's device: its tables are buffers.
    """

    def __init__(self, places: int, topk: int, nodes: int, draws: bool, temperature: float = 1.0):
        super().__init__()
        self.nodes, self.temperature = nodes, temperature
        self.drawn = Schedule(nodes - 1, 1, nodes) if draws else None
        tree = BlockTree(places, topk, nodes)
        self.tree = tree if topk > 1 else None

    def propose(
        self, state: State, logits: Tensor, first: int = 0, draft_to_target: Tensor | None = None,
        log_confidence: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Propose trees below the last committed tokens.

        logits [B, first + P, Vd]: P places, after `first` rows that draft nothing.
        draft_to_target [Vd]: see `grow`.
        log_confidence [B, P] float32: logarithms of the chances that the drafts of a place are accepted if those before
            are (None: not predicted). The place's tokens share them by their probabilities.
        """
        if self.drawn is not None:
            return self._draw(state, logits[:, first:], draft_to_target)
        # The likeliest tokens of each place.
        root = state.tree_tokens[:, 0].clone()
        topk, temperature = (1, 1.0) if self.tree is None else (self.tree.topk, self.temperature)
        scores, tokens = best_tokens(logits.flatten(0, 1), topk, temperature)
        tokens = tokens if draft_to_target is None else draft_to_target[tokens]
        scores, tokens = (x.view(*logits.shape[:2], topk)[:, first:] for x in (scores, tokens))
        # Make a tree of them, or a chain.
        if self.tree is not None:
            scores = scores if log_confidence is None else scores + log_confidence[:, :, None]
            return propose_full(state, *self.tree(root, scores, tokens))
        scores = scores[:, :, 0] if log_confidence is None else log_confidence
        tokens = torch.cat([root[:, None], tokens[:, : self.nodes - 1, 0]], dim=1)
        propose_full(state, tokens, chain_parents(root, self.nodes), chain_scores(scores[:, : self.nodes - 1]))

    def _draw(self, state: State, logits: Tensor, draft_to_target: Tensor | None) -> None:
        """Propose a chain drawn from logits [B, P, Vd]."""

        def step(tokens, hidden, ancestors, depth, offset, wanted):
            return hidden, logits[:, offset + 1 : offset + 2]

        propose_grown(state, self.drawn, True, logits[:, 0], logits[:, 0, :1], step, draft_to_target)


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
        # Score all candidates; the column of zeros is for paths that have ended.
        scores = torch.cat([scores, torch.zeros_like(scores[:, :, :1])], dim=2)
        totals = scores[:, 0].index_select(1, self.ranks[0])
        for place in range(1, len(self.ranks)):  # in this order no sum is above its parent's
            totals = totals + scores[:, place].index_select(1, self.ranks[place])
        # Keep the best, and find their parents among them.
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

    At depth d there are ``(r_1 + 1) * ... * (r_d + 1)`` paths whose ranks are nowhere above (r_1, ..., r_d):
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

    logprobs [B, P, K, K] float32: entry [p, a, b] is for candidate b after candidate a of the place before; the
    first place has those after the root in row 0.
    For the other arguments and the results see `grow_lattice`. ValueError for more than 16 candidates, or fewer
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
