"""A Llama, Qwen 3 or Gemma 3 in a folder written as a file without a vocabulary, for engines that read only GGUF."""

from pathlib import Path

import gguf
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedModel, Qwen3Config

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""Names of modules -> of tensors in the file; in a layer without its prefix."""
QWEN3 = NAMES | {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
"""The same for Qwen 3, whose attention has two norms."""
GEMMA3 = QWEN3 | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
"""The same for Gemma 3, which has four norms in a layer, too."""
KINDS = {LlamaConfig: ("llama", NAMES), Qwen3Config: ("qwen3", QWEN3), Gemma3TextConfig: ("gemma3", GEMMA3)}
"""By the class of a config, llama.cpp's name of the architecture, and the names of its tensors."""
TYPES = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}


def write(folder: str | Path, path: Path, dtype: str) -> None:
    """Write the model of a folder. dtype: of its matrices, one of `TYPES`; vectors are of float32.

    ValueError if the model is none of `KINDS`, or scales its rotary positions; a Llama may, as Llama 3 does.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    known = {"default", "llama3"} if isinstance(config, LlamaConfig) else {"default"}
    if type(config) not in KINDS or not _rope_types(config) <= known:
        expected = "a Llama, with scaled positions only as Llama 3's, or a Qwen 3 or a Gemma 3 without"
        raise ValueError(f"model: expected {expected}, got {type(config).__name__}")
    writer = gguf.GGUFWriter(path, KINDS[type(config)][0])
    _describe(writer, config)
    for name, tensor in _tensors(model):
        kind = TYPES[dtype] if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rope_types(config) -> set[str]:
    """The ways in which a model of `KINDS` scales its rotary positions; Gemma 3 has one for each kind of layer."""
    ropes = config.rope_parameters
    return {one["rope_type"] for one in (ropes.values() if isinstance(config, Gemma3TextConfig) else [ropes])}


def _describe(writer: gguf.GGUFWriter, config: LlamaConfig | Qwen3Config | Gemma3TextConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    if isinstance(config, Gemma3TextConfig):
        rope, windows = config.rope_parameters, [kind == "sliding_attention" for kind in config.layer_types]
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern(windows)
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _tensors(model: PreTrainedModel):
    """The names in the file, and the tensors as it has them."""
    config, tied = model.config, model.get_output_embeddings().weight is model.get_input_embeddings().weight
    is_gemma, (_, names) = isinstance(config, Gemma3TextConfig), KINDS[type(config)]
    if _rope_types(config) == {"llama3"}:  # by what llama.cpp divides the frequencies
        scaled = model.model.rotary_emb.inv_freq
        places = torch.arange(len(scaled)) / len(scaled)
        yield "rope_freqs.weight", config.rope_parameters["rope_theta"] ** -places / scaled
    # llama.cpp turns neighbours in a Llama, and both halves of a head in others, as transformers does in all models.
    heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for key, tensor in model.state_dict().items():
        module, _, leaf = key.rpartition(".")
        if tied and module == "lm_head":
            continue
        prefix = ""
        if module.startswith("model.layers."):
            _, _, number, module = module.split(".", 3)
            prefix = f"blk.{number}."
        if is_gemma and module.endswith("norm"):
            tensor = tensor + 1  # a norm of Gemma multiplies by 1 + w, that of the file by what is stored
        elif isinstance(config, LlamaConfig) and module in heads:
            tensor = _halves_interleaved(tensor, heads[module])
        yield f"{prefix}{names[module]}.{leaf}", tensor


def _halves_interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head in the order 0, n / 2, 1, n / 2 + 1, ...: the file turns neighbours by rotary positions."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
