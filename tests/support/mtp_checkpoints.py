"""Writers of tiny checkpoints with modules of multi-token prediction, one for each family that is read.

`MTP` maps a name to a `Family`; ``write_mtp(name, folder)`` makes its target and writes exactly the tensors and the
config of the format.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import models
import transformers
from draft_checkpoints import HEADS, KV, TARGETS_LATENT, D, H, I, V, Weights, Written, deepseek, nextn, own, save
from torch import nn

HAS_MODULES = hasattr(transformers, "BailingHybridConfig")
"""True if this version of transformers has its own modules of multi-token prediction for all families that it has."""
INNER = 32
EXPERTS = 4
MLA = dict(num_key_value_heads=4, **TARGETS_LATENT)
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
WINDOW = 4
STEP_HEADS = 8  # of a layer of Step with a window


@dataclass(frozen=True)
class Family:
    """What writes the tensors of module i, and the target, or None if this version of transformers has no such model.

    modules: how many there are.
    config: keys of the checkpoint's config that the target's lacks.
    """

    module: Callable[[Weights, nn.Module, int], None]
    target: Callable[[], nn.Module] | None
    modules: int = 1
    config: dict = field(default_factory=dict)


def write_mtp(name: str, folder: Path) -> Written:
    """Write a family's checkpoint, as the target's own."""
    family = MTP[name]
    target, tensors = family.target(), Weights()
    changes = {"num_nextn_predict_layers": family.modules, **family.config}
    config = {**target.config.to_dict(), **changes}
    own(tensors, target)
    for number in range(family.modules):
        family.module(tensors, target, number)
    save(folder, config, tensors)
    target.config._name_or_path = str(folder)
    for key, value in changes.items():
        setattr(text_config(target), key, value)
    return Written(folder, target, config, tensors)


def text_config(model: nn.Module):
    """The configuration of a model's layers."""
    return model.config.get_text_config(decoder=True)


def module(w: Weights, prefix: str, last: str, second: str = "post_attention_layernorm") -> str:
    """The norms of a module and of its layer, and eh_proj; the prefix of all names. last, second: norms."""
    nextn(w, prefix, last)
    w.norm(f"{prefix}.input_layernorm", f"{prefix}.{second}")
    return prefix


def after(model: nn.Module, number: int = 0, layers: str = "model.layers") -> str:
    """The name of a layer after the last one."""
    return f"{layers}.{text_config(model).num_hidden_layers + number}"


# Families


def deepseek_v3(w: Weights, model: nn.Module, number: int) -> None:
    deepseek(w, model, model.config.num_hidden_layers + number)


def indexed(w: Weights, model: nn.Module, number: int) -> None:
    """DeepSeek-V3.2, GLM-5: DeepSeek's module with an indexer."""
    deepseek_v3(w, model, number)
    indexer = f"{after(model, number)}.self_attn.indexer"
    heads, size = model.config.index_n_heads, model.config.index_head_dim
    w.linear(f"{indexer}.wq_b", heads * size, TARGETS_LATENT["q_lora_rank"])
    w.linear(f"{indexer}.wk", size, H)
    w.norm(f"{indexer}.k_norm", size=size)
    w[f"{indexer}.k_norm.bias"] = w.normal(size) * 0.3
    w.linear(f"{indexer}.weights_proj", heads, H)


def hunyuan(w: Weights, model: nn.Module, number: int) -> None:
    """HunYuan 3: other names in the mixture."""
    prefix = module(w, after(model), "final_layernorm")
    w.attention(f"{prefix}.self_attn", qk_norm=True)
    w.experts(f"{prefix}.mlp", EXPERTS, shared="shared_mlp", bias="expert_bias")
    w[f"{prefix}.mlp.router.gate.weight"] = w.pop(f"{prefix}.mlp.gate.weight")


def ling(w: Weights, model: nn.Module, number: int) -> None:
    """Ling: MLA with a gate for each head, other names in the attention."""
    prefix = module(w, after(model), "final_layernorm")
    w.latent(f"{prefix}.attention", TARGETS_LATENT)
    w.linear(f"{prefix}.attention.g_proj", HEADS, H)
    w[f"{prefix}.attention.dense.weight"] = w.pop(f"{prefix}.attention.o_proj.weight")
    w.experts(f"{prefix}.mlp", EXPERTS, bias="gate.expert_bias")


def glm_ocr(w: Weights, model: nn.Module, number: int) -> None:
    """GLM-OCR: a layer after the language model's last, with norms before and after its parts."""
    prefix = module(w, after(model, layers="model.language_model.layers"), "shared_head.norm")
    w.norm(f"{prefix}.post_self_attn_layernorm", f"{prefix}.post_mlp_layernorm")
    w.attention(f"{prefix}.self_attn")
    w.linear(f"{prefix}.mlp.gate_up_proj", 2 * I, H)
    w.linear(f"{prefix}.mlp.down_proj", H, I)


def glm4v_moe(w: Weights, model: nn.Module, number: int) -> None:
    """GLM-4.5V: GLM-4.5's layer, after the language model's last."""
    prefix = module(w, after(model, layers="model.language_model.layers"), "shared_head.norm")
    w.attention(f"{prefix}.self_attn")
    w.experts(f"{prefix}.mlp", EXPERTS, bias="gate.e_score_correction_bias")


def step(w: Weights, model: nn.Module, number: int) -> None:
    """Step: a gate for each head, of which a window has more, and an output matrix of its own."""
    prefix = module(w, after(model, number), "transformer.shared_head.norm")
    w.linear(f"{prefix}.transformer.shared_head.output", V, H)
    heads = HEADS if text_config(model).mtp_layer_types[number] == models.FULL else STEP_HEADS
    w.attention(f"{prefix}.self_attn", heads=(heads, heads, KV), qk_norm=True)
    w.linear(f"{prefix}.self_attn.g_proj", heads, H)
    w.mlp(f"{prefix}.mlp")


def exaone(w: Weights, model: nn.Module, number: int) -> None:
    """K-EXAONE: Qwen's names, plain norms, a dense layer with a window."""
    if number == 0:
        w.norm("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
        w.linear("mtp.fc", H, 2 * H)
    w.layer(f"mtp.layers.{number}", qk_norm=True)


def exaone_4_5(w: Weights, model: nn.Module, number: int) -> None:
    """EXAONE 4.5: norms after the parts of the layer only."""
    exaone(w, model, number)
    w["mtp.layers.0.post_feedforward_layernorm.weight"] = w.pop("mtp.layers.0.input_layernorm.weight")


def ernie(w: Weights, model: nn.Module, number: int) -> None:
    """ERNIE 4.5: each part has a number, and there is no last norm."""
    w.norm(f"model.mtp_emb_norm.{number}", f"model.mtp_hidden_norm.{number}")
    w.linear(f"model.mtp_linear_proj.{number}", H, 2 * H)
    w.layer(f"model.mtp_block.{number}")


def mellum(w: Weights, model: nn.Module, number: int) -> None:
    """Qwen's names, a window, a mixture without shared experts."""
    exaone(w, model, number)
    for part in ("gate", "up", "down"):
        del w[f"mtp.layers.0.mlp.{part}_proj.weight"]
    w.experts("mtp.layers.0.mlp", EXPERTS, shared="")


def mimo_v2(w: Weights, model: nn.Module, number: int) -> None:
    """MiMo-V2: windows with sinks, twice the key-value heads, dense."""
    prefix = module(w, f"model.mtp.layers.{number}", "final_layernorm", "pre_mlp_layernorm")
    w.attention(f"{prefix}.self_attn", heads=(HEADS, HEADS, 2 * KV))
    w[f"{prefix}.self_attn.attention_sink_bias"] = w.normal(HEADS)
    w.mlp(f"{prefix}.mlp")


def nemotron(w: Weights, model: nn.Module, number: int) -> None:
    """Nemotron-H: two half-layers, the first without RoPE, the second a mixture of experts without gates."""
    nextn(w, "mtp.layers.0", "norm")
    w.norm("mtp.layers.1.norm", "mtp.layers.1.final_layernorm")
    w.attention("mtp.layers.0.mixer")
    w.experts("mtp.layers.1.mixer", EXPERTS, bias="gate.e_score_correction_bias")
    for name in [name for name in w if "gate_proj" in name and name.startswith("mtp.")]:
        del w[name]


def longcat(w: Weights, model: nn.Module, number: int) -> None:
    """LongCat-Flash: a plain layer of MLA and MLP, and an embedding of its own."""
    prefix = "model.mtp.layers.0"
    w.norm(f"{prefix}.enorm.m", f"{prefix}.hnorm.m", "model.mtp.norm")
    w.linear(f"{prefix}.eh_proj", H, 2 * H)
    w["model.mtp.embed_tokens.weight"] = w.normal(V, H)
    w.norm(f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm")
    w.latent(f"{prefix}.self_attn", TARGETS_LATENT)
    w.mlp(f"{prefix}.transformer_layer.mlp")


def family(module, name, base=models.GQA16, modules=1, vision=None, config=(), **sizes) -> Family:
    """A target of the classes `name`Config and `name`ForCausalLM, or an image-text model with a `vision` config."""
    sizes = {**base, "num_hidden_layers": 2, "rms_norm_eps": 1e-5, **sizes}
    model = f"{name}ForConditionalGeneration" if vision else f"{name}ForCausalLM"
    if vision:
        sizes = dict(text_config={**sizes, **models.SPECIAL}, vision_config=vision)
    needs_modules = vision or name == "Mellum"  # whose modules were other ones before transformers 5.24
    is_there = hasattr(transformers, model) and (HAS_MODULES or not needs_modules)
    return Family(
        module, partial(models.build, f"{name}Config", model, sizes) if is_there else None, modules, dict(config)
    )


SPARSE = dict(num_experts_per_tok=2, moe_intermediate_size=INNER)
TOWER = dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=H, patch_size=4)
MTP = {
    "deepseek_v3": Family(deepseek_v3, models.ADMITTED["deepseek_v3"], modules=3),
    "glm4_moe_lite": family(
        deepseek_v3, "Glm4MoeLite", models.BASE, **MLA, **SPARSE, n_routed_experts=8, n_shared_experts=1, n_group=2,
        topk_group=1, rope_parameters=ROPE,
    ),
    "deepseek_v32": Family(indexed, models.INDEXED.get("deepseek_v32")),
    "glm_moe_dsa": Family(indexed, models.INDEXED.get("glm_moe_dsa")),
    "hy_v3": family(
        hunyuan, "HYV3", **SPARSE, num_local_experts=EXPERTS, num_shared_experts=1,
        mlp_layer_types=["dense", "sparse"], rope_parameters=ROPE,
    ),
    "bailing_hybrid": family(
        ling, "BailingHybrid", models.MLA, q_lora_rank=32, head_dim=16, num_experts=EXPERTS,
        moe_intermediate_size=INNER, rope_parameters=ROPE,
    ),
    "ernie4_5_moe": family(
        ernie, "Ernie4_5_Moe", moe_k=2, moe_intermediate_size=INNER, moe_num_experts=EXPERTS,
        moe_num_shared_experts=1, rope_parameters=ROPE,
    ),
    "exaone_moe": family(
        exaone, "ExaoneMoe", modules=2, config={"mtp_layer_types": [models.WIN, models.FULL]}, **SPARSE,
        num_experts=EXPERTS, num_shared_experts=1, n_group=1, topk_group=1, sliding_window=WINDOW,
        layer_types=[models.WIN, models.FULL], mlp_layer_types=["dense", "sparse"], rope_parameters=ROPE,
    ),
    "mellum": family(
        mellum, "Mellum", **SPARSE, num_experts=EXPERTS, norm_topk_prob=True, sliding_window=WINDOW,
        layer_types=[models.WIN, models.FULL], mlp_layer_types=["sparse"] * 2, num_nextn_predict_layers=1,
        rope_parameters={models.WIN: ROPE, models.FULL: ROPE},
    ),
    "mimo_v2": family(
        mimo_v2, "MiMoV2Flash", modules=3, **SPARSE, v_head_dim=D, n_routed_experts=EXPERTS, sliding_window=WINDOW,
        layer_types=[models.FULL, models.WIN], mlp_layer_types=["dense", "sparse"],
        rope_parameters={kind: {**ROPE, "partial_rotary_factor": 0.5} for kind in (models.WIN, models.FULL)},
    ),
    "glm_ocr": family(
        glm_ocr, "GlmOcr", vision=TOWER, rope_parameters={**ROPE, "mrope_section": [4, 2, 2]}
    ),
    "glm4v_moe": family(
        glm4v_moe, "Glm4vMoe", vision=TOWER, **SPARSE, n_routed_experts=EXPERTS,
        n_shared_experts=1, n_group=1, topk_group=1, attention_bias=False,
        rope_parameters={**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    ),
    "step3p7": family(
        step, "Step3p7", modules=3,
        vision=dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=16,
                    patch_size=4),
        moe_intermediate_size=INNER, share_expert_dim=INNER, n_routed_experts=EXPERTS, num_experts_per_tok=2,
        num_hidden_layers=3, mlp_layer_types=["dense", "sparse", "sparse"], swiglu_limits=[0, 0, 0.3],
        layer_types=[models.FULL, models.WIN, models.FULL], sliding_window=WINDOW,
        num_sliding_attention_heads=STEP_HEADS, num_nextn_predict_layers=3,
        mtp_layer_types=[models.WIN, models.FULL, models.WIN], mtp_mlp_layer_types=["dense"] * 3,
        rope_theta=[1e4, 1e4, 1e4], partial_rotary_factors=[0.5, 1.0, 0.5],
    ),
    "exaone4_5": family(
        exaone_4_5, "Exaone4_5_", vision=dict(TOWER, num_key_value_heads=2, fullatt_block_indexes=[0]),
        model_type="exaone4", sliding_window=WINDOW, sliding_window_pattern="LG",
        layer_types=[models.WIN, models.FULL], rope_parameters=ROPE,
    ),
    "nemotron_h": Family(nemotron, models.HYBRIDS["nemotron_h"]),
    "longcat_flash": family(
        longcat, "LongcatFlash", models.BASE, **MLA, num_layers=2, num_hidden_layers=4, ffn_hidden_size=96,
        expert_ffn_hidden_size=INNER, n_routed_experts=EXPERTS, zero_expert_num=2, moe_topk=2, head_dim=8,
        rope_parameters=ROPE,
    ),
}  # fmt: skip
