"""Random numbers by counter, and the tokens drawn with them."""

import torch
from torch import Tensor

from ...errors import RequestError

NO_PROBABILITIES = (
    "cannot sample: the scores of the next token contain NaN or +inf, or every token is -inf; look at the logits "
    "processors, or pass remove_invalid_values=True"
)

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def uniform(seed: int | Tensor, row: Tensor, position: Tensor, stream: int | Tensor = 0) -> Tensor:
    """Random numbers in [0, 1), float64, that depend only on (seed, row, position, stream).

    All arguments are int64 and broadcast to the shape of the result; `seed` and `stream` may be ints.
    row: of the batch. position: tokens that the row has generated. stream: the number's index at that position; 0
        draws a token, others test drafts, and those from `drafters.trees.grow.DRAFT_STREAM` on draw drafts.

    The arguments go in turn through the finaliser of SplitMix64 (Steele, Lea and Flood 2014, section 3), modulo 2**64.
    """
    bits = mix(seed + _GOLDEN if isinstance(seed, Tensor) else torch.full_like(row, seed) + _GOLDEN)
    for counter in (row, position, stream):  # guard: random-counters
        counter = counter if isinstance(counter, Tensor) else torch.full_like(row, counter)
        bits = mix(bits + (counter + 1) * _GOLDEN)
    return _shift(bits, 12).to(torch.float64) * 2.0**-52  # 52 bits: below 1 even times any total


def counter(count: int, device: torch.device) -> Tensor:
    """0 .. count - 1 as int64 [count] for `uniform` in a compiled graph. Inductor would turn a plain arange into an
    index, whose product with the constants of `uniform` overflows."""
    return torch.arange(count, device=device) | 0


def mix(bits: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (see `uniform`) of int64."""
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Logical shift to the right of int64."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def probabilities(scores: Tensor, raw: Tensor) -> Tensor:
    """The softmax of scores [R, V] in float64; `no_probabilities` if there is none (NaN, or every token excluded).

    raw: [R, V], the scores before the processors.
    """
    weights = scores.double().softmax(dim=-1)
    if not weights.isfinite().all():
        raise no_probabilities(raw)
    return weights


def no_probabilities(raw: Tensor) -> RuntimeError:
    """The error that no token can be drawn: a RequestError if logits processors have made it so.

    raw: [R, V], the scores before the processors.
    """
    is_of_model = not raw.amax(dim=-1).isfinite().all()
    return RuntimeError(NO_PROBABILITIES) if is_of_model else RequestError(NO_PROBABILITIES)


def draw(weights: Tensor, u: Tensor) -> Tensor:
    """The token [R] int64 at which the running sum of `weights` first exceeds `u` times their total.

    weights: [R, V] float64, not negative; weight 0 is never drawn. u: [R] float64 in [0, 1).
    Weights [0, 2, 0, 6] have the sums 0, 2, 2, 8: u < 0.25 draws token 1, any other token 3.
    """
    sums = weights.cumsum(dim=1)
    return torch.searchsorted(sums, (u * sums[:, -1])[:, None], right=True)[:, 0]  # guard: excluded-tokens
