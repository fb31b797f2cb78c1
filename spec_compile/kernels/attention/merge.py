"""Attention in parts: softmax over a union of keys from softmaxes over its parts."""

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from that over each (online softmax; Milakov & Gimelshein 2018, eq. 4).

    out, other [..., D]: weighted means of values; lse, other_lse [...]: natural logarithms of the sums of exponentials
    of scores, minus infinity where a part sees nothing (not both). -> out [..., D] of the first's dtype, lse [...].
    """
    total = torch.logaddexp(lse, other_lse)
    shares = (lse - total).exp(), (other_lse - total).exp()
    return (out * shares[0][..., None] + other * shares[1][..., None]).to(out.dtype), total


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention that also gives probability to sinks without a value (gpt-oss), from that without: `merge` with zeros.

    out [..., H, D], lse [..., H], sinks [H] -> [..., H, D].
    """
    return (out * torch.sigmoid(lse - sinks.to(lse.dtype))[..., None]).to(out.dtype)
