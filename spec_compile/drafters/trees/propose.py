"""The trees that a draft grows become those that the next round verifies."""

import torch
from torch import Tensor

from ...kernels.top_logits import best_tokens
from ...runtime.state import State
from .block import BlockTree
from .draw import draw_chain
from .grow import grow
from .schedule import Schedule
from .static import StaticTree
from .step import Step


def propose_grown(
    state: State,
    schedule: Schedule | StaticTree,
    draws: bool,
    logits: Tensor,
    hidden: Tensor,
    step: Step,
    draft_to_target: Tensor | None = None,
) -> None:
    """Grow trees (see `grow`), or chains that are drawn, below the last committed tokens and propose them.

    logits [B, Vd], hidden [B, C]: the draft's output at the last committed slot. draft_to_target [Vd]: see `grow`.
    """
    root, probs, scores = state.tree_tokens[:, 0].clone(), None, None
    if draws:
        place = state.lengths + 1 - state.prompt_lengths
        tokens, parents, probs = draw_chain(
            schedule, root, logits, hidden, step, state.temperature, state.seed, state.numbers, place,
            state.is_eos.shape[1], draft_to_target,
        )  # fmt: skip
    else:
        tokens, parents, scores = grow(schedule, root, logits, hidden, step, draft_to_target)
    count = torch.full_like(root, tokens.shape[1])
    state.propose(tokens, parents, count, torch.zeros_like(count), probs, scores)


def propose_block(
    state: State,
    tree: BlockTree,
    logits: Tensor,
    first: int = 0,
    score_temperature: float = 1.0,
    draft_to_target: Tensor | None = None,
) -> None:
    """Propose the best trees over the likeliest tokens of each place below the last committed token.

    logits [B, first + P, Vd]: those of the P places of `tree`, after `first` rows that draft nothing.
    score_temperature: of their softmax. draft_to_target [Vd]: see `grow`.
    """
    root = state.tree_tokens[:, 0].clone()
    scores, tokens = best_tokens(logits.flatten(0, 1), tree.topk, score_temperature)
    tokens = tokens if draft_to_target is None else draft_to_target[tokens]
    scores, tokens = (x.view(*logits.shape[:2], tree.topk)[:, first:] for x in (scores, tokens))
    tokens, parents, scores = tree(root, scores, tokens)
    count = torch.full_like(root, tree.nodes)
    state.propose(tokens, parents, count, torch.zeros_like(count), None, scores)
