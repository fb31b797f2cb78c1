"""What the tests must notice: each guarded line of the package, the fault that is put there, and the tests.

`mutations.py` finds a line by its comment, `guard: name`, and makes the fault.
"""

from enum import StrEnum
from typing import NamedTuple


class Change(StrEnum):
    """What is done to a guarded statement."""

    NEVER = "the condition is false"
    ALWAYS = "the condition is true"
    SKIP = "the statement is left out"
    FIRST = "of what is joined by and, or, & or |, the first remains"
    LAST = "of what is joined by and, or, & or |, the last remains"
    BOUND = "a comparison takes the bound in, or leaves it out"
    MORE = "({}) + 1"
    LESS = "({}) - 1"
    ZERO = "0 * ({})"
    HUNDREDFOLD = "100 * ({})"


class Guard(NamedTuple):
    """does: a change; or the text that takes the statement's place, or the place of the head's condition or iterable.

    tests: what pytest is given to notice it.
    """

    name: str
    does: Change | str
    tests: str


NEVER, ALWAYS, SKIP, FIRST, LAST, BOUND, MORE, LESS, ZERO, HUNDREDFOLD = Change
GUARDS = [
    Guard(name, does, f"tests/{tests}")
    for name, does, tests in (
        # capture and api
        ("float16-range", NEVER, "capture/test_admit.py -k cannot_be_converted"),
        ("model-changes", NEVER, "capture/test_changes.py -k test_generate_raises"),
        ("checks-refuse", NEVER, "capture/test_checks.py -k factors_in_full"),
        ("noise", HUNDREDFOLD, "capture/test_checks.py -k rounding_beyond"),
        ("forbidden-tokens", "return logits.std()", "capture/test_checks.py -k forbidden"),
        ("capture-is-checked", SKIP, "runtime/test_generate.py -k test_every_check_is_run"),
        ("trees-are-checked", SKIP, "runtime/test_generate.py -k test_every_check_is_run"),
        ("windows-are-crossed", NEVER, "capture/test_checks.py -k windows"),
        ("layers-alike", NEVER, "capture/test_kinds.py -k read_other_layers"),
        ("dropout", NEVER, "capture/test_changes.py -k effects_are_named"),
        ("evaluation-mode", SKIP, "capture/test_changes.py -k captured_alike"),
        ("adapter-in-use", ALWAYS, "capture/test_loras.py -k slots_keep"),
        ("rounding-is-undone", SKIP, "capture/test_rounded.py -k error_gives"),
        ("own-code", NEVER, "product/test_custom_generate.py -k bound"),
        # passes
        ("stream-read-by-others", NEVER, "passes/test_cpu_products.py -k others_read"),
        ("norm-read-by-others", FIRST, "passes/test_cpu_products.py -k test_joined_products"),
        ("writes-keep-order", NEVER, "passes/test_forward.py -k not_lowered"),
        ("joined-weights", "not self._addresses", "passes/test_forward.py -k stale"),
        ("rotation-by-halves", NEVER, "passes/test_fuse_rotary.py -k rotations_by_halves"),
        # kernels on a GPU
        ("ancestors-are-seen", ALWAYS, "runtime/test_tree.py -k tree_mask"),
        ("window", BOUND, "runtime/test_tree.py -k tree_mask"),
        ("mask", SKIP, "kernels/test_grouped.py -k masks"),
        ("nothing-is-seen", "out = acc / total", "kernels/test_grouped.py -k sees_nothing"),
        ("parts-are-read-once", SKIP, "kernels/test_all_reduce.py -k no_numbers"),
        ("experts-of-a-rank", FIRST, "kernels/test_experts.py -k each_rank"),
        ("tokens-that-count", BOUND, "kernels/test_recurrence.py -k same_bits"),
        ("state-of-the-root", BOUND, "kernels/test_recurrence.py -k gated"),
        ("running-sums", BOUND, "runtime/test_sampling_bits.py -k test_kernels"),
        # C++ and CUDA
        ("cpu-ancestors", ALWAYS, "kernels/test_cpu_attention.py -k means"),
        ("cpu-zero-points", ALWAYS, "kernels/test_cpu_gemm.py -k test_layouts"),
        (
            "warp-sums",
            "for (int step = 8; step; step /= 2) value = join(value, __shfl_xor_sync(kAll, value, step));",
            "ngram/test_match.py -k without_sums_of_warps",
        ),
        ("rows-checked", NEVER, "ngram/test_trie_operations.py -k refuses_before"),
        ("saved-tries", SKIP, "ngram/test_trie_files.py -k contradictory"),
        # quantised weights
        ("scales-of-blocks", SKIP, "quantised/test_gguf_blocks.py"),
        ("divided-scales", NEVER, "drafters/test_quantised_drafts.py -k 'has_the_weights and ct_nvfp4'"),
        ("scales-before-products", NEVER, "kernels/test_cpu_gemm.py -k test_layouts"),
        ("rounded-activations", SKIP, "kernels/test_cpu_gemm.py -k test_the_op_takes_the_kernel"),
        ("scale-before-norm", ALWAYS, "kernels/test_cpu_gemm.py -k test_layouts"),
        ("gptq-zero", ALWAYS, "drafters/test_quantised_drafts.py -k 'has_the_weights and gptq_v2'"),
        ("rank-rounding", "largest = x.abs().amax(dim=-1, keepdim=True)", "parallel/test_quantised_ranks.py -k few"),
        # what is accepted
        ("accepted-path", ALWAYS, "runtime/test_tree.py -k follow"),
        ("accepted-count", MORE, "runtime/test_tree.py -k follow"),
        ("accepted-slots", LAST, "runtime/test_tree.py -k follow"),
        ("drawn-drafts", ALWAYS, "runtime/test_sampling.py -k 'test_drawn_drafts_leave_the_target'"),
        ("residual", "return target", "runtime/test_sampling.py -k 'test_drawn_drafts_leave_the_target'"),
        ("drawn-chains", ALWAYS, "runtime/test_drawn_chains.py -k 'paper or texts'"),
        ("random-counters", "(position, stream)", "runtime/test_sampling.py -k test_every_row_has_numbers_of_its_own"),
        (
            "seed",
            "return draw(weights, uniform(0, numbers, gained).to(weights.device))",
            "runtime/test_sampling.py -k test_the_seed_decides",
        ),
        (
            "excluded-tokens",
            "return torch.searchsorted(sums, (u * sums[:, -1])[:, None], right=False)[:, 0]",
            "runtime/test_sampling.py -k test_ends_of_a_draw",
        ),
        ("grammar-forbids", SKIP, "runtime/test_grammars.py -k greedy_tokens"),
        ("grammar-looks-ahead", SKIP, "runtime/test_grammars.py -k drawn_chains"),
        ("end-of-thinking", BOUND, "runtime/test_thinking.py -k exactly_after"),
        # the state of rounds, calls and caches
        ("minimum-length", BOUND, "runtime/test_round.py -k test_minimum_length_to_the_token"),
        ("check-before-tokens", SKIP, "runtime/test_round.py::test_a_model_that_has_changed_gives_no_token_out"),
        ("finished-rows", SKIP, "runtime/test_round.py::test_finished_rows_are_left_alone"),
        ("end-inside-a-run", MORE, "runtime/test_round.py::test_end_of_sequence_inside_an_accepted_run"),
        ("limit-of-a-row", MORE, "runtime/test_round.py::test_limits_inside_an_accepted_run"),
        ("accepted-keys-move", SKIP, "runtime/test_round.py -k 'test_rounds_over_random_trees and llama-16-3'"),
        ("states-are-led-on", SKIP, "product/test_hybrids.py -k test_the_answer_and_the_states"),
        ("next-request", SKIP, "runtime/test_round.py -k test_a_request_leaves_nothing_to_the_next"),
        ("offsets-of-pictures", SKIP, "capture/test_pictures.py -k 'test_the_same_tokens and Qwen3VL'"),
        ("slots-of-attention", ZERO, "capture/test_modules.py -k positions_that_llama4"),
        (
            "end-of-a-prompt",
            "state.lengths.add_(size)",
            "product/test_drop_in.py -k 'test_each_row_of_a_batch_is_its_own_run and llama'",
        ),
        ("put-off-prompts", SKIP, "drafters/test_draft_rounds.py -k rounds_without_any"),
        ("ends-of-slices", SKIP, "batching/test_rides.py -k 'generate and tree'"),
        ("ended-rows", SKIP, "runtime/test_generate.py -k 'every_row_ends'"),
        ("longest-text", NEVER, "runtime/test_generate_errors.py -k test_a_wrong_option"),
        ("own-positions", NEVER, "contrib/test_more_pictures.py -k padding_that_counts"),
        ("mixed-rows", NEVER, "product/test_unmasked.py -k test_batches"),
        ("generate-during-ranks", NEVER, "batching/test_batching_ranks.py -k told"),
        # steps, compiled parts and turns
        ("replayed-cache", NEVER, "compile/test_replays.py -k copied"),
        ("new-weight", NEVER, "compile/test_replays.py -k copied"),
        (
            "parts-alike",
            "return next(iter(self._made.values())).bound(owner)",
            "runtime/test_compiled_steps.py -k test_parts_alike",
        ),
        ("shapes-are-forgotten", SKIP, "compile/test_regions.py -k test_a_compilation_leaves"),
        ("owed", ZERO, "runtime/test_turns.py -k share_the_time"),
        ("other-wrappers", NEVER, "compile/test_cold_start.py -k another_wrapper"),
        ("drafts-earn", ALWAYS, "runtime/test_whole_tree_budget.py -k test_drafts_that_are_never"),
        # drafters
        ("another-tokenizer", "ids = tokens", "contrib/test_two_tokenizers.py -k accepts_everything"),
        ("drafted-twice", FIRST, "drafters/test_union.py -k test_merged_trees"),
        ("seam-of-rounds", LESS, "contrib/test_mtp_modules.py -k token_k"),
        ("yarn", NEVER, "drafters/test_draft_block.py -k 'formulas and eagle3_mla'"),
        ("drafting-backend", NEVER, "contrib/test_assistant.py -k other_models"),
        ("draft-weights", SKIP, "drafters/test_draft_weights.py -k refresh"),
        # batching, and the texts of other people
        ("adapter-kv", 'adapter = b""', "batching/test_lora_requests.py -k 'belong and cpu-1'"),
        ("adapters-are-freed", SKIP, "batching/test_lora_requests.py -k end_with"),
        ("rows-being-copied", SKIP, "batching/test_rows.py -k written"),
        ("pages-of-idle-rows", SKIP, "batching/test_rows.py -k told_their_pages"),
        ("late-rows", SKIP, "batching/test_rides.py -k 'answers and eagle3'"),
        ("states-of-idle-rows", SKIP, "batching/test_rows.py -k idle_row"),
        ("pages-of-rounds", NEVER, "batching/test_preemption.py -k without_pages"),
        ("prefixes-of-weights", SKIP, "batching/test_prefix_cache.py -k other_weights"),
        ("longest-prompt", BOUND, "batching/test_request_faults.py -k fills_a_row"),
        ("fixed-chunks", SKIP, "batching/test_prefill.py -k load"),
        ("states-of-a-row", SKIP, "batching/test_hybrid_batches.py -k 'test_rows_enter_and_leave and qwen3_5'"),
        ("texts-with-pictures", "return self.text", "batching/test_picture_batches.py -k test_ids_without"),
        ("chosen-tokens", NEVER, "batching/test_request_faults.py -k 'choose_no_token and many'"),
        ("own-processors", SKIP, "batching/test_request_faults.py -k 'for_itself and own'"),
        ("long-lists", NEVER, "batching/test_request_faults.py -k 'refused_by_name_at_once and bad'"),
        ("forks", NEVER, "batching/test_request_faults.py -k forked"),
        ("share-text", FIRST, "train/test_online.py -k test_texts_that_are_for_nobody"),
        # serving
        ("ids-of-tokens", FIRST, "serve/test_refusals.py -k detokenize"),
        ("held-text", ZERO, "serve/test_anthropic.py -k pieces"),
        ("tools", NEVER, "serve/test_anthropic.py -k without_tools"),
        ("requests-end-first", SKIP, "serve/test_load.py -k stopped_hard"),
        ("event-loop", "return await answering", "serve/test_load.py -k event_loop"),
        ("early-leaver", NEVER, "serve/test_load.py -k leaves_while"),
        ("limit-comes-first", NEVER, "serve/test_load.py -k before_anything_of_its_size"),
        ("names-twice", NEVER, "serve/test_refusals.py -k no_json"),
        ("request-ids", 'REQUEST_ID = re.compile(r".*")', "serve/test_bounds.py -k odd_headers"),
        ("hosted-tools", NEVER, "serve/test_agents.py -k tools_of_services"),
        ("answers-of-others", "text = next(iter(self._kept.values()), None)", "serve/test_agents.py -k kept_answers"),
        ("shadow-counts", SKIP, "serve/test_shadow.py -k wrong_token"),
        # artefacts
        ("quick-look", SKIP, "compile/test_start.py -k test_a_wrong_artefact"),
        ("weight-values", FIRST, "compile/test_bind.py -k test_small_constants"),
        ("called-code", NEVER, "compile/test_key.py -k test_patched_code"),
        ("checksums", ALWAYS, "compile/test_cache.py -k test_no_damage"),
        ("other-users", "return bool(by_group)", "compile/test_cache.py -k another_user"),
        ("named-functions", ALWAYS, "compile/test_graphs.py -k test_other_names"),
        # strangers
        ("public-addresses", NEVER, "serve/test_media.py -k resolved_once"),
        ("pixels-before-decoding", SKIP, "serve/test_media.py -k before_they_are_decoded"),
        ("joined-control-tokens", SKIP, "serve/test_chat_text.py -k become_one"),
        ("template-variables", NEVER, "serve/test_chat_text.py -k only_variables"),
        ("signatures", ALWAYS, "compile/test_start.py -k test_compiled_code_is_loaded"),
        ("writes-of-graphs", NEVER, "compile/test_graphs.py -k new_tensors_only"),
        ("salts", "return adapter", "batching/test_scheduler.py -k salt"),
        ("figures-in-blocks", "return tokens", "batching/test_scheduler.py -k sixteen"),
        ("owners-of-texts", "texts = self.trie", "batching/test_scheduler.py -k belong"),
        ("owners-on-a-gpu", "self.reads_corpus[row].fill_(1)", "drafters/test_matching.py -k owners"),
        ("owners-of-tokens", "self.reads[row].fill_(True)", "drafters/test_recycle.py -k owners"),
        ("row-turns", "first = self.adapters.next(waiting)", "batching/test_scheduler.py -k free_row"),
        ("shares-of-the-queue", "share, added = bound, len(sequences)", "batching/test_scheduler.py -k share"),
        # several ranks
        ("giving-up", SKIP, "parallel/test_faults.py -k round-hangs-2-1"),
        ("errors-of-a-rank", LAST, "parallel/test_tensor_parallel.py -k error_on_rank_0"),
        # training
        ("worse-weights", NEVER, "train/test_online.py -k test_worse_weights"),
        ("supervised-tokens", "supervised[:] = True", "train/test_data.py -k test_answers_are_transformers_own"),
        ("ctrl-c", LAST, "train/test_loop.py -k 'test_ctrl_c_ends'"),
        ("private-heads", NEVER, "train/test_hub.py -k private"),
        # reports and extensions
        ("other-answers", ALWAYS, "tools/test_audit_answers.py -k another"),
        ("other-cpp", NEVER, "product/test_extensions.py -k 'installed_is_taken'"),
    )
]
