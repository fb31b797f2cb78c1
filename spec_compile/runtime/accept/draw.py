"""Drawing a token after every node at once, as a part of a captured round."""

import torch
from torch import Tensor

from ...tree import Accepted, Tree
from ..state import State
from .chain import accept_chain, chain_numbers
from .greedy import follow
from .processors import MINIMA, OF_SCORES, WAITING, is_known
from .random_numbers import draw, uniform
from .row_invariant import row_invariant


class DrawInRound:
    """Draws after every node of the trees and follows what was drawn; the tokens are those of `host.HostAcceptor`.

    processors: logits processors that `takes` accepts. They are applied to all nodes at once, and nothing here waits
        for the device.

    The seed lies in `State.seed`. `key` is what a captured round depends on.
    """

    def __init__(self, processors: list):
        self.processors = [processor for processor in processors if not is_known(processor, MINIMA)]
        self.key = tuple((type(processor).__name__, *_settings(processor)) for processor in self.processors)

    @staticmethod
    def takes(processors: list) -> bool:
        """Whether these processors can be applied to all nodes at once, and captured."""
        return all(is_known(processor, (OF_SCORES | MINIMA) - WAITING) for processor in processors)

    def __call__(self, state: State, tree: Tree, ancestors: Tensor, depth: Tensor, logits: Tensor) -> Accepted:
        """The accepted nodes, with a token of -1 where there was nothing to draw from.

        ancestors, depth: [B, N] int64, see `tree.ancestry`. logits: [B, N, V] of the target after every node.
        """
        with row_invariant(logits.device, self.processors):
            return self._accept(state, tree, ancestors, depth, logits)

    def process(self, state: State, scores: Tensor) -> Tensor:
        """The processed scores of [B, N, V]."""
        scores = scores.reshape(-1, scores.shape[2])
        for processor in self.processors:
            scores = processor(None, scores)
        return scores

    def _accept(self, state: State, tree: Tree, ancestors: Tensor, depth: Tensor, logits: Tensor) -> Accepted:
        batch, nodes, vocab = logits.shape
        scores = self.process(state, state.forbid_early_eos(logits.float(), depth))
        weights = scores.reshape(batch * nodes, vocab).double().softmax(dim=-1)
        gained = state.lengths + 1 - state.prompt_lengths  # [B]
        if tree.probs is not None:  # a chain that was itself drawn
            numbers = chain_numbers(state.seed, state.numbers, gained, nodes)
            return accept_chain(weights.view(batch, nodes, vocab), tree.probs, tree.tokens, tree.real, numbers)
        seed, row = state.seed[:, None], state.numbers[:, None]
        choice = draw(weights, uniform(seed, row, gained[:, None] + depth).reshape(-1))
        choice = torch.where(weights.sum(dim=-1).isfinite(), choice.clamp(max=vocab - 1), -1)
        return follow(tree, ancestors, depth, choice.view(batch, nodes))


def _settings(processor) -> list[tuple[str, str]]:
    """The attributes of a processor that decide what it does."""
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in vars(processor).items()}
    return sorted((name, repr(value)) for name, value in plain.items())
