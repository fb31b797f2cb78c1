"""The round: verify, accept, commit, propose, as plain PyTorch that compiles into one graph."""

import torch
from torch import Tensor, nn

from ..graph import ModelGraph
from .accept import Accepted, accept_greedy
from .state import State
from .tree import MAX_NODES, Tree, ancestry


class Round(nn.Module):
    """One round of speculative decoding over the first N nodes of the pending trees.

    A round verifies the trees that the round before it proposed and ends by proposing the next, so that whoever runs
    it knows how many nodes the next one needs.
    """

    def __init__(self, graph: ModelGraph, drafter: nn.Module, state: State, nodes: int | None):
        """`nodes`: None if each call says how many."""
        super().__init__()
        self.verify, self.drafter, self.state, self.nodes = graph.gm, drafter, state, nodes

    def forward(self, span: int, nodes: int = 0) -> Tensor:
        """`span`: slots of the cache to look at, at least lengths.max() + N.

        Returns int64 [B, 5 + 2 N]: tokens gained, finished, real nodes and hint of the next tree, depth of this one,
        the N tokens of which the first "gained" count, and the N nodes of the accepted path.
        """
        state = self.state
        tree = state.tree(self.nodes or nodes)
        ancestors, depth = self._ancestry(tree)
        logits, *features = self._verify(tree, ancestors, depth, span)
        accepted = accept_greedy(tree, ancestors, depth, state.forbid_early_eos(logits, depth))
        return self._finish(tree, depth, accepted, features)

    def look(self, span: int, nodes: int = 0) -> list[Tensor]:
        """The first half of a round whose tokens are chosen outside: the target's logits [B, N, V], and features."""
        tree = self.state.tree(self.nodes or nodes)
        return self._verify(tree, *self._ancestry(tree), span)

    def finish(self, path: Tensor, tokens: Tensor, count: Tensor, features: list[Tensor]) -> Tensor:
        """The second half, with what was `Accepted`; returns what `forward` returns."""
        tree = self.state.tree(path.shape[1])
        return self._finish(tree, self._ancestry(tree)[1], Accepted(path, tokens, count), features)

    def _ancestry(self, tree: Tree) -> tuple[Tensor, Tensor]:
        return ancestry(tree.parents, self.nodes or MAX_NODES)

    def _verify(self, tree: Tree, ancestors: Tensor, depth: Tensor, span: int) -> list[Tensor]:
        state = self.state
        return self.verify(tree.tokens, state.positions(depth), state.lengths, ancestors, state.cache, span)

    def _finish(self, tree: Tree, depth: Tensor, accepted: Accepted, features: list[Tensor]) -> Tensor:
        state = self.state
        gained = state.commit(accepted)
        self.drafter.observe(state, features, accepted)
        self.drafter.propose(state)
        deepest = torch.where(tree.real, depth, 0).amax(dim=1)
        columns = [gained, state.finished.to(torch.int64), state.tree_count, state.tree_hint, deepest]
        columns = torch.stack(columns, dim=1)
        return torch.cat([columns, accepted.tokens, accepted.path], dim=1)


class Prefill(nn.Module):
    """Keys and values of a chunk of the prompts; the last prompt token is left to be the root of the first tree."""

    def __init__(self, graph: ModelGraph, drafter: nn.Module, state: State):
        super().__init__()
        self.model, self.drafter, self.state = graph.gm, drafter, state

    def forward(self, size: int, span: int) -> None:
        """Process the next `size` tokens of every row (fewer where a prompt ends; the rest is never seen)."""
        state = self.state
        offsets = torch.arange(size, device=state.tokens.device)[None, :]
        ids = state.tokens.gather(1, (state.lengths[:, None] + offsets).clamp(max=state.capacity - 1))
        features = self.model(ids, state.positions(offsets), state.lengths, None, state.cache, span)
        self.drafter.prefill(state, features)
        state.lengths.copy_(torch.minimum(state.lengths + size, state.prompt_lengths - 1))
