"""Rejection sampling: tests drawn drafts one by one so that tokens stay distributed as the target's.

It serves trees with several children of a node, for which block verification (`chain`) is not defined and which no
drafter of the package draws, and rows in lockstep (see `host.HostAcceptor`). Other chains are tested as blocks, which
accepts at least as many drafts.

A draft x drawn from q is accepted with probability min(1, p(x) / q(x)), where p is the target's distribution. After a
rejection the token is drawn from max(p - q, 0), normalised. In total the token is distributed as p (Leviathan et al.
2023, arXiv:2211.17192, section 2.3). A second draft, drawn without replacement, is tested in the same way with the
normalised residual as p, and with q without the first draft (Jeon et al. 2024, arXiv:2402.14160, section 3.2).
"""

import torch
from torch import Tensor

from .random_numbers import draw


def is_accepted(u: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """True if drafts are accepted: bool, with probability min(1, p / q).

    u: float64 in [0, 1). p, q: the probability of the draft's token in the target and in the draft. All broadcast.
    """
    return u * q < p  # guard: drawn-drafts


def residual(target: Tensor, draft: Tensor, rejected: Tensor) -> Tensor:
    """The weights of the token after a rejection: [..., V] float64, max(target - draft, 0), normalised.

    target, draft: [..., V] float64, both normalised. rejected: [..., 1] int64, the draft's token, which cannot be
    drawn again. If nothing is left, which only rounding can cause, it is the target.
    """
    difference = (target - draft).clamp(min=0).scatter(-1, rejected, 0)  # it is 0 already, but for rounding
    total = difference.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, difference / total, target)  # guard: residual


def accept_drawn(target: Tensor, draft: Tensor, children: list[int], u: Tensor) -> Tensor:
    """The token after one node of a tree, 0-dim int64: an accepted child's, or one from the residual.

    target: [V] float64, normalised. draft: [V] float64, the first child's distribution, normalised here.
    children: the tokens of the node's children in the order of drawing, without replacement.
    u: float64 in [0, 1), a number for each child and one more.
    """
    draft = draft / draft.sum()
    for token, number in zip(children, u):
        if is_accepted(number, target[token], draft[token]):
            return torch.tensor(token, device=target.device)
        rejected = torch.tensor([token], device=target.device)
        target = residual(target, draft, rejected)
        draft = draft.scatter(0, rejected, 0)
        draft = draft / draft.sum().clamp(min=torch.finfo(draft.dtype).tiny)
    return draw(target[None], u[-1].reshape(1))[0]
