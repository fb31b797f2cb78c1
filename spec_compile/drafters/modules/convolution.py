"""DFlash 2's layers: short convolutions over the slots of a block, before and after attention and the MLP.

Attention inside a block fades over the layers, and a slot's draft depends most on the slot before it.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

from .layers import Layer, LayerKnobs


class BlockConvolution(nn.Module):
    """Two causal convolutions of few taps, whose coefficients are learned and also computed from each slot.

    size: channels.
    taps: slots that are read, the slot itself and those before it in its block.
    group: neighbouring channels that share the computed part of a coefficient.
    """

    def __init__(self, size: int, taps: int, group: int):
        super().__init__()
        self.taps, self.group = taps, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def around(self, x: Tensor, sublayer) -> Tensor:
        """x [B, T, H] -> convolve(sublayer(convolve(x))); the coefficients of both convolutions come from x."""
        computed = self.kernel_projection(x).unflatten(2, (2, self.taps, -1)).repeat_interleave(self.group, dim=4)
        before, after = (self.base_kernel + computed).unbind(dim=2)  # [B, T, taps, H]
        return self._convolve(sublayer(self._convolve(x, before)), after)

    def _convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        out = kernel[:, :, 0] * x
        for tap in range(1, self.taps):
            shifted = F.pad(x, (0, 0, tap, 0))[:, : x.shape[1]]  # zero before the block's first slot
            out = out + kernel[:, :, tap] * shifted
        return out


class ConvolvedLayer(Layer):
    """A pre-norm decoder layer with a `BlockConvolution` around each of its two parts."""

    def __init__(self, config: LlamaConfig, number: int, knobs: LayerKnobs):
        super().__init__(config, number, knobs)
        self.attention_conv, self.mlp_conv = (
            BlockConvolution(config.hidden_size, knobs.conv_taps, knobs.conv_group) for _ in range(2)
        )

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention_conv.around(self.input_layernorm(x), partial(self.self_attn, rope=rope))
        return x + self.mlp_conv.around(self.post_attention_layernorm(x), self.mlp)
