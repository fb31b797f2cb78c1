"""Which cases of a sweep run by default; `make test-all` runs them all."""

import itertools

import pytest

OFTEN = {
    "test_architectures": {
        "test_a_llama_that_is_none": "PastMean AcrossRows",
        "test_a_window_that_attention_is_not_told_of": "8 300",
        "test_admitted": "llama gemma3 deepseek_v3 gpt_oss",
    },
    "test_adapters": {"test_a_wrapped_model": "CAUSAL_LM"},
    "test_attention_backends": {
        "test_anything": 2,
        "test_causal_chunks": 2,
        "test_kinds_of_attention": 8,
        "test_pass_puts_the_op_into_the_graph": 3,
        "test_rotation_joins_what_rotates": "triton sdpa",
        "test_trees": 8,
    },
    "test_backend": {"test_every_architecture_keeps_its_logits": "gemma3 mixtral"},
    "test_batching": {"test_every_algorithm": ["eagle3 tree"]},
    "test_capture_modules": {
        "test_one_row": "falcon_alibi llama4",
        "test_rows_padded_on_the_left": 4,
        "test_tables_limit_positions": "codegen-512 mpt-512 bloom-None",
    },
    "test_checks": {
        "test_factors_in_full_precision": "llama-dtype0-1.01 llama-dtype6-1.001",
        "test_sound_models_pass_and_a_factor_of_1_01_does_not": "llama-dtype0-cpu mixtral-dtype8-cpu",
    },
    "test_classes": {
        "test_a_method_of_the_models_own_is_run_with_one_warning": "OwnInputs OwnLoop",
        "test_class": "BertLMHeadModel MoshiForCausalLM",
        "test_sound_models_pass_in_16_bits": "llama-dtype0",
    },
    "test_demo_heads": {
        "test_heads_draft_what_the_demo_model_says": "eagle3-options1-3.3",
    },
    "test_dflash": {
        "test_a_flavour_loads": "dflash dflash_bin dflash_bias dflash_mimo dflash_deepspec dflash_speculators",
        "test_blocks_are_their_formulas": "dflash_sliding dflash_bias jetspec",
        "test_drafts_are_those_of_a_draft_without_a_cache": "tree cut",
        "test_tokens_are_plain_decodings": "llama-chain llama-tree mixtral-tree",
    },
    "test_draft_block": {
        "test_a_head_is_captured_for_any_batch_and_length": "eagle_qwen2 eagle3_sglang_layers mtp_deepseek mtp_qwen35",
    },
    "test_draft_checkpoints": {
        "test_every_tensor_is_needed": "eagle31 eagle3_sglang_layers mtp_qwen",
    },
    "test_draft_rounds": {
        "test_a_draft_that_is_the_target_accepts_everything": "mixtral",
        "test_drafts_are_those_of_a_draft_without_a_cache": "eagle3-tree draft_model-chain",
        "test_tokens_are_plain_decodings": "eagle-tree-llama eagle3-union-llama eagle3-tree-mixtral mtp-chain-llama "
        "naive_eagle-one-llama",
    },
    "test_drop_in": {
        "test_a_cache_goes_from_one_to_the_other": 6,
        "test_features": 8,
        "test_inputs": 4,
        "test_stops_at_the_same_token": 3,
    },
    "test_errors": {"test_the_command_line": 2},
    "test_hybrid_batches": {"test_rows_enter_and_leave": "qwen3_5 lfm2 mamba2"},
    "test_hybrids": {
        "test_drafts_of_a_head_and_of_a_model": "qwen3_5-eagle3 lfm2-draft_model",
        "test_kernels_give_the_same_answer": "lfm2 qwen3_5",
    },
    "test_kernels_all_reduce": {"test_processes_wait_for_each_other": 2},
    "test_kernels_append": {"test_rotation": 3},
    "test_kernels_attention": {
        "test_a_block_that_lies_in_the_cache_already": 2,
        "test_caches_of_8_bits": 2,
        "test_causal_chunks": 3,
        "test_heads_and_sizes": 3,
        "test_large_causal_chunks": 2,
        "test_norms": 2,
        "test_sliding_window": 2,
        "test_slopes": "interpreter-7-options0-slopes0 interpreter-7-options1-slopes1",
        "test_splits": 2,
        "test_trees": 3,
    },
    "test_kernels_experts": {"test_experts_in_fp8": 2, "test_markers_mean_what_the_library_computes": 2},
    "test_kernels_fit": {"test_kernels_fit": "products"},
    "test_kernels_matmul": {"test_residual_stream_and_norm": 4},
    "test_kernels_ngram": {"test_kernels_without_a_gpu": 2},
    "test_kernels_norm": {"test_shapes": 3},
    "test_kernels_quantised": {"test_products": 2},
    "test_kernels_top_logits": {"test_ends_of_parts": 4},
    "test_linked_drafts": {
        "test_blocks_and_chains_are_their_formulas": 2,
        "test_tokens_are_plain_decodings": "domino",
        "test_trees_are_the_best_of_all_paths": 2,
    },
    "test_logit_bits": {"test_nodes_and_plain_steps": 2},
    "test_parallel_drafts": {
        "test_drafts_are_those_of_a_draft_model_without_a_cache": 2,
        "test_heads_keep_the_answers": "p_eagle",
    },
    "test_passes": {
        "test_avx512_linear_is_linear": 3,
        "test_few_rows_of_float32_take_the_form_avx512": 3,
        "test_fused_residuals": 2,
        "test_rotary_and_fused_norms_of_real_architectures": "llama-2-5-4 gemma3-4-17-8",
        "test_rotary_takes_rotations_by_halves_only": 3,
        "test_taps_of_real_architectures": "llama gpt2 deepseek_v3",
        "test_tree_attention_equals_a_forward_over_every_path": 3,
    },
    "test_picture_batches": {"test_rows_with_pictures_beside_rows_without": "Qwen3VL"},
    "test_pictures": {
        "test_a_draft_model_answers_prompts_with_pictures": 2,
        "test_options_of_generate": 3,
        "test_the_same_tokens": 3,
    },
    "test_prepared": {"test_a_replaced_method_is_called": 3},
    "test_quantised": {
        "test_greedy_tokens_are_those_of_transformers": ("fp8_block ct_fp8 ct_w4a16 nf4 ao_int8 gptq_by_activation"),
        "test_a_layer_means_what_its_library_computes": 2,
        "test_layers_of_one_input_are_merged_without_a_copy": 2,
        "test_layers_take_the_kernel_for_few_rows": 2,
        "test_refresh_takes_over_other_quantised_weights": "awq",
        "test_the_answer_in_16_bits": "fp8_block",
    },
    "test_recurrences": {"test_one_compilation_serves_every_number_of_nodes": "convolution selective"},
    "test_reentry": {
        "test_both_sides_of_a_fork_while_another_thread_generates": "ngram-eager eagle3-eager draft_model-eager",
        "test_calls_inside_a_call": "ngram-eager eagle3-eager",
        "test_calls_of_several_threads": "ngram eagle3 draft_model",
    },
    "test_refresh": {"test_training_and_loading_between_answers": ["ngram", "eagle3 of some tokens"]},
    "test_regions": {"test_the_same_computation": "llama gemma3 gpt_oss"},
    "test_report": {"test_trees_and_paths_write_the_answer": 3},
    "test_round": {"test_minimum_length": ["what is forbidden-8-16", "what comes instead-8-4"]},
    "test_row_invariance": {
        "test_kernels_of_ours_compute_all_of_these": "llama gpt_oss lfm2",
        "test_what_no_kernel_of_ours_computes_is_named": "gpt2-parts0 cohere-parts1",
    },
    "test_sampling": {
        "test_generate": "nodes8-repetition_penalty nodes5-min_p",
        "test_generate_with_a_draft_model": ["drawn-{}"],
        "test_walk": 2,
    },
    "test_scaled_caches": {"test_kernels": 2},
    "test_serving": {"test_a_signal_stops_admission_and_lets_requests_end": "30.0"},
    "test_tensor_parallel": {
        "test_every_algorithm_gives_one_processs_tokens": "eagle3_tree",
        "test_every_architecture_gives_one_processs_tokens": "llama",
        "test_parts_add_up_to_the_whole": "2",
    },
    "test_training": {
        "test_a_head_loads_as_it_was_trained": "eagle3 mtp",
        "test_an_interrupted_training_goes_on_bit_for_bit": 2,
        "test_answers_are_transformers_own": 2,
        "test_one_batch_is_learned": "eagle3",
        "test_other_architectures": 3,
        "test_rounds_accept_what_training_unrolls": "eagle3-40",
    },
}
"""File -> test -> its cases that are not slow; a number n: every n-th of them."""


SELDOM = set(
    "cohere cohere2 gemma gemma2 glm4 gpt_bigcode gpt_neox granite mistral nemotron olmo2 olmo3 opt phi phi3 qwen2 "
    "qwen2_moe smollm3 stablelm starcoder2".split()
)
"""Architectures whose cases are slow in all tests that `OFTEN` does not name: each takes seconds to be captured."""
SELDOM_IN = {"test_drop_in": {"gpt2", "qwen3"}}
"""More of them in a file."""


def mark(items: list) -> None:
    """Mark the collected cases that are slow; those on a GPU are not. Raises AssertionError where a test of `OFTEN` has
    other cases."""
    collected: dict[tuple[str, str], list] = {}
    for item in items:
        if item.get_closest_marker("gpu") is None:
            collected.setdefault((item.path.stem, item.originalname), []).append(item)
    for (file, test), cases in collected.items():
        often = _often(file, test, cases)
        for case in cases:
            if case.name not in often:
                case.add_marker(pytest.mark.slow)


def _often(file: str, test: str, cases: list) -> set[str]:
    """The names of the cases of a test that are not slow."""
    often = OFTEN.get(file, {}).get(test)
    if often is None or isinstance(often, int) or len(cases) == 1:  # perhaps one case was asked for by its name
        seldom = SELDOM | SELDOM_IN.get(file, set())
        names = [case.name for case in cases if not _words(case) & seldom]
        return set(names[:: often if isinstance(often, int) else 1])
    names = {f"{test}[{each}]" for each in (often.split() if isinstance(often, str) else often)}
    assert names <= {case.name for case in cases}, f"sweeps.OFTEN: {file}::{test} has other cases"
    return names


def _words(case) -> set[str]:
    """The parameters of a case that are text."""
    parameters = case.callspec.params.values() if hasattr(case, "callspec") else ()
    return {value for value in parameters if isinstance(value, str)}


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
