"""Decoder layers of drafts, with attention that a captured graph can rewrite.

Attention has grouped queries, or is multi-head latent attention (MLA; DeepSeek-V2, arXiv:2405.04434, section 2.1). Keys
and values of all heads come from one short row a slot, and all heads share one turned part of the key:
c = norm(W_c x), [k_h; v_h] = W_h c, key_h = [k_h; RoPE(W_r x)]. The cache holds whole keys and values of each head.

Shapes: B rows, T slots, H the draft's hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.glm4_moe import modeling_glm4_moe as of_parts
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from ...kernels import ops


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of MLA, as configs of DeepSeek name them.

    q_lora_rank: width of the row that queries come from (None: they come from x).
    kv_lora_rank: width of c.
    qk_nope_head_dim, qk_rope_head_dim: numbers of a query or key without RoPE, and with it.
    v_head_dim: numbers of a value.
    scale: factor of the scores; YaRN changes it.
    pairs: RoPE turns neighbours (2i, 2i + 1), else numbers half a part from each other.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    scale: float
    pairs: bool = True


class LatentAttention(nn.Module):
    """MLA of a draft layer. x [B, T, inputs] -> [B, T, H].

    Source: SpecForge's ``deepseek_eagle3.py``, vLLM's ``deepseek_eagle3.py``. The norms have the config's epsilon
    there, transformers' layers have 1e-6.
    """

    def __init__(self, config: LlamaConfig, number: int, inputs: int, knobs: "LayerKnobs"):
        super().__init__()
        self.sizes = sizes = knobs.latent
        self.number, self.window, self.heads = number, knobs.window(number), config.num_attention_heads
        self.query_parts = [sizes.qk_nope_head_dim, sizes.qk_rope_head_dim]
        queries = self.heads * sum(self.query_parts)
        if sizes.q_lora_rank is None:
            self.q_proj = nn.Linear(inputs, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(inputs, sizes.q_lora_rank, bias=False)
            self.q_a_layernorm = LlamaRMSNorm(sizes.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = nn.Linear(sizes.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(inputs, sizes.kv_lora_rank + sizes.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = LlamaRMSNorm(sizes.kv_lora_rank, config.rms_norm_eps)
        expanded = self.heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
        self.kv_b_proj = nn.Linear(sizes.kv_lora_rank, expanded, bias=False)
        self.o_proj = nn.Linear(self.heads * sizes.v_head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        # Queries, each of a part without RoPE and a part with it.
        sizes = self.sizes
        whole = self.q_proj(x) if sizes.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q, q_turned = self._by_head(whole).split(self.query_parts, dim=-1)
        # Keys and values of all heads from one row, and the turned part that all heads share.
        latent, k_turned = self.kv_a_proj_with_mqa(x).split([sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1)
        expanded = self._by_head(self.kv_b_proj(self.kv_a_layernorm(latent)))
        k, v = expanded.split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=-1)
        # RoPE, and the whole keys of each head.
        rotate = apply_rotary_pos_emb_interleave if sizes.pairs else apply_rotary_pos_emb
        q_turned, k_turned = rotate(q_turned, k_turned[:, None], *rope)
        q = torch.cat([q, q_turned], dim=-1)
        k = torch.cat([k, k_turned.expand(-1, self.heads, -1, -1)], dim=-1)
        out = ops.attention(q, k, v, None, sizes.scale, self.window, None, self.number)
        return self.o_proj(out.flatten(2))

    def _by_head(self, x: Tensor) -> Tensor:
        """[B, T, heads * d] -> [B, heads, T, d]"""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)


@dataclass(frozen=True)
class LayerKnobs:
    """The differences of draft layers besides the sizes, activation and RoPE of their config.

    num_layers: number of layers.
    qkv_bias, output_bias: biases of the attention's projections.
    qk_norm: an RMSNorm over each query and key head (Qwen3).
    windows: the sliding window of each layer, the token itself included (None: full attention).
    latent: sizes of multi-head latent attention (None: attention has grouped queries).
    """

    num_layers: int = 1
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    latent: LatentSizes | None = None

    extras = ""
    """Further parts that the layers have, for reports."""

    def window(self, number: int) -> int | None:
        """The sliding window of layer `number`."""
        return self.windows[number] if self.windows else None

    def make(self, config: LlamaConfig, number: int) -> "Layer":
        """Layer `number` of a draft."""
        return Layer(config, number, self)


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
        is_whole = rope[0].shape[-1] == self.head_dim  # else RoPE turns the first numbers of each head
        q, k = (apply_rotary_pos_emb if is_whole else of_parts.apply_rotary_pos_emb)(q, k, *rope)
        out = ops.attention(q, k, v, None, self.head_dim**-0.5, self.window, None, self.number)
        return self.o_proj(out.flatten(2))


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
        attention = Attention if knobs.latent is None else LatentAttention
        self.self_attn = attention(config, number, inputs or size, knobs)
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


def rotary(config: LlamaConfig, device: torch.device) -> of_parts.Glm4MoeRotaryEmbedding:
    """The rotary embedding of a draft's own config: (x, positions [B, T]) -> cos, sin [B, T, R].

    R is the head size, or the part of it that ``partial_rotary_factor`` says.
    """
    with torch.device(device):
        return of_parts.Glm4MoeRotaryEmbedding(config)
