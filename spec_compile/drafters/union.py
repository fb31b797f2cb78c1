"""Unions: trees of a head's drafts and of n-grams' together, under one budget.

The head drafts as it does without n-grams, and n-grams are matched as with algo="ngram", each up to the budget.
`trees.merge` takes the drafts that are likeliest to be accepted, judged by the outcomes of earlier drafts.
"""

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..compile.part import PartCompiler
from ..drafting import Algorithm, Drafter
from ..graph import ModelGraph
from ..runtime.state import State
from ..tree import Accepted
from .ngram import Ngram
from .trees.merge import CELLS, Drafts, learn_from, merge_into


class Union(Algorithm):
    """Drafts of any head and of n-grams."""

    def __init__(self, head: Algorithm, ngram: Ngram, nodes: int, device: torch.device):
        """nodes: of a joined tree."""
        self.head, self.plan = head, replace(head.plan, nodes=nodes, levels=1)
        self.ngram = Ngram(ngram.store, replace(ngram.options, num_draft_tokens=nodes))
        self.graph, self.draft_module, self.store = head.graph, head.draft_module, ngram.store
        self.vocabulary_share = head.vocabulary_share
        self.counts = torch.zeros(2, CELLS, device=device)
        """See `trees.merge`. All drafters share them, so every call goes on with what earlier calls have shown."""

    stored = property(attrgetter("ngram.stored"))
    ahead, token_bytes = (property(attrgetter(f"head.{name}")) for name in ("ahead", "token_bytes"))

    def take(self, target: ModelGraph) -> None:
        self.head.take(target)

    def refresh(self) -> None:
        self.head.refresh()

    def drafter(self, batch: int, slots: int) -> Drafter:
        return UnionDrafter(self, batch, slots)

    def documents(self, reference) -> list[Tensor]:
        return self.ngram.documents(reference)

    def explain(self) -> list[str]:
        line = f"joined with n-grams: a round verifies the {self.plan.nodes} likeliest nodes of both"
        return [*self.head.explain(), line]


class CollectingState:
    """A `State` as one source sees it, which keeps the trees that the source proposes.

    trees: the arguments of `State.propose`.
    """

    def __init__(self, state: State):
        self._state = state
        self.trees: tuple[Any, ...] = ()

    def __getattr__(self, name: str):
        return getattr(self._state, name)

    def propose(self, *trees: Any) -> None:
        self.trees = trees


def _both(name: str) -> Callable[..., None]:
    """A method of `Drafter` that both sources run."""

    def method(self: "UnionDrafter", *arguments: Any) -> None:
        for source in self.sources:
            getattr(source, name)(*arguments)

    return method


class UnionDrafter(Drafter):
    """Lets both sources propose and merges their trees; learns the outcomes of all that they proposed."""

    def __init__(self, algorithm: Union, batch: int, slots: int):
        super().__init__()
        self.head, self.ngram = algorithm.head.drafter(batch, slots), algorithm.ngram.drafter(batch, slots)
        self.sources = self.head, self.ngram
        self.head_nodes, self.nodes = algorithm.head.plan.nodes, algorithm.plan.nodes
        self.fuses, self.is_compiled = self.head.fuses, False
        drafts, device = self.head_nodes + self.nodes, algorithm.counts.device
        self.register_buffer("counts", algorithm.counts, persistent=False)
        self.register_buffer("begins", torch.full((batch,), -1, device=device), persistent=False)
        for name in Drafts._fields:  # the last drafts, below the roots in the slots `begins`
            dtype = torch.float32 if name == "priors" else torch.int64
            buffer = torch.zeros(batch, drafts, dtype=dtype, device=device)
            self.register_buffer(f"drafts_{name}", buffer, persistent=False)

    @property
    def drafts(self) -> Drafts:
        """The drafts that were proposed last."""
        return Drafts(*(getattr(self, f"drafts_{name}") for name in Drafts._fields))

    @property
    def seconds(self) -> float:
        return self.head.seconds + self.ngram.seconds

    def small_buffers(self) -> list[Tensor]:
        return [*super().small_buffers(), *self.head.small_buffers(), *self.ngram.small_buffers()]

    def row_buffers(self) -> list[Tensor]:
        return [self.begins, *self.drafts, *self.head.row_buffers(), *self.ngram.row_buffers()]

    def compile(self, compiler: PartCompiler) -> None:
        self.head.compile(compiler)
        if not (self.fuses or self.is_compiled):
            self.join = compiler(self.join, "join")
            self.is_compiled = True

    mute, resize, prefill, see = map(_both, ("mute", "resize", "prefill", "see"))
    vacate, leave, finish = map(_both, ("vacate", "leave", "finish"))

    def start(self, state: State, prompts: list[list[int]], references: list[Tensor], share_text: bool = True) -> None:
        self.begins.fill_(-1)
        for source in self.sources:
            source.start(state, prompts, references, share_text)

    def observe(self, state: State, features: list[Tensor], accepted: Accepted, begin: Tensor, max_kv_len: int) -> None:
        self.head.observe(state, features, accepted, begin, max_kv_len)
        seen = [*self.drafts], self.begins, begin, state.lengths, state.tokens
        learn_from(self.counts, *seen, self.head_nodes)

    def propose(self, state: State, max_kv_len: int) -> None:
        head, ngram = CollectingState(state), CollectingState(state)
        self.head.propose(head, max_kv_len)
        self.ngram.propose(ngram, max_kv_len)
        *of_head, _, _, scores = head.trees
        *of_ngram, match = ngram.trees
        state.propose(*self.join(state.lengths.clone(), of_head, scores, of_ngram, match))

    def join(
        self, lengths: Tensor, head: list[Tensor], scores: Tensor, trie: list[Tensor], match: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The trees, which are remembered: tokens, parents [B, N], count, confidence [B] (see `State.propose`)."""
        kept = self.counts.clone(), self.begins, [*self.drafts]
        return merge_into(lengths, head, scores, trie, match, *kept, self.nodes)

    def share(self, other: Drafter) -> None:
        super().share(other)
        for source, larger in zip(self.sources, other.sources):
            source.share(larger)

    def enter(self, row: int, share_text: bool | str, references: list[Tensor]) -> None:
        self.begins[row].fill_(-1)
        for source in self.sources:
            source.enter(row, share_text, references)
