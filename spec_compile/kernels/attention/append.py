"""Appending a block to a cache."""

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as a cache of `dtype` holds it: in float8_e4m3fn nothing is larger than `LARGEST`, and the scale is 1."""
    return (x.clamp(-LARGEST, LARGEST) if dtype == torch.float8_e4m3fn else x).to(dtype)


def append(cache: Tensor, new: Tensor, lengths: Tensor) -> None:
    """Write new [B, Hkv, N, D] into cache [B, Hkv, S, D], in place, at the slots lengths[b] .. lengths[b] + N."""
    batch, heads, nodes, _ = new.shape
    slots = lengths[:, None] + torch.arange(nodes, device=new.device)
    row = torch.arange(batch, device=new.device)[:, None, None]
    head = torch.arange(heads, device=new.device)[None, :, None]
    cache.index_put_((row, head, slots[:, None, :]), new)
