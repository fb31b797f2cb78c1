"""How a rounded model differs from the same model before its weights were rounded: perplexity and answers."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..capture.quantised import output_matrix


@dataclass
class Rounding:
    """A rounded model next to the unrounded one.

    predicted: tokens of the texts that both predicted, all but the first of each.
    perplexity: over these tokens, of the unrounded model and of the rounded one.
    agreeing: of these tokens, those for which both models have the same most probable token.
    same: for each prompt, the tokens of the greedy answers up to the first that differs; None if all are equal.
    """

    predicted: int
    perplexity: tuple[float, float]
    agreeing: int
    same: list[int | None]

    def __str__(self) -> str:
        before, after = self.perplexity
        equal = sum(length is None for length in self.same)
        return (
            f"rounding of weights: perplexity {before:.3f} before, {after:.3f} after ({after / before - 1:+.2%}) over "
            f"{self.predicted} tokens, the same most probable token for {self.agreeing / self.predicted:.1%}; "
            f"{equal} of {len(self.same)} answers equal"
        )


def check_unrounded(unrounded: Any, rounded: Any, texts: list[Tensor]) -> None:
    """ValueError if the two models cannot be compared, or not over `texts` [1, T]."""
    sizes = [output_matrix(model).shape[0] for model in (unrounded, rounded)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"unrounded: expected the model before its weights were rounded, with {sizes[1]} tokens, got {sizes[0]}"
        )
    if all(ids.shape[1] < 2 for ids in texts):
        raise ValueError("prompts: with unrounded, expected at least one of two tokens or more, for perplexity")


@torch.no_grad()
def compare_rounding(
    unrounded: Any, rounded: Any, texts: list[Tensor], prompts: list[Tensor], options: dict
) -> Rounding:
    """The figures over texts [1, T], and answers to prompts [1, T] by transformers. options: for ``generate()``."""
    models, losses, predicted, agreeing = (unrounded, rounded), [0.0, 0.0], 0, 0
    for ids in texts:
        logits = [model(ids.to(model.device)).logits[0, :-1].double().cpu() for model in models]
        for number, each in enumerate(logits):
            losses[number] += float(F.cross_entropy(each, ids[0, 1:].cpu(), reduction="sum"))
        predicted += ids.shape[1] - 1
        agreeing += int((logits[0].argmax(dim=-1) == logits[1].argmax(dim=-1)).sum())
    before, after = (math.exp(loss / predicted) for loss in losses)
    same = [_same(*(_answer(model, ids, options) for model in models)) for ids in prompts]
    return Rounding(predicted, (before, after), agreeing, same)


def _answer(model: Any, ids: Tensor, options: dict) -> list[int]:
    ids = ids.to(model.device)
    answer = model.generate(ids, attention_mask=torch.ones_like(ids), **{**options, "do_sample": False})
    return answer[0, ids.shape[1] :].tolist()


def _same(before: list[int], after: list[int]) -> int | None:
    """The tokens up to the first that differs, or to the end of the shorter answer; None if all are equal."""
    if before == after:
        return None
    return next((n for n, (a, b) in enumerate(zip(before, after)) if a != b), min(len(before), len(after)))
