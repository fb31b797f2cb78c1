"""Attention modules that do not call transformers' attention interface: for the capture they call the marker.

Each function of `MODULES` changes one module of a twin, and what it computes stays the same. The checks after capture
compare it with the model's own forward, so that a wrong one is refused.
"""

import sys
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

Attend = Callable[..., tuple[Tensor, None]]
"""The attention function of transformers' interface: ``attend(module, q, k, v, mask, **more)``, of q [B, H, T, Dk] and
k, v [B, Hkv, T, D*] -> [B, T, H, Dv], None."""


def connect(model: nn.Module, attend: Attend) -> list[int]:
    """Let every module of `model`, a twin, whose class is in `MODULES` call `attend`; the positions that they limit."""
    classes = [(f"{type(module).__module__}.{type(module).__qualname__}", module) for module in model.modules()]
    limits = [MODULES[name](module, attend) for name, module in classes if name in MODULES]
    return [limit for limit in limits if limit is not None]


def gptj(module: nn.Module, attend: Attend) -> None:
    """Scores in float32."""
    _replace_scores(module, attend, 1 / module.scale_attn)


def codegen(module: nn.Module, attend: Attend) -> int:
    """As GPT-J; the table of rotations is indexed by positions."""
    _replace_scores(module, attend, 1 / module.scale_attn)
    return module.embed_positions.shape[0]


def gpt_neox_japanese(module: nn.Module, attend: Attend) -> None:
    """Scores by baddbmm."""
    _replace_scores(module, attend, 1 / module.norm_factor)


def gpt_neo(module: nn.Module, attend: Attend) -> None:
    """Scores that are not scaled, and a window in the local layers."""
    _replace_scores(module, attend, 1.0, module.config.window_size if module.attention_type == "local" else None)


def openai_gpt(module: nn.Module, attend: Attend) -> None:
    """Keys come transposed, and the result in a list."""

    def scores(q: Tensor, k: Tensor, v: Tensor, attention_mask=None, output_attentions=False) -> list[Tensor]:
        scaling = v.shape[3] ** -0.5 if module.scale else 1.0
        return [attend(module, q, k.transpose(2, 3), v, None, scaling=scaling)[0].transpose(1, 2)]

    module._attn = scores


def _replace_scores(module: nn.Module, attend: Attend, scaling: float, window: int | None = None) -> None:
    """Replace ``_attn(q, k, v, mask)``, whose result is [B, H, T, D]. Rotated q and k may be in float32."""

    def scores(q: Tensor, k: Tensor, v: Tensor, attention_mask=None) -> tuple[Tensor, None]:
        q, k = q.to(v.dtype), k.to(v.dtype)
        out, _ = attend(module, q, k, v, None, scaling=scaling, sliding_window=window)
        return out.transpose(1, 2), None

    module._attn = scores


def xglm(module: nn.Module, attend: Attend) -> None:
    """Queries are scaled, not scores."""

    def forward(hidden_states: Tensor, **_) -> tuple[Tensor, None]:
        q = module.q_proj(hidden_states) * module.scaling
        q, k, v = (_heads(x, module.head_dim) for x in (q, module.k_proj(hidden_states), module.v_proj(hidden_states)))
        return module.out_proj(attend(module, q, k, v, None, scaling=1.0)[0].flatten(2)), None

    module.forward = forward


def xglm_positions(module: nn.Module, attend: Attend) -> int:
    """A table of positions that would grow with the length."""

    def forward(position_ids: Tensor, past_key_values_length=0) -> Tensor:
        return F.embedding(position_ids + module.offset, module.weights)

    module.forward = forward
    return module.num_positions


def falcon(module: nn.Module, attend: Attend) -> None:
    """Rotary positions, or ALiBi. Keys and values of a group of query heads are kept once."""
    source, uses_alibi = _source(module), module.config.alibi
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
    _add_slopes(module, _source(module).build_alibi_tensor(ones, module.num_heads, torch.float32)[:, 0, 1])

    def forward(hidden_states: Tensor, residual: Tensor, **_) -> tuple[Tensor, None]:
        q, k, v = module._reshape(module.query_key_value(hidden_states))
        out, _ = attend(module, q, k, v, None, scaling=module.inv_norm_factor, slopes=module.slopes)
        return module.dense(out.flatten(2)) + residual, None

    module.forward = forward


def mpt(module: nn.Module, attend: Attend) -> int:
    """ALiBi, from a table of distances."""
    biases = _source(module).build_mpt_alibi_tensor(module.n_heads, 2, device=module.Wqkv.weight.device)
    _add_slopes(module, -biases[:, 0, 0])

    def forward(hidden_states: Tensor, **_) -> tuple[Tensor, None]:
        qkv = module.Wqkv(hidden_states)
        if module.clip_qkv:
            qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
        q, k, v = (_heads(x, module.head_dim) for x in qkv.chunk(3, dim=2))
        out, _ = attend(module, q, k, v, None, scaling=module.softmax_scale, slopes=module.slopes)
        return module.out_proj(out.flatten(2)), None

    module.forward = forward
    return module.max_seq_length


def mpt_model(model: nn.Module, attend: Attend) -> None:
    """A decoder that cannot do without a mask."""

    def forward(input_ids: Tensor, **_) -> BaseModelOutputWithPastAndCrossAttentions:
        hidden_states = model.wte(input_ids)
        for block in model.blocks:
            hidden_states, _ = block(hidden_states, position_bias=None, attention_mask=None)
        return BaseModelOutputWithPastAndCrossAttentions(model.norm_f(hidden_states))

    model.forward = forward


def diffllama(module: nn.Module, attend: Attend) -> None:
    """Differential attention (Ye et al. 2024): two calls with the same scores are one with values side by side."""

    def forward(hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_) -> tuple[Tensor, None]:
        projections = module.q_proj, module.k_proj, module.v_proj
        q, k, v = (_heads(project(hidden_states), module.head_dim) for project in projections)
        q, k = _source(module).apply_rotary_pos_emb(q, k, *position_embeddings)
        v = torch.cat(v.chunk(2, dim=1), dim=3).repeat(1, 2, 1, 1)
        out, _ = attend(module, q, k, v, None, scaling=module.scaling)
        first, second = out.chunk(2, dim=2)
        pairs = (module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2)
        ratios = [torch.exp((a * b).sum(dim=-1, dtype=torch.float32)).to(q.dtype) for a, b in pairs]
        out = first - (ratios[0] - ratios[1] + module.lambda_init) * second
        out = (1 - module.lambda_init) * module.groupnorm(out)
        return module.o_proj(out.flatten(2)), None

    module.forward = forward


def llama4(layer: nn.Module, attend: Attend) -> None:
    """Chunks of positions in layers with rotary positions; in the others queries are scaled by their position, which
    the attention counts for itself."""
    module, own = layer.self_attn, layer.forward
    chunk = module.config.attention_chunk_size if _is_chunked(module) else None

    def forward(hidden_states: Tensor, position_embeddings: Tensor, positions: Tensor, **_) -> tuple[Tensor, None]:
        projections = module.q_proj, module.k_proj, module.v_proj
        q, k, v = (_heads(project(hidden_states), module.head_dim).transpose(1, 2) for project in projections)
        if module.use_rope:
            q, k = _source(module).apply_rotary_emb(q, k, position_embeddings)
        if hasattr(module, "qk_norm"):
            q, k = module.qk_norm(q), module.qk_norm(k)
        if module.attn_temperature_tuning and not module.use_rope:
            steps = torch.floor((positions.float() + 1) / module.floor_scale)
            q = (q * (torch.log1p(steps) * module.attn_scale + 1)[..., None, None]).to(q.dtype)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, _ = attend(module, q, k, v, None, scaling=module.scaling, chunk=chunk)
        return module.o_proj(out.flatten(2)), None

    module.forward = forward
    layer.forward = lambda *args, position_ids, **kwargs: own(*args, positions=position_ids, **kwargs)


def _is_chunked(module: nn.Module) -> bool:
    return module.config.layer_types[module.layer_idx] == "chunked_attention"


def _heads(x: Tensor, size: int) -> Tensor:
    """[B, T, H * size] -> [B, H, T, size]."""
    return x.unflatten(2, (-1, size)).transpose(1, 2)


def _source(module: nn.Module) -> ModuleType:
    """The module of Python that defines a module's class."""
    return sys.modules[type(module).__module__]


def _add_slopes(module: nn.Module, slopes: Tensor) -> None:
    """Slopes [H] as a buffer, which the graph shares."""
    module.register_buffer("slopes", slopes, persistent=False)


_NAMES: dict[str, Callable[[nn.Module, Attend], int | None]] = {
    "bloom.modeling_bloom.BloomAttention": bloom,
    "codegen.modeling_codegen.CodeGenAttention": codegen,
    "diffllama.modeling_diffllama.DiffLlamaAttention": diffllama,
    "falcon.modeling_falcon.FalconAttention": falcon,
    "gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention": gpt_neo,
    "gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": gpt_neox_japanese,
    "gptj.modeling_gptj.GPTJAttention": gptj,
    "llama4.modeling_llama4.Llama4TextDecoderLayer": llama4,
    "mpt.modeling_mpt.MptAttention": mpt,
    "mpt.modeling_mpt.MptModel": mpt_model,
    "openai.modeling_openai.Attention": openai_gpt,
    "xglm.modeling_xglm.XGLMAttention": xglm,
    "xglm.modeling_xglm.XGLMSinusoidalPositionalEmbedding": xglm_positions,
}
MODULES = {f"transformers.models.{name}": function for name, function in _NAMES.items()}
"""What changes a module, by the path of its class."""
