"""Low-rank additions to linear layers (LoRA, arXiv 2106.09685), of which each row of a batch chooses one.

As in S-LoRA (arXiv 2311.03285) the batch shares the product with the layer's own weight, and each row adds the product
with its own two small matrices.
"""

import torch
from torch import Tensor, nn


class LowRank(nn.Module):
    """The stacked matrices of a linear layer, at fixed addresses. Entry 0 adds nothing.

    Ranks below `rank` are padded with zeros, so one product serves adapters of different ranks.
    """

    down: Tensor
    up: Tensor
    scale: Tensor

    def __init__(self, entries: int, rank: int, weight: Tensor, dtype: torch.dtype):
        """entries: adapters, entry 0 included. weight: of the layer, [out, in]. dtype: of the low-rank products."""
        super().__init__()
        outputs, inputs = weight.shape
        like = {"dtype": dtype, "device": weight.device}
        self.register_buffer("down", torch.zeros(entries, rank, inputs, **like), persistent=False)
        self.register_buffer("up", torch.zeros(entries, outputs, rank, **like), persistent=False)
        self.register_buffer("scale", torch.zeros(entries, **like), persistent=False)

    def put(self, entry: int, down: Tensor | None, up: Tensor | None, scale: float) -> None:
        """Copy the matrices [r, in] and [out, r] of an adapter into an entry; None: it adds nothing to this layer."""
        self.down[entry].zero_()
        self.up[entry].zero_()
        self.scale[entry].fill_(scale)
        if down is not None and up is not None:
            self.down[entry, : len(down)].copy_(down)
            self.up[entry, :, : len(down)].copy_(up)


def add_low_rank(y: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: Tensor, rows: Tensor) -> Tensor:
    """``y[b] + scale[i] (x[b] down[i]^T) up[i]^T`` with ``i = rows[b]``; rows = [2, 0] give row 0 entry 2, row 1 none.

    y: [B, N, out], the layer's own result. x: [B, N, in]. down, up, scale: of a `LowRank`, in whose dtype the products
    are computed, as peft does. rows: [B] int64. Returns [B, N, out] in the dtype of `y`.
    """
    inner = torch.bmm(x.to(down.dtype), down[rows].transpose(1, 2))
    added = torch.bmm(inner, up[rows].transpose(1, 2)) * scale[rows][:, None, None]
    return y + added.to(y.dtype)
