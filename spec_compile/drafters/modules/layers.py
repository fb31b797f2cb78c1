"""Decoder layers of drafts, with attention that a captured graph can rewrite.

Shapes: B rows, T slots, H the draft's hidden size.
"""

import copy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from ...kernels import ops
from .latent import LatentAttention, LatentSizes


@dataclass(frozen=True)
class LayerKnobs:
    """The differences of draft layers besides the sizes, activation and RoPE of their config.

    num_layers: number of layers.
    qkv_bias, output_bias: biases of the attention's projections.
    qk_norm: an RMSNorm over each query and key head (Qwen3).
    windows: the sliding window of each layer, the token itself included (None: full attention).
    conv_taps, conv_group: of `BlockConvolution` (0: layers have none).
    latent: sizes of multi-head latent attention (None: attention has grouped queries).
    """

    num_layers: int = 1
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    conv_taps: int = 0
    conv_group: int = 1
    latent: LatentSizes | None = None

    def window(self, number: int) -> int | None:
        """The sliding window of layer `number`."""
        return self.windows[number] if self.windows else None


ONE_LAYER = LayerKnobs()


class Attention(nn.Module):
    """Grouped-query attention of a draft layer. x [B, T, inputs] -> [B, T, H]."""

    def __init__(self, config: LlamaConfig, number: int, inputs: int, knobs: LayerKnobs):
        super().__init__()
        self.number, self.head_dim = number, config.head_dim
        self.window = knobs.window(number)
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=knobs.qkv_bias)
        self.k_proj = nn.Linear(inputs, keys, bias=knobs.qkv_bias)
        self.v_proj = nn.Linear(inputs, keys, bias=knobs.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=knobs.output_bias)
        self.q_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if knobs.qk_norm else nn.Identity()
        self.k_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if knobs.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (project(x).unflatten(2, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (heads.transpose(1, 2) for heads in (self.q_norm(q), self.k_norm(k), v))
        q, k = turn(q, k, rope)
        out = ops.attention(q, k, v, None, self.head_dim**-0.5, self.window, None, self.number)
        return self.o_proj(out.flatten(2))


def make_attention(config: LlamaConfig, number: int, inputs: int, knobs: LayerKnobs) -> Attention | LatentAttention:
    """The attention of layer `number`, which reads `inputs` numbers a slot."""
    if knobs.latent is None:
        return Attention(config, number, inputs, knobs)
    return LatentAttention(config, number, inputs, knobs.latent, knobs.window(number))


class Layer(nn.Module):
    """A pre-norm decoder layer; without `input_norm`, attention takes the residual stream as it is.

    inputs: width of attention's input (None: H).
    """

    def __init__(
        self, config: LlamaConfig, number: int, knobs: LayerKnobs, inputs: int | None = None, input_norm: bool = True
    ):
        super().__init__()
        size = config.hidden_size
        self.input_layernorm = LlamaRMSNorm(size, config.rms_norm_eps) if input_norm else nn.Identity()
        self.self_attn = make_attention(config, number, inputs or size, knobs)
        self.post_attention_layernorm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        return self._attend(x, self.input_layernorm(x), rope)

    def _attend(self, residual: Tensor, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = residual + self.self_attn(x, rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class JoinedLayer(Layer):
    """The first layer of EAGLE-3: attention reads [norm(embedding); norm(state)], the residual stream is the state.

    norm_before_residual: the residual stream starts from the normed state instead.
    """

    def __init__(self, config: LlamaConfig, number: int, knobs: LayerKnobs, norm_before_residual: bool):
        super().__init__(config, number, knobs, inputs=2 * config.hidden_size)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedding: Tensor, state: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        normed = self.hidden_norm(state)
        x = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        return self._attend(normed if self.norm_before_residual else state, x, rope)


class BlockConvolution(nn.Module):
    """DFlash 2's two causal convolutions of few taps, whose coefficients are learned and also computed from each slot.

    Attention inside a block fades over the layers, and a slot's draft depends most on the slot before it.

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


def turn(q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Queries and keys [B, heads, T, D] with RoPE on the first R numbers of each head. rope: two of [B, T, R]."""
    size, rest = rope[0].shape[-1], q.shape[-1] - rope[0].shape[-1]
    if not rest:
        return apply_rotary_pos_emb(q, k, *rope)
    (q, q_rest), (k, k_rest) = (heads.split([size, rest], dim=-1) for heads in (q, k))
    q, k = apply_rotary_pos_emb(q, k, *rope)
    return torch.cat([q, q_rest], dim=-1), torch.cat([k, k_rest], dim=-1)


def rotary(config: LlamaConfig, device: torch.device) -> LlamaRotaryEmbedding:
    """The rotary embedding of a draft's own config: (x, positions [B, T]) -> cos, sin [B, T, R].

    R is the head size, or the part of it that ``partial_rotary_factor`` says.
    """
    rope = dict(config.rope_parameters)
    part = rope.pop("partial_rotary_factor", None) or 1.0
    if part != 1.0:
        config = copy.deepcopy(config)
        config.head_dim, config.rope_parameters = int(config.head_dim * part), rope
    with torch.device(device):
        return LlamaRotaryEmbedding(config)
