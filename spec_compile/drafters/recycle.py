"""Token recycling (Luo et al. 2024, arXiv:2408.08696): the likeliest tokens of logits that rounds compute anyway.

A table keeps the target's likeliest next tokens after each token that was verified last, accepted or not. Read from the
root down, it gives trees without a draft model. `union` joins these with n-grams, as it joins a head's trees.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..capture.admit import Inventory
from ..drafting import Algorithm, Drafter, DraftPlan
from ..kernels.top_logits import best_tokens
from ..runtime.state import State
from ..tree import Tree
from . import ngram
from .ngram import NgramOptions
from .trees.grow import best_nodes, expected_drafts, highest
from .union import Union

BUDGET = 8 << 20
"""Most bytes of a table: 8 candidates of each of 262,144 tokens."""
UNIT, LOW = 16, 255
"""A candidate is ``id << 8 | min(-UNIT * log-probability, LOW)``, or -1 if there is none: token 5 with a
log-probability of -0.5 is 1288."""
LEVELS, WIDTH = 6, 8
"""Levels of a tree, and nodes of a level whose candidates are looked up."""
LOST = 0.03
"""The chance that the likeliest token but the root comes after the root; the next one has half of it, and so on. With
SmolLM2-135M these were 0.032 and 0.013."""


def renew(table: Tensor, tokens: Tensor, logits: Tensor) -> None:
    """Write what a verification shows into the table [V, k] int32. If several nodes have one token, the last counts.

    tokens: [M] int64; -1 for nodes that leave no trace.
    logits: [M, V'] of the target after every node.
    """
    logprobs, ids = best_tokens(logits, table.shape[1], 1.0)
    new = ids << 8 | (-UNIT * logprobs).clamp(max=LOW).round().to(torch.int64)
    # A model may not read all that it generates.
    new = torch.where((ids < len(table)) & (logprobs > -torch.inf), new, -1).to(table.dtype)
    # A GPU writes the rows of equal tokens in any order, even in parts, which would mix candidates of two nodes and may
    # give siblings one token. So all nodes of a token write the row of the last of them.
    number, at = torch.arange(len(tokens), device=tokens.device), tokens.clamp(min=0)
    last = torch.where((at[:, None] == at) & (tokens >= 0), number, -1).amax(dim=1)
    table.index_put_((at,), torch.where(last[:, None] < 0, table[at], new[last]))


def unrolled(table: Tensor, before: Tensor, root: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest trees below the roots [B]: tokens, parents [B, nodes] int64 and scores [B, nodes] float32, sums of
    log-probabilities, from the best node down; -inf for slots without a node.

    before: [B]; the tokens before the roots. Tokens that were likely in a root's place may still come after it, which
    helps if the root has few candidates (as in LogitSpec, Liu et al. 2025, arXiv:2507.01449).

    Candidates are numbered level by level, the root being 0. With k = 2 its own are numbers 1 and 2, and 3 is the one
    that lost its place. If the best two of these are 1 and 3, their candidates are numbers 4 to 7.
    """
    own, lost = table[root].to(torch.int64), table[before, 1:].to(torch.int64)
    is_new = (lost >= 0) & ((lost >> 8)[:, :, None] != (own >> 8)[:, None, :]).all(dim=2)
    chances = (LOST / torch.arange(1, lost.shape[1] + 1, device=root.device)).log()
    zero = torch.zeros_like(root)[:, None]
    levels = [(root[:, None], zero - 1, zero.float())]
    scores = torch.cat([_logprobs(own), torch.where(is_new, chances, -torch.inf)], dim=1)
    candidates, above, first = torch.cat([own, lost], dim=1), zero, 1
    for level in range(1, LEVELS + 1):
        above = above.repeat_interleave(candidates.shape[1] // above.shape[1], dim=1)
        tokens = (candidates >> 8).clamp(min=0)
        levels.append((tokens, above, scores))
        if level < LEVELS:
            best = highest(scores, WIDTH)
            above, first = first + best, first + tokens.shape[1]
            below = table[tokens.gather(1, best)].to(torch.int64)  # [B, W, k]
            scores = (scores.gather(1, best)[:, :, None] + _logprobs(below)).flatten(1)
            candidates = below.flatten(1)
    return best_nodes(*(torch.cat(parts, dim=1) for parts in zip(*levels)), nodes)


def _logprobs(candidates: Tensor) -> Tensor:
    """Their log-probabilities; -inf for none."""
    return torch.where(candidates < 0, -torch.inf, -(candidates & LOW) / UNIT)


class Recycle(Algorithm):
    """Trees from one table, which all drafters of a model share. Graphs read it, so it is never replaced."""

    def __init__(self, vocab: int, k: int, plan: DraftPlan, device: torch.device):
        most = 2 * k + (LEVELS - 1) * min(2 * k - 1, WIDTH) * k
        self.plan = replace(plan, nodes=min(plan.nodes, most))
        self.table = torch.full((vocab, k), -1, dtype=torch.int32, device=device)

    def refresh(self) -> None:
        """Forget all: other weights have other candidates."""
        self.table.fill_(-1)

    def drafter(self, batch: int, slots: int) -> Drafter:
        return RecycleDrafter(self, batch)

    def explain(self) -> list[str]:
        vocab, k = self.table.shape
        return [f"recycles the {k} likeliest tokens after each of {vocab:,} tokens, in {4 * k * vocab / 1e6:.1f} MB"]


class RecycleDrafter(Drafter):
    """Unrolls the table below each row's root.

    reads, writes: [B] bool; rows that draft from the table, and whose logits go into it.
    """

    table: Tensor
    reads: Tensor
    writes: Tensor

    def __init__(self, algorithm: Recycle, batch: int):
        super().__init__()
        self.algorithm, self.nodes = algorithm, algorithm.plan.nodes
        self.register_buffer("table", algorithm.table, persistent=False)
        for name in ("reads", "writes"):
            flags = torch.zeros(batch, dtype=torch.bool, device=algorithm.table.device)
            self.register_buffer(name, flags, persistent=False)

    def small_buffers(self) -> list[Tensor]:
        return [self.reads, self.writes]

    def mute(self) -> None:
        self.writes.fill_(False)

    def start(self, state: State, prompts: list[list[int]], references: list[Tensor], share_text: bool = True) -> None:
        self.reads.fill_(True)
        self.writes.fill_(share_text)

    def enter(self, row: int, share_text: bool | str, references: list[Tensor]) -> None:
        self.reads[row].fill_(not isinstance(share_text, str))  # guard: owners-of-tokens
        self.writes[row].fill_(share_text is True)

    def vacate(self, row: int) -> None:
        self.writes[row].fill_(False)

    def leave(self, state: State, row: int, length: int, share_text: bool | str) -> None:
        self.vacate(row)

    def see(self, state: State, tree: Tree, logits: Tensor) -> None:
        tokens = torch.where(tree.real & self.writes[:, None], tree.tokens, -1)
        renew(self.table, tokens.flatten(), logits.flatten(0, 1))

    def propose(self, state: State, max_kv_len: int, nodes: int | None = None) -> None:
        before = state.tokens.gather(1, (state.lengths - 1).clamp(min=0)[:, None])[:, 0]
        tokens, parents, scores = unrolled(self.table, before, state.tree_tokens[:, 0].clone(), self.nodes)
        scores = torch.where(self.reads[:, None], scores, -torch.inf)
        count = (scores > -torch.inf).sum(dim=1).clamp(min=1)
        state.propose(tokens, parents, count, expected_drafts(scores), None, scores)


def build(target: Inventory, options: NgramOptions) -> Algorithm:
    """N-grams, joined with recycled tokens if `options` say so."""
    ngrams = ngram.build(target, options)
    k = min(options.recycle, BUDGET // (4 * target.embedded), target.embedded)
    if options.num_draft_tokens == 1 or k == 0:
        return ngrams
    recycled = Recycle(target.embedded, k, ngrams.plan, target.device)
    ngrams.store.on_reset = recycled.refresh
    return Union(recycled, ngrams, ngrams.plan, target.device)
