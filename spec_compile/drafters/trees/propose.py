"""The trees that a draft grows become those that the next round verifies."""

import torch
from torch import Tensor, nn

from ...kernels.top_logits import best_tokens
from ...runtime.state import State
from .block import BlockTree
from .grow import StaticTree, Step, chain_parents, chain_scores, draw_chain, expected_drafts, grow
from .schedule import Schedule


def propose_full(
    state: State, tokens: Tensor, parents: Tensor, scores: Tensor | None = None, probs: Tensor | None = None
) -> None:
    """Propose trees all of whose nodes are in use. The arguments are those of `State.propose`.

    The hint is the number of drafts that `scores` expect to be accepted. Without scores, as for drawn drafts, it is 0:
    the number of verified nodes may depend on the hint, and a drawn token that decides whether it is verified is no
    longer distributed as the draft says.
    """
    count = torch.full_like(tokens[:, 0], tokens.shape[1])
    hint = torch.zeros_like(count) if scores is None else expected_drafts(scores)
    state.propose(tokens, parents, count, hint, probs, scores)


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
    nodes: of a tree, the root included; ValueError if there are not as many.
    draws: True if a chain's tokens are drawn when the target's are.
    temperature: of the probabilities by which a tree's nodes are chosen.

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

        logits [B, first + P, Vd]: those of P places, after `first` rows that draft nothing.
        draft_to_target [Vd]: see `grow`.
        log_confidence [B, P] float32: logarithms of the chances that the drafts of a place are accepted if those before
            are (None: not predicted). The place's tokens share them by their probabilities.
        """
        if self.drawn is not None:
            return self._draw(state, logits[:, first:], draft_to_target)
        root = state.tree_tokens[:, 0].clone()
        topk, temperature = (1, 1.0) if self.tree is None else (self.tree.topk, self.temperature)
        scores, tokens = best_tokens(logits.flatten(0, 1), topk, temperature)
        tokens = tokens if draft_to_target is None else draft_to_target[tokens]
        scores, tokens = (x.view(*logits.shape[:2], topk)[:, first:] for x in (scores, tokens))
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
