"""Appending a block to a cache."""

import torch
from torch import Tensor


def append(cache: Tensor, new: Tensor, lengths: Tensor) -> None:
    """Write new [B, Hkv, N, D] into cache [B, Hkv, S, D], in place, at the slots lengths[b] .. lengths[b] + N."""
    batch, heads, nodes, _ = new.shape
    slots = lengths[:, None] + torch.arange(nodes, device=new.device)
    row = torch.arange(batch, device=new.device)[:, None, None]
    head = torch.arange(heads, device=new.device)[None, :, None]
    cache.index_put_((row, head, slots[:, None, :]), new)
