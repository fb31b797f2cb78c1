"""Which cases of a sweep run by default; `make test-all` runs them all."""

import itertools

import pytest

OFTEN = {
    "test_architectures": {
        "test_admitted": "llama qwen3 gpt2 gemma3 mixtral deepseek_v3 gpt_oss phi3 glm4 olmo2 cohere stablelm",
    },
    "test_attention_backends": {"test_rotation_joins_what_rotates": "triton sdpa"},
    "test_backend": {"test_every_architecture_keeps_its_logits": "gpt2 gemma3 mixtral deepseek_v3 gpt_oss"},
    "test_batching": {"test_every_algorithm": ["eagle3 tree"]},
    "test_checks": {
        "test_factors_in_full_precision": "llama-dtype0-1.01 llama-dtype6-1.001 gemma3-dtype2-1.01",
        "test_sound_models_pass_and_a_factor_of_1_01_does_not": "llama-dtype0-cpu mixtral-dtype8-cpu",
    },
    "test_classes": {
        "test_a_method_of_the_models_own_is_run_with_one_warning": "OwnInputs OwnLoop",
        "test_class": "BertLMHeadModel MoshiForCausalLM",
        "test_sound_models_pass_in_16_bits": "llama-dtype0",
    },
    "test_demo_heads": {
        "test_heads_draft_what_the_demo_model_says": "eagle3-options1-3.3 mtp-options2-2.3 dflash-options3-1.8",
    },
    "test_demo_model": {"test_real_prompts": "bug_fixing code_editing chat"},
    "test_dflash": {
        "test_a_flavour_loads": "dflash dflash_bin dflash_bias dflash_mimo dflash_deepspec dflash_speculators",
        "test_blocks_are_their_formulas": "dflash dflash_sliding dflash_bias dflash_speculators jetspec",
        "test_drafts_are_those_of_a_draft_without_a_cache": "tree cut",
        "test_tokens_are_plain_decodings": "llama-chain llama-tree mixtral-tree",
    },
    "test_draft_block": {
        "test_a_head_is_captured_for_any_batch_and_length": "eagle_qwen2 eagle3_sglang_layers mtp_deepseek mtp_qwen35",
    },
    "test_draft_checkpoints": {
        "test_every_tensor_is_needed": "eagle_qwen2 eagle31 eagle3_sglang_layers mtp_mimo mtp_qwen",
    },
    "test_draft_rounds": {
        "test_drafts_are_those_of_a_draft_without_a_cache": "eagle3-tree draft_model-chain",
        "test_tokens_are_plain_decodings": "eagle-tree-llama eagle3-union-llama eagle3-tree-mixtral mtp-chain-llama "
        "naive_eagle-one-llama",
    },
    "test_kernels_attention": {
        "test_slopes": "interpreter-7-options0-slopes0 interpreter-7-options1-slopes1 interpreter-70-options3-slopes0",
    },
    "test_kernels_fit": {"test_kernels_fit": "attention products"},
    "test_linked_drafts": {"test_tokens_are_plain_decodings": "domino"},
    "test_parallel_drafts": {"test_heads_keep_the_answers": "p_eagle"},
    "test_passes": {
        "test_rotary_and_fused_norms_of_real_architectures": "llama-2-5-4 gemma3-4-17-8 deepseek_v3-0-13-6 gpt2-0-0-0",
        "test_taps_of_real_architectures": "llama gpt2 gpt_oss deepseek_v3",
    },
    "test_quantised": {
        "test_a_head_drafts_for_a_quantised_target": "awq",
        "test_greedy_tokens_are_those_of_transformers": (
            "fp8_block ct_fp8 ct_w4a16 nf4 nf4_nested fp4 ao_int8 ao_float8 ao_int4 gptq_by_activation"
        ),
        "test_refresh_takes_over_other_quantised_weights": "awq",
        "test_the_answer_in_16_bits": "fp8_block",
    },
    "test_reentry": {"test_calls_inside_a_call": "ngram-eager eagle3-eager"},
    "test_refresh": {"test_training_and_loading_between_answers": ["ngram", "eagle3 of some tokens", "draft_model"]},
    "test_regions": {"test_the_same_computation": "llama gpt2 gemma3 mixtral deepseek_v3 gpt_oss"},
    "test_round": {"test_minimum_length": ["what is forbidden-8-16", "what comes instead-8-4"]},
    "test_row_invariance": {
        "test_kernels_of_ours_compute_all_of_these": "llama qwen3 gpt_oss lfm2",
        "test_what_no_kernel_of_ours_computes_is_named": "gpt2-parts0 cohere-parts1",
    },
    "test_sampling": {
        "test_generate": "nodes8-plain nodes8-repetition_penalty nodes5-min_p",
        "test_generate_with_a_draft_model": ["drawn-{}"],
    },
    "test_tensor_parallel": {
        "test_every_algorithm_gives_one_processs_tokens": "ngram eagle3_tree",
        "test_every_architecture_gives_one_processs_tokens": "llama deepseek_v3",
    },
    "test_training": {
        "test_one_batch_is_learned": "eagle3",
        "test_rounds_accept_what_training_unrolls": "eagle3-40",
    },
}
"""File -> test -> its cases that are not slow."""


SELDOM = set(
    "cohere cohere2 gemma gemma2 glm4 gpt_bigcode gpt_neox granite mistral nemotron olmo2 olmo3 opt phi phi3 qwen2 "
    "qwen2_moe smollm3 stablelm starcoder2".split()
)
"""Architectures whose cases are slow in all tests that `OFTEN` does not name: each takes seconds to be captured."""
SELDOM_IN = {"test_drop_in": {"gpt2", "qwen3"}}
"""More of them in a file."""


def mark(items: list) -> None:
    """Mark the collected cases that are slow. Raises AssertionError where a test of `OFTEN` has other cases."""
    collected = {}
    for item in items:
        if hasattr(item, "callspec"):
            collected.setdefault((item.path.stem, item.originalname), []).append(item)
    for (file, test), cases in collected.items():
        often = OFTEN.get(file, {}).get(test)
        often = often.split() if isinstance(often, str) else often
        if often and len(cases) > 1:  # not where one case was asked for by its name
            assert {*often} <= {case.callspec.id for case in cases}, f"sweeps.OFTEN: {file}::{test} has other cases"
        seldom = SELDOM | SELDOM_IN.get(file, set())
        for case in cases:
            names = {value for value in case.callspec.params.values() if isinstance(value, str)}
            is_slow = case.callspec.id not in often if often else bool(names & seldom)
            if is_slow:
                case.add_marker(pytest.mark.slow)


def thinned(step: int, *parts: list) -> list:
    """Parameters of the product of `parts`, whose tuples are spliced in. Those off every `step`-th diagonal are slow:
    with as many values as the second longest part has, each value remains, and of three parts each pair."""
    numbered = itertools.product(*(enumerate(part) for part in parts))
    return [
        pytest.param(
            *(value for _, item in case for value in (item if isinstance(item, tuple) else (item,))),
            marks=pytest.mark.slow if sum(number for number, _ in case) % step else [],
        )
        for case in numbered
    ]
