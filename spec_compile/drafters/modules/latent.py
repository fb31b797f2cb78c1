"""Multi-head latent attention (MLA) of a draft layer (DeepSeek-V2, arXiv:2405.04434, section 2.1).

Keys and values of all heads come from one short row a slot, and all heads share one turned part of the key:
c = norm(W_c x), [k_h; v_h] = W_h c, key_h = [k_h; RoPE(W_r x)]. The cache holds whole keys and values of each head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

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

    def __init__(self, config: LlamaConfig, number: int, inputs: int, sizes: LatentSizes, window: int | None):
        super().__init__()
        self.number, self.sizes, self.window, self.heads = number, sizes, window, config.num_attention_heads
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
        sizes = self.sizes
        q, q_turned = self._by_head(self._queries(x)).split(self.query_parts, dim=-1)
        latent, k_turned = self.kv_a_proj_with_mqa(x).split([sizes.kv_lora_rank, sizes.qk_rope_head_dim], dim=-1)
        expanded = self._by_head(self.kv_b_proj(self.kv_a_layernorm(latent)))
        k, v = expanded.split([sizes.qk_nope_head_dim, sizes.v_head_dim], dim=-1)
        turn = apply_rotary_pos_emb_interleave if sizes.pairs else apply_rotary_pos_emb
        q_turned, k_turned = turn(q_turned, k_turned[:, None], *rope)
        q = torch.cat([q, q_turned], dim=-1)
        k = torch.cat([k, k_turned.expand(-1, self.heads, -1, -1)], dim=-1)
        out = ops.attention(q, k, v, None, sizes.scale, self.window, None, self.number)
        return self.o_proj(out.flatten(2))

    def _queries(self, x: Tensor) -> Tensor:
        if self.sizes.q_lora_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def _by_head(self, x: Tensor) -> Tensor:
        """[B, T, heads * d] -> [B, heads, T, d]"""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)
