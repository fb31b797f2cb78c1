"""Accept a chain of drafts that were drawn at random: rejection sampling of all rows at once, for a captured round."""

import torch
from torch import Tensor

from ...tree import Accepted
from .random import draw, uniform


def counter(count: int, device: torch.device) -> Tensor:
    """0 .. count - 1, to be given to `uniform` in a compiled graph.

    Of a plain arange Inductor would make an index, whose product with the constants of `uniform` overflows.
    """
    return torch.arange(count, device=device) | 0


def chain_numbers(seed: int | Tensor, place: Tensor, nodes: int) -> Tensor:
    """The numbers [B, N, 2] that test the drafts of a chain, those that `walk.Walk` would take.

    place [B]: how many tokens each row has gained before the root's child.
    """
    row = counter(place.shape[0], place.device)[:, None, None]
    level = torch.arange(nodes, device=place.device)[:, None]
    return uniform(seed, row, place[:, None, None] + level, counter(2, place.device))


def accept_chain(target: Tensor, draft: Tensor, tokens: Tensor, real: Tensor, u: Tensor) -> Accepted:
    """What `sampling.accept_drawn` gives down a chain, node by node (Leviathan et al. 2023, arXiv:2211.17192, 2.3).

    target [B, N, V] float64: what the token after each node should be drawn from; draft [B, N, V]: what it was drawn
    from, normalised here; tokens [B, N]; real [B, N] bool: nodes in use, the first ones of each row; u [B, N, 2]: see
    `chain_numbers`. The child of node i is accepted while ``u[i, 0] * q < p``; at the first rejection the token comes
    from the normalised positive part of p - q with ``u[i, 1]``, after the last child from p with ``u[i, 0]``. A token
    is -1 where there was nothing to draw from.
    """
    nodes, vocab = tokens.shape[1], target.shape[2]
    number = torch.arange(nodes, device=tokens.device)
    child = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)  # of the last node: anything
    exists = torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], dim=1)
    p, q = (x.gather(2, child[:, :, None])[:, :, 0].double() for x in (target, draft))
    passes = exists & (u[:, :, 0] * (q / draft.sum(dim=2, dtype=torch.float64)) < p)
    accepted = passes.to(torch.int64).cumprod(dim=1)
    last = accepted.sum(dim=1, keepdim=True)  # the node after which a token is drawn

    def at_last(x: Tensor) -> Tensor:
        return x.gather(1, last.view(-1, *[1] * (x.dim() - 1)).expand(-1, 1, *x.shape[2:]))[:, 0]

    p, q, numbers, rejected = at_last(target), at_last(draft).double(), at_last(u), at_last(exists)[:, None]
    q = q / q.sum(dim=1, keepdim=True)
    residual = (p - q).clamp(min=0).scatter(1, at_last(child)[:, None], 0)
    total = residual.sum(dim=1, keepdim=True)
    weights = torch.where(rejected & (total > 0), residual / total, p)
    token = draw(weights, torch.where(rejected[:, 0], numbers[:, 1], numbers[:, 0])).clamp(max=vocab - 1)
    token = torch.where(p.sum(dim=1).isfinite(), token, -1)
    follows = torch.where(number < last, child, token[:, None])
    return Accepted(number.expand_as(tokens).contiguous(), follows, last[:, 0] + 1)
