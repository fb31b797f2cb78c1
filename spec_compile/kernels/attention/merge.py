"""Attention to a union of keys, from the results and log-sum-exps of attention to its parts."""

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two disjoint sets of keys (online softmax; Milakov & Gimelshein 2018, eq. 4):

        total = log(e^lse + e^other_lse)        result = e^(lse - total) * out + e^(other_lse - total) * other

    out, other: [..., D]; weighted means of values.
    lse, other_lse: [...]; natural log-sum-exps of scores; minus infinity where a set has no visible key, but not both.
    -> result [..., D] of out's dtype, total [...].
    """
    total = torch.logaddexp(lse, other_lse)
    shares = (lse - total).exp(), (other_lse - total).exp()
    return (out * shares[0][..., None] + other * shares[1][..., None]).to(out.dtype), total


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention with sinks (gpt-oss) from attention without: `merge` with a key of score sinks[h] and a value of zeros.

    out [..., H, D], lse [..., H], sinks [H] -> [..., H, D].
    """
    return (out * torch.sigmoid(lse - sinks.to(lse.dtype))[..., None]).to(out.dtype)
