"""A Llama or Gemma 3 in a folder written as a GGUF file without a vocabulary, for engines that read nothing else."""

from pathlib import Path

import gguf
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PreTrainedModel

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
"""Names of modules -> of tensors in the file; in a layer without its prefix."""
GEMMA3 = NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
"""The same for Gemma 3, which has four norms in a layer and two in its attention."""
TYPES = {"float32": gguf.GGMLQuantizationType.F32, "bfloat16": gguf.GGMLQuantizationType.BF16}


def write(folder: str | Path, path: Path, dtype: str) -> None:
    """Write the model of a folder. dtype: of its matrices, one of `TYPES`; vectors are of float32.

    ValueError if the model is neither a Llama nor a Gemma 3, or scales its rotary positions.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    is_gemma = isinstance(config, Gemma3TextConfig)
    ropes = [*config.rope_parameters.values()] if is_gemma else [getattr(config, "rope_parameters", None)]
    if not isinstance(config, LlamaConfig | Gemma3TextConfig) or any(one["rope_type"] != "default" for one in ropes):
        raise ValueError(f"model: expected a Llama or a Gemma 3 without scaled positions, got {type(config).__name__}")
    writer = gguf.GGUFWriter(path, "gemma3" if is_gemma else "llama")
    _describe(writer, config)
    for name, tensor in _tensors(model):
        kind = TYPES[dtype] if tensor.dim() == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _describe(writer: gguf.GGUFWriter, config: LlamaConfig | Gemma3TextConfig) -> None:
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
    is_gemma = isinstance(config, Gemma3TextConfig)
    names = GEMMA3 if is_gemma else NAMES
    # llama.cpp turns neighbours in a Llama, and both halves of a head in a Gemma, as transformers does in all models.
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
        elif not is_gemma and module in heads:
            tensor = _halves_interleaved(tensor, heads[module])
        yield f"{prefix}{names[module]}.{leaf}", tensor


def _halves_interleaved(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head in the order 0, n / 2, 1, n / 2 + 1, ...: the file turns neighbours by rotary positions."""
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
