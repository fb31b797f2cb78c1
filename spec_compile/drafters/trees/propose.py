"""The trees that a draft grows become those that the next round verifies.

`propose_grown` grows them level by level. `BlockProposer` makes them of the drafts of a block, which one forward gives:
any token of a place may follow any token of the place before. `block_tree` scores each draft by its place,
`grow_levels` and `lattice_tree` also by those before it. On a GPU one kernel grows both kinds of trees.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ...kernels.launching import one_launch
from ...kernels.ops import gather_rows
from ...kernels.top_logits import MAX_K, top_logits
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


class BlockProposer:
    """Proposes chains or trees over the places of a block, whose logits a draft gives in one forward. The token of a
    place does not depend on the tokens of the others.

    places: drafts of a block.
    topk: tokens of each place that are looked at (1: chains).
    nodes: size of a tree, the root included; ValueError if there are not as many.
    draws: True if a chain's tokens are drawn when the target's are.
    temperature: divides the logits of the probabilities by which a tree's nodes are chosen.
    """

    def __init__(self, places: int, topk: int, nodes: int, draws: bool, temperature: float = 1.0):
        available = sum(topk**depth for depth in range(places + 1))
        if nodes > available:
            raise ValueError(
                f"num_draft_tokens must be at most {available}, the nodes of a tree of {topk} tokens at each of "
                f"{places} places and the root, not {nodes}: lower it, or raise topk or block_size"
            )
        self.topk, self.nodes, self.temperature = topk, nodes, 1.0 if topk == 1 else temperature
        self.drawn = Schedule(nodes - 1, 1, nodes) if draws else None

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
        scores, tokens = top_logits(logits.flatten(0, 1), self.topk, self.temperature)
        tokens = tokens if draft_to_target is None else draft_to_target[tokens]
        scores, tokens = (x.view(*logits.shape[:2], self.topk)[:, first:] for x in (scores, tokens))
        # Make a tree of them, or a chain.
        if self.topk > 1:
            scores = scores if log_confidence is None else scores + log_confidence[:, :, None]
            return propose_full(state, *block_tree(root, scores, tokens, self.nodes))
        scores = scores[:, :, 0] if log_confidence is None else log_confidence
        tokens = torch.cat([root[:, None], tokens[:, : self.nodes - 1, 0]], dim=1)
        propose_full(state, tokens, chain_parents(root, self.nodes), chain_scores(scores[:, : self.nodes - 1]))

    def _draw(self, state: State, logits: Tensor, draft_to_target: Tensor | None) -> None:
        """Propose a chain drawn from logits [B, P, Vd]."""

        def step(tokens, hidden, ancestors, depth, offset, wanted):
            return hidden, logits[:, offset + 1 : offset + 2]

        propose_grown(state, self.drawn, True, logits[:, 0], logits[:, 0, :1], step, draft_to_target)


def block_tree(root: Tensor, scores: Tensor, tokens: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """`grow_levels` for the places of a block that do not depend on each other.

    scores, tokens [B, P, K]: the log-probabilities of the candidates, and these.
    """
    if scores.is_cuda:  # one launch; a sort of each place takes many
        return lattice_tree(root, tokens, scores[:, :, None].expand(-1, -1, scores.shape[2], -1), nodes)

    def follow(place: int, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tokens[:, place, None], scores[:, place, None], state

    return grow_levels(root, tokens.shape[1], follow, scores.new_empty(root.shape[0], 0), nodes)


Follow = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""The candidates of a level: (level, from 0; tokens [B, W] int64 of the level before; what was carried over the tokens
before them [B, W, C]) -> tokens [B, 1 or W, K], different after each node, their log-probabilities [B, 1 or W, K], none
above 0, and what is carried over the nodes."""


def grow_levels(root: Tensor, levels: int, follow: Follow, state: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best trees of `nodes` nodes, the root included, over the candidates that `follow` gives after each node.

    root [B].
    state [B, C]: of the root.

    A node's score is the sum of log-probabilities on its path. Only the best nodes - 1 - p paths go on at level p: a
    node there needs its p ancestors in the tree, so that many better neighbours leave no room for it, nor for anything
    below it.

    Returns tokens, parents [B, nodes] int64 and scores [B, nodes] float32, from the best node down.
    """
    level, state = root[:, None], state[:, None]  # the nodes of the level before
    scores = torch.zeros_like(level, dtype=torch.float32)
    grown = [(level, torch.full_like(level, -1), scores)]
    first = 0  # number of the level's first node
    for number in range(min(levels, nodes - 1)):
        tokens, logprobs, state = follow(number, level, state)
        totals = scores[:, :, None] + logprobs
        kept = highest(totals.flatten(1), min(totals[0].numel(), nodes - 1 - number))
        parents = kept // totals.shape[2]
        above = first + parents
        first += level.shape[1]
        level, scores = (x.expand_as(totals).flatten(1).gather(1, kept) for x in (tokens, totals))
        state = gather_rows(state, parents)
        grown.append((level, above, scores))
    return best_nodes(*(torch.cat(parts, dim=1) for parts in zip(*grown)), nodes)


def lattice_tree(root: Tensor, tokens: Tensor, logprobs: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """`grow_levels` for a block of P places whose candidates' probabilities depend only on the token before.

    tokens [B, P, K] int64: the candidates, different at each place.
    logprobs [B, P, K, K] float32: entry [p, a, b] is for candidate b after candidate a of the place before; the
    first place has those after the root in row 0.
    For the other arguments and the results see `grow_levels`. ValueError for more than 16 candidates, or fewer
    nodes than asked for.
    """
    places, count = tokens.shape[1:]
    if count > MAX_K or nodes > sum(count**depth for depth in range(places + 1)):
        raise ValueError(
            f"nodes: {count} candidates at each of {places} places, at most {MAX_K} of them, are too few for {nodes}"
        )
    return grow_table(root, tokens, logprobs, nodes)


def _trees(root, tokens, logprobs, nodes):
    ids = root.new_empty(root.shape[0], nodes)
    return ids, torch.empty_like(ids), logprobs.new_empty(root.shape[0], nodes)


@one_launch("lattice_tree", _trees, "launch")
def grow_table(root: Tensor, tokens: Tensor, logprobs: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """`lattice_tree` of tables that have as many nodes."""

    def follow(place: int, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if place == 0:
            return tokens[:, :1], logprobs[:, 0, :1], state
        candidate = (tokens[:, place - 1, None] == previous[:, :, None]).int().argmax(dim=2)
        after = logprobs[:, place].gather(1, candidate[:, :, None].expand(-1, -1, tokens.shape[2]))
        return tokens[:, place, None], after, state

    return grow_levels(root, tokens.shape[1], follow, logprobs.new_empty(root.shape[0], 0), nodes)
