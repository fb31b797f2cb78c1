"""Sampling: random numbers by counter, the draw, and the test of drafts that were themselves drawn."""

import torch
from torch import Tensor

NO_PROBABILITIES = (
    "cannot sample: the scores of the next token contain NaN or +inf, or every token is -inf; look at the logits "
    "processors, or pass remove_invalid_values=True"
)

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def uniform(seed: int | Tensor, sequence: Tensor, position: Tensor, stream: int | Tensor = 0) -> Tensor:
    """Numbers in [0, 1) that depend on nothing but (seed, sequence, position, stream); float64.

    sequence, position, stream: int64 that broadcast to the shape of the result: the row of the batch, how many tokens
    it had generated, and which of the numbers at that place. The counters go one after the other through the finaliser
    of SplitMix64 (Steele, Lea and Flood 2014, section 3), in arithmetic modulo 2**64.
    """
    bits = _mix(seed + _GOLDEN if isinstance(seed, Tensor) else torch.full_like(sequence, seed) + _GOLDEN)
    for counter in (sequence, position, stream):
        counter = counter if isinstance(counter, Tensor) else torch.full_like(sequence, counter)
        bits = _mix(bits + (counter + 1) * _GOLDEN)
    return _shift(bits, 12).to(torch.float64) * 2.0**-52  # 52 bits: below 1 even times any total


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def probabilities(scores: Tensor) -> Tensor:
    """softmax in float64 of scores [R, V]; RuntimeError where there is none (NaN, or every token excluded)."""
    weights = scores.double().softmax(dim=-1)
    if not weights.isfinite().all():
        raise RuntimeError(NO_PROBABILITIES)
    return weights


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """The token [R] at which the running sum of weights [R, V] first exceeds u [R] times their total.

    A token of weight zero is never drawn.
    """
    sums = weights.cumsum(dim=1)
    return torch.searchsorted(sums, (u * sums[:, -1])[:, None], right=True)[:, 0]


def accept_drawn(target: Tensor, draft: Tensor, children: list[int], u: Tensor) -> Tensor:
    """The next token after a node whose children were drawn without replacement: a child's, or one from the residual.

    target, draft [V] float64: what the tokens should be, and the first child was, drawn from. children: their tokens,
    in the order drawn. u: a number in [0, 1) for each child and one more. -> 0-dim int64.

    Each child is accepted with probability min(1, p / q); if it is not, the target becomes the normalised positive
    part of p - q, and its token leaves q (recursive rejection sampling without replacement: Jeon et al. 2024,
    arXiv:2402.14160, section 3.2; for one child, Leviathan et al. 2023, arXiv:2211.17192, section 2.3).
    """
    target, draft = target.clone(), draft / draft.sum()
    for token, number in zip(children, u):
        if number * draft[token] < target[token]:
            return torch.tensor(token, device=target.device)
        residual = (target - draft).clamp(min=0)
        residual[token] = 0  # it is already, but for rounding
        if residual.sum() > 0:
            target = residual / residual.sum()
        draft[token] = 0
        draft = draft / draft.sum().clamp(min=torch.finfo(draft.dtype).tiny)
    return draw(target[None], u[-1].reshape(1))[0]
