"""`draw_chain`: a chain whose tokens are drawn at random from the draft."""

import math

import torch
from torch import Tensor

from ...compat import argmax
from ...runtime.accept.random_numbers import draw, uniform
from ...tree import MAX_NODES
from .schedule import Schedule
from .step import Step, chain_parents, feed

DRAFT_STREAM = MAX_NODES
"""The stream of `uniform` that draws the first draft of a chain; later drafts take the streams after it. Verification
takes the streams below it, at the same position."""


def draw_chain(
    schedule: Schedule,
    root: Tensor,
    logits: Tensor,
    hidden: Tensor,
    step: Step,
    temperature: Tensor,
    seed: int | Tensor,
    sequence: Tensor,
    place: Tensor,
    vocab_size: int,
    draft_to_target: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A chain whose tokens are drawn from the draft: tokens, parents [B, N] int64, probs [B, N, vocab_size] float32.

    temperature [B]: of the draft's softmax; at 0 the likeliest token has all the probability.
    seed, sequence, place [B]: of `uniform`; place counts the tokens of a row between its prompt and the root's child.
    vocab_size: the target's.
    The other arguments are those of `grow`.

    Node i's child was drawn from row i of probs; the last row is zeros. Verified tokens are distributed as the target's
    only if the length to which the chain is cut before verification does not depend on the tokens cut off. No number is
    taken twice, because every chain of a row has another place (see `accept.chain.chain_numbers`). ValueError unless
    the schedule is a chain.
    """
    if schedule.topk != 1:
        raise ValueError(f"topk must be 1 (a chain) for drafts that are drawn, not {schedule.topk}")
    if draft_to_target is None and logits.shape[1] != vocab_size:
        raise ValueError(
            f"logits must have vocab_size = {vocab_size} columns without draft_to_target, not {logits.shape[1]}"
        )
    tokens, probs = [root[:, None]], []
    for level in range(1, schedule.nodes):
        if level > 1:
            hidden, logits = feed(step, tokens[-1], hidden, level - 1)
        distribution = _distribution(logits, temperature)
        token = draw(distribution.double(), uniform(seed, sequence, place, DRAFT_STREAM + level - 1))[:, None]
        if draft_to_target is not None:
            everywhere = distribution.new_zeros(distribution.shape[0], vocab_size)
            distribution = everywhere.index_copy(1, draft_to_target, distribution)
            token = draft_to_target[token]
        tokens.append(token)
        probs.append(distribution)
    probs.append(torch.zeros_like(probs[0]))
    return torch.cat(tokens, dim=1), chain_parents(root, len(tokens)), torch.stack(probs, dim=1)


def _distribution(logits: Tensor, temperature: Tensor) -> Tensor:
    """softmax(logits [B, Vd] / temperature [B]) in float32; at 0, or if that is not finite, 1 for the likeliest."""
    logits = logits.float().nan_to_num(-math.inf, torch.finfo(torch.float32).max, -math.inf)
    likeliest = torch.arange(logits.shape[1], device=logits.device) == argmax(logits)[:, None]
    peak = logits.amax(dim=1, keepdim=True)
    weights = ((logits - peak) / temperature[:, None]).softmax(dim=1)
    drawn = (temperature[:, None] > 0) & weights.isfinite().all(dim=1, keepdim=True)
    return torch.where(drawn, weights, likeliest.to(weights.dtype))
