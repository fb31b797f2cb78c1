"""Writers of tiny checkpoints with modules of multi-token prediction, one for each family that is read.

`MTP` maps a name to a `Family`; ``write_mtp(name, folder)`` makes its target and writes exactly the tensors and the
config of the format.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import models
import transformers
from draft_checkpoints import HEADS, KV, D, H, I, V, Weights, Written, own, save
from torch import nn

HAS_MODULES = hasattr(transformers, "BailingHybridConfig")
"""True if this version of transformers has its own modules of multi-token prediction for all families that it has."""
INNER = 32
EXPERTS = 4
MLA = dict(
    num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12
)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
WINDOW = 4
STEP_HEADS = 8
"""Of a layer of Step with a window."""


@dataclass(frozen=True)
class Family:
    """The target, and what writes the tensors of module i.

    modules: how many there are.
    config: keys of the checkpoint's config that the target's lacks.
    """

    target: Callable[[], nn.Module]
    module: Callable[[Weights, nn.Module, int], None]
    modules: int = 1
    config: dict = field(default_factory=dict)


def write_mtp(name: str, folder: Path) -> Written:
    """Write a family's checkpoint, as the target's own."""
    family = MTP[name]
    target, tensors = family.target(), Weights()
    changes = {"num_nextn_predict_layers": family.modules, **family.config}
    config = {**own(tensors, target), **changes}
    for number in range(family.modules):
        family.module(tensors, target, number)
    save(folder, config, tensors)
    target.config._name_or_path = str(folder)
    for key, value in changes.items():
        setattr(text_config(target), key, value)
    return Written(folder, target, config, tensors)


def target(config: str, model: str, base: dict = models.GQA16, **kwargs) -> Callable[[], nn.Module] | None:
    """Builds a target; None if this version of transformers has no such model, or its modules are not those of 5.24."""
    if not hasattr(transformers, config) or (config == "MellumConfig" and not HAS_MODULES):
        return None
    return lambda: models.build(config, model, {**base, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, **kwargs})


def image_text(name: str, vision: dict, base: dict = models.GQA16, **kwargs) -> Callable[[], nn.Module] | None:
    """As `target`, of an image-text model of the classes `name`Config and `name`ForConditionalGeneration."""
    if not hasattr(transformers, f"{name}Config") or not HAS_MODULES:
        return None
    text = {**base, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, **models.SPECIAL, **kwargs}
    config = dict(text_config=text, vision_config=vision)
    return lambda: models.build(f"{name}Config", f"{name}ForConditionalGeneration", config)


def text_config(model: nn.Module):
    """The configuration of a model's layers."""
    return model.config.get_text_config(decoder=True)


def nextn(w: Weights, prefix: str, last: str) -> None:
    """The norms of embedding and state, eh_proj, and the last norm."""
    w.norm(f"{prefix}.enorm", f"{prefix}.hnorm", f"{prefix}.{last}")
    w.linear(f"{prefix}.eh_proj", H, 2 * H)


def pre_fc(w: Weights) -> None:
    w.norm("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    w.linear("mtp.fc", H, 2 * H)


def latent(w: Weights, name: str) -> None:
    """DeepSeek's MLA."""
    heads, rotated, kept = HEADS, MLA["qk_rope_head_dim"], MLA["qk_nope_head_dim"]
    w.linear(f"{name}.q_a_proj", MLA["q_lora_rank"], H)
    w.norm(f"{name}.q_a_layernorm", size=MLA["q_lora_rank"])
    w.linear(f"{name}.q_b_proj", heads * (kept + rotated), MLA["q_lora_rank"])
    w.linear(f"{name}.kv_a_proj_with_mqa", MLA["kv_lora_rank"] + rotated, H)
    w.norm(f"{name}.kv_a_layernorm", size=MLA["kv_lora_rank"])
    w.linear(f"{name}.kv_b_proj", heads * (kept + MLA["v_head_dim"]), MLA["kv_lora_rank"])
    w.linear(f"{name}.o_proj", H, heads * MLA["v_head_dim"])


def layer_norms(w: Weights, prefix: str, second: str = "post_attention_layernorm") -> None:
    w.norm(f"{prefix}.input_layernorm", f"{prefix}.{second}")


# Families


def deepseek(w: Weights, model: nn.Module, number: int) -> None:
    """Layers after the last one, with copies of embedding and output matrix."""
    prefix = f"model.layers.{model.config.num_hidden_layers + number}"
    nextn(w, prefix, "shared_head.norm")
    layer_norms(w, prefix)
    w[f"{prefix}.embed_tokens.weight"] = model.get_input_embeddings().weight.detach().clone()
    w[f"{prefix}.shared_head.head.weight"] = model.get_output_embeddings().weight.detach().clone()
    latent(w, f"{prefix}.self_attn")
    experts = model.config.n_routed_experts
    w.experts(f"{prefix}.mlp", experts, INNER, "shared_experts")
    w[f"{prefix}.mlp.gate.e_score_correction_bias"] = w.normal(experts) * 0.2


def indexed(w: Weights, model: nn.Module, number: int) -> None:
    """DeepSeek-V3.2, GLM-5: DeepSeek's module with an indexer."""
    deepseek(w, model, number)
    indexer = f"model.layers.{model.config.num_hidden_layers + number}.self_attn.indexer"
    heads, size = model.config.index_n_heads, model.config.index_head_dim
    w.linear(f"{indexer}.wq_b", heads * size, MLA["q_lora_rank"])
    w.linear(f"{indexer}.wk", size, H)
    w.norm(f"{indexer}.k_norm", size=size)
    w[f"{indexer}.k_norm.bias"] = w.normal(size) * 0.3
    w.linear(f"{indexer}.weights_proj", heads, H)


def hunyuan(w: Weights, model: nn.Module, number: int) -> None:
    """HunYuan 3: other names in the mixture."""
    prefix = f"model.layers.{model.config.num_hidden_layers}"
    nextn(w, prefix, "final_layernorm")
    w.layer(prefix, qk_norm=True)
    for part in ("gate", "up", "down"):
        del w[f"{prefix}.mlp.{part}_proj.weight"]
    w.experts(f"{prefix}.mlp", EXPERTS, INNER, "shared_mlp")
    w[f"{prefix}.mlp.router.gate.weight"] = w.pop(f"{prefix}.mlp.gate.weight")
    w[f"{prefix}.mlp.expert_bias"] = w.normal(EXPERTS) * 0.2


def ling(w: Weights, model: nn.Module, number: int) -> None:
    """Ling: MLA with a gate for each head, other names in the attention."""
    prefix = f"model.layers.{model.config.num_hidden_layers}"
    nextn(w, prefix, "final_layernorm")
    layer_norms(w, prefix)
    latent(w, f"{prefix}.attention")
    w.linear(f"{prefix}.attention.g_proj", HEADS, H)
    w[f"{prefix}.attention.dense.weight"] = w.pop(f"{prefix}.attention.o_proj.weight")
    w.experts(f"{prefix}.mlp", EXPERTS, INNER, "shared_experts")
    w[f"{prefix}.mlp.gate.expert_bias"] = w.normal(EXPERTS) * 0.2


def glm_ocr(w: Weights, model: nn.Module, number: int) -> None:
    """GLM-OCR: a layer after the language model's last, with norms before and after its parts."""
    prefix = f"model.language_model.layers.{text_config(model).num_hidden_layers}"
    nextn(w, prefix, "shared_head.norm")
    layer_norms(w, prefix)
    w.norm(f"{prefix}.post_self_attn_layernorm", f"{prefix}.post_mlp_layernorm")
    attention(w, f"{prefix}.self_attn", HEADS)
    w.linear(f"{prefix}.mlp.gate_up_proj", 2 * I, H)
    w.linear(f"{prefix}.mlp.down_proj", H, I)


def glm4v_moe(w: Weights, model: nn.Module, number: int) -> None:
    """GLM-4.5V: GLM-4.5's layer, after the language model's last."""
    prefix = f"model.language_model.layers.{text_config(model).num_hidden_layers}"
    nextn(w, prefix, "shared_head.norm")
    layer_norms(w, prefix)
    attention(w, f"{prefix}.self_attn", HEADS)
    w.experts(f"{prefix}.mlp", EXPERTS, INNER, "shared_experts")
    w[f"{prefix}.mlp.gate.e_score_correction_bias"] = w.normal(EXPERTS) * 0.2


def step(w: Weights, model: nn.Module, number: int) -> None:
    """Step: a gate for each head, of which a window has more, and an output matrix of its own."""
    prefix = f"model.layers.{text_config(model).num_hidden_layers + number}"
    nextn(w, prefix, "transformer.shared_head.norm")
    w.linear(f"{prefix}.transformer.shared_head.output", V, H)
    layer_norms(w, prefix)
    heads = HEADS if text_config(model).mtp_layer_types[number] == models.FULL else STEP_HEADS
    attention(w, f"{prefix}.self_attn", heads)
    w.norm(f"{prefix}.self_attn.q_norm", f"{prefix}.self_attn.k_norm", size=D)
    w.linear(f"{prefix}.self_attn.g_proj", heads, H)
    w.mlp(f"{prefix}.mlp")


def attention(w: Weights, name: str, heads: int) -> None:
    """Grouped queries."""
    for part, rows in (("q", heads * D), ("k", KV * D), ("v", KV * D)):
        w.linear(f"{name}.{part}_proj", rows, H)
    w.linear(f"{name}.o_proj", H, heads * D)


def exaone_4_5(w: Weights, model: nn.Module, number: int) -> None:
    """EXAONE 4.5: Qwen's names, and norms after the parts of the layer only."""
    pre_fc(w)
    w.layer("mtp.layers.0", qk_norm=True)
    w["mtp.layers.0.post_feedforward_layernorm.weight"] = w.pop("mtp.layers.0.input_layernorm.weight")


def ernie(w: Weights, model: nn.Module, number: int) -> None:
    """ERNIE 4.5: each part has a number, and there is no last norm."""
    w.norm(f"model.mtp_emb_norm.{number}", f"model.mtp_hidden_norm.{number}")
    w.linear(f"model.mtp_linear_proj.{number}", H, 2 * H)
    w.layer(f"model.mtp_block.{number}")


def exaone(w: Weights, model: nn.Module, number: int) -> None:
    """K-EXAONE: Qwen's names, plain norms, a dense layer with a window."""
    if number == 0:
        pre_fc(w)
    w.layer(f"mtp.layers.{number}", qk_norm=True)


def mellum(w: Weights, model: nn.Module, number: int) -> None:
    """Qwen's names, a window, a mixture without shared experts."""
    exaone(w, model, number)
    for part in ("gate", "up", "down"):
        del w[f"mtp.layers.0.mlp.{part}_proj.weight"]
    w.linear("mtp.layers.0.mlp.gate", EXPERTS, H)
    for expert in range(EXPERTS):
        w.mlp(f"mtp.layers.0.mlp.experts.{expert}", INNER)


def mimo_v2(w: Weights, model: nn.Module, number: int) -> None:
    """MiMo-V2: windows with sinks, twice the key-value heads, dense."""
    prefix = f"model.mtp.layers.{number}"
    nextn(w, prefix, "final_layernorm")
    layer_norms(w, prefix, "pre_mlp_layernorm")
    for part, rows in (("q", HEADS * D), ("k", 2 * KV * D), ("v", 2 * KV * D)):
        w.linear(f"{prefix}.self_attn.{part}_proj", rows, H)
    w.linear(f"{prefix}.self_attn.o_proj", H, HEADS * D)
    w[f"{prefix}.self_attn.attention_sink_bias"] = w.normal(HEADS)
    w.mlp(f"{prefix}.mlp")


def nemotron(w: Weights, model: nn.Module, number: int) -> None:
    """Nemotron-H: two half-layers, the first without RoPE, the second a mixture of experts without gates."""
    nextn(w, "mtp.layers.0", "norm")
    w.norm("mtp.layers.1.norm", "mtp.layers.1.final_layernorm")
    for part, rows in (("q", HEADS * D), ("k", KV * D), ("v", KV * D)):
        w.linear(f"mtp.layers.0.mixer.{part}_proj", rows, H)
    w.linear("mtp.layers.0.mixer.o_proj", H, HEADS * D)
    mixer = "mtp.layers.1.mixer"
    w.linear(f"{mixer}.gate", EXPERTS, H)
    w[f"{mixer}.gate.e_score_correction_bias"] = w.normal(EXPERTS) * 0.2
    for name in (*(f"experts.{expert}" for expert in range(EXPERTS)), "shared_experts"):
        w.linear(f"{mixer}.{name}.up_proj", INNER, H)
        w.linear(f"{mixer}.{name}.down_proj", H, INNER)


def longcat(w: Weights, model: nn.Module, number: int) -> None:
    """LongCat-Flash: a plain layer of MLA and MLP, and an embedding of its own."""
    prefix = "model.mtp.layers.0"
    w.norm(f"{prefix}.enorm.m", f"{prefix}.hnorm.m", "model.mtp.norm")
    w.linear(f"{prefix}.eh_proj", H, 2 * H)
    w["model.mtp.embed_tokens.weight"] = w.normal(V, H)
    layer_norms(w, prefix)
    latent(w, f"{prefix}.self_attn")
    w.mlp(f"{prefix}.transformer_layer.mlp")


SPARSE = dict(num_experts_per_tok=2, moe_intermediate_size=INNER)
MTP = {
    "deepseek_v3": Family(models.ADMITTED["deepseek_v3"], deepseek, modules=3),
    "glm4_moe_lite": Family(
        target(
            "Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", models.BASE, **MLA, **SPARSE, n_routed_experts=8,
            n_shared_experts=1, n_group=2, topk_group=1, rope_parameters=ROPE,
        ),
        deepseek,
    ),
    "deepseek_v32": Family(models.INDEXED.get("deepseek_v32"), indexed),
    "glm_moe_dsa": Family(models.INDEXED.get("glm_moe_dsa"), indexed),
    "hy_v3": Family(
        target(
            "HYV3Config", "HYV3ForCausalLM", **SPARSE, num_local_experts=EXPERTS, num_shared_experts=1,
            mlp_layer_types=["dense", "sparse"], rope_parameters=ROPE,
        ),
        hunyuan,
    ),
    "bailing_hybrid": Family(
        target(
            "BailingHybridConfig", "BailingHybridForCausalLM", models.MLA, q_lora_rank=32, head_dim=16,
            num_experts=EXPERTS, moe_intermediate_size=INNER, rope_parameters=ROPE,
        ),
        ling,
    ),
    "ernie4_5_moe": Family(
        target(
            "Ernie4_5_MoeConfig", "Ernie4_5_MoeForCausalLM", moe_k=2, moe_intermediate_size=INNER,
            moe_num_experts=EXPERTS, moe_num_shared_experts=1, rope_parameters=ROPE,
        ),
        ernie,
    ),
    "exaone_moe": Family(
        target(
            "ExaoneMoeConfig", "ExaoneMoeForCausalLM", **SPARSE, num_experts=EXPERTS, num_shared_experts=1, n_group=1,
            topk_group=1, sliding_window=WINDOW, layer_types=[models.WIN, models.FULL],
            mlp_layer_types=["dense", "sparse"], rope_parameters=ROPE,
        ),
        exaone,
        modules=2,
        config={"mtp_layer_types": [models.WIN, models.FULL]},
    ),
    "mellum": Family(
        target(
            "MellumConfig", "MellumForCausalLM", **SPARSE, num_experts=EXPERTS, norm_topk_prob=True,
            sliding_window=WINDOW, layer_types=[models.WIN, models.FULL], mlp_layer_types=["sparse"] * 2,
            num_nextn_predict_layers=1, rope_parameters={models.WIN: ROPE, models.FULL: ROPE},
        ),
        mellum,
    ),
    "mimo_v2": Family(
        target(
            "MiMoV2FlashConfig", "MiMoV2FlashForCausalLM", **SPARSE, v_head_dim=D, n_routed_experts=EXPERTS,
            sliding_window=WINDOW, layer_types=[models.FULL, models.WIN], mlp_layer_types=["dense", "sparse"],
            rope_parameters={kind: {**ROPE, "partial_rotary_factor": 0.5} for kind in (models.WIN, models.FULL)},
        ),
        mimo_v2,
        modules=3,
    ),
    "glm_ocr": Family(
        image_text(
            "GlmOcr",
            dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=H, patch_size=4),
            rope_parameters={**ROPE, "mrope_section": [4, 2, 2]},
        ),
        glm_ocr,
    ),
    "glm4v_moe": Family(
        image_text(
            "Glm4vMoe",
            dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=H, patch_size=4),
            **SPARSE, n_routed_experts=EXPERTS, n_shared_experts=1, n_group=1, topk_group=1, attention_bias=False,
            rope_parameters={**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
        ),
        glm4v_moe,
    ),
    "step3p7": Family(
        image_text(
            "Step3p7",
            dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=16,
                 patch_size=4),
            moe_intermediate_size=INNER, share_expert_dim=INNER, n_routed_experts=EXPERTS, num_experts_per_tok=2,
            num_hidden_layers=3, mlp_layer_types=["dense", "sparse", "sparse"], swiglu_limits=[0, 0, 0.3],
            layer_types=[models.FULL, models.WIN, models.FULL], sliding_window=WINDOW,
            num_sliding_attention_heads=STEP_HEADS, num_nextn_predict_layers=3,
            mtp_layer_types=[models.WIN, models.FULL, models.WIN], mtp_mlp_layer_types=["dense"] * 3,
            rope_theta=[1e4, 1e4, 1e4], partial_rotary_factors=[0.5, 1.0, 0.5],
        ),
        step,
        modules=3,
    ),
    "exaone4_5": Family(
        image_text(
            "Exaone4_5_",
            dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, num_key_value_heads=2, out_hidden_size=H,
                 patch_size=4, fullatt_block_indexes=[0]),
            model_type="exaone4", sliding_window=WINDOW, sliding_window_pattern="LG",
            layer_types=[models.WIN, models.FULL], rope_parameters=ROPE,
        ),
        exaone_4_5,
    ),
    "nemotron_h": Family(models.HYBRIDS["nemotron_h"], nemotron),
    "longcat_flash": Family(
        target(
            "LongcatFlashConfig", "LongcatFlashForCausalLM", models.BASE, **MLA, num_layers=2, num_hidden_layers=4,
            ffn_hidden_size=96, expert_ffn_hidden_size=INNER, n_routed_experts=EXPERTS, zero_expert_num=2, moe_topk=2,
            head_dim=8, rope_parameters=ROPE,
        ),
        longcat,
    ),
}  # fmt: skip
