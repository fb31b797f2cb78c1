"""Chains and trees over the places of a block, whose logits a draft gives in one forward."""

import torch
from torch import Tensor, nn

from ...kernels.top_logits import best_tokens
from ...runtime.state import State
from .block import BlockTree
from .propose import propose_block, propose_grown
from .schedule import Schedule
from .step import chain_parents, chain_scores


class Places(nn.Module):
    """Proposes the likeliest tokens of each place, whatever stands at the others.

    places: drafts of a block. topk: tokens of each place that are looked at (1: chains). nodes: of a tree, the root
    included. draws: whether a chain's tokens are drawn where the target's are. temperature: of the probabilities by
    which a tree's nodes are chosen. Move it to the draft's device: its tables are buffers. ValueError if there are not
    as many nodes.
    """

    def __init__(self, places: int, topk: int, nodes: int, draws: bool, temperature: float = 1.0):
        super().__init__()
        self.nodes, self.temperature = nodes, temperature
        self.drawn = Schedule(nodes - 1, 1, nodes) if draws else None
        self.tree = BlockTree(places, topk, nodes) if topk > 1 else None

    def propose(self, state: State, logits: Tensor, first: int = 0, draft_to_target: Tensor | None = None) -> None:
        """Propose trees below the last committed tokens.

        logits [B, first + P, Vd]: those of the P places, after `first` rows that draft nothing. draft_to_target [Vd]:
        see `grow`.
        """
        if self.drawn is not None:
            return self._draw(state, logits[:, first:], draft_to_target)
        if self.tree is not None:
            return propose_block(state, self.tree, logits, first, self.temperature, draft_to_target)
        root = state.tree_tokens[:, 0].clone()
        scores, tokens = (x[:, first : first + self.nodes - 1] for x in likeliest(logits, draft_to_target))
        count = torch.full_like(root, self.nodes)
        tokens = torch.cat([root[:, None], tokens], dim=1)
        state.propose(
            tokens, chain_parents(root, self.nodes), count, torch.zeros_like(count), None, chain_scores(scores)
        )

    def _draw(self, state: State, logits: Tensor, draft_to_target: Tensor | None) -> None:
        """Propose a chain drawn from logits [B, P, Vd], those of each place whatever was drawn before."""

        def step(tokens, hidden, ancestors, depth, offset, wanted):
            return hidden, logits[:, offset + 1 : offset + 2]

        propose_grown(state, self.drawn, True, logits[:, 0], logits[:, 0, :1], step, draft_to_target)


def likeliest(logits: Tensor, draft_to_target: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of the likeliest tokens of logits [B, T, Vd] the log-probabilities and the target's ids, [B, T]."""
    scores, tokens = best_tokens(logits.flatten(0, 1), 1, 1.0)
    tokens = tokens if draft_to_target is None else draft_to_target[tokens]
    return scores.view(logits.shape[:2]), tokens.view(logits.shape[:2])
