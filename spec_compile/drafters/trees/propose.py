"""The trees that a draft grows become those that the next round verifies."""

import torch
from torch import Tensor, nn

from ...kernels.top_logits import best_tokens
from ...runtime.state import State
from .block import BlockTree
from .draw import draw_chain
from .grow import grow
from .schedule import Schedule
from .static import StaticTree
from .step import Step, chain_parents, chain_scores, expected_drafts


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


def propose_block(
    state: State,
    tree: BlockTree,
    logits: Tensor,
    first: int = 0,
    score_temperature: float = 1.0,
    draft_to_target: Tensor | None = None,
    log_confidence: Tensor | None = None,
) -> None:
    """Propose the best trees over the likeliest tokens of each place below the last committed token.

    logits [B, first + P, Vd]: those of the P places of `tree`, after `first` rows that draft nothing.
    score_temperature: of their softmax.
    draft_to_target [Vd]: see `grow`.
    log_confidence [B, P] float32: logarithms of the chances that the drafts of a place are accepted if those before are
        (None: not predicted). The place's tokens share them by their probabilities.
    """
    root = state.tree_tokens[:, 0].clone()
    scores, tokens = best_tokens(logits.flatten(0, 1), tree.topk, score_temperature)
    tokens = tokens if draft_to_target is None else draft_to_target[tokens]
    scores, tokens = (x.view(*logits.shape[:2], tree.topk)[:, first:] for x in (scores, tokens))
    scores = scores if log_confidence is None else scores + log_confidence[:, :, None]
    propose_full(state, *tree(root, scores, tokens))


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
        self.tree = BlockTree(places, topk, nodes) if topk > 1 else None

    def propose(
        self, state: State, logits: Tensor, first: int = 0, draft_to_target: Tensor | None = None,
        log_confidence: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Propose trees below the last committed tokens. The arguments are those of `propose_block`."""
        if self.drawn is not None:
            return self._draw(state, logits[:, first:], draft_to_target)
        if self.tree is not None:
            how = self.tree, logits, first, self.temperature, draft_to_target, log_confidence
            return propose_block(state, *how)
        root = state.tree_tokens[:, 0].clone()
        scores, tokens = (x[:, first : first + self.nodes - 1] for x in likeliest(logits, draft_to_target))
        tokens = torch.cat([root[:, None], tokens], dim=1)
        scores = scores if log_confidence is None else log_confidence[:, : self.nodes - 1]
        propose_full(state, tokens, chain_parents(root, self.nodes), chain_scores(scores))

    def _draw(self, state: State, logits: Tensor, draft_to_target: Tensor | None) -> None:
        """Propose a chain drawn from logits [B, P, Vd]."""

        def step(tokens, hidden, ancestors, depth, offset, wanted):
            return hidden, logits[:, offset + 1 : offset + 2]

        propose_grown(state, self.drawn, True, logits[:, 0], logits[:, 0, :1], step, draft_to_target)


def likeliest(logits: Tensor, draft_to_target: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities and target's ids [B, T] of the likeliest tokens of logits [B, T, Vd]."""
    scores, tokens = best_tokens(logits.flatten(0, 1), 1, 1.0)
    tokens = tokens if draft_to_target is None else draft_to_target[tokens]
    return scores.view(logits.shape[:2]), tokens.view(logits.shape[:2])
