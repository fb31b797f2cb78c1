"""Block verification of chains of drafts that were drawn, for all rows at once and inside a captured round.

The drafts of a chain are tested together (Sun et al. 2024, arXiv:2403.10444, algorithm 2). Let T_i and Q_i be the
distributions of the target and of the draft after i drafts, and x_i draft i of n:

    w_0 = 1,  w_i = min(1, w_(i-1) T_(i-1)(x_i) / Q_(i-1)(x_i))
    R_i = sum over all tokens of max(T_i - Q_i / w_i, 0)
    h_i = R_i / (R_i + 1 / w_i - 1) for i < n,  h_n = w_n

Draft i passes with probability h_i. The chain is accepted up to the last draft that passes, even if drafts before it
have not passed. The next token is drawn from T_n after the last draft, otherwise from max(T_i - Q_i / w_i, 0). In the
paper w_i is p_i, and w_i R_i is a sum.

Given x_1 .. x_i, at least i drafts are accepted with probability w_i. Tokens are therefore distributed as the target's,
and in expectation at least as many drafts are accepted as by a test of each token (`rejection`). With target (1/3, 2/3)
and draft (2/3, 1/3) at both places of a chain of two drafts, it accepts 11/9 drafts, and the other test 10/9.

A chain may end after draft i for any reason that depends on x_1 .. x_i only.
"""

import torch
from torch import Tensor

from ...tree import Accepted
from .random_numbers import counter, draw, uniform


def chain_numbers(seed: Tensor, row: Tensor, gained: Tensor, nodes: int) -> Tensor:
    """The random numbers [B, N] float64 for chains of N nodes: streams 0 .. N - 1 at the position of the root's child.

    seed, row: [B] int64, see `uniform`. gained: [B] int64, tokens that each row has gained before the root's child.

    The length that is accepted depends on the numbers of all drafts, also of rejected ones. The next round begins at a
    later position, so none of its numbers is one of these: after 5 tokens a chain of 3 nodes takes streams 0, 1, 2 of
    position 5. If it gains 2 tokens, the next chain takes those of position 7.
    """
    return uniform(seed[:, None], row[:, None], gained[:, None], counter(nodes, gained.device))


def accept_chain(target: Tensor, draft: Tensor, tokens: Tensor, real: Tensor, u: Tensor) -> Accepted:
    """Accept drawn chains by block verification.

    target: [B, N, V] float64, normalised; the target's distribution after each node. It is NaN if there is none, and
        the chain ends there.
    draft: [B, N, V] float; the distribution that each node's child was drawn from, normalised here.
    tokens: [B, N] int64; node i is draft i, and node 0 the root.
    real: [B, N] bool, the nodes in use, which are the first ones of each row.
    u: [B, N] float64 in [0, 1). Number i > 0 tests draft i, and number 0 draws the token after the accepted drafts.

    Returns the accepted nodes, with a token of -1 if there was nothing to draw from.
    """
    nodes, vocab = tokens.shape[1], target.shape[2]
    number = torch.arange(nodes, device=tokens.device)
    child = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1)  # the last node's is never read
    has_child = torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], dim=1) & target[:, :, 0].isfinite()
    has_child = has_child.to(torch.int64).cumprod(dim=1) > 0
    scale = draft.sum(dim=2, dtype=torch.float64)
    p, q = (weights.gather(2, child[:, :, None])[:, :, 0].double() for weights in (target, draft))
    w = _weights(p, q / scale)

    # Sums of one node at a time, because all [B, N, V] differences together would take as much memory as the target's.
    # The root always passes, and the last node has no child.
    sums = [torch.zeros_like(w[:, 0])] * nodes
    for i in range(1, nodes - 1):
        sums[i] = _rest(target[:, i], draft[:, i], scale[:, i], w[:, i]).sum(dim=1)
    r = torch.stack(sums, dim=1)
    passes = torch.where(has_child, u * (r + (1 - w) / w) < r, u < w)  # guard: drawn-chains
    is_draft = torch.cat([torch.zeros_like(has_child[:, :1]), has_child[:, :-1]], dim=1)
    last = torch.where(passes & is_draft, number, 0).amax(dim=1, keepdim=True)

    def at_last(values: Tensor) -> Tensor:
        """values [B, N, ...] of the last accepted nodes: [B, ...]."""
        return values.gather(1, last.view(-1, *[1] * (values.dim() - 1)).expand(-1, 1, *values.shape[2:]))[:, 0]

    # If nothing is left after a rejection, which only rounding can cause, the token is drawn from the target.
    after = at_last(target)
    rest = _rest(after, *map(at_last, (draft, scale, w)))
    is_rejected = at_last(has_child) & (rest.sum(dim=1) > 0)
    token = draw(torch.where(is_rejected[:, None], rest, after), u[:, 0]).clamp(max=vocab - 1)
    token = torch.where(after[:, 0].isfinite(), token, -1)
    follows = torch.where(number < last, child, token[:, None])
    return Accepted(number.expand_as(tokens).contiguous(), follows, last[:, 0] + 1)


def _weights(target: Tensor, draft: Tensor) -> Tensor:
    """w [B, N] float64 (see above) of the nodes of chains.

    target, draft: [B, N] float64, the probability of each node's child. With target [0.2, 0.9, ...] and draft
    [0.4, 0.3, ...], w is [1, 0.5, 1, ...], because 0.5 * 0.9 / 0.3 is above 1. A draft of probability 0, which is never
    drawn, gets 1 if the target can give it, and 0 if not.
    """
    w = [torch.ones_like(target[:, 0])]
    for p, q in zip(target.unbind(dim=1)[:-1], draft.unbind(dim=1)[:-1]):
        scaled = w[-1] * p
        w.append(torch.where(scaled < q, scaled / q, (scaled > 0).to(scaled.dtype)))
    return torch.stack(w, dim=1)


def _rest(target: Tensor, draft: Tensor, scale: Tensor, w: Tensor) -> Tensor:
    """max(T - Q / w, 0) [B, V] float64 of one node of each chain, where Q is draft / scale.

    target: [B, V] float64. draft: [B, V] float. scale, w: [B] float64. No product is added to anything here, nor in the
    test of `accept_chain`, so that no compiler rounds them in another way than plain PyTorch does.
    """
    return (target - draft / scale[:, None] / w[:, None]).clamp(min=0)
