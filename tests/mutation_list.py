"""The faults that the tests must notice: see `mutations.py`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`old`, which occurs once in `file`, becomes `new`. tests: what pytest is given to notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: str


RUNTIME = "spec_compile/runtime/"
ARTEFACTS = "spec_compile/artefacts/"
ROUND, TREE, SAMPLING = "tests/runtime/test_round.py", "tests/runtime/test_tree.py", "tests/runtime/test_sampling.py"
GENERATE, REPORT = "tests/runtime/test_generate.py", "tests/report/test_report.py"
KINDS = "tests/capture/test_kinds.py"
DROP_IN, SHARED_CODE = "tests/product/test_drop_in.py", "tests/runtime/test_shared_code.py"
STORE = "tests/artefacts/test_store.py"
DROP_IN_PROMPTS = "tests/product/test_drop_in_prompts.py"

WEIGHTS = [
    Mutation(
        "weights beyond float16 are converted", "spec_compile/capture/served_dtype.py",
        "if not (each.tensor.abs() <= largest).all():", "if each.tensor.isnan().any():",
        "tests/capture/test_served_dtype.py",
    ),
    Mutation(
        "an old driver is said to launch early", "spec_compile/kernels/card.py",
        "    if version >= LAUNCHES_EARLY:", "    if version:",
        "tests/kernels/test_card.py",
    ),
    Mutation(
        "sums of a warp without the instruction forget half", "spec_compile/ngram/match.cu",
        "for (int step = 16; step; step /= 2) value = join", "for (int step = 8; step; step /= 2) value = join",
        "tests/ngram/test_match.py -k without_sums_of_warps",
    ),
    Mutation(
        "a start that fails keeps the layers rounded", "spec_compile/capture/rounded_weights.py",
        "        for path, layer in replaced.items():\n            put_layer(model, path, layer)\n        raise",
        "        raise",
        "tests/capture/test_rounded_weights.py",
    ),
    Mutation(
        "a head of a few tokens reads the codes of others", "spec_compile/drafters/checkpoints/load.py",
        "some_rows(target.codes, head.draft_to_target)", "some_rows(target.codes, slice(head.head_weight.shape[0]))",
        "tests/capture/test_rounded_weights.py",
    ),
    Mutation(
        "a chain goes on where others read its stream", "spec_compile/passes/chain_products.py",
        "if stream is not None and len(_readers(chain)) > 1:", "if False:",
        "tests/passes/test_chain_products.py -k others_read",
    ),
    Mutation(
        "a norm that others read joins a product", "spec_compile/passes/fuse_around.py",
        "if norm is not None and len(norm.out.users) == 1:", "if norm is not None:",
        "tests/passes/test_fuse_around.py -k test_joined_products",
    ),
    Mutation(
        "a layer of a GGUF file is replaced by another's codes", "spec_compile/capture/gguf.py",
        "if torch.equal(packed.weight().to(weight), weight):", "if packed.inputs == weight.shape[1]:",
        "tests/capture/test_gguf.py",
    ),
    Mutation(
        "rows of a GGUF file stay in the order of the file", "spec_compile/capture/gguf.py",
        "(torch.tensor(matrix.data)[order])", "(torch.tensor(matrix.data))",
        "tests/capture/test_gguf.py -k keep_the_bits",
    ),
    Mutation(
        "minima of a GGUF file are left out", "spec_compile/kernels/linear/quantised/blocks.py",
        "(numbers + units[:, :, 1:] if self.second == MINIMUM else numbers)", "numbers",
        "tests/kernels/test_gguf_blocks.py",
    ),
    Mutation(
        "a kernel of a CPU leaves zero points and minima out", "spec_compile/kernels/linear/few_rows.py",
        "second=layout.second", "second=0", "tests/kernels/test_few_rows.py -k test_layouts",
    ),
    Mutation(
        "layers that change keep the order of a GPU on a CPU", "spec_compile/kernels/linear/quantised/one_layout.py",
        "self.inputs, is_of_cpu(self.packed)", "self.inputs, False", "tests/capture/test_one_layout.py -k on_a_cpu",
    ),
    Mutation(
        "perplexity takes the unrounded model twice", "spec_compile/report/rounding.py",
        "models, losses, predicted, agreeing = (unrounded, rounded),",
        "models, losses, predicted, agreeing = (unrounded, unrounded),", "tests/report/test_rounding.py",
    ),
]  # fmt: skip

STATE = [
    Mutation(
        "an end of sequence is allowed one token early", f"{RUNTIME}state.py",
        "early = self.lengths[:, None] + 1 + depth < self.min_lengths[:, None]",
        "early = self.lengths[:, None] + 2 + depth < self.min_lengths[:, None]",
        f"{ROUND} -k test_minimum_length_to_the_token",
    ),
    Mutation(
        "an end of sequence is forbidden one token too long", f"{RUNTIME}state.py",
        "early = self.lengths[:, None] + 1 + depth < self.min_lengths[:, None]",
        "early = self.lengths[:, None] + 1 + depth <= self.min_lengths[:, None]",
        f"{ROUND} -k test_minimum_length_to_the_token",
    ),
    Mutation(
        "slots that are not in use are leaves", f"{RUNTIME}state.py",
        ".clone(), number - 1)", ".clone(), 0)",
        f"{TREE} -k slots_that_are_not_in_use",
    ),
    Mutation(
        "tokens of a model that has changed are given out", f"{RUNTIME}call.py",
        "check, self.request.check = self.request.check, None\n            check()",
        "self.request.check = None",
        f"{ROUND}::test_a_model_that_has_changed_gives_no_token_out",
    ),
    Mutation(
        "sizes that have not run are never tried", f"{RUNTIME}round_costs.py",
        "self._weight(nodes) / self._weight(nearest)", "1",
        "tests/runtime/test_sizes.py -k tried_where_they_may_pay",
    ),
    Mutation(
        "finished rows go on", f"{RUNTIME}state.py",
        "gained = torch.where(self.finished, 0, gained)",
        "gained = torch.where(self.finished, gained, gained)",
        f"{ROUND}::test_finished_rows_are_left_alone",
    ),
    Mutation(
        "what was drafted behind an end of sequence stays", f"{RUNTIME}state.py",
        "until_end = torch.where(ends, number + 1, nodes + 1).amin(dim=1)",
        "until_end = torch.where(ends, number + 2, nodes + 1).amin(dim=1)",
        f"{ROUND}::test_end_of_sequence_inside_an_accepted_run",
    ),
    Mutation(
        "a row gets one token more than its limit", f"{RUNTIME}state.py",
        "room = (self.max_lengths - (self.lengths + 1)).clamp(min=0)",
        "room = (self.max_lengths - self.lengths).clamp(min=0)",
        f"{ROUND}::test_limits_inside_an_accepted_run",
    ),
    Mutation(
        "keys and values of the path are not moved into place", f"{RUNTIME}state.py",
        "source, target = (self.lengths[:, None] + accepted.path)[:, None, :], slots[:, None, :]",
        "source, target = slots[:, None, :], slots[:, None, :]",
        f"{ROUND} -k 'test_rounds_over_random_trees and llama-16-3'",
    ),
    Mutation(
        "states are led over rejected nodes", f"{RUNTIME}state.py",
        "self.kv.states.commit(accepted.path, gained)", "self.kv.states.commit(accepted.path, gained + 1)",
        "tests/product/test_hybrids.py -k test_the_answer_and_the_states",
    ),
    Mutation(
        "a state of a call is that of the next", f"{RUNTIME}state.py",
        "self.kv.states.reset(self.prompt_lengths)", "self.kv.states.valid",
        "tests/product/test_hybrids.py -k test_the_answer_and_the_states",
    ),
    Mutation(
        "what stands behind a prompt enters its state", f"{RUNTIME}round.py",
        "(state.prompt_lengths - 1 - state.lengths).clamp(0, size)", "(state.prompt_lengths + size).clamp(0, size)",
        "tests/product/test_hybrids.py -k test_the_answer_and_the_states",
    ),
    Mutation(
        "steps that are tried change states", f"{RUNTIME}steps/untouched.py",
        "state.finished.fill_(True)", "state.finished.any()",
        "tests/product/test_hybrids.py -k test_building_steps",
    ),
    Mutation(
        "positions behind a picture have no offset", f"{RUNTIME}state.py",
        "positions = positions + self.position_offsets[:, None]", "positions = positions + 0",
        "tests/capture/test_pictures.py -k 'test_the_same_tokens and Qwen3VL'",
    ),
    Mutation(
        "windows go by positions with an offset", "spec_compile/passes/use_tree_attention.py",
        "positions = _positions_of_slots(gm, positions, lengths)", "pass",
        "tests/capture/test_pictures.py -k 'test_the_same_tokens and Qwen2_5_VL'",
    ),
    Mutation(
        "the finished rows of a call are those of the next", f"{RUNTIME}state.py",
        "self.finished.zero_()", "self.finished.any()",
        f"{ROUND} -k test_a_request_leaves_nothing_to_the_next",
    ),
    Mutation(
        "a cache that comes in counts one place of padding", f"{RUNTIME}call.py",
        "cached = [request.past.length - pad for pad in", "cached = [request.past.length - pad + 1 for pad in",
        f"{DROP_IN_PROMPTS} -k 'test_a_cache_goes_from_one and llama and StaticCache'",
    ),
    Mutation(
        "keys and values that come in lie a place off", f"{RUNTIME}state.py",
        "torch.tensor([max(first - pad, 0)],", "torch.tensor([max(first - pad, 0) + (pad > 0)],",
        f"{DROP_IN_PROMPTS} -k 'test_a_cache_goes_from_one and llama and StaticCache'",
    ),
    Mutation(
        "positions end before a learned table does", f"{RUNTIME}state.py",
        "positions.clamp(max=self.position_limit - 1)", "positions.clamp(max=self.position_limit - 3)",
        f"{DROP_IN} -k 'test_each_row_of_a_batch_is_its_own_run and gpt2'",
    ),
]  # fmt: skip
CACHES = [
    Mutation(
        "a row begins with the states of the request before", "spec_compile/cache.py",
        "self[number][0][row].zero_()", "self[number][0][row].abs()",
        "tests/batching/test_hybrid_batches.py -k 'test_rows_enter_and_leave and qwen3_5'",
    ),
    Mutation(
        "states stay behind when a row moves", "spec_compile/batching/lanes.py",
        "_copy(self._states(row), target._states(to))", "",
        "tests/batching/test_hybrid_batches.py -k 'test_rows_enter_and_leave and qwen3_5'",
    ),
    Mutation(
        "an answer that was cut is gone on with", "spec_compile/batching/decoding.py",
        "outcome.finished and sum(job.speculation.per_step_tokens) == len(job.tokens)", "True",
        "tests/batching/test_hybrid_batches.py -k test_an_answer_that_was_cut",
    ),
    Mutation(
        "a text with pictures is its ids", "spec_compile/batching/decoding.py",
        "job.weights == self.texts.weights and not job.has_pictures", "job.weights == self.texts.weights",
        "tests/batching/test_picture_batches.py -k test_ids_without",
    ),
    Mutation(
        "a root that a state is behind is committed again", f"{RUNTIME}steps/build.py",
        "states = self.state.kv.states.kept()", "states = nullcontext()",
        "tests/product/test_hybrid_caches.py -k test_embeddings",
    ),
    Mutation(
        "states in a cache that comes in are not read", f"{RUNTIME}state.py",
        "self.kv.states.fill(past.states)", "pass",
        "tests/product/test_hybrid_caches.py -k 'test_a_cache_goes and qwen3_5'",
    ),
    Mutation(
        "a cache that goes out lies a place off", f"{RUNTIME}past.py",
        "slots[row, :, first - pad : length - pad]",
        "slots[row, :, first - pad + (pad > 0) : length - pad + (pad > 0)]",
        f"{DROP_IN_PROMPTS} -k 'test_a_cache_goes_from_one and llama and DynamicCache'",
    ),
    Mutation(
        "what goes out of a cache covers its padding", f"{RUNTIME}past.py",
        "first = max(begin, pad)", "first = max(begin, pad - 1)",
        f"{DROP_IN_PROMPTS} -k 'test_a_cache_goes_from_one and llama and returned'",
    ),
    Mutation(
        "attention looks at too few slots", f"{RUNTIME}flights.py",
        "session.max_kv_len(longest + nodes)", "session.max_kv_len(min(rider.length for rider in riders))",
        f"{DROP_IN} -k 'test_each_row_of_a_batch_is_its_own_run and llama'",
    ),
    Mutation(
        "a prompt is processed beyond its end", f"{RUNTIME}round.py",
        "state.lengths.copy_(torch.minimum(state.lengths + size, ends))", "state.lengths.add_(size)",
        f"{DROP_IN} -k 'test_each_row_of_a_batch_is_its_own_run and llama'",
    ),
]  # fmt: skip
TREES = [
    Mutation(
        "a drafted token is accepted below a wrong one", f"{RUNTIME}accept/greedy.py",
        "on_path = (ancestors & chosen_bits) == ancestors",
        "on_path = (torch.ones_like(ancestors) << number) & chosen_bits != 0",
        f"{TREE} -k accept_greedy",
    ),
    Mutation(
        "an accepted run is one token too long", f"{RUNTIME}accept/greedy.py",
        "count = torch.where(on_path, depth, -1).amax(dim=1) + 1",
        "count = torch.where(on_path, depth, -1).amax(dim=1) + 2",
        f"{TREE} -k accept_greedy",
    ),
    Mutation(
        "an accepted run is one token too short", f"{RUNTIME}accept/greedy.py",
        "count = torch.where(on_path, depth, -1).amax(dim=1) + 1",
        "count = torch.where(on_path, depth, -1).amax(dim=1).clamp(min=1)",
        f"{TREE} -k accept_greedy",
    ),
    Mutation(
        "slots that are not in use are accepted", f"{RUNTIME}accept/greedy.py",
        "is_chosen = tree.real & (choice", "is_chosen = (choice", f"{TREE} -k accept_greedy",
    ),
    Mutation(
        "the tree's depth ends at half of its nodes", "spec_compile/tree.py",
        "- 1).bit_length())", "- 1).bit_length() - 1)", f"{TREE} -k ancestry",
    ),
    Mutation(
        "children of the root are as deep as the root", "spec_compile/tree.py",
        "depth = (parents >= 0)", "depth = (parents > 0)",
        f"{TREE} -k ancestry",
    ),
    Mutation(
        "nodes stand at their number, not at their depth", f"{RUNTIME}round.py",
        "ancestors, depth, self.state.positions(depth)",
        "ancestors, depth, self.state.positions(torch.arange(depth.shape[1])[None])",
        f"{ROUND} -k 'test_rounds_over_random_trees and llama-16-3'",
    ),
    Mutation(
        "a node sees its neighbour", "spec_compile/kernels/masks.py",
        "seen = ((ancestors[:, :, None] >> index[:, None, :]) & 1).bool()",
        "seen = ((ancestors[:, :, None] >> (index[:, None, :] - 1).clamp(min=0)) & 1).bool()",
        f"{TREE} -k tree_mask",
    ),
    Mutation(
        "a window is one token too wide", "spec_compile/kernels/ops.py",
        "slot_position[:, None, :] < window", "slot_position[:, None, :] <= window", f"{TREE} -k tree_mask",
    ),
    Mutation(
        "of equal index scores one too few is chosen", "spec_compile/kernels/attention/choice.py",
        "(equal.cumsum(dim=2) <= most - above", "(equal.cumsum(dim=2) < most - above",
        "tests/kernels/test_indexed_attention.py -k 'equal_scores or largest'",
    ),
    Mutation(
        "the cache of an indexer has another layer's place", "spec_compile/passes/use_indexes.py",
        "(inputs[\"cache\"], begin + number)", "(inputs[\"cache\"], begin)",
        "tests/passes/test_use_indexes.py -k every_path",
    ),
    Mutation(
        "n-grams are matched one token early", "spec_compile/drafters/ngram.py",
        "state.tokens, state.lengths + 1, self.streams", "state.tokens, state.lengths, self.streams",
        f"{GENERATE} -k 'test_answers_as_transformers'",
    ),
]  # fmt: skip
DRAWS = [
    Mutation(
        "random numbers ignore the row", f"{RUNTIME}accept/random_numbers.py",
        "for counter in (row, position, stream):", "for counter in (row * 0, position, stream):",
        f"{SAMPLING} -k test_every_row_has_numbers_of_its_own",
    ),
    Mutation(
        "random numbers ignore the place", f"{RUNTIME}accept/random_numbers.py",
        "for counter in (row, position, stream):", "for counter in (row, position * 0, stream):",
        f"{SAMPLING} -k 'uniform'",
    ),
    Mutation(
        "random numbers ignore the stream", f"{RUNTIME}accept/random_numbers.py",
        "for counter in (row, position, stream):", "for counter in (row, position, 0):",
        f"{SAMPLING} -k 'uniform'",
    ),
    Mutation(
        "random numbers ignore the seed", f"{RUNTIME}accept/host.py",
        "draw(weights, uniform(self.seed, numbers, gained)", "draw(weights, uniform(0, numbers, gained)",
        f"{SAMPLING} -k test_the_seed_decides",
    ),
    Mutation(
        "a token that is excluded can be drawn", f"{RUNTIME}accept/random_numbers.py",
        "[:, None], right=True)", "[:, None], right=False)", f"{SAMPLING} -k test_ends_of_a_draw",
    ),
    Mutation(
        "a rejected draft leaves the target as it was", f"{RUNTIME}accept/rejection.py",
        "torch.where(total > 0, difference / total, target)", "target",
        f"{SAMPLING} -k 'test_drawn_drafts_leave_the_target'",
    ),
    Mutation(
        "drafts that were drawn are accepted always", f"{RUNTIME}accept/rejection.py",
        "return u * q < p", "return u == u", f"{SAMPLING} -k 'test_drawn_drafts_leave_the_target'",
    ),
    Mutation(
        "in a chain, drafts that were drawn pass always", f"{RUNTIME}accept/chain.py",
        "passes = torch.where(has_child, u * (r + (1 - w) / w) < r, u < w)", "passes = u < 2",
        "tests/runtime/test_chain.py -k 'paper or texts'",
    ),
    Mutation(
        "in a chain, the residual forgets the weight of the drafts before it", f"{RUNTIME}accept/chain.py",
        "(target - draft / scale[:, None] / w[:, None])", "(target - draft / scale[:, None])",
        "tests/runtime/test_chain.py -k 'paper or texts'",
    ),
    Mutation(
        "the numbers of a chain return in the next round", f"{RUNTIME}accept/chain.py",
        "return uniform(seed[:, None], row[:, None], gained[:, None], counter(nodes, gained.device))",
        "return uniform(seed[:, None], row[:, None], gained[:, None] + counter(nodes, gained.device))",
        "tests/drafters/test_schedule.py -k test_no_number_is_taken_twice",
    ),
    Mutation(
        "drafts of a chain take numbers of other rounds", "spec_compile/drafters/trees/draw.py",
        "uniform(seed, sequence, place, DRAFT_STREAM + level - 1)",
        "uniform(seed, sequence, place + level - 1, DRAFT_STREAM)",
        "tests/drafters/test_schedule.py -k test_no_number_is_taken_twice",
    ),
    Mutation(
        "a grammar keeps the drafts that it has looked ahead at", f"{RUNTIME}accept/grammars.py",
        "self.rewind(row, self.ahead[row])", "self.rewind(row, 0)",
        "tests/runtime/test_grammars.py -k drawn_chains",
    ),
    Mutation(
        "a running sum is left to torch", f"{RUNTIME}accept/row_invariant.py",
        " aten.cumsum.default: _cumsum,", "", "tests/runtime/test_sampling_bits.py -k no_sum",
    ),
    Mutation(
        "a running sum counts its own part twice", "spec_compile/kernels/row_scan.py",
        "mask=number < part,", "mask=number <= part,", "tests/runtime/test_sampling_bits.py -k test_kernels",
    ),
    Mutation(
        "the walk goes to slots that are not in use", f"{RUNTIME}accept/host.py",
        "follows = follows & tree.real[rows]", "follows = follows & tree.real[rows].any()",
        f"{SAMPLING} -k 'test_walk'",
    ),
    Mutation(
        "processors see a prefix that lacks its last token", f"{RUNTIME}accept/processors.py",
        "ids if has_all_rows else ids[rows])[:, :length]", "ids if has_all_rows else ids[rows])[:, : length - 1]",
        f"{SAMPLING} -k 'test_drafts_do_not_change_the_answer or test_walk'",
    ),
    Mutation(
        "processors of some rows see the first rows", f"{RUNTIME}accept/processors.py",
        "ids if has_all_rows else ids[rows])[:, :length]", "ids if has_all_rows else ids[: len(rows)])[:, :length]",
        f"{SAMPLING} -k 'test_walk'",
    ),
    Mutation(
        "a processor that holds rows is given those of others", f"{RUNTIME}accept/processors.py",
        "values = {name: value[rows] for", "values = {name: value[: len(rows)] for",
        f"{DROP_IN} -k 'test_features and encoder_repetition and llama'",
    ),
    Mutation(
        "a likeliest token is taken though the grammar forbids it", f"{RUNTIME}accept/grammar_acceptors.py",
        "                return True\n            walk", "                pass\n            walk",
        "tests/runtime/test_grammars.py -k greedy_tokens",
    ),
    Mutation(
        "a matcher keeps guesses that were not drawn", f"{RUNTIME}accept/grammar_acceptors.py",
        "            self.grammars.rewind(row, len(walk.gained) - index)\n", "",
        "tests/runtime/test_grammars.py -k way_of_a_gpu",
    ),
    Mutation(
        "guesses that a mask changes are kept", f"{RUNTIME}accept/grammar_acceptors.py",
        "if walk.gained[index : index + 1] == [token]:", "if index < len(walk.gained):",
        "tests/runtime/test_grammars.py -k way_of_a_gpu",
    ),
    Mutation(
        "a row goes on beyond its grammar's end with the mask of its end", f"{RUNTIME}accept/grammars.py",
        "matcher.rollback(1)\n                self.fill(row)\n                matcher.accept_token(token)\n", "pass\n",
        "tests/runtime/test_grammars.py -k 'greedy_tokens and beyond'",
    ),
    Mutation(
        "thinking ends one token late", f"{RUNTIME}accept/thinking.py",
        "self.count < budget", "self.count <= budget", "tests/runtime/test_thinking.py -k exactly_after",
    ),
    Mutation(
        "a drafted end of thinking is not taken back", f"{RUNTIME}accept/thinking.py",
        "self.place, self._opened, self._is_first, in_grammar = self._before.pop()", "in_grammar = False",
        "tests/runtime/test_thinking.py -k leave_no_trace",
    ),
    Mutation(
        "a vocabulary of another size is let pass", f"{RUNTIME}accept/grammars.py",
        "if sizes != {vocab_size}:", "if not sizes:", "tests/runtime/test_grammars.py -k refused",
    ),
]  # fmt: skip
ANSWERS = [
    Mutation(
        "stopping criteria are called once less", f"{RUNTIME}answer.py",
        "len(tokens) > self.columns for tokens, ended", "len(tokens) > self.columns + 1 for tokens, ended",
        f"{DROP_IN} -k 'test_everything_is_called_as_in_plain_decoding and llama'",
    ),
    Mutation(
        "stopping criteria see ids without the last column", f"{RUNTIME}answer.py",
        "ids = self.ids[:, :width].contiguous()", "ids = self.ids[:, : width - 1].contiguous()",
        f"{DROP_IN} -k 'test_everything_is_called_as_in_plain_decoding and llama'",
    ),
    Mutation(
        "a row that has ended goes on with its own tokens", f"{RUNTIME}answer.py",
        "self.ids[row, width:] = self.pad", "self.ids[row, width + 1 :] = self.pad",
        f"{GENERATE} -k 'every_row_ends'",
    ),
    Mutation(
        "the minimum of new tokens is one too small", f"{RUNTIME}ask.py",
        "max(0, self.shortest + difference)", "max(0, self.shortest + difference - 1)",
        f"{GENERATE} -k 'test_a_minimum_of_new_tokens'",
    ),
    Mutation(
        "a report's text is not escaped", "spec_compile/report/html.py",
        '.replace("<", "\\\\u003c")', "", f"{REPORT} -k test_no_token_breaks_the_page",
    ),
    Mutation(
        "answers for training see their padding", "spec_compile/training/on_policy.py",
        "[[0] * (width - len(prompt)) + [1]", "[[1] * (width - len(prompt)) + [1]",
        "tests/training/test_data.py -k test_answers_are_transformers_own",
    ),
    Mutation(
        "rows of one teacher have the logits of the one before", "spec_compile/training/loss.py",
        "(shared[rows] for rows in parts)", "((shared[rows] - 1).clamp(min=0) for rows in parts)",
        "tests/training/test_losses.py -k test_soft_cross_entropy",
    ),
    Mutation(
        "a captured rollout has gradients of the batch before", "spec_compile/training/capture.py",
        "        self._pull.zero_()\n", "", "tests/training/test_rollout.py -k test_a_captured_rollout_is_the_rollout",
    ),
    Mutation(
        "the sum of a drafted key's exponentials is of another maximum", "spec_compile/kernels/rollout_kernel.py",
        "z = z * shrink + share", "z = z + share", "tests/training/test_rollout.py -k test_drafted_keys_in_one_kernel",
    ),
    Mutation(
        "a block sees the position of its anchor", "spec_compile/kernels/block_attention_kernel.py",
        "tl.sum((anchors <= first).to(tl.int32))", "tl.sum((anchors < first).to(tl.int32)) + 1",
        "tests/training/test_block_attention.py -k test_blocks_in_kernels",
    ),
    Mutation(
        "training while serving takes more than its share", "spec_compile/training/online.py",
        "self._next = begin + seconds / self.options.share", "self._next = begin + seconds",
        "tests/training/test_online.py -k test_training_keeps_to_its_share",
    ),
    Mutation(
        "worse weights go into service", "spec_compile/training/online.py",
        "if trained[:, 1].sum() < served[:, 1].sum():", "if not len(trained):",
        "tests/training/test_online.py -k test_worse_weights",
    ),
    Mutation(
        "texts that are for nobody else are learned from", "spec_compile/runtime/served.py",
        "self.online is not None and request.share_text and", "self.online is not None and",
        "tests/training/test_online.py -k test_texts_that_are_for_nobody",
    ),
    Mutation(
        "Muon forgets Nesterov's momentum", "spec_compile/training/muon.py",
        "torch.stack(torch._foreach_lerp(grads, momentum, MOMENTUM))", "torch.stack(momentum)",
        "tests/training/test_muon.py -k test_updates",
    ),
    Mutation(
        "JetSpec's blocks are trained as DFlash's", "spec_compile/training/jetspec.py",
        "    causal = True", "    causal = False", "tests/training/test_blocks.py -k 'test_blocks_learn and jetspec'",
    ),
    Mutation(
        "masks of P-EAGLE see the masks after them", "spec_compile/training/p_eagle.py",
        "scale, causal=True)", "scale, causal=False)",
        "tests/training/test_blocks.py -k 'test_blocks_learn and p_eagle'",
    ),
    Mutation(
        "a Markov head reads the token that it drafts", "spec_compile/training/linked.py",
        "+ torch.arange(self.block_size)).clamp(max=length - 1)",
        "+ 1 + torch.arange(self.block_size)).clamp(max=length - 1)",
        "tests/training/test_blocks.py -k 'test_blocks_learn and dspark'",
    ),
    Mutation(
        "D-PACE weighs positions by those before them", "spec_compile/training/positions.py",
        "    return reached.flip(1).cumsum(1).flip(1) * counted\n", "    return reached.cumsum(1) * counted\n",
        "tests/training/test_positions.py -k test_weights_of_positions",
    ),
    Mutation(
        "a draft's window begins one token early", "spec_compile/drafters/window.py",
        "(lengths - self.size).clamp", "(lengths - self.size - 1).clamp",
        "tests/drafters/test_dflash.py -k test_blocks_see_the_ends",
    ),
    Mutation(
        "what a head reads in a window is not kept", "spec_compile/drafters/heads.py",
        "write_back(self.cache.tensors, begin, cache, slots, rows)", "pass",
        "tests/drafters/test_draft_windows.py -k test_heads_draft",
    ),
    Mutation(
        "prompts are supervised in training", "spec_compile/training/on_policy.py",
        "supervised[len(prompt) :] = True", "supervised[:] = True",
        "tests/training/test_data.py -k test_answers_are_transformers_own",
    ),
]  # fmt: skip
FORWARDS = [
    Mutation(
        "products move over writes to what they read",
        "spec_compile/passes/forward/lower.py",
        "if not kept and node.meta",
        "if False and node.meta",
        "tests/passes/test_forward.py -k not_lowered",
    ),
    Mutation(
        "views of an input that is written are forgotten",
        "spec_compile/passes/forward/lower.py",
        "and (_written(node) or _is_view(node)):",
        "and _written(node):",
        "tests/passes/test_forward.py -k not_lowered",
    ),
    Mutation(
        "attention reads a cache after a later write",
        "spec_compile/passes/forward/use_grouped_attention.py",
        "or not all(is_quiet_between(x, node) for x in (first, second))",
        "",
        "tests/passes/test_forward.py -k leaves_alone",
    ),
    Mutation(
        "joined weights go stale",
        "spec_compile/passes/forward/bind.py",
        "if self._addresses != [",
        "if not self._addresses and self._addresses != [",
        "tests/passes/test_forward.py -k stale",
    ),
    Mutation(
        "a graph is replayed with other weights",
        "spec_compile/runtime/steps/replays.py",
        "any(map(operator.is_not, weights, self._weights))",
        "False",
        "tests/runtime/test_replays.py -k copied",
    ),
    Mutation(
        "a graph is replayed over another cache",
        "spec_compile/runtime/steps/replays.py",
        "return (x.data_ptr(), x.shape) if place in self.kept else x.shape",
        "return x.shape",
        "tests/runtime/test_replays.py -k copied",
    ),
    Mutation(
        "slots that the mask hides are seen",
        "spec_compile/kernels/attention/grouped_kernel.py",
        "seen = seen & (tl.load(shown, mask=seen, other=0) != 0)",
        "seen = seen & (tl.load(shown, mask=seen) >= 0)",
        "tests/kernels/test_grouped.py -k masks",
    ),
    Mutation(
        "a query that sees nothing divides by zero",
        "spec_compile/kernels/attention/grouped_kernel.py",
        "out = tl.where(total > 0, acc / tl.where(total > 0, total, 1.0), 0.0)",
        "out = acc / total",
        "tests/kernels/test_grouped.py -k sees_nothing",
    ),
]

OTHERS = [
    Mutation(
        "parts that were read look as if they had been sent again", "spec_compile/kernels/all_reduce_kernel.py",
        "tl.full(word.shape, MISSING, word.dtype)", "tl.full(word.shape, 0, word.dtype)",
        "tests/kernels/test_all_reduce.py -k names_of_ranks",
    ),
    Mutation(
        "a rank that gives up does not say so", "spec_compile/parallel/ranks.py",
        "        self._ring.give_up()\n", "",
        "tests/parallel/test_faults.py -k round-hangs-2-1",
    ),
    Mutation(
        "an error of a user's streamer is taken for one about a rank", "spec_compile/parallel/ranks.py",
        "if is_of_group and any(", "if any(",
        "tests/parallel/test_tensor_parallel.py -k error_on_rank_0",
    ),
    Mutation(
        "ranks that have come are said to be late", "spec_compile/parallel/start.py",
        "for each in range(size) if not store.check([keys[each]])", "for each in range(size)",
        "tests/parallel/test_faults.py -k torchrun_started",
    ),
    Mutation(
        "other hosts reach the store of the ranks", "spec_compile/parallel/start.py",
        "create_server((LOOPBACK, port))", 'create_server(("", port))',
        "tests/parallel/test_faults.py -k reaches",
    ),
    Mutation(
        "a message with an unknown name is taken", "spec_compile/parallel/messages.py",
        "each for each in value if each not in names", "each for each in value if not each",
        "tests/parallel/test_faults.py -k messages",
    ),
    Mutation(
        "two shots send a part to ranks that do not own it", "spec_compile/kernels/all_reduce_kernel.py",
        "mask=mask & (owner(at, RANKS) == peer)", "mask=mask",
        "tests/kernels/test_all_reduce.py -k owners_take_turns",
    ),
    Mutation(
        "two shots are thought to save what a rank sends to itself", "spec_compile/kernels/all_reduce.py",
        "(ranks - 1) * count * (4 - 6 / ranks)", "ranks * count * (4 - 6 / ranks)",
        "tests/kernels/test_all_reduce.py -k shots_by_ranks",
    ),
    Mutation(
        "a product that others read is summed away", "spec_compile/passes/fuse_residuals.py",
        "len(product.users) == len(summand.users) == 1", "len(summand.users) == 1",
        "tests/passes/test_fuse_residuals.py -k fused_residuals_of_ranks",
    ),
    Mutation(
        "two halves turned by anything are a rotation", "spec_compile/passes/fuse_rotary.py",
        "!= [(x2, cos), (x1, sin)]", "== []",
        "tests/passes/test_fuse_rotary.py -k rotations_by_halves",
    ),
    Mutation(
        "dropout of a model that trains is overlooked", "spec_compile/capture/training_mode.py",
        "if value is not ... and value > 0:", "if value is not ... and value > 1:",
        "tests/capture/test_training_mode.py -k effects_are_named",
    ),
    Mutation(
        "the mode of a model is in its graph", "spec_compile/capture/trace.py",
        "    nn.Module.train(twin, False)", "    nn.Module.train(twin, model.training)",
        "tests/capture/test_training_mode.py -k captured_alike",
    ),
    Mutation(
        "weights are never compared", "spec_compile/runtime/served.py",
        "if changes := self.watch.changes():", "if changes := []:",
        "tests/capture/test_watch.py -k test_generate_raises",
    ),
    Mutation(
        "a changed generation config is not seen by a call like an earlier one", f"{RUNTIME}prepared.py",
        "marshal.dumps((options, *configs, read,", "marshal.dumps((options, read,",
        "tests/runtime/test_prepared.py -k test_a_change_between_two_calls",
    ),
    Mutation(
        "padding in a prompt is not seen by a call like an earlier one", f"{RUNTIME}prepared.py",
        "(ids.numpy() == padding).any()", "(ids.numpy() != ids.numpy()).any()",
        "tests/runtime/test_prepared.py -k test_uncommon_calls",
    ),
    Mutation(
        "calls of several threads do not wait for each other", f"{RUNTIME}served.py",
        "self.remembered = Turns(), Agreement", "self.remembered = __import__('contextlib').nullcontext(), Agreement",
        "tests/product/test_reentry.py -k another_thread_waits",
    ),
    Mutation(
        "the checks never refuse", "spec_compile/capture/yardstick.py",
        "if not error <= limit:", "if not error <= limit + 1e9:", "tests/capture/test_checks.py",
    ),
    Mutation(
        "tables that a model of 16 bits rounds stay rounded in float32", "spec_compile/capture/modules/recurrent.py",
        "                setattr(part, name, table.to(rounded.device))\n", "",
        "tests/product/test_unmasked.py -k tables_that_minimax_rounds",
    ),
    Mutation(
        "the checks never refuse in 16 bits", "spec_compile/capture/yardstick.py",
        "if not error <= max(NOISE * noise,", "if not error <= max(1e9,", "tests/capture/test_checks.py",
    ),
    Mutation(
        "the captured graph is never checked", "spec_compile/api.py",
        "check_capture(model, runnable)", "model, runnable", f"{GENERATE} -k test_every_check_is_run",
    ),
    Mutation(
        "the tree attention is never checked", "spec_compile/api.py",
        "check_tree(type(model).__name__, self._runnable, verify)", "verify",
        f"{GENERATE} -k test_every_check_is_run",
    ),
    Mutation(
        "no text is longer than a window", "spec_compile/capture/check_generation.py",
        "if far_reaches and long > PADDING + STEPS:", "if False:", "tests/capture/test_checks.py -k windows",
    ),
    Mutation(
        "layers may share weights", "spec_compile/capture/kinds.py",
        "if own & seen:", "if False:", KINDS,
    ),
    Mutation(
        "layers may compute with their numbers", "spec_compile/capture/kinds.py",
        "vars(part)[name] = _LayerNumber(position)", "vars(part)[name] = position", KINDS,
    ),
    Mutation(
        "lists by layer are not cut", "spec_compile/capture/kinds.py",
        "for number in repeats.kept)", "for number in range(len(repeats.kept)))",
        f"{KINDS} -k test_the_copy_is_numbered",
    ),
    Mutation(
        "layers that differ are templates", "spec_compile/capture/repeat.py",
        "if not same or not all(", "if False and not all(", KINDS,
    ),
    Mutation(
        "attentions are not numbered anew", "spec_compile/capture/repeat.py",
        "(*args[:PLACE], self._attentions, *args[PLACE + 1 :])", "args", KINDS,
    ),
    Mutation(
        "layers that look alike are never captured whole", "spec_compile/api.py",
        "if not graph.traced_layers or not may_repeat:", "if True:", KINDS,
    ),
]  # fmt: skip
TOLERANCES = [
    Mutation(
        f"the checks allow a hundred times more in {dtype}", "spec_compile/capture/yardstick.py",
        f"torch.{dtype}: {value}", f"torch.{dtype}: 1e2 * {value}", "tests/capture/test_checks.py",
    )
    for dtype, value in (("float64", "1e-4"), ("float32", "1e-3"))
] + [
    Mutation(
        f"{name} is a hundred times as lenient", f"spec_compile/{file}.py",
        f"{name} = {value}", f"{name} = {lenient}", tests,
    )
    for file, name, value, lenient, tests in (
        ("capture/yardstick", "NOISE", "3.0", "300.0", "tests/capture/test_checks.py"),
        ("capture/yardstick", "NEAR_TIE", "3.0", "300.0", "tests/report/test_audit.py -k near_tie"),
        ("capture/yardstick", "MORE_NOISE", "0.03", "3.0", "tests/report/test_audit.py -k beyond_the_noise"),
        ("capture/yardstick", "DEVIATIONS", "3.0", "300.0", "tests/report/test_audit.py -k beyond_the_noise"),
        ("report/audit", "SIGNIFICANCE", "1e-3", "1e-5", "tests/report/test_audit.py -k one_in_a_thousand"),
    )
] + [
    Mutation(
        f"{file} allows a hundred times more in {dtype}", file,
        f"torch.{dtype}: {value}", f"torch.{dtype}: 1e2 * {value}", f"{tests} -k tolerance",
    )
    for file, tests, values in (
        ("tests/support/attention_cases.py", "tests/kernels/test_attention.py",
         {"float32": "2e-5", "float16": "4e-3", "bfloat16": "3e-2"}),
        ("tests/kernels/test_matmul.py", "tests/kernels/test_matmul.py",
         {"float32": "1e-5", "float16": "5e-4", "bfloat16": "3e-3"}),
    )
    for dtype, value in values.items()
] + [
    Mutation(
        "test_backend.py allows a hundred times more", "tests/product/test_backend.py",
        "TOLERANCE = 1e-4", "TOLERANCE = 1e-2", "tests/product/test_backend.py -k tolerance",
    ),
]  # fmt: skip
UNION, GROWERS = "tests/drafters/test_union.py", "spec_compile/drafters/trees/"
UNIONS = [
    Mutation(
        "what was accepted lowers a draft's probability", f"{GROWERS}calibrate.py",
        "(counts[0] + WEIGHT) / (counts[1] + WEIGHT)", "(counts[1] + WEIGHT) / (counts[0] + WEIGHT)",
        f"{UNION} -k test_merged_trees",
    ),
    Mutation(
        "old counts never fade", f"{GROWERS}calibrate.py", "KEPT * counts + added", "counts + added",
        f"{UNION} -k test_counts_after_a_round",
    ),
    Mutation(
        "a text follows drafts beyond its end", f"{GROWERS}calibrate.py",
        "(tokens == text) & (depth <= gained[:, None])", "(tokens == text)", f"{UNION} -k test_nodes_that_a_text",
    ),
    Mutation(
        "a draft of both sources is expected as if the head alone had it", f"{GROWERS}merge.py",
        "torch.where(is_doubled, both, head_priors)", "torch.where(is_doubled, head_priors, head_priors)",
        f"{UNION} -k test_merged_trees",
    ),
    Mutation(
        "a draft of both sources is there twice", f"{GROWERS}merge.py",
        "is_trie_draft & ~has_twin", "is_trie_draft", f"{UNION} -k test_merged_trees",
    ),
    Mutation(
        "drafts count of which nothing is known yet", "spec_compile/drafters/union.py",
        "(drafts.cells >= 0) & (drafts.depth <= gained[:, None])", "(drafts.cells >= 0)",
        "tests/drafters/test_draft_rounds.py -k test_a_union_learns",
    ),
]  # fmt: skip
CONFIDENT = "tests/drafters/test_confidence.py"
CONFIDENCE = [
    Mutation(
        "trees over linked places ignore the prediction of acceptance", f"{GROWERS}linked.py",
        "logprobs if predicted is None else logprobs + predicted[..., None]", "logprobs",
        f"{CONFIDENT} -k 'doubtful_places or the_token_before'",
    ),
    Mutation(
        "chains of linked places ignore the prediction of acceptance", f"{GROWERS}linked.py",
        "torch.cat(logprobs, dim=1) if predicted is None else predicted", "torch.cat(logprobs, dim=1)",
        f"{CONFIDENT} -k confidence_is_the_hint",
    ),
    Mutation(
        "trees over places ignore the prediction of acceptance", f"{GROWERS}propose.py",
        "scores if log_confidence is None else scores + log_confidence[:, :, None]", "scores",
        f"{CONFIDENT} -k places_alone",
    ),
    Mutation(
        "the root counts as an expected draft", f"{GROWERS}step.py",
        "scores[:, 1:].exp()", "scores.exp()", f"{CONFIDENT} -k expected_drafts",
    ),
    Mutation(
        "a prediction reads the table of tokens although the config says no", "spec_compile/drafters/modules/dflash.py",
        "if self.confidence.rank else None", "if self.transition is not None else None",
        f"{CONFIDENT} -k confidence_is_the_hint",
    ),
]  # fmt: skip
BATCHING, FAULTS = "spec_compile/batching/", "tests/batching/test_request_faults.py"
LORAS, TURNS = "tests/batching/test_lora_requests.py", "tests/batching/test_turns.py"
REQUESTS = [
    Mutation(
        "keys and values of one adapter serve another", f"{BATCHING}prefix_store.py",
        "yield (b\"\" if begin else scope) +", "yield", f"{LORAS} -k 'belong and cpu-1'",
    ),
    Mutation(
        "prompts take keys and values of another salt", f"{BATCHING}job.py",
        ' + self.cache_salt.encode("utf-8", "surrogatepass")', "", f"{TURNS} -k salt",
    ),
    Mutation(
        "figures tell each token of another client's text", f"{BATCHING}texts.py",
        "    return tokens // LEAST * LEAST\n", "    return tokens\n", f"{TURNS} -k sixteen",
    ),
    Mutation(
        "texts of another owner are drafted from", "spec_compile/drafters/ngram.py",
        "self.trie.owned.get(share_text) or self.trie.empty()", "self.trie", f"{TURNS} -k belong",
    ),
    Mutation(
        "on a GPU a text with an owner drafts from all texts", "spec_compile/drafters/matching.py",
        "self.reads_corpus[row] = not isinstance(share_text, str)", "self.reads_corpus[row] = 1",
        "tests/drafters/test_matching.py -k owners",
    ),
    Mutation(
        "a free row goes to whoever came first", f"{BATCHING}scheduler.py",
        "sorted(waiting, key=order)", "waiting", f"{TURNS} -k free_row",
    ),
    Mutation(
        "a long prompt holds up those of other clients", f"{BATCHING}prompts.py",
        "is_due = self._turn >= TURN and", "is_due = False and", f"{TURNS} -k aside",
    ),
    Mutation(
        "one client fills the queue", f"{BATCHING}worker.py",
        "share, added = bound // len(clients), len(jobs)", "share, added = bound, len(jobs)", f"{TURNS} -k share",
    ),
    Mutation(
        "a request that waits for a slot of an adapter is passed for ever", f"{BATCHING}lora_slots.py",
        "any(other.passed >= self._most for other in passed)", "False", f"{LORAS} -k bounded",
    ),
    Mutation(
        "clients get the adapter of another name", "spec_compile/serving/loras.py",
        "name if name in self._paths else None", "name", "tests/serving/test_loras.py -k unknown",
    ),
    Mutation(
        "a request keeps the slot of its adapter", f"{BATCHING}scheduler.py",
        "        self.adapters.release(job)\n", "", f"{LORAS} -k end_with",
    ),
    Mutation(
        "a block of a head is found by a text that goes on otherwise", f"{BATCHING}prefix_store.py",
        "lanes.runtime.device, ahead", "lanes.runtime.device, 0",
        "tests/batching/test_prefix_store.py -k token_after_it",
    ),
    Mutation(
        "the beginning of a text is dropped before its end", f"{BATCHING}prefix_tree.py",
        "        for block in reversed(chain):\n", "        for block in chain:\n",
        "tests/batching/test_prefix_tree.py",
    ),
    Mutation(
        "a row is written while its text is copied out of it", f"{BATCHING}lanes.py",
        "        target.reuse(to)\n", "", "tests/batching/test_rows.py -k written",
    ),
    Mutation(
        "a text is kept before a silent draft knows it", f"{BATCHING}decoding.py",
        "            self.catch_up(job)\n", "            pass\n",
        "tests/batching/test_batching.py -k silent",
    ),
    Mutation(
        "states at a branch are those of a later token", f"{BATCHING}prompts.py",
        "fill_(branch + 1)", "fill_(len(job.prompt))",
        "tests/batching/test_prefix_store.py -k prompts_branch",
    ),
    Mutation(
        "kept prefixes outlive the weights", f"{BATCHING}beginnings.py",
        "        self.prefixes.forget()\n", "        pass\n",
        "tests/batching/test_prefix_store.py -k other_weights",
    ),
    Mutation(
        "texts of earlier weights are reused", f"{BATCHING}beginnings.py",
        "            self.forget()\n            row, known, blocks, seen = 0, 0, [], 0\n", "            pass\n",
        f"{FAULTS} -k 'between_requests and a_step'",
    ),
    Mutation(
        "writes that torch does not count are never looked for", f"{BATCHING}beginnings.py",
        "is_sure = self.distrusts_weights and (known > 0 or bool(blocks))", "is_sure = False",
        f"{FAULTS} -k 'between_requests and of_data'",
    ),
    Mutation(
        "a pause lets weights change unnoticed", f"{BATCHING}manager.py",
        "self.scheduler.beginnings.distrusts_weights = True", "pass",
        f"{FAULTS} -k test_a_pause_is_distrusted",
    ),
    Mutation(
        "a request over which weights change leaves its text", f"{BATCHING}texts.py",
        "        if not self._counts[row]:\n            return\n", "",
        "tests/batching/test_batching.py -k test_texts",
    ),
    Mutation(
        "a prompt may fill its row", f"{BATCHING}prepare.py",
        "if len(prompt) >= self.room:", "if len(prompt) > self.room:",
        f"{FAULTS} -k fills_a_row",
    ),
    Mutation(
        "an error where a request moves ends all", f"{BATCHING}scheduler.py",
        "                except Exception as error:\n                    news += self.drop([job], error)",
        "                except ZeroDivisionError as error:\n                    news += self.drop([job], error)",
        f"{FAULTS} -k 'changes_places and moved'",
    ),
    Mutation(
        "scores of a prompt are of the token itself", f"{BATCHING}prompts.py",
        "job.prompt[done + 1 : done + 1 + size]", "job.prompt[done : done + size]",
        "tests/batching/test_logprobs.py -k known",
    ),
    Mutation(
        "fixed chunks follow the load", f"{BATCHING}prompts.py",
        "return next(chunks(tokens, lanes.all.steps.prefill_sizes, fixed))", "pass",
        "tests/batching/test_fixed_chunks.py -k load",
    ),
    Mutation(
        "beginnings end within fixed chunks", f"{BATCHING}beginnings.py",
        "if runtime.has_fixed_chunks else tokens", "if runtime.on_gpu else tokens",
        "tests/batching/test_fixed_chunks.py -k known",
    ),
    Mutation(
        "an audit passes over other answers to the same request", "spec_compile/report/audit.py",
        "self.bits, *self.requests) if row]", "self.bits) if row]", "tests/report/test_audit.py -k equal_ones",
    ),
    Mutation(
        "another answer to the same request is not seen", "spec_compile/report/requests.py",
        "        if ours == expected:", "        if len(ours) == len(expected):",
        "tests/report/test_requests.py -k another",
    ),
    Mutation(
        "scores of an answer are of raw logits at any temperature", f"{BATCHING}logprobs.py",
        "tokens.tolist(), scores.top, scores.temperature)", "tokens.tolist(), scores.top)",
        "tests/batching/test_score.py -k rollouts",
    ),
    Mutation(
        "tokens without a text lose their scores in a stream", "spec_compile/serving/generation.py",
        "scores.add(output.scores[self._prev_len :])", "scores.add(output.scores[-1:])",
        "tests/serving/test_logprobs.py -k 'stream or calls'",
    ),
    Mutation(
        "a call that cannot be read is lost", "spec_compile/serving/call_forms.py",
        "        elif not is_cut:\n            text", "        elif is_cut:\n            text",
        "tests/serving/test_call_forms.py -k 'read_is_content or cut_off'",
    ),
    Mutation(
        "allowed tools are all tools", "spec_compile/serving/tool_calls.py",
        'for function, index in functions if function["name"] in names]', "for function, index in functions]",
        "tests/serving/test_tool_calls.py -k allows",
    ),
    Mutation(
        "choices of one prompt have one seed", "spec_compile/serving/choices.py",
        'call.fields["seed"] + number', 'call.fields["seed"]', "tests/serving/test_choices.py -k 'chats or seeds'",
    ),
    Mutation(
        "a client that leaves cancels one choice", "spec_compile/serving/call.py",
        "for each in call.choices or [call]:", "for each in (call.choices or [call])[:1]:",
        "tests/serving/test_choices.py -k leaves",
    ),
    Mutation(
        "places of an answer begin at 0 after an echo", "spec_compile/serving/logprobs.py",
        "_Places(tokenizer, len(echo or \"\"))", "_Places(tokenizer, 0)",
        "tests/serving/test_logprobs.py -k echoed",
    ),
    Mutation(
        "tokens outside the vocabulary go on", f"{BATCHING}decoding.py",
        "                check_tokens(result.tokens, logits.shape[-1])\n", "",
        f"{FAULTS} -k 'choose_no_token and many'",
    ),
    Mutation(
        "sequences share what remembers", f"{BATCHING}intake.py",
        "if prepared[0].remembers else prepared[0]", "if False else prepared[0]",
        f"{FAULTS} -k 'for_itself and guidance'",
    ),
    Mutation(
        "sequences share processors of one's own", f"{BATCHING}intake.py",
        "options[name] = copy.deepcopy(options[name], dict(memo))", "pass",
        f"{FAULTS} -k 'for_itself and own'",
    ),
    Mutation(
        "a refused prompt has no output", f"{BATCHING}generate_batch.py",
        "    return {name: done[name] for number in sorted(names) for name in names[number]}",
        "    return {name: each for name, each in done.items() if each.error is None}",
        f"{FAULTS} -k refused_prompts",
    ),
    Mutation(
        "generate_batch() starts with a model that has changed", f"{BATCHING}generate_batch.py",
        "    model.speculation.engine.refuse_changes()\n", "", "tests/product/test_rollouts.py -k another_dtype",
    ),
    Mutation(
        "more prompts than may wait are added", f"{BATCHING}generate_batch.py",
        "(manager.queue_room is None or manager.queue_room >= sequences)", "True",
        f"{FAULTS} -k more_prompts",
    ),
    Mutation(
        "requests are taken after the last ones were ended", f"{BATCHING}worker.py",
        "            require_open()\n", "",
        f"{FAULTS} -k stops_while",
    ),
    Mutation(
        "calls starve rounds", "spec_compile/runtime/turns.py",
        "self._owed = self._owed + time.perf_counter() - self._begin if self._batches else 0.0",
        "self._owed = 0.0",
        f"{FAULTS} -k share_the_time",
    ),
    Mutation(
        "stop() waits inside pause()", f"{BATCHING}manager.py",
        """            self._refuse_waiting("stop()", "or pass block=False")""", "            pass",
        f"{FAULTS} -k wait_for_itself",
    ),
    Mutation(
        "a lock is held while transformers prepares", f"{BATCHING}prepare.py",
        "        call = self._ask_transformers(shadow, ids, config, tokenizer, arguments)",
        "        with self._lock, self._engine.turns:\n"
        "            call = self._ask_transformers(shadow, ids, config, tokenizer, arguments)",
        f"{FAULTS} -k 'requests_are_added_inside'",
    ),
    Mutation(
        "generate() runs beside a manager of ranks", "spec_compile/runtime/agreement.py",
        "        if self._batches:\n", "        if False:\n",
        "tests/batching/test_batching_ranks.py -k told",
    ),
    Mutation(
        "an end at the limit is no stop", f"{BATCHING}job.py",
        "if self.tokens and (is_met or", "if self.tokens and (False or",
        "tests/batching/test_batching.py -k at_the_limit",
    ),
    Mutation(
        "a stop string over HTTP may begin in the prompt", "spec_compile/serving/generation.py",
        "stops_in_prompt=False, ", "", "tests/serving/test_stops.py -k answer_alone",
    ),
    Mutation(
        "a stop string may end before the last token", f"{BATCHING}stop_strings.py",
        "max(0, len(before) + 1 - len(stop))", "max(0, len(before) - len(stop))",
        f"{FAULTS} -k stop_strings_end",
    ),
    Mutation(
        "lists of any size are prepared", f"{BATCHING}request_options.py",
        "if sum(sizes.values()) > MOST_NUMBERS:", "if False:",
        f"{FAULTS} -k 'refused_by_name_at_once and bad'",
    ),
    Mutation(
        "an answer is allocated to its limit", "spec_compile/runtime/answer.py",
        "min(self._room, self.prompt_width + FIRST_COLUMNS)", "self._room",
        f"{FAULTS} -k as_it_grows",
    ),
    Mutation(
        "rows that have ended lose their padding as an answer grows", "spec_compile/runtime/answer.py",
        "longer[self.ended, before:] = self.pad", "pass",
        f"{FAULTS} -k as_it_grows",
    ),
    Mutation(
        "one sequence of several is cancelled", f"{BATCHING}worker.py",
        """if name == request_id or name.startswith(child_name(request_id, "")):""", "if name == request_id:",
        f"{FAULTS} -k cancelling_a_request",
    ),
    Mutation(
        "a forked process adds requests", f"{BATCHING}manager.py",
        "        if not self.is_of_this_process:\n            raise", "        if False:\n            raise",
        f"{FAULTS} -k forked",
    ),
    Mutation(
        "max_time counts the wait for a row", f"{BATCHING}prepare.py",
        "                criterion.initial_timestamp = None\n", "                pass\n",
        f"{FAULTS} -k max_time",
    ),
]  # fmt: skip
FIELDS, LOAD, HTTP = "tests/serving/test_fields.py", "tests/serving/test_load.py", "spec_compile/serving/"
FORMS = "tests/serving/test_grammars.py"
CALLS, CALL_FORMS = "tests/serving/test_tool_calls.py", "tests/serving/test_call_forms.py"
VLLM = "tests/serving/test_vllm_fields.py"
MEDIA, TEXTS = "tests/serving/test_media.py", "tests/serving/test_chat_text.py"
SERVING = [
    Mutation(
        "a name may resolve to addresses within the network", f"{HTTP}media.py",
        "if not addresses or not all(map(is_public, addresses)):", "if not addresses:", f"{MEDIA} -k resolved_once",
    ),
    Mutation(
        "pictures are decoded before their size is known", f"{HTTP}media.py",
        "pixels = check_pixels(path, *image.size, pixels)", "pass", f"{MEDIA} -k before_they_are_decoded",
    ),
    Mutation(
        "parts of a message join to a control token", f"{HTTP}chat_text.py",
        'value = f"{value[:end]}{sign}{value[end:]}" if end else value', "pass", f"{TEXTS} -k become_one",
    ),
    Mutation(
        "arguments of processors are variables of templates", f"{HTTP}handlers.py",
        "if name not in ChatText.of(processor).variables:", "if False:", f"{TEXTS} -k only_variables",
    ),
    Mutation(
        "an id outside the vocabulary has a text", f"{HTTP}tokens.py",
        "ID.accepts(each) and each < requests.embedded", "ID.accepts(each)",
        "tests/serving/test_tokens.py -k refused",
    ),
    Mutation(
        "every grammar is compiled again", f"{HTTP}grammars.py",
        "            self._kept[key] = grammar\n", "            pass\n", f"{FORMS} -k compiled_once",
    ),
    Mutation(
        "a stop string is cut out only if it comes in one piece", f"{BATCHING}stop_strings.py",
        "held = max(sizes, default=0)", "held = 0", "tests/serving/test_anthropic.py -k pieces",
    ),
    Mutation(
        "a message without text comes a second time", f"{HTTP}responses.py",
        'kind == "response.output_item.done" and not self._waiting', 'kind == "response.output_item.done"',
        "tests/serving/test_responses.py -k each_item",
    ),
    Mutation(
        "two forms are taken", f"{HTTP}grammars.py", "if len(forms) > 1:", "if False:",
        f"{FORMS} -k cannot_be_compiled",
    ),
    Mutation(
        "a call ends at the first text that closes one", f"{HTTP}call_forms.py",
        'if end >= 0 and self.form.style == "json":', "if False:", f"{CALL_FORMS} -k any_size",
    ),
    Mutation(
        "calls within reasoning are held to schemas", f"{HTTP}tool_calls.py",
        "[_tag(begin, TEXT, end)] if is_thinking is None else []", "[]", f"{CALLS} -k allows_these",
    ),
    Mutation(
        "two calls are taken for one", f"{HTTP}tool_calls.py",
        '"stop_after_first": self.only_one', '"stop_after_first": False', f"{CALLS} -k allows_these",
    ),
    Mutation(
        "stop_token_ids replace the model's own ends", f"{HTTP}settings.py",
        "[*(token for token in own if token >= 0), *more]", "more", f"{VLLM} -k as_the_models_own",
    ),
    Mutation(
        "top_k is dropped", f"{HTTP}settings.py", 'if "top_k" in fields:', "if False:", f"{VLLM} -k each_field",
    ),
    Mutation(
        "biases are dropped", f"{HTTP}settings.py", 'if "logit_bias" in fields:', "if False:",
        f"{FIELDS} -k biases_are_those",
    ),
    Mutation(
        "a limit in max_length is dropped", f"{HTTP}settings.py",
        '("max_new_tokens", "max_length"), values)]', '("max_new_tokens",), values)]',
        f"{FIELDS} -k limit_in_the_generation",
    ),
    Mutation(
        "tools are dropped by a template without them", f"{HTTP}handlers.py",
        'elif "tools" not in template:', "elif False:", f"{FIELDS} -k would_change",
    ),
    Mutation(
        "a server ends before its requests", f"{HTTP}drain.py",
        "await asyncio.to_thread(self.requests.stop)", "pass", f"{LOAD} -k stopped_hard",
    ),
    Mutation(
        "a request that the manager has lost does not end", f"{HTTP}generation.py",
        'self.end_all(self._death() or "the server was stopped")', "pass", f"{LOAD} -k stopped_hard",
    ),
    Mutation(
        "requests are prepared on the event loop", f"{HTTP}handlers.py",
        "return await requests.workers.drive(answering)", "return await answering", f"{LOAD} -k event_loop",
    ),
    Mutation(
        "a client that leaves early leaves its request", f"{HTTP}generation.py",
        "if call.is_gone:  # it left", "if False:  # it left", f"{LOAD} -k leaves_while",
    ),
    Mutation(
        "64 stop strings are taken", f"{HTTP}fields.py",
        "MOST_STOPS, LONGEST_STOP = 16, 256", "MOST_STOPS, LONGEST_STOP = 64, 256",
        f"{FIELDS} -k 'bad_values and stop'",
    ),
    Mutation(
        "a limit is checked by the manager", f"{HTTP}generation.py",
        "if config.max_new_tokens > room:", "if False:", f"{LOAD} -k before_anything_of_its_size",
    ),
    Mutation(
        "names that are there twice are taken", f"{HTTP}body.py",
        "if len(values) < len(pairs):", "if False:", f"{FIELDS} -k no_json",
    ),
    Mutation(
        "every chunk repeats an id of any length", f"{HTTP}body.py",
        'r"[!-~]{0,256}"', 'r".*"', "tests/serving/test_bounds.py -k odd_headers",
    ),
    Mutation(
        "a prompt goes where a later part of it was read", f"{HTTP}prefixes.py",
        "if lengths[each] == number}", "}", "tests/serving/test_prefixes.py -k read_most",
    ),
    Mutation(
        "a request of a replica that died is lost", f"{HTTP}ray_ingress.py",
        "                deaths += 1\n                continue\n", "                raise\n",
        "tests/serving/test_ray_ingress.py -k sent_again",
    ),
    Mutation(
        "every seed is taken", f"{HTTP}fields.py",
        '"seed": integer(-(1 << 63), (1 << 64) - 1),', '"seed": integer(-(1 << 99), 1 << 99),',
        f"{FIELDS} -k 'bad_values and seed'",
    ),
    Mutation(
        "a penalty does not count", f"{HTTP}penalties.py",
        "self.frequency * counts.to(scores.dtype)", "self.frequency", f"{FIELDS} -k penalties_are",
    ),
    Mutation(
        "a response is streamed to a client that does not ask", f"{HTTP}handlers.py",
        'body["stream"] = body.get("stream", False)', "pass", f"{FIELDS} -k streamed_only",
    ),
    Mutation(
        "a stream drops an incomplete character", f"{HTTP}generation.py",
        "if output.is_finished() and self._is_partial:", "if False:", f"{FIELDS} -k incomplete",
    ),
    Mutation(
        "a prompt that fills the row gets no token", f"{HTTP}generation.py",
        "if room < 1:", "if room < 0:", f"{FIELDS} -k fills_the_row",
    ),
    Mutation(
        "another model is served in place of one's own", f"{HTTP}handlers.py",
        "if adapter is None:", "if False:", f"{FIELDS} -k served_name",
    ),
    Mutation(
        "a flag that does nothing is taken", f"{HTTP}__init__.py",
        '"host", "port", "enable_cors"', '"compile", "host", "port", "enable_cors"', f"{FIELDS} -k only_flags",
    ),
]  # fmt: skip
CAPTURE, FOLLOWED = "spec_compile/capture/", "tests/runtime/test_generation_config.py"
WATCHED = "tests/training/test_watched.py"
NEWCOMERS = [
    Mutation(
        "a compiled forward of a copy runs the original", f"{CAPTURE}compiled.py",
        'vars(memo[id(part)])["forward"] = copy.deepcopy(inner, memo)', "pass",
        "tests/capture/test_compiled_models.py -k 'test_compiled_before and forward'",
    ),
    Mutation(
        "a layer that is compiled counts as replaced", f"{CAPTURE}watch.py",
        "{name: underlying(module) for name, module in part._modules.items()}", "dict(part._modules)",
        "tests/capture/test_compiled_models.py -k 'test_compiled_afterwards and layers'",
    ),
    Mutation(
        "the checks compile what the user had compiled", "spec_compile/api.py",
        'COMPILE_LOCK, torch.compiler.set_stance("force_eager"), rounded:', "COMPILE_LOCK, rounded:",
        "tests/capture/test_compiled_models.py -k 'test_compiled_before'",
    ),
    Mutation(
        "changes of the original's generation config are not seen", f"{CAPTURE}followed.py",
        "if self._is_new(source):", "if source is not self._source:", f"{FOLLOWED} -k in_place",
    ),
    Mutation(
        "what was changed in the copy of a generation config is lost", f"{CAPTURE}followed.py",
        "(self._seen.keys() | now.keys()) - self._own:", "self._seen.keys() | now.keys():",
        f"{FOLLOWED} -k test_what_is_changed_here",
    ),
    Mutation(
        "copies lose what was changed in their generation config", f"{CAPTURE}adapters.py",
        "    followed(made).restore(*own)\n", "", f"{FOLLOWED} -k test_copies",
    ),
    Mutation(
        "an adapter that a row uses is overwritten", f"{CAPTURE}loras.py",
        "return slot is None or slot.users == 0", "return True", "tests/capture/test_loras.py -k slots_keep",
    ),
    Mutation(
        "an adapter of a smaller rank keeps a part of the one before", "spec_compile/kernels/linear/low_rank.py",
        "        self.up[entry].zero_()\n", "", "tests/kernels/test_low_rank.py -k replaced_whole",
    ),
    Mutation(
        "any function of TRL counts as the model's forward", f"{CAPTURE}watch.py",
        'forward = getattr(forward, "__wrapped__", None)  # none',
        'forward = getattr(forward, "__wrapped__", type(part).forward)  # none',
        "tests/product/test_trl.py -k another_forward",
    ),
    Mutation(
        "the loss of TRL's trainers counts as another model", f"{CAPTURE}watch.py",
        '.partition(".")[0] == "trl":', '.partition(".")[0] == "":', "tests/product/test_trl.py -k another_forward",
    ),
    Mutation(
        "methods of generate() that are set later are left out", f"{CAPTURE}watch.py",
        "not (followed if name in METHODS else private", "not (private",
        "tests/capture/test_watch.py -k 'processors or criteria'",
    ),
    Mutation(
        "what is compiled from other C++ is taken", "spec_compile/extensions.py",
        "if ours != theirs or version", "if version", "tests/product/test_extensions.py -k 'installed_is_taken'",
    ),
    Mutation(
        "what is installed of another version is taken", "spec_compile/extensions.py",
        "or version != distribution.version:", "or None is distribution.version:",
        "tests/product/test_extensions.py -k 'installed_is_taken'",
    ),
    Mutation(
        "an algorithm without its draft speaks of something else", "spec_compile/drafters/__init__.py",
        'if needs and getattr(options, "draft", None) is None:', "if False:",
        "tests/report/test_accounts.py -k test_an_algorithm_without",
    ),
    Mutation(
        "a repr leaves options out", "spec_compile/report/accounts.py",
        "or value != field.default):", "and value != field.default):",
        "tests/report/test_accounts.py -k test_a_repr_tells_algo",
    ),
    Mutation(
        "help lists the first options only", "spec_compile/config.py",
        "    for field in added(cls, to):\n        facts", "    for field in added(cls, to)[:2]:\n        facts",
        "tests/report/test_accounts.py -k test_help",
    ),
    Mutation(
        "a length beyond all bounds is taken", f"{RUNTIME}check_options.py",
        "if most is not None and not value <= most:", "if most is not None and value != value:",
        "tests/runtime/test_generate_errors.py -k test_a_wrong_option",
    ),
    Mutation(
        "a criterion may ask for a text beyond all bounds", f"{RUNTIME}served.py",
        "if tokens > LONGEST:", "if tokens < 0:", "tests/runtime/test_generate_errors.py -k test_a_criterion",
    ),
    Mutation(
        "a step that ran at Ctrl-C is lost", "spec_compile/training/loop.py",
        "if is_asked or (now - saved", "if (now - saved", f"{WATCHED} -k 'test_ctrl_c_ends'",
    ),
    Mutation(
        "the first step of a training is not reported", "spec_compile/training/loop.py",
        "begin), 0.0, False", "begin), 99.0, False", f"{WATCHED} -k test_the_first_step",
    ),
    Mutation(
        "a curve ends a step early", "spec_compile/training/save.py",
        "enumerate(state.losses, 1)]", "enumerate(state.losses[:-1], 1)]", f"{WATCHED} -k test_a_curve",
    ),
    Mutation(
        "too few minutes are not said to be too few", "spec_compile/training/loop.py",
        "if self.options.minutes is not None and steps < ENOUGH:", "if steps < 0:", f"{WATCHED} -k test_too_few",
    ),
]  # fmt: skip
COMPILED = [
    Mutation(
        "every number of rows has code of its own", f"{RUNTIME}steps/example.py",
        "return Form(0 if rows > 1 and rows_vary(runtime)", "return Form(0 if rows > 99 and rows_vary(runtime)",
        f"{SHARED_CODE} -k test_recurrences_and_single_rows",
    ),
    Mutation(
        "every number of slots has code of its own", f"{RUNTIME}steps/example.py",
        "else rows, 0 if slots_vary(runtime)", "else rows, 0 if not slots_vary(runtime)",
        f"{SHARED_CODE} -k test_recurrences_and_single_rows",
    ),
    Mutation(
        "recurrences share code between numbers of rows", f"{RUNTIME}steps/example.py",
        "or runtime.verify.recurrences or", "or",
        f"{SHARED_CODE} -k test_recurrences_and_single_rows",
    ),
    Mutation(
        "rows of a session are a constant in the code", f"{RUNTIME}steps/pieces.py",
        "(() if exact else (example,)), *sizes.varying)", "(() if exact else (example,)))",
        f"{SHARED_CODE} -k test_one_code_for_all",
    ),
    Mutation(
        "a part may be compiled for the sizes of a session", f"{ARTEFACTS}compiler.py",
        "is_open = self.compiler.is_open or not source.at_once", "is_open = True",
        f"{SHARED_CODE} -k test_a_part_is_not_compiled",
    ),
    Mutation(
        "regions of one number share code whatever they compute", f"{ARTEFACTS}compiler.py",
        "return self._parts[name, alike].bound(owner)", "return next(iter(self._parts.values())).bound(owner)",
        f"{SHARED_CODE} -k test_parts_alike",
    ),
    Mutation(
        "every wrapping compiles anew", f"{RUNTIME}steps/code.py",
        "code = codes.setdefault(key, Code(runtime.tiers))", "code = codes[key] = Code(runtime.tiers)",
        f"{SHARED_CODE} -k test_code_is_shared_between_equals",
    ),
    Mutation(
        "wrappings share code whatever their model computes", f"{RUNTIME}steps/code.py",
        "[_graph_facts(graph) for graph in graphs],", "[],",
        f"{SHARED_CODE} -k test_code_is_shared_between_equals",
    ),
    Mutation(
        "a draft that was defined anew runs the old one's code", f"{RUNTIME}steps/code.py",
        "*(type(part) for part in modules if not isinstance(part, fx.GraphModule))", "*()",
        f"{SHARED_CODE} -k test_code_is_shared_between_drafts",
    ),
    Mutation(
        "a compilation leaves its shapes in memory", f"{ARTEFACTS}parts.py",
        "            forget_shapes(modes=[mode])\n", "            pass\n",
        "tests/runtime/test_regions.py -k test_a_compilation_leaves",
    ),
    Mutation(
        "rows may name any function of torch", f"{ARTEFACTS}graphs.py",
        "if function in FUNCTIONS.get(module, ()):", "if module in FUNCTIONS:",
        "tests/artefacts/test_graphs.py -k test_other_names",
    ),
    Mutation(
        "a trace puts its inputs into modules that other threads use", f"{ARTEFACTS}trace.py",
        "copy = self.copies[id(whole)] = object.__new__(type(whole))", "copy = self.copies[id(whole)] = whole",
        "tests/artefacts/test_trace.py -k test_a_trace_changes_nothing",
    ),
    Mutation(
        "a damaged file ends the call", f"{ARTEFACTS}compiler.py",
        "except Exception as error:\n            log.info(", "except KeyError as error:\n            log.info(",
        "tests/artefacts/test_compiler.py -k test_a_stored_part",
    ),
    Mutation(
        "the key does not depend on the threads", f"{ARTEFACTS}parts.py",
        "return hashlib.sha256(job.text().encode())", "return hashlib.sha256(repr(job.rows).encode())",
        "tests/artefacts/test_parts.py -k test_the_key",
    ),
    Mutation(
        "children that end at once are started for ever", f"{ARTEFACTS}children.py",
        "self._deaths += process.returncode != 0", "self._deaths += 0",
        "tests/artefacts/test_children.py -k test_children_that_end_at_once",
    ),
    Mutation(
        "a forked process ends its parent's children", f"{ARTEFACTS}children.py",
        "if os.getpid() != owner:", "if False:",
        "tests/artefacts/test_children.py -k test_the_end_of_a_forked",
    ),
]  # fmt: skip
STARTS = [
    Mutation(
        "an artefact is used without a look at what it computes", f"{ARTEFACTS}start.py",
        "quick_check(self.model, *(start.graphs[purpose] for purpose in reversed(PURPOSES)))", "pass",
        "tests/artefacts/test_start.py -k test_a_wrong_artefact",
    ),
    Mutation(
        "values of weights are stored", f"{ARTEFACTS}bind.py",
        "if tensor.numel() <= SMALL and tensor.untyped_storage().data_ptr() not in self.storages:",
        "if tensor.numel() <= SMALL:",
        "tests/artefacts/test_bind.py -k test_small_constants",
    ),
    Mutation(
        "the quick check leaves the graph of prompts out", f"{ARTEFACTS}quick_check.py",
        "return tree_logits((prefill, verify), kept", "return tree_logits((verify, verify), kept",
        "tests/artefacts/test_quick_check.py -k test_another_eps",
    ),
    Mutation(
        "a start from an artefact lets others move its weights", f"{ARTEFACTS}start.py",
        "if not self.options.merge_linears:", "if False:",
        "tests/artefacts/test_start.py -k test_weights_that_are_read",
    ),
    Mutation(
        "values that a trace read are not watched after a start from an artefact", f"{ARTEFACTS}start.py",
        "reads = [(config, set(names)) for", "reads = [(config, set()) for",
        "tests/artefacts/test_start.py -k test_values_that_a_start",
    ),
    Mutation(
        "every batch is served after a start from an artefact", f"{ARTEFACTS}start.py",
        'str(content["served_batches"])', '"any"',
        "tests/artefacts/test_start.py -k test_batches_that",
    ),
    Mutation(
        "functions that code calls do not count", f"{ARTEFACTS}digest.py",
        "for name in _names(function.__code__) if name in globals_}", "for name in ()}",
        "tests/artefacts/test_key.py -k test_patched_code",
    ),
    Mutation(
        "ties of tensors do not count", f"{ARTEFACTS}key.py",
        "return places.setdefault(address or id(tensor), len(places))", "return 0",
        "tests/artefacts/test_key.py -k test_a_changed_model",
    ),
    Mutation(
        "a model with hooks has an artefact", f"{ARTEFACTS}key.py",
        "if any(value_hooks((part._forward_hooks, part._forward_pre_hooks)) for part in modules)", "if False",
        "tests/artefacts/test_key.py -k test_a_hook_prevents",
    ),
    Mutation(
        "a checksum is not compared", f"{ARTEFACTS}store.py",
        'return "" if content[: HEADER.size] == _header(path, data) else "its checksum does not match"', 'return ""',
        f"{STORE} -k test_no_damage",
    ),
    Mutation(
        "files that others may write to are read", "spec_compile/folders.py",
        "return bool(found.st_mode & stat.S_IWOTH or", "return bool(False and",
        f"{STORE} -k another_user",
    ),
    Mutation(
        "compiled code of others is loaded", f"{ARTEFACTS}start.py",
        "hmac.compare_digest(signature, self._sign(name, data))", "True",
        "tests/artefacts/test_start.py -k test_compiled_code_is_loaded",
    ),
    Mutation(
        "graphs of files write to weights", f"{ARTEFACTS}permitted.py", 'data.get("row") in writable)', "True)",
        "tests/artefacts/test_graphs.py -k new_tensors_only",
    ),
    Mutation(
        "an item is written in its place", f"{ARTEFACTS}store.py",
        "unfinished = _aside(path, UNFINISHED)", "path.unlink(missing_ok=True)\n        unfinished = path",
        f"{STORE} -k 'killed_writer or full_disk'",
    ),
    Mutation(
        "the artefacts that were used last go first", f"{ARTEFACTS}store.py",
        "for _, folder, size in sorted(sizes):", "for _, folder, size in sorted(sizes, reverse=True):",
        f"{STORE} -k not_used_for_longest",
    ),
]  # fmt: skip
TIERS = [
    Mutation(
        "calls without a pause starve the work between them", f"{RUNTIME}turns.py",
        "(not patience or is_quiet or self._work_is_due())", "(not patience or is_quiet)",
        "tests/runtime/test_turns.py -k busy_loop",
    ),
    Mutation(
        "work between calls starves them", f"{RUNTIME}turns.py",
        "self._due = now + max(EVERY, SHARE * (now - begin))", "self._due = now",
        "tests/runtime/test_turns.py -k their_share",
    ),
    Mutation(
        "calls wait no longer after a long piece of work than after a short one", f"{RUNTIME}turns.py",
        "max(self._due, time.perf_counter() + EVERY) if patience", "time.perf_counter() + EVERY if patience",
        "tests/runtime/test_turns.py -k their_share",
    ),
    Mutation(
        "parts change inside an answer of another wrapper", f"{RUNTIME}tiers.py",
        "if not (turns.enter_context(user.turns.between(0)) and user._may_change()):", "if False:",
        "tests/runtime/test_tiers.py -k another_wrapper",
    ),
    Mutation(
        "warmup does not wait for what is compiled in the background", f"{RUNTIME}tiers.py",
        "        runtime.tiers.finish()\n", "",
        "tests/runtime/test_tiers.py -k test_warmup_waits",
    ),
    Mutation(
        "parts change as soon as they are loaded", f"{ARTEFACTS}compiler.py",
        "        if self.at_once:\n            self.adopt()", "        self.adopt()",
        "tests/artefacts/test_compiler.py -k test_parts_are_eager",
    ),
    Mutation(
        "a first call traces, although parts are compiled in the background", f"{ARTEFACTS}compiler.py",
        "        elif self.source.at_once:\n", "        else:\n",
        "tests/artefacts/test_compiler.py -k test_parts_are_eager",
    ),
    Mutation(
        "jobs that nobody waits for are compiled", f"{ARTEFACTS}children.py",
        "if not self._wanted[key] and os.getpid() == self._owner:", "if False:",
        "tests/artefacts/test_children.py -k test_this_process_helps",
    ),
    Mutation(
        "a part is compiled for the sizes of its first call only", f"{ARTEFACTS}trace.py",
        "    if fixed:\n", "    if False:\n",
        "tests/artefacts/test_trace.py -k become_a_number",
    ),
    Mutation(
        "sizes that differ are one size in a stored graph", f"{ARTEFACTS}bind.py",
        "return VARIES if example is None else int(example)", "return VARIES",
        "tests/artefacts/test_draft_graph.py -k second_start",
    ),
    Mutation(
        "a draft's graph is stored as it was traced", f"{ARTEFACTS}draft_graph.py",
        "graph = passes.run(trace(), passes.Settings(), [tidy])", "graph = trace()",
        "tests/artefacts/test_draft_graph.py -k second_start",
    ),
    Mutation(
        "a saved start lacks its draft", f"{ARTEFACTS}start.py", "(self.key, *self.further)", "(self.key,)",
        "tests/artefacts/test_start.py -k graph_of_a_draft_is_saved",
    ),
    Mutation(
        "a head is checked with the text of other weights", "spec_compile/drafters/self_check.py",
        "return text if (choices[:, 1:-1] == text[:, 2:]).float().mean() >= SAME else None", "return text",
        "tests/drafters/test_draft_checkpoints.py -k own_texts",
    ),
    Mutation(
        "parts of other code are recalled", f"{ARTEFACTS}compiler.py",
        "facts = identity, self.name,", "facts = self.name,",
        "tests/artefacts/test_compiler.py -k test_a_part_that_was_traced_before",
    ),
    Mutation(
        "the form of a part runs what a file says", f"{ARTEFACTS}forms.py",
        "        case {\"result\": int(number)}:", "        case {\"result\": number}:",
        "tests/artefacts/test_forms.py -k test_other_data",
    ),
    Mutation(
        "a draft that was silent does not catch up", f"{RUNTIME}flights.py",
        "            session.steps.catch_up(size, session.max_kv_len(longest + size))\n", "            pass\n",
        "tests/drafters/test_draft_rounds.py -k without_any",
    ),
    Mutation(
        "a prompt begins with slots that a draft has not seen", "spec_compile/batching/beginnings.py",
        "                self._decoder.catch_up()\n", "                pass\n",
        "tests/batching/test_batching.py -k silent",
    ),
    Mutation(
        "a call goes on from slots that a draft has not seen", f"{RUNTIME}call.py",
        "if session.late and request.past is not None:", "if False:",
        "tests/drafters/test_draft_rounds.py -k silent",
    ),
    Mutation(
        "a request's limit of drafts is ignored in a batch", f"{RUNTIME}state.py",
        "real = number < torch.minimum(self.tree_count, self.most_nodes)[:, None]",
        "real = number < self.tree_count.clone()[:, None]",
        "tests/runtime/test_draft_limit.py -k its_own_limit",
    ),
    Mutation(
        "a draft that is accepted no more is not told of", f"{RUNTIME}draft_record.py",
        "self.best >= ENOUGH and self.level < FALL * self.best", "False",
        "tests/runtime/test_step_back.py -k lasting_fall",
    ),
    Mutation(
        "an adapter with which drafts fail stops them for all rows", f"{RUNTIME}draft_length.py",
        "return (bucket - NO_TREE) // STRIDE * STRIDE + ANY", "return ANY",
        "tests/runtime/test_step_back.py -k with_an_adapter",
    ),
    Mutation(
        "drafts that are never accepted are made for ever", f"{RUNTIME}step_back.py",
        "record.share if nodes == 1 else sum(gains) / len(gains) - loss", "record.share",
        "tests/runtime/test_step_back.py -k test_drafts_that_are_never",
    ),
    Mutation(
        "a round without drafts keeps the head's cache from its token", f"{RUNTIME}round.py",
        "        self.guard(self.drafter.observe,", "        path.shape[1] > 1 and self.guard(self.drafter.observe,",
        "tests/drafters/test_draft_rounds.py -k test_drafts_are_the_same_after",
    ),
    Mutation(
        "a round over few nodes drafts whole trees", "spec_compile/drafting.py",
        "return nodes if self.is_whole and nodes - 1 < self.levels else self.nodes",
        "return nodes if self.is_whole and nodes == 1 else self.nodes",
        "tests/drafters/test_draft_rounds.py -k fewer_forwards",
    ),
    Mutation(
        "a round over whole trees verifies parts of them", f"{RUNTIME}flights.py",
        "        if nodes > self.pending:", "        if nodes > 1 == self.pending:",
        "tests/drafters/test_draft_rounds.py -k fewer_forwards",
    ),
    Mutation(
        "parts of trees tell what whole trees gain", f"{RUNTIME}step_back.py",
        "if size <= min(nodes, *counts)]", "if size <= nodes]",
        "tests/runtime/test_step_back.py -k few_nodes_do_not_tell",
    ),
    Mutation(
        "the first nodes of a tree lack their last level", "spec_compile/drafters/trees/schedule.py",
        "num_steps=min(self.num_steps, nodes - 1)", "num_steps=max(1, min(self.num_steps, nodes - 2))",
        "tests/drafters/test_schedule.py -k first_nodes_take",
    ),
    Mutation(
        "another number of steps makes no new model", f"{RUNTIME}called_draft.py",
        "if before != called:", "if before is None:",
        "tests/runtime/test_called_draft.py -k built_once",
    ),
    Mutation(
        "drafts of another tokenizer are read in the target's ids", "spec_compile/drafters/draft_model.py",
        "ids = self.mapping.read(tokens)", "ids = tokens",
        "tests/drafters/test_vocab_mapping.py -k accepts_everything",
    ),
    Mutation(
        "a token that a draft lacks is read as its beginning", "spec_compile/drafters/vocab_mapping.py",
        "return (key[start:] for start in range(len(key)))", "return (key[:end] for end in range(len(key), 0, -1))",
        "tests/drafters/test_vocab_mapping.py -k likeliest_common",
    ),
    Mutation(
        "a draft's token outside the intersection is drafted", "spec_compile/drafters/vocab_mapping.py",
        "return logits.index_select(-1, self.columns)", "return logits[..., : len(self.columns)]",
        "tests/drafters/test_vocab_mapping.py -k likeliest_common",
    ),
    Mutation(
        "Zaya's values are delayed by two tokens", "spec_compile/capture/modules/convolutions.py",
        "zip([*range(past, 0, -1), 1], delays.split(sizes))", "zip([*range(past, 0, -1), past], delays.split(sizes))",
        "tests/capture/test_modules.py -k one_row",
    ),
]  # fmt: skip
DOORS = [
    Mutation(
        "replaced weights are not taken over by custom_generate", "spec_compile/custom_generate.py",
        'if any(change.remedy == "refresh" for change in changes):', "if False:",
        "tests/product/test_custom_generate.py -k replace_weight",
    ),
    Mutation(
        "a speculative model runs the custom_generate of its repository", "spec_compile/capture/hooks.py",
        'return None if _package(getattr(inner, "__module__", None) or "") == "spec_compile" else function',
        "return function",
        "tests/product/test_custom_generate.py -k bound",
    ),
    Mutation(
        "a private head is sent to a public repository", "spec_compile/training/hub.py",
        "if self.private and not is_private:", "if self.private is None:",
        "tests/training/test_hub.py -k private",
    ),
]  # fmt: skip
MODULES = [
    Mutation(
        "a later module is paired with the token of the first", "spec_compile/drafters/mtp_modules.py",
        "(places + number + 1)", "(places + 1)", "tests/drafters/test_mtp_modules.py -k token_k",
    ),
    Mutation(
        "the output at the seam between two rounds is lost", "spec_compile/drafters/mtp_modules.py",
        "row = begin + gained - number - before", "row = begin + gained - number - before - 1",
        "tests/drafters/test_mtp_modules.py -k token_k",
    ),
    Mutation(
        "a later module reads the state of the root at every node", "spec_compile/drafters/mtp_modules.py",
        "states = gather_rows(above, parents_of(ancestors))", "states = gather_rows(above, 0 * parents_of(ancestors))",
        "tests/drafters/test_mtp_modules.py -k token_k",
    ),
    Mutation(
        "later modules run over copied slots without a state", "spec_compile/drafters/mtp_modules.py",
        "torch.maximum(slots - number, self.origin - 1)", "(slots - number)",
        "tests/batching/test_several_modules.py -k later_modules",
    ),
    Mutation(
        "later modules draft with the output matrix of the first", "spec_compile/drafters/mtp_modules.py",
        "drafter.further_logits[number - 1](normed", "drafter.logits(normed",
        "tests/drafters/test_mtp_families.py -k 'rounds and step3p7'",
    ),
    Mutation(
        "a bound of Step's experts is dropped", "spec_compile/capture/experts.py",
        " and module.limit == math.inf", "", "tests/kernels/test_experts.py -k do_not_ask",
    ),
    Mutation(
        "the last pairs of an expert get no tile", "spec_compile/kernels/experts/sort.py",
        "(first + count) // SIZE + expert + 1", "(first + count) // SIZE + expert",
        "tests/kernels/test_experts.py -k sorted_and_cut",
    ),
    Mutation(
        "nobody empties the tiles of experts elsewhere", "spec_compile/kernels/experts/sort.py",
        "pairs // SIZE + expert + 1, end)", "end, end)",
        "tests/kernels/test_experts.py -k elsewhere",
    ),
    Mutation(
        "a gate gates itself", "spec_compile/kernels/experts/wide_kernel.py",
        "weight.load([row + distance, start])", "weight.load([row, start])",
        "tests/kernels/test_experts.py -k descriptors",
    ),
    Mutation(
        "modules that read the target's state read each other's", "spec_compile/drafters/modules/mtp.py",
        "state if self.recycle_state else normed", "normed",
        "tests/drafters/test_mtp_families.py -k 'definition and mimo_v2'",
    ),
    Mutation(
        "Mistral's rows of queries stay in their order", "spec_compile/drafters/checkpoints/mistral.py",
        ".transpose(1, 2).reshape", ".reshape",
        "tests/drafters/test_draft_block.py -k 'formulas and eagle_mistral'",
    ),
    Mutation(
        "speculators' modules are read as MiMo's", "spec_compile/drafters/checkpoints/mtp.py",
        'files.config.get(SPECULATORS) == "mtp"', "False",
        "tests/drafters/test_draft_block.py -k 'formulas and mtp_speculators'",
    ),
    Mutation(
        "YaRN leaves the scores of latent attention alone", "spec_compile/drafters/checkpoints/config.py",
        "if factor > 1:", "if False:",
        "tests/drafters/test_draft_block.py -k 'formulas and eagle3_mla'",
    ),
    Mutation(
        "queries and keys of latent attention are put together in another order",
        "spec_compile/drafters/modules/latent.py",
        "q = torch.cat([q, q_turned], dim=-1)", "q = torch.cat([q_turned, q], dim=-1)",
        "tests/drafters/test_draft_block.py -k 'formulas and eagle3_mla'",
    ),
    Mutation(
        "a tensor that no module holds is not looked at", "spec_compile/drafters/checkpoints/mtp.py",
        "lambda name: name.startswith(prefixes)", "lambda name: any(block.holds(name) for block in blocks)",
        "tests/drafters/test_mtp_families.py -k unknown",
    ),
    Mutation(
        "an assistant's sliding layers see one slot less", "spec_compile/drafters/assistant.py",
        'marker["window"] + 1', 'marker["window"]',
        "tests/drafters/test_assistant.py -k chains_are",
    ),
    Mutation(
        "an assistant reads keys of an earlier layer", "spec_compile/drafters/checkpoints/assistant.py",
        "number, layer in enumerate(layers) if not", "number, layer in enumerate(layers[:-3]) if not",
        "tests/drafters/test_assistant.py -k chains_are",
    ),
    Mutation(
        "drafts of an assistant move on from the root's position", "spec_compile/drafters/assistant.py",
        "positions = lengths[:, None].expand_as(tokens)", "positions = lengths[:, None].expand_as(tokens) + offset",
        "tests/drafters/test_assistant.py -k chains_are",
    ),
    Mutation(
        "a window of transformers' DFlash drafts counts the slot itself",
        "spec_compile/drafters/checkpoints/dflash_config.py",
        'config["sliding_window"] + 1', 'config["sliding_window"]',
        "tests/drafters/test_muse_glimmer.py -k assisted_generation",
    ),
    Mutation(
        "an assistant that drafts blocks is taken for one over the target's cache", "spec_compile/drafters/__init__.py",
        'blocks = name == "assistant" and draft is not None', 'blocks = name == "assistant" and draft is None',
        "tests/drafters/test_muse_glimmer.py -k assisted_generation",
    ),
    Mutation(
        "the part that scores an assistant's tokens has no owner", "spec_compile/drafters/assistant.py",
        "self.compiler(self.score, ", "self.compiler(lambda normed: self.score(normed), ",
        "tests/drafters/test_draft_parts.py -k 'assistants and background-E2B-None'",
    ),
    Mutation(
        "another backend for an assistant is dropped in silence", "spec_compile/drafters/assistant.py",
        'if name not in ("auto", ours):', "if False:", "tests/drafters/test_assistant.py -k other_models",
    ),
    Mutation(
        "each level of an assistant's tree is compiled by itself", "spec_compile/drafters/assistant.py",
        "if rows not in self.compiled:", "if True:", "tests/drafters/test_assistant.py -k what_is_compiled",
    ),
    Mutation(
        "zero points of GPTQ's second format are read as those of its first",
        "spec_compile/drafters/checkpoints/quantised.py",
        'offset = int(config.get("checkpoint_format", "gptq") == "gptq")', "offset = 1",
        "tests/drafters/test_quantised_drafts.py -k 'has_the_weights and gptq_v2'",
    ),
    Mutation(
        "a global scale multiplies that divides", "spec_compile/kernels/linear/quantised/fp4.py",
        "return wide / factor if self.divides else wide * factor", "return wide * factor",
        "tests/drafters/test_quantised_drafts.py -k 'has_the_weights and ct_nvfp4'",
    ),
    Mutation(
        "attention on a CPU has no windows", "spec_compile/kernels/attention/cpu_attention.py",
        "call.window or 0, BEST", "0, BEST",
        "tests/kernels/test_cpu_attention.py -k means",
    ),
    Mutation(
        "attention on a CPU takes its kernel for what it lacks", "spec_compile/kernels/attention/base.py",
        'USUAL = ALL - {"chunk", "slopes", "indexed"}', 'USUAL = ALL - {"indexed"}',
        "tests/kernels/test_cpu_attention.py -k lacks",
    ),
    Mutation(
        "weights on a CPU are scaled after the product", "spec_compile/kernels/linear/few_rows.py",
        "scaled_first = rounds is None and dtype != torch.int8", "scaled_first = False",
        "tests/kernels/test_few_rows.py -k test_layouts",
    ),
    Mutation(
        "a constant scale on a CPU is that of each row", "spec_compile/kernels/linear/few_rows.py",
        "scaled_first, not layout.norms_after)", "scaled_first, False)",
        "tests/kernels/test_few_rows.py -k test_layouts",
    ),
    Mutation(
        "a CPU's kernel rounds activations where none are to be", "spec_compile/kernels/linear/quantised/__init__.py",
        "        return layout_of(kind).unrounded(x, parts, bias)\n", "        pass\n",
        "tests/kernels/test_few_rows.py -k test_the_op_takes_the_kernel",
    ),
    Mutation(
        "a program of all spans gives each row the smaller ones", "spec_compile/kernels/attention/tree_kernel.py",
        "log2 = least + turns(position, turn, length, nodes, MOST).to(tl.int32)", "log2 = least + 0 * position",
        "tests/kernels/test_attention.py -k all_spans_in",
    ),
    Mutation(
        "threads beyond a control group's time", "spec_compile/kernels/cores.py",
        "math.ceil(min(count, quota(root)))", "count", "tests/kernels/test_cores.py",
    ),
    Mutation(
        "a sum of 4-bit codes has the scale of the group before", "spec_compile/kernels/linear/w4a8_kernel.py",
        "weight.scales + column // GROUP * outputs", "weight.scales + start // GROUP * outputs",
        "tests/kernels/test_packed_products.py -k 'products and 18 and w4a8'",
    ),
    Mutation(
        "a constant scale rounds activations before their norm",
        "spec_compile/kernels/linear/quantised/compressed_tensors.py", "return not self.static", "return True",
        "tests/capture/test_quantised.py -k constant_scale",
    ),
    Mutation(
        "scales of activations in NVFP4 are not rounded to FP8", "spec_compile/kernels/linear/quantised/fp4.py",
        "clamp(max=448).to(FP8).float()", "clamp(max=448).float()",
        "tests/capture/test_quantised.py -k activations_in_nvfp4",
    ),
    Mutation(
        "bytes of more than 4 bits are read as W4A8", "spec_compile/kernels/linear/quantised/compressed_tensors.py",
        "int(codes.min()) >= -8 and int(codes.max()) <= 7", "True",
        "tests/capture/test_quantised.py -k a_byte_that",
    ),
    Mutation(
        "a cut inside a group of weights is not noticed", "spec_compile/passes/shares.py",
        "share.blocks % step == 0", "share.blocks % step >= 0",
        "tests/passes/test_shares.py -k groups_that_would_be_cut",
    ),
    Mutation(
        "a rank rounds its columns by their own largest value", "spec_compile/kernels/linear/quantised/rows.py",
        "largest = gather_parts(x.abs().amax(dim=-1, keepdim=True), group_name).amax(dim=0)",
        "largest = x.abs().amax(dim=-1, keepdim=True)",
        "tests/parallel/test_quantised_ranks.py -k few",
    ),
    Mutation(
        "the sum of a token's experts has those of another GPU", "spec_compile/kernels/experts/kernel.py",
        "here = mask & ((expert >= FIRST) & (expert < FIRST + HELD))[:, None]", "here = mask",
        "tests/kernels/test_experts.py -k each_rank",
    ),
    Mutation(
        "copies of a draft's weights are not rounded anew", "spec_compile/drafters/draft_weights.py",
        "old.copy_(new)", "pass", "tests/drafters/test_draft_weights.py -k refresh",
    ),
    Mutation(
        "a state of no tokens has an exponent", "spec_compile/kernels/recurrence/channelwise.py",
        "torch.where(d > 0, m, LOWEST), None", "m, None",
        "tests/kernels/test_recurrence_forms.py -k wkv",
    ),
    Mutation(
        "tokens that do not count lead a state of linear attention on",
        "spec_compile/kernels/recurrence/linear_kernel.py", "leads = valid > step", "leads = valid >= step",
        "tests/kernels/test_recurrence.py -k same_bits",
    ),
    Mutation(
        "a convolution's state lacks the last token of a chunk", "spec_compile/kernels/recurrence/convolution.py",
        "source = (valid[:, None]", "source = ((valid - 1).clamp(min=0)[:, None]",
        "tests/kernels/test_recurrence_forms.py -k convolution",
    ),
    Mutation(
        "children of the root go on from the state before it",
        "spec_compile/kernels/recurrence/channelwise_kernel.py", "if parent >= 0:", "if parent > 0:",
        "tests/kernels/test_recurrence.py -k gated",
    ),
    Mutation(
        "rows that a model mixes are served", "spec_compile/runtime/ask.py",
        "engine.served_batches == SINGLE", "not engine.served_batches",
        "tests/product/test_unmasked.py -k test_batches",
    ),
    Mutation(
        "the cache of a model that attends to pictures is read", "spec_compile/runtime/past.py",
        '"cross_attention_layers", None):', '"cross_attention", None):',
        "tests/capture/test_classes.py -k keys_of_pictures",
    ),
]  # fmt: skip
PLANS = [
    Mutation(
        "tiles of a plan mix families of instructions", "spec_compile/kernels/linear/computed.py",
        "for grouped in (True, False) if card.has_groups else (None,):", "for grouped in (None,):",
        "tests/kernels/test_computed_plans.py -k every_card",
    ),
    Mutation(
        "a card that was not tuned takes Hopper's plans", "spec_compile/kernels/linear/small_m.py",
        "if card.capability != TUNED:\n        return", "if card.capability < (8, 0):\n        return",
        "tests/kernels/test_computed_plans.py -k tuned_computed",
    ),
    Mutation(
        "a search of plans does not end in time", "spec_compile/kernels/linear/tune.py",
        "if clock() > end:", "if clock() > 2 * end:", "tests/kernels/test_tune_kernels.py -k ends_in_time",
    ),
]  # fmt: skip
MUTATIONS: list[Mutation] = [
    *STARTS, *TIERS, *COMPILED,
    *REQUESTS, *STATE, *CACHES, *TREES, *DRAWS, *ANSWERS, *UNIONS, *NEWCOMERS, *FORWARDS, *OTHERS, *SERVING,
    *CONFIDENCE, *TOLERANCES, *DOORS, *MODULES, *WEIGHTS, *PLANS,
]  # fmt: skip
