"""Changes of attention with linear biases (ALiBi), so that it calls the marker with its heads' slopes; and Falcon's."""

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from .attention import Attend, heads_of, source_of


def falcon(module: nn.Module, attend: Attend) -> None:
    """Rotary positions or ALiBi. A group of query heads shares one copy of its keys and values."""
    source, uses_alibi = source_of(module), module.config.alibi
    if uses_alibi:
        ones = torch.ones(1, 2, dtype=torch.int64, device=module.dense.weight.device)
        factor = module.inv_norm_factor
        _add_slopes(module, source.build_alibi_tensor(ones, module.num_heads, torch.bfloat16)[:, 0, 1] * factor)

    def forward(hidden_states: Tensor, alibi=None, attention_mask=None, position_embeddings=None, **_):
        q, k, v = (x.transpose(1, 2) for x in module._split_heads(module.query_key_value(hidden_states)))
        if module.new_decoder_architecture:  # every head has a copy
            k, v = (x[:, :: module.num_heads // module.num_kv_heads] for x in (k, v))
        if not uses_alibi:
            q, k = source.apply_rotary_pos_emb(q, k, *position_embeddings)
        slopes = module.slopes if uses_alibi else None
        out, _ = attend(module, q, k, v, None, scaling=module.inv_norm_factor, slopes=slopes)
        return module.dense(out.flatten(2)), None

    module.forward = forward


def bloom(module: nn.Module, attend: Attend) -> None:
    """ALiBi."""
    ones = torch.ones(1, 2, dtype=torch.int64, device=module.dense.weight.device)
    _add_slopes(module, source_of(module).build_alibi_tensor(ones, module.num_heads, torch.float32)[:, 0, 1])

    def forward(hidden_states: Tensor, residual: Tensor, **_) -> tuple[Tensor, None]:
        q, k, v = module._reshape(module.query_key_value(hidden_states))
        out, _ = attend(module, q, k, v, None, scaling=module.inv_norm_factor, slopes=module.slopes)
        return module.dense(out.flatten(2)) + residual, None

    module.forward = forward


def bloom_model(module: nn.Module, attend: Attend) -> None:
    """The decoder builds no biases: nothing reads them, and PyTorch 2.11 cannot trace how they are reshaped."""
    module.build_alibi_tensor = lambda *_, **__: None


def mpt(module: nn.Module, attend: Attend) -> int:
    """ALiBi, from a table of distances."""
    biases = source_of(module).build_mpt_alibi_tensor(module.n_heads, 2, device=module.Wqkv.weight.device)
    _add_slopes(module, -biases[:, 0, 0])

    def forward(hidden_states: Tensor, **_) -> tuple[Tensor, None]:
        qkv = module.Wqkv(hidden_states)
        if module.clip_qkv:
            qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        q, k, v = (heads_of(x, module.head_dim) for x in qkv.chunk(3, dim=2))
        out, _ = attend(module, q, k, v, None, scaling=module.softmax_scale, slopes=module.slopes)
        return module.out_proj(out.flatten(2)), None

    module.forward = forward
    return module.max_seq_length


def mpt_model(module: nn.Module, attend: Attend) -> None:
    """A decoder without the mask that the original cannot do without."""

    def forward(input_ids: Tensor, **_) -> BaseModelOutputWithPastAndCrossAttentions:
        hidden_states = module.wte(input_ids)
        for block in module.blocks:
            hidden_states, _ = block(hidden_states, position_bias=None, attention_mask=None)
        return BaseModelOutputWithPastAndCrossAttentions(module.norm_f(hidden_states))

    module.forward = forward


def _add_slopes(module: nn.Module, slopes: Tensor) -> None:
    """Slopes [H] as a buffer, which the graph shares."""
    module.register_buffer("slopes", slopes, persistent=False)
