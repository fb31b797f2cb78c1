"""Writers of tiny draft checkpoints, one for each published format: exactly its tensors and its config.

`FLAVOURS` and `DFLASH` map a name to a `Flavour`. ``write(name, folder)`` makes its target, writes the checkpoint and
returns a `Written`; two calls give equal weights.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import models
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

V, H, I, HEADS, KV, D = models.VOCAB, 64, 96, 4, 2, 16
VD = 40
P_MASK = 91
LAYERS = 8
LLAMA = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": I, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": V,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "torch_dtype": "float16",
}  # fmt: skip


class Weights(dict):
    """Random tensors by published name; every scale is such that a block's outputs are about 1."""

    def __init__(self, seed: int = 0):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def linear(self, name: str, out: int, inputs: int, bias: bool = False) -> None:
        self[f"{name}.weight"] = self.normal(out, inputs) * inputs**-0.5
        if bias:
            self[f"{name}.bias"] = self.normal(out) * 0.3

    def norm(self, *names: str, size: int = H, around: float = 1.0) -> None:
        for name in names:
            self[f"{name}.weight"] = around + self.normal(size) * 0.3

    def layer(self, prefix: str, inputs: int = H, norms=("input_layernorm",), size: int = H, bias=(), qk_norm=False):
        """A decoder layer. inputs: width of what attention reads. bias: names of its projections that have one."""
        rows = {"q": HEADS * D, "k": KV * D, "v": KV * D}
        for part, out in rows.items():
            self.linear(f"{prefix}.self_attn.{part}_proj", out, inputs, bias=part in bias)
        self.linear(f"{prefix}.self_attn.o_proj", size, HEADS * D, bias="o" in bias)
        if qk_norm:
            self.norm(f"{prefix}.self_attn.q_norm", f"{prefix}.self_attn.k_norm", size=D)
        self.mlp(f"{prefix}.mlp", I, size)
        self.norm(*(f"{prefix}.{norm}" for norm in (*norms, "post_attention_layernorm")), size=size)

    def mlp(self, prefix: str, inner: int = I, size: int = H) -> None:
        self.linear(f"{prefix}.gate_proj", inner, size)
        self.linear(f"{prefix}.up_proj", inner, size)
        self.linear(f"{prefix}.down_proj", size, inner)

    def experts(self, prefix: str, count: int, inner: int, shared: str) -> None:
        """A mixture as published: each expert's matrices by themselves, a router and a shared expert."""
        self.linear(f"{prefix}.gate", count, H)
        for expert in range(count):
            self.mlp(f"{prefix}.experts.{expert}", inner)
        self.mlp(f"{prefix}.{shared}", inner)


@dataclass
class Written:
    """A checkpoint on disk: where, for which target, and what was written."""

    folder: Path
    target: nn.Module
    config: dict
    tensors: Weights


@dataclass(frozen=True)
class Flavour:
    """A format: the algorithm it is for, its target, and what makes its config and tensors."""

    algorithm: str
    target: Callable[[], nn.Module]
    make: Callable[[Weights, nn.Module], dict]
    files: str = "safetensors"
    options: dict = field(default_factory=dict)


def save(folder: Path, config: dict | None, tensors: dict[str, Tensor], files: str = "safetensors") -> None:
    """Write a checkpoint. files: "safetensors", "sharded" (two of them and an index), "bin" or "mistral"."""
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / ("params.json" if files == "mistral" else "config.json")).write_text(json.dumps(config))
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    if files == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif files == "mistral":
        save_file(tensors, folder / "consolidated.safetensors")
    elif files == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    else:
        names, shards = list(tensors), {}
        for number in (1, 2):
            shard = f"model-{number:05d}-of-00002.safetensors"
            held = names[number - 1 :: 2]
            save_file({name: tensors[name] for name in held}, folder / shard)
            shards.update(dict.fromkeys(held, shard))
        index = {"metadata": {}, "weight_map": shards}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write(name: str, folder: Path, **changes) -> Written:
    """Write a flavour's checkpoint. changes: of its config, after all else."""
    flavour = (FLAVOURS | PARALLEL | DFLASH | LINKED)[name]
    target, tensors = flavour.target(), Weights()
    config = {**flavour.make(tensors, target, **flavour.options), **changes}
    save(folder, config, tensors, flavour.files)
    if flavour.algorithm == "mtp":
        target.config._name_or_path = str(folder)
    return Written(folder, target, config, tensors)


def llama(**kwargs) -> nn.Module:
    return models.build("LlamaConfig", "LlamaForCausalLM", dict(models.GQA, num_hidden_layers=LAYERS, **kwargs))


# EAGLE-1 and EAGLE-2


def eagle(w: Weights, target, bias: bool | None = None, qkv_bias=False, embed=False) -> dict:
    """SafeAILab: no flag means a bias; heads of Qwen2 say qkv_bias."""
    w.linear("fc", H, 2 * H, bias=bias is not False)
    w.layer("layers.0", norms=(), bias="qkv" if qkv_bias else "")
    config = {**LLAMA, "architectures": ["LlamaForCausalLM"]}
    if embed:
        w["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    if bias is not None:
        config |= {"bias": bias, "rope_theta": 500000.0}
    return {**config, "qkv_bias": True} if qkv_bias else config


def eagle_layers(w: Weights, target) -> dict:
    """Two layers, of which the second has an input norm."""
    config = eagle(w, target, bias=False)
    w.layer("layers.1")
    return {**config, "num_hidden_layers": 2}


def eagle_vllm(w: Weights, target) -> dict:
    """vLLM's wrapper: a nested config and the target's output matrix."""
    w.linear("fc", H, 2 * H, bias=True)
    w.layer("model.layers.0", norms=())
    w["model.embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    w["lm_head.weight"] = target.get_output_embeddings().weight.detach().clone()
    return {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": dict(LLAMA), "eagle_fc_bias": True}


def eagle_speculators(w: Weights, target) -> dict:
    """speculators' form of HASS: norms everywhere."""
    w.linear("fusion_fc", H, 2 * H)
    w.layer("transformer")
    w.norm("embedding_layernorm", "pre_lm_head_layernorm")
    return {
        "architectures": ["EagleSpeculator"], "speculators_model_type": "eagle", "layernorms": True,
        "fusion_bias": False, "transformer_layer_config": dict(LLAMA),
        "speculators_config": {"algorithm": "eagle", "verifier": {"name_or_path": "tiny"}},
    }  # fmt: skip


def eagle_mistral(w: Weights, target) -> dict:
    """Mistral-Medium-3.5's, in Mistral's own format: two layers with all norms, YaRN, neither embedding nor output."""
    w.linear("eagle_linear", H, 2 * H)
    w.norm("norm")
    for number in range(2):
        layer = f"layers.{number}"
        for part, rows in (("q", HEADS * D), ("k", KV * D), ("v", KV * D)):
            w.linear(f"{layer}.attention.w{part}", rows, H)
        w.linear(f"{layer}.attention.wo", H, HEADS * D)
        for part in (1, 3):
            w.linear(f"{layer}.feed_forward.w{part}", I, H)
        w.linear(f"{layer}.feed_forward.w2", H, I)
        w.norm(f"{layer}.attention_norm", f"{layer}.ffn_norm")
    yarn = {"factor": 64.0, "original_max_position_embeddings": 64, "beta": 4.0, "alpha": 1.0, "apply_scale": False}
    return {
        "dim": H, "n_layers": 2, "head_dim": D, "hidden_dim": I, "n_heads": HEADS, "n_kv_heads": KV, "norm_eps": 1e-5,
        "rope_theta": 1000000.0, "vocab_size": V, "max_position_embeddings": 262144, "tied_embeddings": False,
        "yarn": yarn, "sliding_window": [None, 3], "q_lora_rank": None, "kv_lora_rank": None, "moe": None,
        "llama_4_scaling": None, "model_type": "transformer",
    }  # fmt: skip


# EAGLE-3


def draft_to_target(count: int = VD) -> Tensor:
    """The tokens that a head keeps, ascending."""
    return torch.randperm(V, generator=torch.Generator().manual_seed(7))[:count].sort().values


def vocabulary(w: Weights, rows: int = VD) -> None:
    """An output matrix of `rows`, with d2t (offsets) and t2d (a mask)."""
    ids = draft_to_target(rows)
    w.linear("lm_head", rows, H)
    w["d2t"] = ids - torch.arange(rows)
    w["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)


def midlayer(w: Weights, prefix: str = "midlayer", taps: int = 3, **kwargs) -> None:
    w.linear("fc", H, taps * H)
    w.layer(prefix, inputs=2 * H, norms=("hidden_norm", "input_layernorm"), **kwargs)
    w.norm("norm")


def eagle3(w: Weights, target) -> dict:
    """SafeAILab (yuhuili): no RoPE base, no taps in the config."""
    midlayer(w)
    vocabulary(w)
    return {**LLAMA, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": VD}


def eagle3_sglang(w: Weights, target, ids=(1, 2, 4), **changes) -> dict:
    """SGLang and SpecForge: taps in eagle_config, a RoPE base copied from the target, an embedding of their own."""
    midlayer(w)
    vocabulary(w)
    w["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    return {
        **LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VD, "rope_theta": 1000000.0,
        "head_dim": D, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids), "use_aux_hidden_state": True},
        **changes,
    }  # fmt: skip


def eagle3_sglang_layers(w: Weights, target) -> dict:
    """SGLang: further layers apart, with their input norm called hidden_norm."""
    midlayer(w, "model.midlayer")
    w.layer("model.additional_layers.0", norms=("hidden_norm",))
    vocabulary(w)
    config = {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VD, "num_hidden_layers": 2}
    return config


def eagle3_vllm_layers(w: Weights, target) -> dict:
    """vLLM: layers counted through."""
    midlayer(w, "layers.0")
    w.layer("layers.1")
    vocabulary(w)
    return {**LLAMA, "architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": VD, "num_hidden_layers": 2}


def eagle3_full(w: Weights, target, zeros=False) -> dict:
    """The whole vocabulary (yuhuili's Vicuna-13B): no d2t and t2d, or zeros."""
    midlayer(w)
    w.linear("lm_head", V, H)
    if zeros:
        w["d2t"], w["t2d"] = torch.zeros(V, dtype=torch.int64), torch.zeros(V, dtype=torch.bool)
    return {**LLAMA, "architectures": ["LlamaForCausalLM"], "draft_vocab_size": V}


def eagle3_borrowed(w: Weights, target) -> dict:
    """nvidia: no output matrix, draft_vocab_size null, ids of boundaries between layers."""
    midlayer(w)
    eagle_config = {"eagle_aux_hidden_state_layer_ids": [2, 3, 5], "use_aux_hidden_state": True}
    return {
        **LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": None, "eagle_config": eagle_config,
        "rope_theta": 150000, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    }  # fmt: skip


def eagle3_plain_state(w: Weights, target) -> dict:
    """nvidia, short context: the final state instead of fc."""
    midlayer(w)
    del w["fc.weight"]
    vocabulary(w)
    eagle_config = {"eagle_aux_hidden_state_layer_ids": [], "use_aux_hidden_state": False}
    return {**LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VD, "eagle_config": eagle_config}


def eagle31(w: Weights, target) -> dict:
    """EAGLE-3.1: a norm for each state, and the normed output goes round."""
    config = eagle3_sglang(w, target, fc_norm=True, norm_output=True)
    w.norm(*(f"fc_norm.{i}" for i in range(3)))
    return config


def eagle3_gpt_oss(w: Weights, target) -> dict:
    """nvidia's gpt-oss: one norm over all states, said in eagle_config."""
    config = eagle3_sglang(w, target)
    w.norm("input_norm", size=3 * H)
    config["eagle_config"] |= {"norm_before_fc": True, "return_hidden_post_norm": True}
    return config


def eagle3_wide(w: Weights, target) -> dict:
    """A draft of another hidden size than its target's, with an embedding of its own."""
    size = 48
    w.linear("fc", size, 3 * H)
    w.layer("midlayer", 2 * size, ("hidden_norm", "input_layernorm"), size)
    w.norm("norm", size=size)
    w["embed_tokens.weight"] = w.normal(V, size)
    w["lm_head.weight"] = w.normal(V, size)
    return {
        **LLAMA, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": V, "hidden_size": size,
        "target_hidden_size": H, "head_dim": D,
    }  # fmt: skip


def eagle3_llama3_rope(w: Weights, target) -> dict:
    """Llama-3.1's scaled RoPE, and a sliding window."""
    config = eagle3_sglang(w, target)
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    return {**config, "rope_theta": 500000.0, "rope_scaling": scaling, "sliding_window": 3, "use_sliding_window": True}


def eagle3_speculators(w: Weights, target, **flags) -> dict:
    """speculators (RedHatAI): nested, the normed state as residual unless it says otherwise."""
    midlayer(w, "layers.0")
    vocabulary(w)
    embedding = target.get_input_embeddings().weight.detach()
    w["embed_tokens.weight"] = embedding + w.normal(V, H) * 0.1 * embedding.std()
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": VD,
        "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "norm_before_fc": False,
        "transformer_layer_config": {**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        "speculators_config": {
            "algorithm": "eagle3", "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        },
        **flags,
    }  # fmt: skip


QWEN35_ROPE = {
    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1],
    "mrope_interleaved": True,
}  # fmt: skip


def eagle3_speculators_09(w: Weights, target) -> dict:
    """speculators 0.9 for Qwen3.5: two layers of Qwen3, the first with a window, four states with norms of their own,
    RoPE of several axes on half of each head, said for each type of layer."""
    w.linear("fc", H, 4 * H)
    w.norm(*(f"fc_norm.{i}" for i in range(4)), "norm")
    w.layer("layers.0", 2 * H, ("hidden_norm", "input_layernorm"), qk_norm=True)
    w.layer("layers.1", qk_norm=True)
    vocabulary(w)
    w["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    layer = {
        **LLAMA, "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": D, "attention_bias": False,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True,
        "max_window_layers": 0,
        "rope_parameters": {
            "sliding_attention": QWEN35_ROPE, "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }  # fmt: skip
    return {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "draft_vocab_size": VD, "target_hidden_size": None, "eagle_aux_hidden_state_layer_ids": [1, 3, 4, 8],
        "norm_before_residual": False, "norm_before_fc": False, "fc_norm": True, "norm_output": True,
        "embed_requires_grad": False, "transformer_layer_config": layer, "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3", "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "tiny", "architectures": ["Qwen3_5ForConditionalGeneration"]},
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
        },
    }  # fmt: skip


def p_eagle(w: Weights, target) -> dict:
    """amazon: vanilla layers behind the first, a state for masks, and their token as vLLM reads it."""
    config = eagle3_sglang(w, target, ptd_token_id=P_MASK, num_hidden_layers=2, num_depths=8)
    w.layer("layers.1")
    w["mask_hidden"] = w.normal(1, 1, 3 * H)
    return config


def p_eagle_speculators(w: Weights, target) -> dict:
    """speculators: said in the config."""
    config = eagle3_speculators(w, target, mask_token_id=P_MASK, embed_requires_grad=True)
    w["mask_hidden"] = w.normal(1, 1, 3 * H)
    return {**config, "speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"]}


LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 0.7, "mscale_all_dim": 0.4,
}  # fmt: skip


def latent_layer(w: Weights, prefix: str, inputs: int, norms: tuple[str, ...], low_rank_queries: bool = True) -> None:
    """A layer with multi-head latent attention and a dense MLP."""
    name, turned, values = f"{prefix}.self_attn", LATENT["qk_rope_head_dim"], LATENT["v_head_dim"]
    rank, nope = LATENT["kv_lora_rank"], LATENT["qk_nope_head_dim"]
    if low_rank_queries:
        w.linear(f"{name}.q_a_proj", LATENT["q_lora_rank"], inputs)
        w.norm(f"{name}.q_a_layernorm", size=LATENT["q_lora_rank"])
        w.linear(f"{name}.q_b_proj", HEADS * (nope + turned), LATENT["q_lora_rank"])
    else:
        w.linear(f"{name}.q_proj", HEADS * (nope + turned), inputs)
    w.linear(f"{name}.kv_a_proj_with_mqa", rank + turned, inputs)
    w.norm(f"{name}.kv_a_layernorm", size=rank)
    w.linear(f"{name}.kv_b_proj", HEADS * (nope + values), rank)
    w.linear(f"{name}.o_proj", H, HEADS * values)
    w.mlp(f"{prefix}.mlp")
    w.norm(*(f"{prefix}.{norm}" for norm in (*norms, "post_attention_layernorm")))


def eagle3_mla(w: Weights, target) -> dict:
    """lightseekorg's Kimi-K2.5, read by vLLM and SGLang: the whole vocabulary, YaRN, keys of the target's mixture."""
    w.linear("fc", H, 3 * H)
    latent_layer(w, "layers.0", 2 * H, ("hidden_norm", "input_layernorm"))
    w.norm("norm")
    w.linear("lm_head", V, H)
    w["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    return {
        **LLAMA, **LATENT, "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2",
        "num_key_value_heads": HEADS, "draft_vocab_size": V, "rope_theta": 50000.0, "rope_scaling": YARN,
        "n_routed_experts": 384, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
        "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True, "aux_loss_alpha": 0.001,
        "ep_size": 1, "num_experts_per_tok": 8, "num_nextn_predict_layers": 0, "attention_bias": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "use_aux_hidden_state": True},
    }  # fmt: skip


def eagle31_mla(w: Weights, target) -> dict:
    """lightseekorg's Kimi-K2.6: the same with the norms of EAGLE-3.1."""
    config = eagle3_mla(w, target)
    w.norm(*(f"fc_norm.{i}" for i in range(3)))
    return {**config, "fc_norm": True, "norm_output": True}


def eagle3_mla_specforge(w: Weights, target) -> dict:
    """SpecForge's DeepseekV3ForCausalLMEagle3: a part of the vocabulary, queries of full rank, no scaling of RoPE."""
    w.linear("fc", H, 3 * H)
    latent_layer(w, "midlayer", 2 * H, ("hidden_norm", "input_layernorm"), low_rank_queries=False)
    w.norm("norm")
    vocabulary(w)
    return {
        **LLAMA, **LATENT, "q_lora_rank": None, "architectures": ["DeepseekV3ForCausalLMEagle3"],
        "model_type": "deepseek_v3", "draft_vocab_size": VD, "rope_theta": 10000.0, "rope_scaling": None,
        "qk_head_dim": 24, "head_dim": 8, "rope_interleave": True,
    }  # fmt: skip


def eagle3_mla_layers(w: Weights, target) -> dict:
    """nvidia's Model-Optimizer and vLLM: a second layer, which reads H numbers and has no norm of the state."""
    config = eagle3_mla(w, target)
    latent_layer(w, "layers.1", H, ("input_layernorm",))
    return {**config, "num_hidden_layers": 2}


def eagle3_deepspec(w: Weights, target) -> dict:
    """DeepSpec: a Qwen3 layer, five states, copies of the target's embedding and output matrix."""
    midlayer(w, "layers.0", taps=5, qk_norm=True)
    w["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    w["lm_head.weight"] = target.get_output_embeddings().weight.detach().clone()
    return {
        **LLAMA, "model_type": "qwen3", "architectures": ["Qwen3Eagle3Model"], "head_dim": D, "rope_theta": 1000000,
        "target_layer_ids": [0, 2, 3, 5, 7], "num_target_layers": LAYERS, "layer_types": ["full_attention"],
    }  # fmt: skip


# Multi-token prediction


def own(w: Weights, target) -> dict:
    """The tensors that the target's own checkpoint has besides."""
    w["model.embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    w["lm_head.weight"] = target.get_output_embeddings().weight.detach().clone()
    w.norm("model.norm")
    w.layer("model.layers.0")
    return target.config.to_dict()


def nextn(w: Weights, target, at: int) -> str:
    """What DeepSeek-V3 and GLM-4.5 share: names around layer `at`, and copies of embedding and output matrix."""
    prefix = f"model.layers.{at}"
    w.norm(f"{prefix}.enorm", f"{prefix}.hnorm", f"{prefix}.shared_head.norm")
    w.linear(f"{prefix}.eh_proj", H, 2 * H)
    w.norm(f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm")
    w[f"{prefix}.embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    w[f"{prefix}.shared_head.head.weight"] = target.get_output_embeddings().weight.detach().clone()
    return prefix


def mtp_deepseek(w: Weights, target, export=False) -> dict:
    """DeepSeek-V3; export: as lmsys' NextN, alone and called layer 0."""
    config = target.config.to_dict() if export else own(w, target)
    prefix = nextn(w, target, 0 if export else target.config.num_hidden_layers)
    c, attention = target.config, f"{prefix}.self_attn"
    w.linear(f"{attention}.q_a_proj", c.q_lora_rank, H)
    w.norm(f"{attention}.q_a_layernorm", size=c.q_lora_rank)
    w.linear(f"{attention}.q_b_proj", HEADS * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank)
    w.linear(f"{attention}.kv_a_proj_with_mqa", c.kv_lora_rank + c.qk_rope_head_dim, H)
    w.norm(f"{attention}.kv_a_layernorm", size=c.kv_lora_rank)
    w.linear(f"{attention}.kv_b_proj", HEADS * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    w.linear(f"{attention}.o_proj", H, HEADS * c.v_head_dim)
    w.experts(f"{prefix}.mlp", c.n_routed_experts, c.moe_intermediate_size, "shared_experts")
    w[f"{prefix}.mlp.gate.e_score_correction_bias"] = w.normal(c.n_routed_experts) * 0.2
    return {**config, "num_nextn_predict_layers": 1}


def mtp_glm(w: Weights, target) -> dict:
    """GLM-4.5: biases and norms of queries and keys, RoPE of half of each head."""
    config = own(w, target)
    prefix = nextn(w, target, target.config.num_hidden_layers)
    for part, rows in (("q", HEADS * D), ("k", KV * D), ("v", KV * D)):
        w.linear(f"{prefix}.self_attn.{part}_proj", rows, H, bias=True)
    w.linear(f"{prefix}.self_attn.o_proj", H, HEADS * D)
    w.norm(f"{prefix}.self_attn.q_norm", f"{prefix}.self_attn.k_norm", size=D)
    w.experts(f"{prefix}.mlp", target.config.n_routed_experts, target.config.moe_intermediate_size, "shared_experts")
    w[f"{prefix}.mlp.gate.e_score_correction_bias"] = w.normal(target.config.n_routed_experts) * 0.2
    return {**config, "num_nextn_predict_layers": 1}


def mtp_mimo(w: Weights, target) -> dict:
    """MiMo-7B: a Qwen2 layer, numbered from 0, [state; embedding]."""
    config = own(w, target)
    prefix = "model.mtp_layers.0"
    w.norm(*(f"{prefix}.{part}_layernorm" for part in ("token", "hidden", "final")))
    w.linear(f"{prefix}.input_proj", H, 2 * H)
    w.layer(prefix, bias="qkv")
    return {**config, "num_nextn_predict_layers": 1, "architectures": ["MiMoForCausalLM"]}


def mtp_qwen(w: Weights, target) -> dict:
    """Qwen3-Next: gated attention, norms stored less 1, no embedding."""
    config = own(w, target)
    w.linear("mtp.fc", H, 2 * H)
    layer, around = "mtp.layers.0", 0.0
    w.norm("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm", around=around)
    w.norm(f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", around=around)
    w.norm(f"{layer}.self_attn.q_norm", f"{layer}.self_attn.k_norm", size=D, around=around)
    for part, rows in (("q", 2 * HEADS * D), ("k", KV * D), ("v", KV * D)):
        w.linear(f"{layer}.self_attn.{part}_proj", rows, H)
    w.linear(f"{layer}.self_attn.o_proj", H, HEADS * D)
    w.experts(f"{layer}.mlp", target.config.num_experts, target.config.moe_intermediate_size, "shared_expert")
    w.linear(f"{layer}.mlp.shared_expert_gate", 1, H)
    return config


def mtp_speculators(w: Weights, target) -> dict:
    """speculators 0.9: Qwen's modules by the names of MiMo; ``convert/mtp/converter.py`` has the table."""
    w.layer("mtp_layers.0", qk_norm=True)
    w.linear("mtp_layers.0.input_proj", H, 2 * H)
    w.norm(*(f"mtp_layers.0.{part}_layernorm" for part in ("token", "hidden", "final")))
    return {
        "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp", "speculators_version": "0.9.0",
        "num_nextn_predict_layers": 1, "transformer_layer_config": target.config.to_diff_dict(),
    }  # fmt: skip


def glm() -> nn.Module:
    config = dict(
        models.GQA16, n_routed_experts=8, n_shared_experts=1, n_group=2, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=32, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    )  # fmt: skip
    return models.build("Glm4MoeConfig", "Glm4MoeForCausalLM", config)


def qwen35() -> nn.Module:
    linear = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
    config = dict(
        models.GQA16, **models.MOE, **linear, shared_expert_intermediate_size=32, layer_types=[models.LIN, models.FULL]
    )
    return models.build("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", config)


FLAVOURS = {
    "eagle": Flavour("eagle", llama, eagle, "bin"),
    "eagle_no_bias": Flavour("eagle", llama, eagle, options={"bias": False, "embed": True}),
    "eagle_qwen2": Flavour("eagle", models.ADMITTED["qwen2"], eagle, "bin", {"bias": True, "qkv_bias": True}),
    "eagle_layers": Flavour("eagle", llama, eagle_layers),
    "eagle_vllm": Flavour("eagle", llama, eagle_vllm),
    "eagle_speculators": Flavour("eagle", llama, eagle_speculators),
    "eagle_mistral": Flavour("eagle", llama, eagle_mistral, "mistral"),
    "eagle3": Flavour("eagle3", llama, eagle3, "bin"),
    "eagle3_sglang": Flavour("eagle3", llama, eagle3_sglang, "sharded"),
    "eagle3_sglang_layers": Flavour("eagle3", llama, eagle3_sglang_layers),
    "eagle3_vllm_layers": Flavour("eagle3", llama, eagle3_vllm_layers),
    "eagle3_full": Flavour("eagle3", llama, eagle3_full, "bin"),
    "eagle3_full_zeros": Flavour("eagle3", llama, eagle3_full, options={"zeros": True}),
    "eagle3_borrowed": Flavour("eagle3", llama, eagle3_borrowed),
    "eagle3_plain_state": Flavour("eagle3", llama, eagle3_plain_state),
    "eagle31": Flavour("eagle3", llama, eagle31),
    "eagle3_gpt_oss": Flavour("eagle3", llama, eagle3_gpt_oss),
    "eagle3_wide": Flavour("eagle3", llama, eagle3_wide),
    "eagle3_llama3_rope": Flavour("eagle3", llama, eagle3_llama3_rope),
    "eagle3_speculators": Flavour("eagle3", llama, eagle3_speculators),
    "eagle3_speculators_31": Flavour(
        "eagle3", llama, eagle3_speculators,
        options={"norm_before_residual": False, "norm_output": True, "embed_requires_grad": True},
    ),
    "eagle3_speculators_09": Flavour("eagle3", llama, eagle3_speculators_09),
    "eagle3_deepspec": Flavour("eagle3", llama, eagle3_deepspec),
    "eagle3_mla": Flavour("eagle3", llama, eagle3_mla),
    "eagle31_mla": Flavour("eagle3", llama, eagle31_mla),
    "eagle3_mla_specforge": Flavour("eagle3", llama, eagle3_mla_specforge),
    "eagle3_mla_layers": Flavour("eagle3", llama, eagle3_mla_layers),
    "mtp_deepseek": Flavour("mtp", models.ADMITTED["deepseek_v3"], mtp_deepseek, "sharded"),
    "mtp_deepseek_nextn": Flavour("mtp", models.ADMITTED["deepseek_v3"], mtp_deepseek, options={"export": True}),
    "mtp_glm": Flavour("mtp", glm, mtp_glm),
    "mtp_mimo": Flavour("mtp", models.ADMITTED["qwen2"], mtp_mimo, "bin"),
    "mtp_speculators": Flavour("mtp", models.ADMITTED["qwen3"], mtp_speculators),
    "mtp_qwen": Flavour("mtp", models.HYBRIDS["qwen3_next"], mtp_qwen, "sharded"),
    "mtp_qwen35": Flavour("mtp", qwen35, mtp_qwen),
}  # fmt: skip

PARALLEL = {
    "p_eagle": Flavour("p_eagle", llama, p_eagle),
    "p_eagle_speculators": Flavour("p_eagle", llama, p_eagle_speculators),
}


# DFlash

MASK = 93
BLOCK = 6
QWEN3 = {**LLAMA, "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": D, "rope_theta": 20000.0}


def blocks(w: Weights, taps: int = 3, layers: int = 2, bias: str = "") -> None:
    """What every DFlash draft has."""
    w.linear("fc", H, taps * H)
    w.norm("hidden_norm", "norm")
    for number in range(layers):
        w.layer(f"layers.{number}", qk_norm=True, bias=bias)


def dflash(w: Weights, target, flags=None, **changes) -> dict:
    """z-lab's first drafts: block_size beside dflash_config."""
    bias = "qkvo" if changes.get("attention_bias") else ""
    blocks(w, bias=bias)
    return {
        **QWEN3, "architectures": ["DFlashDraftModel"], "num_target_layers": LAYERS, "block_size": BLOCK,
        "layer_types": ["full_attention"] * 2, "sliding_window": None, "use_sliding_window": False,
        "dflash_config": {"target_layer_ids": [1, 3, 6], "mask_token_id": MASK, **(flags or {})}, **changes,
    }  # fmt: skip


def dflash_sliding(w: Weights, target, **flags) -> dict:
    """z-lab's later drafts: block_size in dflash_config, layers with sliding windows."""
    types = ["sliding_attention", "full_attention"]
    config = dflash(w, target, {"block_size": BLOCK, **flags}, layer_types=types, sliding_window=7)
    del config["block_size"]
    return config


def dflash_without_taps(w: Weights, target) -> dict:
    """A config that leaves the states to the rule: layers 1 and 5, here."""
    config = dflash(w, target)
    w.linear("fc", H, 2 * H)
    del config["dflash_config"]["target_layer_ids"]
    return config


def dflash_mimo(w: Weights, target) -> dict:
    """MiMo: windows without layer_types, and an embedding of its own for the mask, here beside the other tensors."""
    config = dflash(w, target, {"use_swa": True, "swa_window_size": 9})
    w["mask_embedding"] = w.normal(H)
    del config["layer_types"]
    return config


def dflash_deepspec(w: Weights, target, **changes) -> dict:
    """DeepSpec: flat, with copies of the target's embedding and output matrix; the first slot drafts, too."""
    blocks(w)
    w["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    w["lm_head.weight"] = target.get_output_embeddings().weight.detach().clone()
    return {
        **QWEN3, "architectures": ["Qwen3DSparkModel"], "num_target_layers": LAYERS, "block_size": BLOCK,
        "mask_token_id": MASK, "target_layer_ids": [-1, 3, 6], "layer_types": ["full_attention"] * 2,
        "num_anchors": 512, "markov_rank": 0, "enable_confidence_head": False, **changes,
    }  # fmt: skip


def dflash_confident(w: Weights, target) -> dict:
    """DeepSpec without a Markov head: acceptance is predicted from the place alone."""
    w.linear("confidence_head.proj", 1, H, bias=True)
    return dflash_deepspec(w, target, enable_confidence_head=True, confidence_head_with_markov=False)


def dflash_speculators(w: Weights, target, kept=False, types=("full_attention",) * 2, **changes) -> dict:
    """speculators (RedHatAI): nested, layers named by their inputs; kept: it drafts some tokens only."""
    blocks(w)
    if kept:
        vocabulary(w)
    return {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": BLOCK,
        "draft_vocab_size": VD if kept else V, "aux_hidden_state_layer_ids": [2, 4, 7], "mask_token_id": MASK,
        "sample_from_anchor": False, "target_hidden_size": None,
        "transformer_layer_config": {
            **QWEN3, "rope_parameters": {"rope_type": "default", "rope_theta": 20000.0},
            "layer_types": list(types), "sliding_window": 7,
        },
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "tiny"}},
        **changes,
    }  # fmt: skip


DFLASH = {
    "dflash": Flavour("dflash", llama, dflash),
    "dflash_bin": Flavour("dflash", llama, dflash, "bin"),
    "dflash_bias": Flavour("dflash", llama, dflash, "sharded", {"attention_bias": True}),
    "dflash_sliding": Flavour("dflash", llama, dflash_sliding),
    "dflash_bidirectional": Flavour("dflash", llama, dflash_sliding, options={"causal": False}),
    "dflash_causal": Flavour("dflash", llama, dflash, options={"flags": {"causal": True}}),
    "jetspec": Flavour(
        "dflash", llama, dflash,
        options={"flags": {"block_size": BLOCK, "causal_head": True, "target_hidden_size": H}},
    ),
    "dflash_anchor": Flavour("dflash", llama, dflash, options={"flags": {"sample_from_anchor": True}}),
    "dflash_scaled": Flavour(
        "dflash", llama, dflash,
        options={"flags": {"input_embedding_scale": 1.7, "output_multiplier": 0.6, "final_logit_softcapping": 2.0}},
    ),
    "dflash_without_taps": Flavour("dflash", llama, dflash_without_taps),
    "dflash_mimo": Flavour("dflash", llama, dflash_mimo),
    "dflash_deepspec": Flavour("dflash", llama, dflash_deepspec),
    "dflash_confident": Flavour("dflash", llama, dflash_confident),
    "dflash_speculators": Flavour("dflash", llama, dflash_speculators),
    "dflash_speculators_shifted": Flavour(
        "dflash", llama, dflash_speculators, options={"shift_label": True, "sample_from_anchor": None}
    ),
    "dflash_speculators_kept": Flavour(
        "dflash", llama, dflash_speculators,
        options={"kept": True, "types": ("full_attention", "sliding_attention")},
    ),
    "dflash_speculators_non_causal": Flavour(
        "dflash", llama, dflash_speculators,
        options={"types": ("sliding_attention",) * 2, "sliding_window_non_causal": True},
    ),
}  # fmt: skip


# DFlash 2, DSpark and Domino, whose drafts depend on each other

RANK, CANDIDATES = 8, 4


def selector(w: Weights) -> None:
    """DFlash 2's convolutions around both parts of each layer, and its selector."""
    for number in range(2):
        for part in ("attention_conv", "mlp_conv"):
            w[f"layers.{number}.{part}.base_kernel"] = w.normal(2, 2, H) * 0.3 + torch.tensor([1.0, 0.0])[:, None]
            w.linear(f"layers.{number}.{part}.kernel_projection", 2 * 2 * H // 16, H)
    w.linear("candidate_selector.hidden_projection", RANK, H)
    for codebook in ("predecessor", "successor"):
        w[f"candidate_selector.{codebook}_codebook"] = w.normal(V, RANK)


def dflash2(w: Weights, target) -> dict:
    """z-lab: convolutions around both parts of each layer, a selector over the likeliest tokens of each place."""
    blocks(w)
    selector(w)
    flags = {
        "block_size": BLOCK, "conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": RANK,
        "selector_top_k": CANDIDATES, "final_logit_softcapping": 20.0, "output_multiplier": 0.7,
        "mask_token_id": MASK, "target_layer_ids": [1, 3, 6],
    }  # fmt: skip
    return {
        **QWEN3, "architectures": ["DFlash2DraftModel"], "num_target_layers": LAYERS, "is_causal": False,
        "layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "use_sliding_window": True,
        "dflash_config": flags,
    }  # fmt: skip


def dflash2_speculators(w: Weights, target) -> dict:
    """speculators 0.9: nested; all layers slide, and see their block both ways."""
    config = dflash_speculators(
        w, target, types=("sliding_attention",) * 2, architectures=["DFlash2DraftModel"],
        speculators_model_type="dflash2", sliding_window_non_causal=True, conv_kernel_size=2, conv_group_size=16,
        selector_rank=RANK, selector_top_k=CANDIDATES,
    )  # fmt: skip
    selector(w)
    return config


def markov(w: Weights, head: str, rows: int = V) -> None:
    """The tables of DSpark's head, and what its kind has besides."""
    w["markov_head.markov_w1.weight"], w["markov_head.markov_w2.weight"] = w.normal(V, RANK), w.normal(rows, RANK)
    if head == "gated":
        w.linear("markov_head.gate_proj", RANK, H + RANK, bias=True)
    if head == "rnn":
        w.linear("markov_head.joint_proj", 3 * RANK, 2 * RANK + H, bias=True)


def dspark(w: Weights, target, head="vanilla") -> dict:
    """DeepSpec: flat, with copies of the target's embedding and output matrix, and a prediction of acceptance."""
    config = dflash_deepspec(w, target, markov_rank=RANK, markov_head_type=head, enable_confidence_head=True)
    markov(w, head)
    w.linear("confidence_head.proj", 1, H + RANK, bias=True)
    return {**config, "confidence_head_with_markov": True}


def dspark_projector(w: Weights, target) -> dict:
    """SpecForge: said in dflash_config; it drafts some tokens only."""
    flags = {
        "projector_type": "dspark", "markov_rank": RANK, "markov_head_type": "gated", "sample_from_anchor": True,
        "enable_confidence_head": True, "confidence_head_with_markov": True,
    }  # fmt: skip
    config = dflash(w, target, flags, draft_vocab_size=VD)
    markov(w, "gated", VD)
    vocabulary(w)
    w.linear("confidence_head.proj", 1, H + RANK, bias=True)
    return config


def dspark_speculators(w: Weights, target) -> dict:
    """speculators: layers named by their inputs; the prediction of acceptance does not read the token before."""
    config = dflash_speculators(
        w, target, architectures=["DSparkSpeculator"], speculators_model_type="dspark", sample_from_anchor=True,
        markov_rank=RANK, markov_head_type="vanilla", enable_confidence_head=True, confidence_head_with_markov=False,
    )  # fmt: skip
    markov(w, "vanilla")
    w.linear("confidence_head.proj", 1, H, bias=True)
    return config


def domino(w: Weights, target, **flags) -> dict:
    """SpecForge: a GRU over the tokens before, and a readout of its state and the place's."""
    size = 12
    flags = {"projector_type": "domino", "emb_dim": RANK, "gru_hidden_dim": size, "shift_label": False, **flags}
    config = dflash(w, target, flags)
    w.linear("prefix_gru", 3 * size, H)
    w["prefix_gru.weight_ih_l0"] = w.pop("prefix_gru.weight")
    w["prefix_gru.weight_hh_l0"] = w.normal(3 * size, size) * size**-0.5
    w.linear("embed_proj.0", RANK, H + size)
    w["embed_proj.2.weight"] = w.normal(V, RANK) * 2
    return config


LINKED = {
    "dflash2": Flavour("dflash", llama, dflash2),
    "dflash2_speculators": Flavour("dflash", llama, dflash2_speculators),
    "dspark": Flavour("dflash", llama, dspark),
    "dspark_gated": Flavour("dflash", llama, dspark, options={"head": "gated"}),
    "dspark_rnn": Flavour("dflash", llama, dspark, options={"head": "rnn"}),
    "dspark_projector": Flavour("dflash", llama, dspark_projector),
    "dspark_speculators": Flavour("dflash", llama, dspark_speculators),
    "domino": Flavour("dflash", llama, domino),
    "domino_shifted": Flavour(
        "dflash", llama, domino, options={"shift_label": True, "pure_draft_prefix_len": 2}
    ),
}  # fmt: skip


def loader(folder: Path, read: Callable[[Written], tuple]) -> Callable[[str], tuple]:
    """A function: name of a flavour -> what was written below `folder`, and what `read` makes of it, once a name."""

    @functools.cache
    def load(name):
        written = write(name, folder / name)
        return written, *read(written)

    return load
