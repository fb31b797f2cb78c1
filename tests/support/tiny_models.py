"""A tiny random model of any causal LM class of transformers, and whether `speculate` serves it with the same answer.

`examine` is what `benchmarks/quality/architectures.py` runs for every class, and `test_classes.py` for some.
"""

import inspect
import warnings
from dataclasses import dataclass, field

import models
import torch
import transformers
from transformers import GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import spec_compile
from spec_compile import UnsupportedModelError

VOCAB, NEW, WIDTHS = models.VOCAB, 32, (40, 29, 33)
NEAR_TIE = 1e-4
"""Two logits that differ by less, relative to the spread of all, may swap between two orders of summation."""

SIZES = dict(
    vocab_size=VOCAB, hidden_size=64, n_embd=64, d_model=64, emb_dim=64, embedding_dim=64, embedding_size=64,
    input_embedding_size=64, output_embedding_size=64, word_embed_proj_dim=64, attention_hidden_size=64, lru_width=64,
    num_hidden_layers=4, n_layer=4, n_layers=4, num_layers=4, decoder_layers=4, num_decoder_layers=4, num_blocks=4,
    encoder_layers=4, num_encoder_layers=4, num_layers_per_stack=2, layer_group_size=2,
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, attention_heads=4, decoder_attention_heads=4,
    encoder_attention_heads=4, num_decoder_attention_heads=4, num_encoder_attention_heads=4, swa_num_attention_heads=4,
    num_key_value_heads=2, num_kv_heads=2, swa_num_key_value_heads=2, num_query_groups=2, multi_query_group_num=2,
    num_global_key_value_heads=2, head_dim=16, swa_head_dim=16, attention_head_dim=16, dim_head=16, d_head=16,
    attention_head_size=16, kv_channels=16, global_head_dim=16, v_head_dim=12, kv_lora_rank=24, q_lora_rank=32,
    qk_rope_head_dim=8, qk_nope_head_dim=16, qk_head_dim=24, rotary_dim=8, o_lora_rank=16, o_groups=2,
    intermediate_size=96, ffn_dim=96, encoder_ffn_dim=96, decoder_ffn_dim=96, ffn_hidden_size=96, dim_ff=96, dff=96,
    d_inner=96, dense_intermediate_size=96, intermediate_size_mlp=96, feed_forward_size=96,
    moe_intermediate_size=32, shared_expert_intermediate_size=48, shared_experts_intermediate_size=48,
    shared_intermediate_size=48, moe_shared_expert_intermediate_size=48, expert_ffn_hidden_size=32,
    num_experts=4, n_routed_experts=8, num_local_experts=4, moe_num_experts=4, num_experts_per_tok=2, moe_k=2,
    num_experts_per_token=2, moe_topk=2, top_k_experts=2, n_shared_experts=1, n_group=2, num_expert_group=2,
    topk_group=1, zero_expert_num=2, first_k_dense_replace=1, router_hidden_size=16, moe_layer_end_index=3,
    max_position_embeddings=512, n_positions=512, n_ctx=512, max_seq_len=512, context_length=512,
    max_target_positions=512, model_max_length=512,
    sliding_window=8, window_size=8, sliding_window_size=8, attention_window_size=8, local_attention=16,
    keep_window_size=512, sliding_window_pattern=2, _sliding_window_pattern=2, max_window_layers=2,
    query_pre_attn_scalar=16, index_head_dim=16, index_n_heads=16, index_topk=8, vocab_size_per_layer_input=VOCAB,
    hidden_size_per_layer_input=16, num_kv_shared_layers=2, laurel_rank=8, hc_lowrank=16, ple_embed_dim=32,
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
    linear_num_heads=4, linear_head_dim=16, mamba_d_state=8, mamba_dt_rank=8, mamba_d_ssm=128, mamba_n_heads=8,
    mamba_d_head=16, mamba_chunk_size=16, mamba_num_heads=8, mamba_head_dim=16, mamba_headdim=16, n_mamba_heads=4,
    state_size=8, ssm_state_size=8, time_step_rank=8, chunk_size=16, n_groups=2,
    num_codebooks=2, audio_vocab_size=32, prompt_length=4, prompt_types=4, segment_types=4, prompt_mid_dim=16,
    position_bias_num_buckets=16, num_buckets=16, d_rel=8, rel_extent=64, adapter_rank=8, block_size=16,
    block_multiple_of=16, dim_model_base=64, unpadded_vocab_size=VOCAB, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    sep_token_id=3, cls_token_id=4, decoder_start_token_id=1, start_token_id=1, original_max_position_embeddings=512,
    ngram_vocab_size_base=128, split_ngram_parts=4, make_ngram_vocab_size_divisible_by=8, gated_norm_rank=8,
    pronunciation_embed_dim=16, pronunciation_vocab_size=16, shape_embed_dim=16, shape_vocab_size=16,
    encoder_hash_byte_group_vocab=64, max_source_positions=64, image_size=16, patch_size=8, num_channels=3,
)  # fmt: skip
"""Sizes by the name that configurations give them; those that a configuration does not have are left out."""
ATTEMPTS = [
    {}, dict(head_dim=8), dict(num_key_value_heads=4, num_kv_heads=4), dict(hidden_size=128, head_dim=32),
    dict(head_dim=32), dict(num_hidden_layers=6, n_layer=6), dict(num_hidden_layers=2, n_layer=2, num_layers=2),
    dict(hidden_size=512, head_dim=128),
]  # fmt: skip
"""What is tried in place of `SIZES` if the class cannot be built with these."""
DECODER = dict(is_decoder=True, add_cross_attention=False, is_encoder_decoder=False)
"""Of encoders that can also be a language model."""
BY_CLASS: dict[str, dict] = {
    "GPTNeoForCausalLM": dict(attention_types=[[["global", "local"], 2]]),
    "Llama4ForCausalLM": dict(attention_chunk_size=16, floor_scale=512),
    "BambaForCausalLM": dict(attn_layer_indices=[1, 3]),
    "DbrxForCausalLM": dict(
        attn_config=dict(rope_theta=1e4, kv_n_heads=2, clip_qkv=8.0),
        ffn_config=dict(ffn_hidden_size=96, moe_num_experts=4, moe_top_k=2),
    ),
    "CohereCompassForCausalLM": dict(
        rope_parameters={kind: dict(rope_type="default", rope_theta=1e4) for kind in (models.WIN, models.FULL)}
    ),
    "Lfm2MoeForCausalLM": dict(layer_types=["conv", models.FULL] * 2),
    "Gemma4ForCausalLM": dict(layer_types=[models.WIN, models.FULL] * 2),
    "Gemma4UnifiedForCausalLM": dict(layer_types=[models.WIN, models.FULL] * 2),
    "Gemma4ForConditionalGeneration": dict(text_config=dict(layer_types=[models.WIN, models.FULL] * 2)),
    "Gemma4UnifiedForConditionalGeneration": dict(text_config=dict(layer_types=[models.WIN, models.FULL] * 2)),
    "GraniteMoeHybridForCausalLM": dict(layer_types=["mamba", models.FULL] * 2),
    "ZambaForCausalLM": dict(
        layers_block_type=[models.LIN, "hybrid", "hybrid", models.LIN], attention_hidden_size=128, attention_head_dim=32
    ),
    "Zamba2ForCausalLM": dict(
        layers_block_type=[models.LIN, "hybrid", models.LIN, models.LIN],
        num_mem_blocks=1,
        n_mamba_heads=8,
        attention_hidden_size=128,
        attention_head_dim=32,
    ),
    "ZayaForCausalLM": dict(num_experts_per_tok=1),
    "HrmTextForCausalLM": dict(num_hidden_layers=16),  # 2 in each stack, of which 8 run one after the other
    "Qwen4ExpForCausalLM": dict(
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=2
    ),
    "xLSTMForCausalLM": dict(qk_dim_factor=1.0, v_dim_factor=1.0),
    "XmodForCausalLM": dict(default_language="en_XX"),
    "ReformerModelWithLMHead": dict(axial_pos_shape=[16, 32], axial_pos_embds_dim=[32, 32]),
}
"""What a class needs beyond that."""


@dataclass
class Outcome:
    """What `examine` saw. verdict: one of `VERDICTS`; padded: "equal", "aside" (transformers' own loop ran there) or
    "different"; near_ties: rows whose first difference is one of two nearly equal logits."""

    name: str
    verdict: str
    reason: str = ""
    padded: str = ""
    near_ties: int = 0
    warnings: list[str] = field(default_factory=list)


VERDICTS = {
    "served": "the same tokens as transformers' generate()",
    "aside": "transformers' own loop runs, with a warning",
    "refused": "UnsupportedModelError by speculate(), with the reason",
    "different": "other tokens than transformers' generate()",
    "broken": "another exception",
    "hangs": "no answer in time",
    "not built": "no tiny model could be made of it, or transformers' own generate() fails with it",
}


def classes() -> list[str]:
    """Every causal LM class of the installed transformers, by name."""
    mapped = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return sorted({name for names in mapped for name in ((names,) if isinstance(names, str) else names)})


def build(name: str) -> torch.nn.Module:
    """A tiny random model in float32 of the class of this name; RuntimeError with the first reason if it cannot be."""
    cls, errors = getattr(transformers, name), []
    for attempt in ATTEMPTS:
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                net = cls(_config(cls.config_class, {**attempt, **BY_CLASS.get(name, {})})).float().eval()
                models._randomise(net, torch.Generator().manual_seed(0))
                net.generation_config = GenerationConfig(pad_token_id=0, bos_token_id=1)
                _answer(net, torch.full((1, 3), 5), None, 2)
            return net
        except Exception as error:
            errors.append(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1][:160]}")
    raise RuntimeError(errors[0])


def _config(cls: type, overrides: dict):
    """A configuration whose every known size is small, those of its parts, too."""
    known, default = set(inspect.signature(cls).parameters), None
    try:
        default = cls()
        known |= set(default.to_dict())
    except Exception:
        pass  # it has no defaults
    sizes = {**{key: value for key, value in SIZES.items() if key in known}}
    sizes |= {key: value for key, value in overrides.items() if key in known or key not in SIZES}
    if "is_decoder" in known:
        sizes |= DECODER
    if "kv_lora_rank" in known and "num_key_value_heads" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for part, config in (getattr(cls, "sub_configs", None) or {}).items():
        config = config if config is not transformers.AutoConfig else type(getattr(default, part, None))
        if issubclass(config, transformers.PreTrainedConfig):
            sizes[part] = _config(config, sizes.get(part) or {})
    return cls(**sizes)


def prompts() -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Rows of random ids, longer than any window, and their left-padded batch with its mask."""
    return models.prompts(WIDTHS)


def _answer(model, ids, mask, new):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=new)


def examine(name: str) -> Outcome:
    """Build the class tiny, and compare greedy tokens of `speculate`'s model with those of its own `generate`."""
    try:
        model = build(name)
    except Exception as error:
        return Outcome(name, "not built", f"{error}")
    return compare(name, model)


def compare(name: str, model) -> Outcome:
    """As `examine`, of a model."""
    rows, ids, mask = prompts()
    try:
        requests = [(rows[0], None), (ids, mask)]
        wanted = [_answer(model, *request, NEW) for request in requests]
    except Exception as error:
        return Outcome(name, "not built", f"its own generate() fails: {type(error).__name__}: {error}"[:200])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            fast = spec_compile.speculate(model, compile=False)
            aside = []
            got = []
            for request in requests:
                got.append(_answer(fast, *request, NEW))
                aside.append(any("without speculation" in str(w.message) for w in caught))
        except UnsupportedModelError as error:
            return Outcome(name, "refused", str(error))
        except Exception as error:
            return Outcome(name, "broken", f"{type(error).__name__}: {error}"[:300])
    said = sorted({str(w.message) for w in caught if "without speculation" in str(w.message)})
    ties = [_differences(model, request, w, g) for request, w, g in zip(requests, wanted, got)]
    if None in ties:
        where = "one row" if ties[0] is None else "a batch padded on the left"
        return Outcome(name, "different", where, warnings=said)
    return Outcome(
        name, "aside" if aside[0] else "served", padded="aside" if aside[1] else "equal",
        near_ties=sum(ties), warnings=said,
    )  # fmt: skip


def _differences(model, request, want, got) -> int | None:
    """How many rows part at a near-tie; None if a row parts elsewhere."""
    if want.shape != got.shape:
        return None
    ids, mask = request
    count = 0
    for row in range(len(want)):
        places = (want[row] != got[row]).nonzero()
        if len(places) == 0:
            continue
        place = int(places[0])
        prefix = want[row : row + 1, :place]
        seen = torch.ones_like(ids) if mask is None else mask
        seen = torch.nn.functional.pad(seen[row : row + 1], (0, place - ids.shape[1]), value=1)
        out = model.generate(
            prefix, attention_mask=seen, do_sample=False, max_new_tokens=1, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        logits = out.logits[0][0]
        gap = (logits[want[row, place]] - logits[got[row, place]]).abs() / logits.std()
        if gap > NEAR_TIE:
            return None
        count += 1
    return count
