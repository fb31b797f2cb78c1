"""Draft heads: EAGLE, EAGLE-2, EAGLE-3 and MTP, whose drafts continue the target's own hidden states.

A head's cache has a slot for each slot of the target's: slot t holds the pair of the target's state at token t and of
token t + 1, and predicts token t + 2. So the last committed slot predicts the children of the root.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .. import passes
from ..cache import Cache
from ..capture.admit import Inventory
from ..capture.trace import capture_head
from ..compile.start import draft_graph
from ..drafting import Algorithm, Drafter, DraftPlan
from ..graph import ModelGraph
from ..kernels.ops import gather_rows
from ..runtime.state import State
from ..tree import Accepted
from .checkpoints.load import load_head
from .modules.eagle import Head
from .options import DraftOptions, Window, WindowOptions, seen, write_back
from .self_check import best_reading
from .shared_draft import DraftHead, DraftWeights, choose_ranks, keep_row
from .trees.grow import Schedule, StaticTree, Step
from .trees.propose import propose_grown


@dataclass(frozen=True)
class HeadOptions(DraftOptions, WindowOptions):
    """Options of the draft heads.

    token_map: a file or list of the token ids that the head may propose (FR-Spec).
    tree_choices: a static tree in place of num_steps and topk: paths of child ranks, or "eagle1" for EAGLE-1's.
    rope_theta: base of the head's RoPE, if its config is known to be wrong.
    """

    token_map: Any = None
    tree_choices: Any = None
    rope_theta: float | None = None

    @property
    def schedule(self) -> Schedule | StaticTree:
        if self.tree_choices is None:
            return super().schedule
        if self.draws:
            raise ValueError("tree_choices: drafts that are drawn ('probabilistic') are chains; leave it out")
        return StaticTree() if self.tree_choices == "eagle1" else StaticTree(self.tree_choices)


@dataclass(frozen=True)
class NaiveOptions(HeadOptions):
    """`HeadOptions` with one draft token by default."""

    num_steps: int = 1


class HeadAlgorithm(Algorithm):
    """Drafts of one `head`, in trees of `schedule`."""

    window: Window | None = None
    """The part of a text that its attention sees, except in forwards over the prompt (None: everything)."""
    checked = 2
    """Drafts of the head that its self-check looks at."""

    def __init__(self, head: Head, options: HeadOptions):
        self.schedule, self.weights = options.schedule, DraftWeights(options.draft_weights, head, head.head_weight)
        if isinstance(self.schedule, StaticTree):
            self.schedule.to(head.head_weight.device)
        self.draft_module = options.draft if isinstance(options.draft, nn.Module) else head
        # Capture the head and rewrite its graph for drafting, on the ranks that share it.
        captured = self._capture(head, options)
        ranks, self.sharing = choose_ranks(options.draft_ranks, options.ranks, captured, head.head_weight.nbytes)
        self.settings = passes.Settings(options.merge_linears, attention=options.attention("draft"), ranks=ranks)
        self.graph = passes.run(captured, self.settings, self.weights.pipeline())
        self.logits = DraftHead(head.head_weight, ranks, self.weights)
        self.head = self.weights.with_projection(head, captured)
        # The sizes that rounds are built for.
        self.longest = options.longest(min(self.schedule.nodes, self.schedule.num_steps + 1))
        levels = self.schedule.num_steps if isinstance(self.schedule, Schedule) else 1
        self.plan = DraftPlan(self.schedule.nodes, head.taps, self.schedule.fed, options.draws, levels=levels)

    def _capture(self, head: Head, options: HeadOptions) -> ModelGraph:
        return draft_graph(head, options, partial(capture_head, head, head.hidden_size))

    def drafter(self, batch: int, slots: int) -> Drafter:
        return HeadDrafter(self, batch, slots)

    def refresh(self) -> None:
        self.head.refresh()
        self.weights.refresh()

    def explain(self) -> list[str]:
        window = "" if self.window is None else self.window.describe()
        lines = [*self.head.report, self.sharing, window, *self.weights.explain()]
        return ["draft head:", *(f"  {line}" for line in lines if line)]


class HeadDrafter(Drafter):
    """Runs a head over committed tokens (`prefill`, `observe`) and over the tree it grows (`propose`)."""

    def __init__(self, algorithm: HeadAlgorithm, batch: int, slots: int):
        super().__init__()
        self.head, self.block, self.draws = algorithm.head, algorithm.graph.gm, algorithm.plan.draws
        self.logits, self.window = algorithm.logits, algorithm.window
        self.schedule, self.longest = algorithm.schedule, algorithm.longest  # nodes of an accepted path
        self.cache = Cache(algorithm.graph, batch, slots)
        like = self.head.head_weight
        self.register_buffer("hidden", like.new_zeros(batch, self.head.hidden_size), persistent=False)
        self.register_buffer("normed", like.new_zeros(batch, like.shape[1]), persistent=False)

    def start(self, state: State, prompts: list[list[int]], references: list[Tensor], share_text: bool = True) -> None:
        self.hidden.zero_()  # a prompt of one token has no slot to draft from: these drafts are rejected
        self.normed.zero_()

    def prefill(self, state: State, ids: Tensor, positions: Tensor, features: list[Tensor], max_kv_len: int) -> None:
        # Pair each state with the token after it.
        size = ids.shape[1]
        ahead = (state.lengths[:, None] + 1 + torch.arange(size, device=ids.device)).clamp(max=state.capacity - 1)
        following = state.tokens.gather(1, ahead)
        states = self.head.project(features)
        out = self.block(following, positions, states, state.lengths, None, self.cache.argument, max_kv_len)
        # Remember the output from which the first drafts go on.
        last = state.prompt_lengths - 2 - state.lengths  # the slot that predicts the token after the prompt
        self._keep(out, last, (last >= 0) & (last < size))
        self._follow(state, state.lengths, (last + 1).clamp(0, size), out[0], max_kv_len)

    def observe(self, state: State, features: list[Tensor], accepted: Accepted, begin: Tensor, max_kv_len: int) -> None:
        # Pair the states of the accepted path with the tokens after them.
        path, tokens = accepted.first(self.longest)
        positions = begin[:, None] + torch.arange(path.shape[1], device=begin.device)
        states, rows = self.head.project([gather_rows(feature, path) for feature in features]), path.shape[1]
        cache, slots, length = seen(self.window, self.cache, begin, rows, max_kv_len)
        out = self.block(tokens.clamp(min=0), positions, states, slots, None, cache, length)
        if self.window is not None:
            write_back(self.cache, begin, cache, slots, rows)
        # Remember the output at the last committed slot.
        gained = state.lengths - begin
        self._keep(out, gained - 1, gained > 0)
        self._follow(state, begin, gained, out[0], max_kv_len)

    def _follow(self, state: State, begin: Tensor, gained: Tensor, recycled: Tensor, max_kv_len: int) -> None:
        """The block has seen slots begin [B] onwards, of which gained [B] are committed; it gave recycled [B, T, H]."""

    def _keep(self, out: tuple[Tensor, Tensor], row: Tensor, present: Tensor) -> None:
        """Remember the block's output at row [B] of the sequences with present [B]."""
        for buffer, values in zip((self.hidden, self.normed), out):
            keep_row(buffer, values, row, present)

    def propose(self, state: State, max_kv_len: int, nodes: int | None = None) -> None:
        logits = self.logits(self.normed.clone())
        step = self._steps(state.lengths.clone(), max_kv_len)
        hidden, draft_to_target = self.hidden.clone(), self.head.draft_to_target
        propose_grown(state, self.schedule, self.draws, logits, hidden, step, draft_to_target, nodes)

    def _steps(self, lengths: Tensor, max_kv_len: int) -> Step:
        """The forwards that grow a tree after `lengths` [B] committed slots."""
        return partial(self._step, lengths, *seen(self.window, self.cache, lengths, self.schedule.fed, max_kv_len))

    def _step(
        self, lengths, cache, slots, max_kv_len, tokens, hidden, ancestors, depth, offset, wanted
    ) -> tuple[Tensor, Tensor]:
        """See `trees.grow.Step`. A node at depth d is the token of the pair at position lengths + d - 1."""
        positions = lengths[:, None] + depth - 1
        hidden, normed = self.block(tokens, positions, hidden, slots + offset, ancestors, cache, max_kv_len)
        return hidden, self.logits(normed[:, -wanted:])


KINDS: list[type[HeadAlgorithm]] = []
"""Algorithms for heads with more than `Head` has; the first whose ``fits(head, options)`` is true is taken. `contrib`
adds some."""


def build(algorithm: str | None, target: Inventory, options: HeadOptions) -> HeadAlgorithm:
    """The algorithm with the head that `options` names. algorithm: which the head must be for (None: any)."""
    head = load_head(options.draft, target.model, algorithm, options.token_map, rope_theta=options.rope_theta)
    kind = next((kind for kind in KINDS if kind.fits(head, options)), HeadAlgorithm)
    heads = kind(best_reading(target, head, options, kind.checked), options)
    options.check_window(heads.graph, target)
    heads.window = options.window
    return heads
