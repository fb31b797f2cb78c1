"""Token recycling (Luo et al. 2024, arXiv:2408.08696): the likeliest tokens of logits that rounds compute anyway.

A table keeps the target's likeliest next tokens after each token that was verified last, accepted or not. Read from the
root down, it gives trees without a draft model. `union` joins these with n-grams, as it joins a head's trees.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..capture.admit import Inventory
from ..drafting import Algorithm, Drafter, DraftPlan
from ..kernels.launching import one_launch
from ..kernels.top_logits import top_logits
from ..runtime.state import State
from ..tree import Tree
from . import ngram
from .ngram import NgramOptions
from .trees.propose import grow_levels
from .union import Union

BUDGET = 8 << 20
"""Most bytes of a table: 8 candidates of each of 262,144 tokens."""
UNIT, LOW = 16, 255
"""A candidate is ``id << 8 | min(-UNIT * log-probability, LOW)``, or -1 if there is none: token 5 with a
log-probability of -0.5 is 1288."""
LEVELS = 6
"""Levels of a tree below its root."""
WHOLE = "cuda"
"""The type of device on which rounds verify all of a tree, or only its root."""


@one_launch("recycle_renew", lambda table, tokens, logits: None, "launch_renew", writes=("table",))
def renew(table: Tensor, tokens: Tensor, logits: Tensor) -> None:
    """Write what a verification shows into the table [V, k] int32. If several nodes have one token, the last counts.

    tokens: [M] int64; -1 for nodes that leave no trace.
    logits: [M, V'] of the target after every node.
    """
    logprobs, ids = top_logits(logits, table.shape[1], 1.0)
    new = ids << 8 | (-UNIT * logprobs).clamp(max=LOW).round().to(torch.int64)
    # A model may not read all that it generates.
    new = torch.where((ids < len(table)) & (logprobs > -torch.inf), new, -1).to(table.dtype)
    # A GPU writes the rows of equal tokens in any order, even in parts, which would mix candidates of two nodes and may
    # give siblings one token. So all nodes of a token write the row of the last of them.
    number, at = torch.arange(tokens.shape[0], device=tokens.device), tokens.clamp(min=0)
    last = torch.where((at[:, None] == at) & (tokens >= 0), number, -1).amax(dim=1)
    table.index_put_((at,), torch.where(last[:, None] < 0, table[at], new[last]))


def empty_trees(table, root, reads, nodes):
    """Memory for the results of `unrolled`."""
    tokens, scores = root.new_empty(root.shape[0], nodes), root.new_empty(root.shape[0], nodes, dtype=torch.float32)
    return tokens, torch.empty_like(tokens), scores, root.new_empty(root.shape[0])


@one_launch("recycle_unroll", empty_trees, "launch_unroll", levels=LEVELS)
def unrolled(table: Tensor, root: Tensor, reads: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The likeliest trees below the roots [B], see `grow_levels`, and how many nodes [B] of each are in use.

    reads [B] bool: rows that draft from the table. Slots without a node have a score of -inf.
    """

    def follow(level: int, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        below = table[previous].to(torch.int64)  # [B, W, k]
        logprobs = torch.where(below < 0, -torch.inf, -(below & LOW) / UNIT)
        return (below >> 8).clamp(min=0), logprobs, state

    tokens, parents, scores = grow_levels(root, LEVELS, follow, table.new_empty(root.shape[0], 0), nodes)
    scores = torch.where(reads[:, None], scores, -torch.inf)
    return tokens, parents, scores, (scores > -torch.inf).sum(dim=1).clamp(min=1)


class Recycle(Algorithm):
    """Trees from one table, which all drafters of a model share. Graphs read it, so it is never replaced."""

    def __init__(self, vocab: int, k: int, plan: DraftPlan, device: torch.device):
        self.plan = replace(plan, nodes=min(plan.nodes, sum(k**level for level in range(LEVELS + 1))))
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

    def __init__(self, algorithm: Recycle, batch: int):
        super().__init__()
        self.nodes, self.table = algorithm.plan.nodes, algorithm.table
        for name in ("reads", "writes"):
            flags = torch.zeros(batch, dtype=torch.bool, device=algorithm.table.device)
            self.register_buffer(name, flags, persistent=False)

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
        root = state.tree_tokens[:, 0].clone()
        tokens, parents, scores, count = unrolled(self.table, root, self.reads, self.nodes)
        state.propose(tokens, parents, count, None, None, scores)  # `Union` takes no confidence of its sources


def build(target: Inventory, options: NgramOptions) -> Algorithm:
    """N-grams, joined with recycled tokens if `options` say so."""
    ngrams = ngram.build(target, options)
    k = min(options.recycle, BUDGET // (4 * target.embedded), target.embedded)
    if options.num_draft_tokens == 1 or k == 0:
        return ngrams
    # A plain step spares a GPU the trees only if rounds verify whole trees or nothing. There, few nodes save no time.
    plan = DraftPlan(ngrams.plan.nodes) if target.device.type == WHOLE else ngrams.plan
    recycled = Recycle(target.embedded, k, plan, target.device)
    ngrams.store.on_reset = recycled.refresh
    return Union(recycled, ngrams, plan.nodes, target.device)
