"""Drawing a token after every node at once, inside a captured round."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...compat import argmax
from ...tree import Accepted, Tree
from ..state import State
from .chain import accept_chain, chain_numbers
from .greedy import follow
from .processors import MINIMA, OF_SCORES, WAITING, is_known
from .random_numbers import draw, uniform
from .row_invariant import row_invariant

BY_ROW = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper")
"""Processors that a row may have, in the order in which transformers applies them."""


class DrawInRound:
    """Draws after every node of the trees and follows what was drawn; the tokens are those of `host.HostAcceptor`.

    processors: logits processors that `takes` accepts, applied to all nodes at once. Nothing here waits for the device.

    The seed lies in `State.seed`. A captured round depends on `key`.
    """

    def __init__(self, processors: list):
        self.processors = [processor for processor in processors if not is_known(processor, MINIMA)]
        self.key = tuple((type(processor).__name__, *_settings(processor)) for processor in self.processors)

    @staticmethod
    def takes(processors: list) -> bool:
        """True if these processors can be applied to all nodes at once, and captured."""
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


@dataclass(frozen=True)
class RowSettings:
    """How the tokens of one row are drawn. The defaults exclude none.

    top_k: tokens that are kept; 0 keeps all.
    excluded_p: 1 - top_p, the probability of the excluded tail; -1 excludes none.
    min_p: share of the largest probability below which tokens are excluded.
    """

    top_k: int = 0
    excluded_p: float = -1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, processors: list) -> "RowSettings | None":
        """The settings of these processors, without the temperature; None if they do something else."""
        drawing = [each for each in processors if not is_known(each, MINIMA)]
        names = [type(each).__name__ for each in drawing]
        if not all(is_known(each, {*BY_ROW}) for each in drawing) or names != sorted(names, key=BY_ROW.index):
            return None
        if len({*names}) < len(names) or any(getattr(each, "min_tokens_to_keep", 1) > 1 for each in drawing):
            return None
        settings = {}
        for each in drawing:
            if getattr(each, "filter_value", -torch.inf) != -torch.inf:
                return None
            settings |= {"top_k": each.top_k} if hasattr(each, "top_k") else {}
            settings |= {"excluded_p": 1 - each.top_p} if hasattr(each, "top_p") else {}
            settings |= {"min_p": each.min_p} if hasattr(each, "min_p") else {}
        return cls(**settings)

    def merge(self, other: "RowSettings | None") -> "RowSettings":
        """Settings with each kind of exclusion that either has."""
        if other is None:
            return self
        names = ("top_k", "excluded_p", "min_p")
        return RowSettings(*(max(getattr(self, name), getattr(other, name)) for name in names))

    def numbers(self) -> dict[str, int | float]:
        return {"top_k": self.top_k, "excluded_p": self.excluded_p, "min_p": self.min_p}


class DrawRows(DrawInRound):
    """Draws the tokens of `DrawInRound` with each row's own settings, by the same operations on a row.

    Settings lie in the `State`; rows of temperature 0 take the likeliest token.
    settings: of the rows, merged. A captured round depends on the kinds of exclusion, not on their values.
    """

    def __init__(self, settings: RowSettings):
        super().__init__([])
        self.has_top_k, self.has_top_p = settings.top_k > 0, settings.excluded_p >= 0
        self.has_min_p = settings.min_p > 0
        self.key = ("rows", self.has_top_k, self.has_top_p, self.has_min_p)

    def process(self, state: State, scores: Tensor) -> Tensor:
        """The scores [B, N, V], processed as by transformers."""
        vocab, drawn = scores.shape[2], state.temperature > 0

        def of_rows(values: Tensor) -> Tensor:
            return values[:, None, None]

        # On a GPU torch divides by a number as a product with its reciprocal, which rounds differently.
        tokens = torch.arange(vocab, device=scores.device)
        likeliest = torch.where(tokens == argmax(scores)[..., None], 0.0, -torch.inf)
        warm = scores * of_rows(1.0 / torch.where(drawn, state.temperature, 1.0))
        if self.has_top_k:
            rank = torch.where(state.top_k > 0, state.top_k, vocab).clamp(max=vocab) - 1
            ordered = warm.sort(dim=-1, descending=True).values
            least = ordered.gather(2, of_rows(rank).expand(-1, warm.shape[1], 1))
            warm = warm.masked_fill(warm < least, -torch.inf)
        if self.has_top_p:
            ordered, tokens = warm.sort(dim=-1, descending=False)
            excluded = ordered.softmax(dim=-1).cumsum(dim=-1) <= of_rows(state.excluded_p)
            excluded[..., -1:] = False
            warm = warm.masked_fill(excluded.scatter(2, tokens, excluded), -torch.inf)
        if self.has_min_p:
            weights = warm.softmax(dim=-1)
            warm = warm.masked_fill(weights < of_rows(state.min_p) * weights.amax(dim=-1, keepdim=True), -torch.inf)
        return torch.where(of_rows(drawn), warm, likeliest)


def _settings(processor) -> list[tuple[str, str]]:
    plain = {name: value.tolist() if isinstance(value, Tensor) else value for name, value in vars(processor).items()}
    return sorted((name, repr(value)) for name, value in plain.items())
