"""Writers of tiny draft checkpoints, one for each published format: exactly its tensors and its config.

`FLAVOURS`, `PARALLEL`, `DFLASH` and `LINKED` map a name to a `Flavour`. ``write(name, folder)`` makes its target,
writes the checkpoint and returns a `Written`; two calls give equal weights.
"""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import models
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

V, H, I, HEADS, KV, D = models.VOCAB, 64, 96, 4, 2, 16
VD = 40
P_MASK = 91
LAYERS = 8
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
TARGETS_LATENT = dict(LATENT, q_lora_rank=32, kv_lora_rank=24)
"""The sizes of targets with latent attention, and of their modules of multi-token prediction."""


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

    def norm(self, *names: str, size: int = H) -> None:
        for name in names:
            self[f"{name}.weight"] = 1 + self.normal(size) * 0.3

    def attention(self, name: str, inputs: int = H, size: int = H, heads=(HEADS, HEADS, KV), bias="", qk_norm=False):
        """Grouped queries. heads: how many the outputs, the query matrix and the keys have. bias: matrices with one."""
        for part, count in zip("qkv", (*heads[1:], heads[2])):
            self.linear(f"{name}.{part}_proj", count * D, inputs, bias=part in bias)
        self.linear(f"{name}.o_proj", size, heads[0] * D, bias="o" in bias)
        if qk_norm:
            self.norm(f"{name}.q_norm", f"{name}.k_norm", size=D)

    def latent(self, name: str, sizes: dict, inputs: int = H) -> None:
        """DeepSeek's multi-head latent attention, whose queries have full rank if `sizes` has none for them."""
        rank, kept, turned = (sizes[key] for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"))
        queries, query_rank = HEADS * (kept + turned), sizes["q_lora_rank"]
        if query_rank:
            self.linear(f"{name}.q_a_proj", query_rank, inputs)
            self.norm(f"{name}.q_a_layernorm", size=query_rank)
        self.linear(f"{name}.q_b_proj" if query_rank else f"{name}.q_proj", queries, query_rank or inputs)
        self.linear(f"{name}.kv_a_proj_with_mqa", rank + turned, inputs)
        self.norm(f"{name}.kv_a_layernorm", size=rank)
        self.linear(f"{name}.kv_b_proj", HEADS * (kept + sizes["v_head_dim"]), rank)
        self.linear(f"{name}.o_proj", H, HEADS * sizes["v_head_dim"])

    def layer(self, prefix: str, inputs: int = H, norms=("input_layernorm",), size: int = H, latent=None, **attention):
        """A decoder layer. inputs: width of what attention reads. latent: sizes of latent attention, if it has that."""
        if latent:
            self.latent(f"{prefix}.self_attn", latent, inputs)
        else:
            self.attention(f"{prefix}.self_attn", inputs, size, **attention)
        self.mlp(f"{prefix}.mlp", I, size)
        self.norm(*(f"{prefix}.{norm}" for norm in (*norms, "post_attention_layernorm")), size=size)

    def mlp(self, prefix: str, inner: int = I, size: int = H) -> None:
        self.linear(f"{prefix}.gate_proj", inner, size)
        self.linear(f"{prefix}.up_proj", inner, size)
        self.linear(f"{prefix}.down_proj", size, inner)

    def experts(self, prefix: str, count: int, inner: int = 32, shared: str = "shared_experts", bias: str = "") -> None:
        """A mixture as published: each expert's matrices by themselves, a router, shared experts if they have a name,
        and the bias of the router if it has one."""
        self.linear(f"{prefix}.gate", count, H)
        for name in (*(f"experts.{expert}" for expert in range(count)), *([shared] if shared else ())):
            self.mlp(f"{prefix}.{name}", inner)
        if bias:
            self[f"{prefix}.{bias}"] = self.normal(count) * 0.2

    def copy(self, model: nn.Module, embedding: str = "", output: str = "") -> None:
        """Copies of a model's embedding and output matrix, by these names."""
        if embedding:
            self[f"{embedding}.weight"] = model.get_input_embeddings().weight.detach().clone()
        if output:
            self[f"{output}.weight"] = model.get_output_embeddings().weight.detach().clone()

    def vocabulary(self, rows: int = VD) -> None:
        """An output matrix of `rows`, with d2t (offsets) and t2d (a mask)."""
        ids = draft_to_target(rows)
        self.linear("lm_head", rows, H)
        self["d2t"] = ids - torch.arange(rows)
        self["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)


def draft_to_target(count: int = VD) -> Tensor:
    """The tokens that a head keeps, ascending."""
    return torch.randperm(V, generator=torch.Generator().manual_seed(7))[:count].sort().values


@dataclass
class Written:
    """A checkpoint on disk: where, for which target, and what was written."""

    folder: Path
    target: nn.Module
    config: dict
    tensors: Weights


@dataclass(frozen=True)
class Flavour:
    """A format: the algorithm it is for, what makes its tensors, its config, or what makes it of the target."""

    algorithm: str
    make: Callable[[Weights, nn.Module], None]
    config: dict | Callable[[nn.Module], dict]
    files: str
    target: Callable[[], nn.Module]


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


def write(name: str, folder: Path, change: Callable[[Weights], None] | None = None, files="", **config) -> Written:
    """Write a flavour's checkpoint. change: changes its tensors. files: see `save`. config: further keys."""
    flavour = (FLAVOURS | PARALLEL | DFLASH | LINKED)[name]
    target, tensors = flavour.target(), Weights()
    flavour.make(tensors, target)
    config = {**(flavour.config(target) if callable(flavour.config) else flavour.config), **config}
    if change:
        change(tensors)
    for path in folder.glob("*.*") if change or files else ():  # of another checkpoint
        path.unlink()
    save(folder, config, tensors, files or flavour.files)
    if flavour.algorithm == "mtp":
        target.config._name_or_path = str(folder)
    return Written(folder, target, config, tensors)


def loader(folder: Path, read: Callable[[Written], tuple]) -> Callable[[str], tuple]:
    """A function: name of a flavour -> what was written below `folder`, and what `read` makes of it, once a name."""

    @functools.cache
    def load(name):
        written = write(name, folder / name)
        return written, *read(written)

    return load


def llama(**kwargs) -> nn.Module:
    return models.build("LlamaConfig", "LlamaForCausalLM", dict(models.GQA, num_hidden_layers=LAYERS, **kwargs))


def flavours(algorithm: str, make: Callable) -> Callable[..., Flavour]:
    """What makes flavours of an algorithm, from a config and options of `make`."""

    def flavour(config, files="safetensors", target=llama, **options):
        return Flavour(algorithm, partial(make, **options), config, files, target)

    return flavour


LLAMA = {
    "model_type": "llama", "hidden_size": H, "intermediate_size": I, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "num_hidden_layers": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": V,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "torch_dtype": "float16",
}  # fmt: skip
HEAD = {**LLAMA, "architectures": ["LlamaForCausalLM"]}


def speculators(kind: str, layer: dict, **config) -> dict:
    """The config of a draft of speculators, with that of its layers inside."""
    return {
        "architectures": [f"{kind}Speculator"], "speculators_model_type": kind.lower(), "target_hidden_size": None,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": kind.lower(), "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        },
        **config,
    }  # fmt: skip


# EAGLE-1 and EAGLE-2


def eagle(w: Weights, target, prefix="layers.0", fc="fc", norms=(), outer=(), further=(), bias=True, qkv="", copies=()):
    """norms: names in the first layer. outer: norms outside the layers. further: layers with an input norm."""
    w.linear(fc, H, 2 * H, bias=bias)
    w.layer(prefix, norms=norms, bias=qkv)
    for layer in further:
        w.layer(layer)
    w.norm(*outer)
    w.copy(target, *copies)


MISTRALS_NAMES = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def eagle_mistral(w: Weights, target) -> None:
    """Mistral-Medium-3.5's, in Mistral's own format: two layers with all norms, YaRN, neither embedding nor output."""
    w.linear("eagle_linear", H, 2 * H)
    w.norm("norm")
    for number in range(2):
        w.layer(f"layers.{number}")
        for name, own in MISTRALS_NAMES.items():
            w[f"layers.{number}.{own}.weight"] = w.pop(f"layers.{number}.{name}.weight")


MISTRAL = {
    "dim": H, "n_layers": 2, "head_dim": D, "hidden_dim": I, "n_heads": HEADS, "n_kv_heads": KV, "norm_eps": 1e-5,
    "rope_theta": 1000000.0, "vocab_size": V, "max_position_embeddings": 262144, "tied_embeddings": False,
    "yarn": {"factor": 64.0, "original_max_position_embeddings": 64, "beta": 4.0, "alpha": 1.0, "apply_scale": False},
    "sliding_window": [None, 3], "q_lora_rank": None, "kv_lora_rank": None, "moe": None, "llama_4_scaling": None,
    "model_type": "transformer",
}  # fmt: skip
of_eagle = flavours("eagle", eagle)
EAGLE = {
    "eagle": of_eagle(HEAD, "bin"),  # SafeAILab: no flag means a bias; heads of Qwen2 say qkv_bias
    "eagle_no_bias": of_eagle({**HEAD, "bias": False, "rope_theta": 500000.0}, bias=False, copies=["embed_tokens"]),
    "eagle_qwen2": of_eagle(
        {**HEAD, "bias": True, "rope_theta": 500000.0, "qkv_bias": True}, "bin", models.ADMITTED["qwen2"], qkv="qkv"
    ),
    "eagle_layers": of_eagle(
        {**HEAD, "bias": False, "rope_theta": 500000.0, "num_hidden_layers": 2}, bias=False, further=["layers.1"]
    ),
    "eagle_vllm": of_eagle(  # a wrapper with a nested config
        {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": LLAMA, "eagle_fc_bias": True},
        prefix="model.layers.0", copies=["model.embed_tokens", "lm_head"],
    ),
    "eagle_speculators": of_eagle(  # their form of HASS: norms everywhere
        speculators("Eagle", LLAMA, layernorms=True, fusion_bias=False), prefix="transformer", fc="fusion_fc",
        norms=["input_layernorm"], outer=["embedding_layernorm", "pre_lm_head_layernorm"], bias=False,
    ),
    "eagle_mistral": flavours("eagle", eagle_mistral)(MISTRAL, "mistral"),
}  # fmt: skip


# EAGLE-3 and P-EAGLE


def eagle3(
    w: Weights, target, prefix="midlayer", taps=3, rows=VD, copies=(), noise=0.0, further=(), norms=(), joined=(),
    size=H, masks=False, **layer,
):  # fmt: skip
    """Layers of which the first reads the normed embedding and the normed state.

    taps: states that fc joins; 0: there is no fc.
    rows: how many the output matrix has; None: there is none.
    noise: what is added to the embedding, in its standard deviations.
    further: name and input norm of other layers.
    joined: norms of all joined states.
    size: the hidden size; another one than the target's needs another embedding.
    """
    if taps:
        w.linear("fc", size, taps * H)
    w.layer(prefix, 2 * size, ("hidden_norm", "input_layernorm"), size, **layer)
    w.norm("norm", size=size)
    if rows == VD:
        w.vocabulary()
    elif rows:
        w.linear("lm_head", rows, size)
    w.copy(target, *copies)
    if noise:
        w["embed_tokens.weight"] += noise * w["embed_tokens.weight"].std() * w.normal(V, H)
    if size != H:
        w["embed_tokens.weight"] = w.normal(V, size)
    w.norm(*norms)
    w.norm(*joined, size=3 * H)
    for name, norm in further:
        w.layer(name, norms=[norm], **layer)
    if masks:
        w["mask_hidden"] = w.normal(1, 1, 3 * H)


def eagle3_zeros(w: Weights, target) -> None:
    """The whole vocabulary, and zeros that say so."""
    eagle3(w, target, rows=V)
    w["d2t"], w["t2d"] = torch.zeros(V, dtype=torch.int64), torch.zeros(V, dtype=torch.bool)


def tapped(*ids: int, **more) -> dict:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [*ids], "use_aux_hidden_state": bool(ids), **more}}


PARTLY = {**HEAD, "draft_vocab_size": VD}
SGLANG = {**PARTLY, "architectures": ["LlamaForCausalLMEagle3"]}
LISTED = {**SGLANG, "rope_theta": 1000000.0, "head_dim": D, **tapped(1, 2, 4)}
"""SGLang and SpecForge: taps in eagle_config, a RoPE base copied from the target, with an embedding."""
ROPE5 = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
NESTED = {
    "draft_vocab_size": VD, "eagle_aux_hidden_state_layer_ids": [1, 3, 4], "norm_before_fc": False,
}  # fmt: skip
of_speculators = partial(speculators, "Eagle3", {**LLAMA, **ROPE5}, **NESTED)
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
QWEN35 = {
    **LLAMA, "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": D, "attention_bias": False,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "use_sliding_window": True,
    "max_window_layers": 0,
    "rope_parameters": {
        "sliding_attention": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [1, 2, 1],
            "mrope_interleaved": True,
        },
        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
"""Two layers of Qwen3, the first with a window, RoPE of several axes on half of each head, said for each type."""
YARN = {
    "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 0.7, "mscale_all_dim": 0.4,
}  # fmt: skip
KIMI = {
    **LLAMA, **LATENT, "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2",
    "num_key_value_heads": HEADS, "draft_vocab_size": V, "rope_theta": 50000.0, "rope_scaling": YARN,
    "n_routed_experts": 384, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 32,
    "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True, "aux_loss_alpha": 0.001, "ep_size": 1,
    "num_experts_per_tok": 8, "num_nextn_predict_layers": 0, "attention_bias": False, **tapped(2, 4, 5),
}  # fmt: skip
"""lightseekorg's Kimi-K2.5: YaRN, keys of the target's mixture."""
SPECFORGE_MLA = {
    **LLAMA, **LATENT, "q_lora_rank": None, "architectures": ["DeepseekV3ForCausalLMEagle3"],
    "model_type": "deepseek_v3", "draft_vocab_size": VD, "rope_theta": 10000.0, "rope_scaling": None,
    "qk_head_dim": 24, "head_dim": 8, "rope_interleave": True,
}  # fmt: skip
EMBEDDING, MATRICES = ["embed_tokens"], ["embed_tokens", "lm_head"]
SECOND = [("layers.1", "input_layernorm")]
FC_NORMS = [f"fc_norm.{number}" for number in range(4)]
of_eagle3, of_p_eagle = flavours("eagle3", eagle3), flavours("p_eagle", eagle3)
of_mla = partial(of_eagle3, prefix="layers.0", rows=V, copies=EMBEDDING, latent=LATENT)
EAGLE3 = {
    "eagle3": of_eagle3(PARTLY, "bin"),  # SafeAILab (yuhuili): no RoPE base, no taps in the config
    "eagle3_sglang": of_eagle3(LISTED, "sharded", copies=EMBEDDING),
    "eagle3_sglang_layers": of_eagle3(
        {**SGLANG, "num_hidden_layers": 2}, prefix="model.midlayer",
        further=[("model.additional_layers.0", "hidden_norm")],
    ),
    "eagle3_vllm_layers": of_eagle3(
        {**PARTLY, "architectures": ["Eagle3LlamaForCausalLM"], "num_hidden_layers": 2}, prefix="layers.0",
        further=SECOND,
    ),
    "eagle3_full": of_eagle3({**HEAD, "draft_vocab_size": V}, "bin", rows=V),  # yuhuili's Vicuna-13B
    "eagle3_full_zeros": flavours("eagle3", eagle3_zeros)({**HEAD, "draft_vocab_size": V}),
    "eagle3_borrowed": of_eagle3(  # nvidia: ids of boundaries between layers
        {**SGLANG, "draft_vocab_size": None, **tapped(2, 3, 5), "rope_theta": 150000,
         "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        rows=None,
    ),
    "eagle3_plain_state": of_eagle3({**SGLANG, **tapped()}, taps=0),  # nvidia, short context
    "eagle31": of_eagle3(
        {**LISTED, "fc_norm": True, "norm_output": True}, copies=EMBEDDING, norms=FC_NORMS[:3]
    ),
    "eagle3_gpt_oss": of_eagle3(  # nvidia
        {**LISTED, **tapped(1, 2, 4, norm_before_fc=True, return_hidden_post_norm=True)}, copies=EMBEDDING,
        joined=["input_norm"],
    ),
    "eagle3_wide": of_eagle3(
        {**SGLANG, "draft_vocab_size": V, "hidden_size": 48, "target_hidden_size": H, "head_dim": D}, rows=V, size=48
    ),
    "eagle3_llama3_rope": of_eagle3(
        {**LISTED, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE, "sliding_window": 3,
         "use_sliding_window": True},
        copies=EMBEDDING,
    ),
    "eagle3_speculators": of_eagle3(of_speculators(), prefix="layers.0", copies=EMBEDDING, noise=0.1),
    "eagle3_speculators_31": of_eagle3(
        of_speculators(norm_before_residual=False, norm_output=True, embed_requires_grad=True), prefix="layers.0",
        copies=EMBEDDING, noise=0.1,
    ),
    "eagle3_speculators_09": of_eagle3(  # for Qwen3.5
        speculators(
            "Eagle3", QWEN35, **NESTED | {"eagle_aux_hidden_state_layer_ids": [1, 3, 4, 8]}, dtype="bfloat16",
            speculators_version="0.9.0", norm_before_residual=False, fc_norm=True, norm_output=True,
            embed_requires_grad=False,
        ),
        prefix="layers.0", taps=4, copies=EMBEDDING, norms=FC_NORMS, further=SECOND, qk_norm=True,
    ),
    "eagle3_deepspec": of_eagle3(
        {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3Eagle3Model"], "head_dim": D, "rope_theta": 1000000,
         "target_layer_ids": [0, 2, 3, 5, 7], "num_target_layers": LAYERS, "layer_types": ["full_attention"]},
        prefix="layers.0", taps=5, rows=None, copies=MATRICES, qk_norm=True,
    ),
    "eagle3_mla": of_mla(KIMI),
    "eagle31_mla": of_mla({**KIMI, "fc_norm": True, "norm_output": True}, norms=FC_NORMS[:3]),  # Kimi-K2.6
    "eagle3_mla_specforge": of_eagle3(SPECFORGE_MLA, latent={**LATENT, "q_lora_rank": None}),
    "eagle3_mla_layers": of_mla({**KIMI, "num_hidden_layers": 2}, further=SECOND),  # nvidia's Model-Optimizer
}  # fmt: skip
PARALLEL = {
    "p_eagle": of_p_eagle(  # amazon: the token of masks as vLLM reads it
        {**LISTED, "ptd_token_id": P_MASK, "num_hidden_layers": 2, "num_depths": 8}, copies=EMBEDDING, further=SECOND,
        masks=True,
    ),
    "p_eagle_speculators": of_p_eagle(
        {**of_speculators(mask_token_id=P_MASK, embed_requires_grad=True), "speculators_model_type": "peagle",
         "architectures": ["PEagleSpeculator"]},
        prefix="layers.0", copies=EMBEDDING, noise=0.1, masks=True,
    ),
}  # fmt: skip


# Multi-token prediction


def own(w: Weights, target) -> None:
    """The tensors that the target's own checkpoint has besides."""
    w.copy(target, "model.embed_tokens", "lm_head")
    w.norm("model.norm")
    w.layer("model.layers.0")


def nextn(w: Weights, prefix: str, last: str = "shared_head.norm") -> None:
    """The norms of embedding and state, eh_proj, and the last norm."""
    w.norm(f"{prefix}.enorm", f"{prefix}.hnorm", f"{prefix}.{last}")
    w.linear(f"{prefix}.eh_proj", H, 2 * H)


def module(w: Weights, target, at: int) -> str:
    """What DeepSeek-V3 and GLM-4.5 share: layer `at`, with copies of embedding and output matrix, but its attention."""
    prefix = f"model.layers.{at}"
    nextn(w, prefix)
    w.norm(f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm")
    w.copy(target, f"{prefix}.embed_tokens", f"{prefix}.shared_head.head")
    w.experts(f"{prefix}.mlp", target.config.n_routed_experts, bias="gate.e_score_correction_bias")
    return prefix


def deepseek(w: Weights, target, at: int) -> None:
    w.latent(f"{module(w, target, at)}.self_attn", TARGETS_LATENT)


def mtp_deepseek(w: Weights, target, export=False) -> None:
    """export: as lmsys' NextN, alone and called layer 0."""
    if not export:
        own(w, target)
    deepseek(w, target, 0 if export else target.config.num_hidden_layers)


def mtp_glm(w: Weights, target) -> None:
    """GLM-4.5: biases and norms of queries and keys, RoPE of half of each head."""
    own(w, target)
    w.attention(f"{module(w, target, target.config.num_hidden_layers)}.self_attn", bias="qkv", qk_norm=True)


def mtp_mimo(w: Weights, target, prefix="model.mtp_layers.0", alone=False, **layer) -> None:
    """A Qwen2 layer, numbered from 0, [state; embedding]."""
    if not alone:
        own(w, target)
    w.norm(*(f"{prefix}.{part}_layernorm" for part in ("token", "hidden", "final")))
    w.linear(f"{prefix}.input_proj", H, 2 * H)
    w.layer(prefix, **layer)


def mtp_qwen(w: Weights, target) -> None:
    """Qwen3-Next: gated attention, norms stored less 1, no embedding."""
    own(w, target)
    layer = "mtp.layers.0"
    w.linear("mtp.fc", H, 2 * H)
    w.norm("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    w.norm(f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    w.attention(f"{layer}.self_attn", heads=(HEADS, 2 * HEADS, KV), qk_norm=True)
    for name in [name for name in w if name.startswith("mtp.") and "norm" in name]:
        w[name] -= 1
    w.experts(f"{layer}.mlp", target.config.num_experts, shared="shared_expert")
    w.linear(f"{layer}.mlp.shared_expert_gate", 1, H)


def targets(**changes) -> Callable[[nn.Module], dict]:
    """The target's config, with changes."""
    return lambda target: {**target.config.to_dict(), **changes}


def mtp_speculators(target) -> dict:
    """speculators 0.9: Qwen's modules by the names of MiMo; ``convert/mtp/converter.py`` has the table."""
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


ONE = targets(num_nextn_predict_layers=1)
of_deepseek, of_mimo, of_qwen = (flavours("mtp", make) for make in (mtp_deepseek, mtp_mimo, mtp_qwen))
FLAVOURS = {
    **EAGLE,
    **EAGLE3,
    "mtp_deepseek": of_deepseek(ONE, "sharded", models.ADMITTED["deepseek_v3"]),
    "mtp_deepseek_nextn": of_deepseek(ONE, target=models.ADMITTED["deepseek_v3"], export=True),
    "mtp_glm": flavours("mtp", mtp_glm)(ONE, target=glm),
    "mtp_mimo": of_mimo(
        targets(num_nextn_predict_layers=1, architectures=["MiMoForCausalLM"]), "bin", models.ADMITTED["qwen2"],
        bias="qkv",
    ),
    "mtp_speculators": of_mimo(
        mtp_speculators, target=models.ADMITTED["qwen3"], prefix="mtp_layers.0", alone=True, qk_norm=True
    ),
    "mtp_qwen": of_qwen(targets(), "sharded", models.HYBRIDS["qwen3_next"]),
    "mtp_qwen35": of_qwen(targets(), target=models.HYBRIDS["qwen3_5_moe"]),
}  # fmt: skip


# DFlash

MASK = 93
BLOCK = 6
QWEN3 = {**LLAMA, "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": D, "rope_theta": 20000.0}
FULL, SLIDING = "full_attention", "sliding_attention"


def blocks(w: Weights, target, taps=3, bias="", rows=None, copies=(), parts=()) -> None:
    """What every DFlash draft has. parts: functions that write what others have besides."""
    w.linear("fc", H, taps * H)
    w.norm("hidden_norm", "norm")
    for number in range(2):
        w.layer(f"layers.{number}", qk_norm=True, bias=bias)
    if rows:
        w.vocabulary(rows)
    w.copy(target, *copies)
    for part in parts:
        part(w)


def zlab(flags=(), without=(), **changes) -> dict:
    """z-lab's first drafts: block_size beside dflash_config. without: keys that are left out."""
    config = {
        **QWEN3, "architectures": ["DFlashDraftModel"], "num_target_layers": LAYERS, "block_size": BLOCK,
        "layer_types": [FULL] * 2, "sliding_window": None, "use_sliding_window": False,
        "dflash_config": {"target_layer_ids": [1, 3, 6], "mask_token_id": MASK, **dict(flags)}, **changes,
    }  # fmt: skip
    for key in without:
        del (config if key in config else config["dflash_config"])[key]
    return config


def sliding(**flags) -> dict:
    """z-lab's later drafts: block_size in dflash_config, layers with sliding windows."""
    flags = {"block_size": BLOCK, **flags}
    return zlab(flags, without=["block_size"], layer_types=[SLIDING, FULL], sliding_window=7)


def deepspec(**changes) -> dict:
    """DeepSpec: flat, with copies of the target's embedding and output matrix; the first slot drafts, too."""
    return {
        **QWEN3, "architectures": ["Qwen3DSparkModel"], "num_target_layers": LAYERS, "block_size": BLOCK,
        "mask_token_id": MASK, "target_layer_ids": [-1, 3, 6], "layer_types": [FULL] * 2, "num_anchors": 512,
        "markov_rank": 0, "enable_confidence_head": False, **changes,
    }  # fmt: skip


def nested(kind="DFlash", types=(FULL, FULL), **changes) -> dict:
    """speculators (RedHatAI): layers named by their inputs."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}
    config = dict(
        block_size=BLOCK, draft_vocab_size=V, aux_hidden_state_layer_ids=[2, 4, 7], mask_token_id=MASK,
        sample_from_anchor=False,
    )  # fmt: skip
    return speculators(kind, {**QWEN3, **rope, "layer_types": [*types], "sliding_window": 7}, **config | changes)


def confidence(inputs: int) -> Callable[[Weights], None]:
    """A prediction of acceptance."""
    return lambda w: w.linear("confidence_head.proj", 1, inputs, bias=True)


def mask_embedding(w: Weights) -> None:
    w["mask_embedding"] = w.normal(H)


of_dflash = flavours("dflash", blocks)
DFLASH = {
    "dflash": of_dflash(zlab()),
    "dflash_bin": of_dflash(zlab(), "bin"),
    "dflash_bias": of_dflash(zlab(attention_bias=True), "sharded", bias="qkvo"),
    "dflash_sliding": of_dflash(sliding()),
    "dflash_bidirectional": of_dflash(sliding(causal=False)),
    "dflash_causal": of_dflash(zlab({"causal": True})),
    "jetspec": of_dflash(zlab({"block_size": BLOCK, "causal_head": True, "target_hidden_size": H})),
    "dflash_anchor": of_dflash(zlab({"sample_from_anchor": True})),
    "dflash_scaled": of_dflash(
        zlab({"input_embedding_scale": 1.7, "output_multiplier": 0.6, "final_logit_softcapping": 2.0})
    ),
    "dflash_without_taps": of_dflash(zlab(without=["target_layer_ids"]), taps=2),  # the rule: layers 1 and 5, here
    "dflash_mimo": of_dflash(  # windows without layer_types, and another embedding for the mask
        zlab({"use_swa": True, "swa_window_size": 9}, without=["layer_types"]), parts=[mask_embedding]
    ),
    "dflash_deepspec": of_dflash(deepspec(), copies=MATRICES),
    "dflash_confident": of_dflash(  # without a Markov head: acceptance is predicted from the place alone
        deepspec(enable_confidence_head=True, confidence_head_with_markov=False), copies=MATRICES,
        parts=[confidence(H)],
    ),
    "dflash_speculators": of_dflash(nested()),
    "dflash_speculators_shifted": of_dflash(nested(shift_label=True, sample_from_anchor=None)),
    "dflash_speculators_kept": of_dflash(nested(types=(FULL, SLIDING), draft_vocab_size=VD), rows=VD),
    "dflash_speculators_non_causal": of_dflash(nested(types=(SLIDING, SLIDING), sliding_window_non_causal=True)),
}  # fmt: skip


# DFlash 2, DSpark and Domino, whose drafts depend on each other

RANK, CANDIDATES, GRU = 8, 4, 12


def selector(w: Weights) -> None:
    """DFlash 2's convolutions around both parts of each layer, and its selector of the likeliest tokens."""
    for number in range(2):
        for part in ("attention_conv", "mlp_conv"):
            w[f"layers.{number}.{part}.base_kernel"] = w.normal(2, 2, H) * 0.3 + torch.tensor([1.0, 0.0])[:, None]
            w.linear(f"layers.{number}.{part}.kernel_projection", 2 * 2 * H // 16, H)
    w.linear("candidate_selector.hidden_projection", RANK, H)
    for codebook in ("predecessor", "successor"):
        w[f"candidate_selector.{codebook}_codebook"] = w.normal(V, RANK)


def markov(head: str, rows: int = V) -> Callable[[Weights], None]:
    """The tables of DSpark's head, and what its kind has besides."""

    def part(w):
        w["markov_head.markov_w1.weight"], w["markov_head.markov_w2.weight"] = w.normal(V, RANK), w.normal(rows, RANK)
        if head == "gated":
            w.linear("markov_head.gate_proj", RANK, H + RANK, bias=True)
        if head == "rnn":
            w.linear("markov_head.joint_proj", 3 * RANK, 2 * RANK + H, bias=True)

    return part


def gru(w: Weights) -> None:
    """SpecForge's Domino: a GRU over the tokens before, and a readout of its state and the place's."""
    w["prefix_gru.weight_ih_l0"] = w.normal(3 * GRU, H) * H**-0.5
    w["prefix_gru.weight_hh_l0"] = w.normal(3 * GRU, GRU) * GRU**-0.5
    w.linear("embed_proj.0", RANK, H + GRU)
    w["embed_proj.2.weight"] = w.normal(V, RANK) * 2


def dspark(head: str) -> Flavour:
    """DeepSpec's, with a prediction of acceptance."""
    flags = dict(markov_rank=RANK, markov_head_type=head, enable_confidence_head=True, confidence_head_with_markov=True)
    return of_dflash(deepspec(**flags), copies=MATRICES, parts=[markov(head), confidence(H + RANK)])


CONVOLVED = {"conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": RANK, "selector_top_k": CANDIDATES}
MARKOV = {"markov_rank": RANK, "enable_confidence_head": True}
DOMINO = {"projector_type": "domino", "emb_dim": RANK, "gru_hidden_dim": GRU, "shift_label": False}
LINKED = {
    "dflash2": of_dflash(
        zlab(
            {**CONVOLVED, "block_size": BLOCK, "final_logit_softcapping": 20.0, "output_multiplier": 0.7},
            without=["block_size"], architectures=["DFlash2DraftModel"], is_causal=False, layer_types=[SLIDING] * 2,
            sliding_window=9, use_sliding_window=True,
        ),
        parts=[selector],
    ),
    "dflash2_speculators": of_dflash(  # all layers slide, and see their block both ways
        nested(
            "DFlash2", (SLIDING, SLIDING), architectures=["DFlash2DraftModel"], sliding_window_non_causal=True,
            **CONVOLVED,
        ),
        parts=[selector],
    ),
    "dspark": dspark("vanilla"),
    "dspark_gated": dspark("gated"),
    "dspark_rnn": dspark("rnn"),
    "dspark_projector": of_dflash(  # SpecForge: said in dflash_config; it drafts some tokens only
        zlab(
            {**MARKOV, "projector_type": "dspark", "markov_head_type": "gated", "sample_from_anchor": True,
             "confidence_head_with_markov": True},
            draft_vocab_size=VD,
        ),
        rows=VD, parts=[markov("gated", VD), confidence(H + RANK)],
    ),
    "dspark_speculators": of_dflash(  # the prediction of acceptance does not read the token before
        nested(
            "DSpark", sample_from_anchor=True, **MARKOV, markov_head_type="vanilla", confidence_head_with_markov=False
        ),
        parts=[markov("vanilla"), confidence(H)],
    ),
    "domino": of_dflash(zlab(DOMINO), parts=[gru]),
    "domino_shifted": of_dflash(zlab({**DOMINO, "shift_label": True, "pure_draft_prefix_len": 2}), parts=[gru]),
}  # fmt: skip
