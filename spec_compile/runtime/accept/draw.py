"""The sampler: drawing a token at every node at once, as a part of a captured round."""

import torch
from torch import Tensor

from ...tree import Accepted, Tree
from ..state import State
from .chain import accept_chain, chain_numbers
from .greedy import follow
from .processors import MINIMA, OF_SCORES, WAITING, is_known
from .random import draw, uniform


class Sampler:
    """Draws after every node of the trees and follows what was drawn: the same tokens as `walk.Walk` would choose.

    For processors that look at the scores alone: they are applied to all nodes at once, and nothing here waits for the
    device. `State.seed` holds the seed. `key`: what a captured round depends on.
    """

    def __init__(self, processors: list):
        self.processors = [processor for processor in processors if not is_known(processor, MINIMA)]
        self.key = tuple((type(processor).__name__, *_settings(processor)) for processor in self.processors)

    @staticmethod
    def takes(processors: list) -> bool:
        """Whether these processors can be applied to all nodes at once, and captured."""
        return all(is_known(processor, (OF_SCORES | MINIMA) - WAITING) for processor in processors)

    def __call__(self, state: State, tree: Tree, ancestors: Tensor, depth: Tensor, logits: Tensor) -> Accepted:
        """logits [B, N, V]. A token is -1 where there was nothing to draw from."""
        batch, nodes, vocab = logits.shape
        scores = state.forbid_early_eos(logits.float(), depth).reshape(batch * nodes, vocab)
        for processor in self.processors:
            scores = processor(None, scores)
        weights = scores.double().softmax(dim=-1)
        rows = torch.arange(batch, device=logits.device)[:, None].expand(batch, nodes)
        places = (state.lengths + 1 - state.prompt_lengths)[:, None] + depth
        if tree.probs is not None:  # a chain that was itself drawn
            numbers = chain_numbers(state.seed, places[:, 0], nodes)
            return accept_chain(weights.view(batch, nodes, vocab), tree.probs, tree.tokens, tree.real, numbers)
        choice = draw(weights, uniform(state.seed, rows, places).reshape(-1))
        choice = torch.where(weights.sum(dim=-1).isfinite(), choice.clamp(max=vocab - 1), -1)
        return follow(tree, ancestors, depth, choice.view(batch, nodes))


def _settings(processor) -> list[tuple]:
    """The attributes of a processor that decide what it does."""
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in vars(processor).items()}
    return sorted((name, repr(value)) for name, value in plain.items())
