"""DFlash: blocks of drafts in one forward, by a draft whose cache is made of the target's states.

Its cache has the target's slots: slot t holds keys and values made of the target's states at token t. A block lies
after the committed slots, from the root's on, and is overwritten by the next commit.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from .. import passes
from ..cache import Cache
from ..capture.admit import Inventory
from ..capture.trace import capture_head
from ..compile.part import PartCompiler
from ..compile.regions import compile_regions
from ..compile.start import draft_graph
from ..drafting import Algorithm, Drafter, DraftPlan
from ..errors import check_int
from ..graph import ModelGraph
from ..kernels import attention, ops
from ..kernels.top_logits import MAX_K
from ..runtime.state import State
from ..tree import MAX_NODES, Accepted
from .checkpoints.load import load_head
from .modules.dflash import ContextProjection, DFlashDraft
from .options import ModuleOptions, WindowOptions, seen
from .shared_draft import DraftWeights, choose_ranks


@dataclass(frozen=True)
class DFlashOptions(ModuleOptions, WindowOptions):
    """Options of DFlash, with the engines' names and meaning.

    draft: the draft: a folder, a name on the hub, a `DFlashDraft`, or a ``MuseGlimmerAssistantModel``.
    block_size: slots of a block, the root's included (default: as many as the draft was trained with; fewer work, too).
    topk: tokens of each place that are looked at (1: a chain; DFlash 2 looks at as many as it was trained with).
    num_draft_tokens: nodes verified, the root included (default: as many as a chain of all drafts has).
    draft_tensor_parallel_size: as with draft models; the output matrix stays whole.
    rope_theta: base of the draft's RoPE, if its config is known to be wrong.
    """

    block_size: int | None = None
    rope_theta: float | None = None

    def __post_init__(self):
        super().__post_init__()
        check_int("topk", self.topk, 1, MAX_K, "tokens of each place that are looked at")
        if self.block_size is not None:
            check_int("block_size", self.block_size, 1, MAX_NODES, "slots of a block, the root's included")
        if self.num_draft_tokens is not None:
            check_int("num_draft_tokens", self.num_draft_tokens, 2, MAX_NODES, "nodes verified, the root included")
        if not 0 < self.score_temperature < math.inf:
            raise ValueError(f"score_temperature must be positive and finite, not {self.score_temperature}")

    def fit(self, draft: DFlashDraft) -> tuple[int, int]:
        """The slots of a block and the nodes of a tree that `draft` is used with; ValueError if it cannot be."""
        most = draft.block_size
        slots = min(most, MAX_NODES) if self.block_size is None else self.block_size
        if slots > most:
            raise ValueError(f"block_size: this draft was trained with blocks of {most}, not {slots}; lower it")
        places = slots - draft.first
        if places == 0:
            raise ValueError("block_size: the first slot of this draft's blocks drafts nothing; it must be at least 2")
        chain = min(places + 1, MAX_NODES)
        nodes = self.draft_nodes(chain if self.topk == 1 else MAX_NODES) or chain
        if self.topk == 1 and nodes > chain:
            raise ValueError(
                f"num_draft_tokens must be at most {chain}, the drafts of a block of {slots} and the root, not "
                f"{nodes}: lower it, or raise block_size or topk"
            )
        return slots, nodes


class DFlash(Algorithm):
    """Chains or trees of one `draft`."""

    def __init__(self, draft: DFlashDraft, options: DFlashOptions):
        self.draft, self.options, self.window = draft, options, options.window
        self.weights = DraftWeights(options.draft_weights, draft, draft.head_weight)
        self.draft_module = options.draft if isinstance(options.draft, nn.Module) else draft
        self.block_size, nodes = options.fit(draft)
        self.plan = DraftPlan(nodes, draft.taps, self.block_size, options.draws)
        self.longest = options.longest(min(nodes, self.block_size - draft.first + 1))
        how = self.block_size - draft.first, options.topk, nodes, options.draws, options.score_temperature
        self.proposer = draft.proposer(*how)

        # Capture the draft and rewrite its graph, on the ranks that share it.
        pipeline = self.weights.pipeline([*passes.PIPELINE, self.causal_layers])
        captured = draft_graph(draft, options, partial(capture_head, draft))
        ranks, self.sharing = choose_ranks(options.draft_ranks, options.ranks, captured)
        settings = passes.Settings(options.merge_linears, attention=options.attention("draft"), ranks=ranks)
        self.graph = passes.run(captured, settings, pipeline)
        parts = captured.layers[0].kv_heads // self.graph.layers[0].kv_heads
        projecting = self.weights.with_projection(draft, captured)
        self.context = ContextProjection(projecting, self.weights, parts, ranks.rank * parts // ranks.size)

    def causal_layers(self, graph: ModelGraph, settings: passes.Settings) -> str:
        """A pass after `passes.use_tree_attention`: causal layers see the block so, whatever ``ancestors`` says."""
        causal = self.draft.causal
        for node, restricted in zip(attention.attention_calls(graph), causal):
            if restricted:
                node.update_kwarg("ancestors", None)
        attention.prepare(graph)
        return f"{sum(causal)} layers see the block causally, {len(causal) - sum(causal)} all of it"

    def drafter(self, batch: int, slots: int) -> Drafter:
        return DFlashDrafter(self, batch, slots)

    def refresh(self) -> None:
        self.context.refresh()
        self.weights.refresh()

    def explain(self) -> list[str]:
        window = "" if self.window is None else self.window.describe()
        return [*self.draft.report, *(line for line in (self.sharing, window, *self.weights.explain()) if line)]


class DFlashDrafter(Drafter):
    """Writes the context of committed tokens (`prefill`, `observe`) and drafts the block after them (`propose`)."""

    fuses = False  # its layers are alike and compiled once

    def __init__(self, algorithm: DFlash, batch: int, slots: int):
        super().__init__()
        self.draft, self.context, self.proposer = algorithm.draft, algorithm.context, algorithm.proposer
        self.graph, self.block, self.block_size = algorithm.graph, algorithm.graph.gm, algorithm.block_size
        self.longest = algorithm.longest  # nodes of an accepted path
        self.window = algorithm.window
        self.cache, self.compiled_slots = Cache(algorithm.graph, batch, slots), 0

    def compile(self, compiler: PartCompiler) -> None:
        if self.compiled_slots != self.cache.slots:
            self.block = compile_regions(self.graph, compiler, "block")
            self.compiled_slots = self.cache.slots

    def prefill(self, state: State, ids: Tensor, positions: Tensor, features: list[Tensor], max_kv_len: int) -> None:
        self.write(features, state.lengths)

    def observe(self, state: State, features: list[Tensor], accepted: Accepted, begin: Tensor, max_kv_len: int) -> None:
        path, _ = accepted.first(self.longest)
        self.write([ops.gather_rows(feature, path) for feature in features], begin)

    def write(self, features: list[Tensor], begin: Tensor) -> None:
        """Put the context of tokens with these states [B, T, h] into the cache, at slots `begin` [B] onwards."""
        positions = begin[:, None] + torch.arange(features[0].shape[1], device=begin.device)
        for cache, values in zip(self.cache.tensors, self.context(features, positions)):
            ops.append(cache, values, begin, self.cache.table)

    def propose(self, state: State, max_kv_len: int) -> None:
        # The root and masks, in a block after the committed slots.
        root, lengths = state.tree_tokens[:, 0].clone(), state.lengths.clone()
        masks = root.new_full((len(root), self.block_size - 1), self.draft.mask_token_id)
        ids = torch.cat([root[:, None], masks], dim=1)
        positions = lengths[:, None] + torch.arange(self.block_size, device=root.device)
        everything = torch.full_like(ids, -1)  # of the block
        cache, lengths, max_kv_len = seen(self.window, self.cache, lengths, self.block_size, max_kv_len)
        output = self.block(ids, positions, lengths, everything, cache, max_kv_len)
        self.draft.propose(self.proposer, state, *output)


def build(target: Inventory, options: DFlashOptions) -> DFlash:
    """The algorithm with the draft that `options` names."""
    algorithm = DFlash(load_head(options.draft, target.model, "dflash", rope_theta=options.rope_theta), options)
    options.check_window(algorithm.graph, target)
    return algorithm
