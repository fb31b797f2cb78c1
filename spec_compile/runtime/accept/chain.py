"""Rejection sampling down chains of drafts that were drawn, for all rows at once and inside a captured round."""

import torch
from torch import Tensor

from ...tree import Accepted
from .random_numbers import counter, draw, uniform
from .rejection import is_accepted, residual


def chain_numbers(seed: Tensor, row: Tensor, gained: Tensor, nodes: int) -> Tensor:
    """The random numbers [B, N, 2] float64 for chains of N nodes, those that `host.HostAcceptor` takes.

    seed, row: [B] int64, see `uniform`. gained: [B] int64, tokens that each row has gained before the root's child.
    """
    seed, row, gained = (x[:, None, None] for x in (seed, row, gained))
    level = torch.arange(nodes, device=gained.device)[:, None]
    return uniform(seed, row, gained + level, counter(2, gained.device))


def accept_chain(target: Tensor, draft: Tensor, tokens: Tensor, real: Tensor, u: Tensor) -> Accepted:
    """The tokens that `rejection.accept_drawn` gives down a chain, for all rows at once.

    target: [B, N, V] float64, normalised; the target's distribution after each node.
    draft: [B, N, V] float; the distribution that each node's child was drawn from, normalised here.
    tokens: [B, N] int64. real: [B, N] bool, the nodes in use, which are the first ones of each row.
    u: [B, N, 2] float64 in [0, 1). The first number tests the node's child, and the second draws the token if the
        child is rejected. After the last child the first number draws.

    Returns the accepted nodes, with a token of -1 where there was nothing to draw from.
    """
    nodes, vocab = tokens.shape[1], target.shape[2]
    number = torch.arange(nodes, device=tokens.device)
    child = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)  # that of the last node is never read
    has_child = torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], dim=1)

    # Test every child, and count those before the first rejection.
    p, q = (weights.gather(2, child[:, :, None])[:, :, 0].double() for weights in (target, draft))
    passes = has_child & is_accepted(u[:, :, 0], p, q / draft.sum(dim=2, dtype=torch.float64))
    last = passes.to(torch.int64).cumprod(dim=1).sum(dim=1, keepdim=True)  # the node after which a token is drawn

    def at_last(values: Tensor) -> Tensor:
        """values [B, N, ...] of the last accepted nodes: [B, ...]."""
        return values.gather(1, last.view(-1, *[1] * (values.dim() - 1)).expand(-1, 1, *values.shape[2:]))[:, 0]

    # Draw the token after the last accepted node, from the residual if its child was rejected.
    p, q, numbers, is_rejected = at_last(target), at_last(draft).double(), at_last(u), at_last(has_child)
    q = q / q.sum(dim=1, keepdim=True)
    weights = torch.where(is_rejected[:, None], residual(p, q, at_last(child)[:, None]), p)
    token = draw(weights, torch.where(is_rejected, numbers[:, 1], numbers[:, 0])).clamp(max=vocab - 1)
    token = torch.where(p.sum(dim=1).isfinite(), token, -1)
    follows = torch.where(number < last, child, token[:, None])
    return Accepted(number.expand_as(tokens).contiguous(), follows, last[:, 0] + 1)
