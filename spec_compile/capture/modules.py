"""Modules of transformers that are changed in a shared copy, so that their capture shows what they compute as markers.

Each function of `MODULES` changes one module, whose result stays the same. The checks after capture compare it with the
model's own forward, so that a wrong one is refused.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from ..compat import TRANSFORMERS
from ..quantised.codes import class_path
from . import experts, recurrences

# Attention that does not call transformers' attention interface, or passes it too little.


Attend = Callable[..., tuple[Tensor, None]]
"""The attention function of transformers' interface: ``attend(module, q, k, v, mask, **more)``, of q [B, H, T, Dk] and
k, v [B, Hkv, T, D*] -> [B, T, H, Dv], None."""


class _Unread:
    """Stands for the causal mask of modules that read one although transformers builds none during the trace."""

    def __getitem__(self, index) -> None:
        return None


UNREAD = _Unread()


def gptj(module: nn.Module, attend: Attend) -> None:
    """Scores in float32."""
    _replace_scores(module, attend, 1 / module.scale_attn)


def codegen(module: nn.Module, attend: Attend) -> int:
    """Like GPT-J, with a table of rotations that positions index."""
    gptj(module, attend)
    return rotations(module, attend)


def rotations(module: nn.Module, attend: Attend) -> int:
    """Nothing to change. Positions index a table of rotations, which limits them."""
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
        projections = module.q_proj, module.k_proj, module.v_proj
        q, k, v = (heads_of(project(hidden_states), module.head_dim) for project in projections)
        return module.out_proj(attend(module, q * module.scaling, k, v, None, scaling=1.0)[0].flatten(2)), None

    module.forward = forward


def xglm_positions(module: nn.Module, attend: Attend) -> int:
    """A table of positions that would grow with the length."""

    def forward(position_ids: Tensor, *_) -> Tensor:
        return F.embedding(position_ids + module.offset, module.weights)

    module.forward = forward
    return module.num_positions


def decoder(module: nn.Module, attend: Attend) -> int:
    """The decoder of an encoder-decoder as a language model, which counts its positions without being told."""
    table = module.model.decoder.embed_positions
    return tell_positions(module, table, "weight", getattr(table, "offset", 0))


def tell_positions(module: nn.Module, table: nn.Module, weight: str, offset: int = 0) -> int:
    """Have `module` take positions as an argument, which index rows of its part `table` from `offset` on.

    weight: the name of the table's tensor. Returns how many positions there are.
    """
    own = module.forward

    def forward(*args, position_ids: Tensor, **kwargs):
        table.forward = lambda *_, **__: F.embedding(position_ids + offset, getattr(table, weight))
        return own(*args, **kwargs)

    module.forward = forward
    return len(getattr(table, weight)) - offset


def diffllama(module: nn.Module, attend: Attend) -> None:
    """Differential attention (Ye et al. 2024). Its two calls with the same scores become one with both values."""

    def forward(hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_) -> tuple[Tensor, None]:
        projections = module.q_proj, module.k_proj, module.v_proj
        q, k, v = (heads_of(project(hidden_states), module.head_dim) for project in projections)
        q, k = source_of(module).apply_rotary_pos_emb(q, k, *position_embeddings)
        v = torch.cat(v.chunk(2, dim=1), dim=3).repeat(1, 2, 1, 1)
        out, _ = attend(module, q, k, v, None, scaling=module.scaling)
        first, second = out.chunk(2, dim=2)
        pairs = (module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2)
        ratios = [torch.exp((a * b).sum(dim=-1, dtype=torch.float32)).to(q.dtype) for a, b in pairs]
        out = first - (ratios[0] - ratios[1] + module.lambda_init) * second
        out = (1 - module.lambda_init) * module.groupnorm(out)
        return module.o_proj(out.flatten(2)), None

    module.forward = forward


def phimoe(module: nn.Module, attend: Attend) -> None:
    """Only the mask has the window."""
    module.forward = functools.partial(module.forward, sliding_window=module.config.sliding_window)


def doge(module: nn.Module, attend: Attend) -> int:
    """A bias for each key and head, computed from the value, is one more column of the keys. Only the mask has the
    window. A longer text than `keep_window_size` would leave out some keys, so that is the limit."""

    def forward(hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_) -> tuple[Tensor, None]:
        projections = module.q_proj, module.k_proj, module.v_proj
        q, k, v = (project(hidden_states).unflatten(2, (-1, module.head_dim)) for project in projections)
        bias = torch.exp(module.A * F.softplus(module.dt_proj(v.flatten(2))))
        q, k, v = (x.transpose(1, 2) for x in (module.q_norm(q), module.k_norm(k), v))
        q, k = source_of(module).apply_rotary_pos_emb(q, k, *position_embeddings)
        q, k = F.pad(q, (0, 1), value=1 / module.scaling), torch.cat([k, bias.transpose(1, 2)[..., None]], dim=3)
        out, _ = attend(module, q, k, v, None, scaling=module.scaling, sliding_window=module.config.sliding_window)
        return module.o_proj(out.flatten(2)), None

    module.forward = forward
    return module.keep_window_size


def llama4(layer: nn.Module, attend: Attend) -> None:
    """Layers with rotary positions attend in chunks. The others scale queries by their position, which the attention
    would count itself; it is given the positions instead."""
    module, own = layer.self_attn, layer.forward
    is_chunked = module.config.layer_types[module.layer_idx] == "chunked_attention"
    chunk = module.config.attention_chunk_size if is_chunked else None

    def forward(hidden_states: Tensor, position_embeddings: Tensor, positions: Tensor, **_) -> tuple[Tensor, None]:
        projections = module.q_proj, module.k_proj, module.v_proj
        q, k, v = (heads_of(project(hidden_states), module.head_dim).transpose(1, 2) for project in projections)
        if module.use_rope:
            q, k = source_of(module).apply_rotary_emb(q, k, position_embeddings)
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


def heads_of(x: Tensor, size: int) -> Tensor:
    """[B, T, H * size] -> [B, H, T, size]."""
    return x.unflatten(2, (-1, size)).transpose(1, 2)


def source_of(module: nn.Module) -> ModuleType:
    """The module of Python that defines a module's class."""
    return sys.modules[type(module).__module__]


# Changes of attention with linear biases (ALiBi), so that it calls the marker with its heads' slopes; and Falcon's.


def falcon(module: nn.Module, attend: Attend) -> None:
    """Rotary positions or ALiBi. A group of query heads shares one copy of its keys and values."""
    source, uses_alibi = source_of(module), module.config.alibi
    if uses_alibi:
        ones = torch.ones(1, 2, dtype=torch.int64, device=module.dense.weight.device)
        slopes = source.build_alibi_tensor(ones, module.num_heads, torch.bfloat16)[:, 0, 1] * module.inv_norm_factor
        module.register_buffer("slopes", slopes, persistent=False)

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
    slopes = source_of(module).build_alibi_tensor(ones, module.num_heads, torch.float32)[:, 0, 1]
    module.register_buffer("slopes", slopes, persistent=False)

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
    module.register_buffer("slopes", -biases[:, 0, 0], persistent=False)

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


# The table of classes.


_BY_CLASS: dict[str, Callable[[nn.Module, Attend], int | None]] = {
    "bloom.modeling_bloom.BloomAttention": bloom,
    "bloom.modeling_bloom.BloomModel": bloom_model,
    "diffllama.modeling_diffllama.DiffLlamaAttention": diffllama,
    "doge.modeling_doge.DogeAttention": doge,
    "falcon.modeling_falcon.FalconAttention": falcon,
    "gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention": gpt_neo,
    "gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": gpt_neox_japanese,
    "llama4.modeling_llama4.Llama4TextDecoderLayer": llama4,
    "mpt.modeling_mpt.MptAttention": mpt,
    "mpt.modeling_mpt.MptModel": mpt_model,
    "openai.modeling_openai.Attention": openai_gpt,
    "phimoe.modeling_phimoe.PhimoeAttention": phimoe,
    "xglm.modeling_xglm.XGLMAttention": xglm,
    "xglm.modeling_xglm.XGLMSinusoidalPositionalEmbedding": xglm_positions,
}
_BY_CLASS |= {
    f"{name.lower()}.modeling_{name.lower()}.{name.replace('_', '')}ForCausalLM": decoder
    for name in ("Bart", "BigBird_Pegasus", "Blenderbot", "Blenderbot_Small", "Marian", "MBart", "Pegasus", "PLBart")
}
_BY_CLASS |= (
    {
        "codegen.modeling_codegen.CodeGenRotaryEmbedding": rotations,
        "gptj.modeling_gptj.GPTJRotaryEmbedding": rotations,
    }
    if TRANSFORMERS >= (5, 24)  # their attention calls the interface
    else {
        "codegen.modeling_codegen.CodeGenAttention": codegen,
        "gptj.modeling_gptj.GPTJAttention": gptj,
    }
)
MODULES = {f"transformers.models.{name}": function for name, function in _BY_CLASS.items()}
MODULES |= experts.MODULES | recurrences.MODULES
"""The function that changes a module, by the path of its class."""


def connect(model: nn.Module, attend: Attend) -> list[int]:
    """Change every module of `model`, a shared copy, whose class is in `MODULES`.

    attend: the attention function that they call. Returns the lengths of tables of positions, which limit a text.
    """
    limits = [MODULES[name](part, attend) for part in model.modules() if (name := class_path(part)) in MODULES]
    return [limit for limit in limits if limit is not None]
