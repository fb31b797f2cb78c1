"""The keys of published draft configs: those that are read here, and those that cannot change a draft's output.

Every other key with a value that switches something on is an error that names it. Tensors are read as strictly (see
`Checkpoint.fill`), so a key that only asks for further tensors needs no entry of its own meaning here.
"""

import math
import re
from collections.abc import Collection

from transformers import GenerationConfig, PreTrainedConfig

SPECULATORS = "speculators_model_type"
LAYERS = {
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "head_dim",
    "hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "draft_vocab_size", "target_hidden_size",
    "attention_bias", "mlp_bias", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "is_neox_style", "rope_is_neox_style", "sliding_window", "use_sliding_window", "layer_types", "q_lora_rank",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "v_head_dim",
}  # fmt: skip
"""Keys that the layers are built from."""
EAGLE = {
    "bias", "qkv_bias", "eagle_fc_bias", "fusion_bias", "layernorms", "add_para_norm", "norm_before_residual",
    "norm_before_fc", "fc_norm", "norm_output", "return_hidden_post_norm", "embed_requires_grad",
    "use_aux_hidden_state", "target_layer_ids", "eagle_aux_hidden_state_layer_ids", "use_aux_norm",
}  # fmt: skip
"""Further keys of the EAGLE family, at the top or in eagle_config."""
DFLASH = {
    "block_size", "mask_token_id", "target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids",
    "num_target_layers", "sample_from_anchor", "shift_label", "dspark_bonus_anchor", "is_causal", "causal",
    "causal_head", "sliding_window_non_causal", "use_swa", "swa_window_size", "input_embedding_scale",
    "output_multiplier", "final_logit_softcapping", "conv_kernel_size", "conv_group_size", "selector_rank",
    "selector_top_k", "markov_rank", "markov_head_type", "emb_dim", "gru_hidden_dim", "enable_confidence_head",
    "confidence_head_with_markov",
}  # fmt: skip
"""Further keys of DFlash drafts and their kin, at the top or in dflash_config."""
BOOKKEEPING = {
    *PreTrainedConfig().to_dict(), *GenerationConfig().to_dict(),
    "architectures", "auto_map", "custom_pipelines", "name_or_path", "torch_dtype", "tokenizer_class",
    "attn_implementation", "_attn_implementation_autoset", "transformers_weights", "quantization_config",
    "compression_config", "pretraining_tp", "initializer_range",
    "target_model_type", "target_model_name", "target_model_path", "target_vocab_size", "num_target_layers",
    "finetuning_task", "is_decoder", "prefix", "torchscript", "tf_legacy_loss", "use_bfloat16", "max_window_layers",
    "sep_token_id", "task_specific_params", "tie_encoder_decoder", "num_beam_groups", "tie_word_embeddings", "dtype",
    SPECULATORS, "speculators_version", "speculators_config", "has_no_defaults_at_init", "speculator_config",
    "transformer_layer_config", "transformer_layer_architecture", "model", "eagle_config", "dflash_config",
    "max_seq_len", "model_max_length", "num_nextn_predict_layers", "num_lookahead_tokens",
    "method", "draft_arch", "draft_layer_init_from_target",
}  # fmt: skip
"""Names, ids, formats of numbers, provenance, and options of generation with a whole model."""
TENSORS_DECIDE = {
    "num_local_experts", "num_experts_per_tok", "experts_per_token", "output_router_logits", "router_aux_loss_coef",
    "router_jitter_noise", "use_qk_norm", "truncated_vocab_size", "has_lm_head", "use_last_layernorm",
    "use_input_layernorm_in_first_layer", "parallel_draft_heads_num_layers", "num_eagle_features", "fc_input_size",
    "num_aux_hidden_states", "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "moe_layer_freq",
    "first_k_dense_replace", "n_group", "topk_group", "topk_method", "norm_topk_prob", "routed_scaling_factor",
    "scoring_func", "seq_aux", "aux_loss_alpha", "ep_size",
}  # fmt: skip
"""Mixtures, norms and matrices, which the checkpoint's tensors show."""
OF_A_SWITCH = {
    "dflash2_conv_kernel_size", "dflash2_conv_group_size", "dflash2_selector_rank", "dflash2_selector_top_k",
    "dflash2_selector_search_mode",
}  # fmt: skip
"""Sizes of parts of DFlash variants whose switches are not in these lists."""
TRAINING = re.compile("(^|_)(loss|train|training|optimizer|lr|seed|dropout|anchors)(_|$)")
"""Names that only a training reads."""
FACTOR = re.compile("(scale|scaling|multiplier|factor)$")
ONLY = {
    "use_mtp_layernorm": (False,),
    "parallel_draft_step": (0, 1),
    "next_layer_regular": (True,),
    "position_embedding_type": ("rope",),
}
"""Keys that are known with only these values."""
VARIANTS = {
    "projector_type": ("dflash", "dspark", "domino"),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "attention_mode": ("gqa", "mha"),
    "use_aux_hidden_state": (True,),
}
"""Keys with their known values; any other value asks for a variant of DFlash that is not built here."""
INNER = ("eagle_config", "dflash_config", "transformer_layer_config", "model")
"""Objects within a config whose keys are looked at, too."""


def refuse_unknown_keys(raw: dict, dflash: bool = False, also: Collection[str] = ()) -> None:
    """ValueError, naming the key, if a config asks for anything that is not known here, or in `also`."""
    known = (
        {*also} | LAYERS | BOOKKEEPING | TENSORS_DECIDE | (DFLASH | OF_A_SWITCH | VARIANTS.keys() if dflash else EAGLE)
    )
    for section in ("", *INNER):
        keys = raw.get(section) if section else raw
        for name, value in keys.items() if isinstance(keys, dict) else ():
            path = f"{section}.{name}" if section else name
            if name in ONLY:
                if not _neutral(name, value) and value not in ONLY[name]:
                    raise ValueError(f"draft: its config has {path} {value!r}, which is not built here")
            elif name not in known and not TRAINING.search(name) and not _neutral(name, value):
                raise ValueError(
                    f"draft: its config has {path} {value!r}, which is not known here and may change what the draft "
                    "computes; if it does not, take it out of config.json"
                )


def check_rope_theta(name: str, value) -> float:
    """`value` as a float; TypeError or ValueError unless it is a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a positive number, not {type(value).__name__}")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be a positive, finite number, not {value}")
    return float(value)


def _neutral(name: str, value) -> bool:
    """True if `value` switches nothing on."""
    if isinstance(value, (int, float)):
        return value == 0 or (value == 1 and FACTOR.search(name) is not None and not isinstance(value, bool))
    return value is None or value in ("", [], {})
