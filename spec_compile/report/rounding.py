"""How a rounded model differs from the same model before its weights were rounded: perplexity and answers."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..capture.yardstick import first_unequal


@dataclass
class Rounding:
    """A rounded model next to the unrounded one.

    predicted: tokens of the prompts that both predicted, all but the first of each.
    perplexity: over these tokens, of the unrounded model and of the rounded one.
    agreeing: of these tokens, those for which both models have the same most probable token.
    same: for each answer, the tokens up to the first that differs; None if all are equal.
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


def check_unrounded(unrounded: Any, rounded: Any, rows: list[Tensor]) -> None:
    """ValueError if the two models, or prompts [1, T], cannot be compared."""
    sizes = [model.get_output_embeddings().weight.shape[0] for model in (unrounded, rounded)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"unrounded: expected the model before its weights were rounded, with {sizes[1]} tokens, got {sizes[0]}"
        )
    if all(ids.shape[1] < 2 for ids in rows):
        raise ValueError("prompts: with unrounded, expected at least one of two tokens or more, for perplexity")


@torch.no_grad()
def compare_rounding(
    unrounded: Any, rounded: Any, rows: list[Tensor], answers: list[list[int]], options: dict
) -> Rounding:
    """The figures over prompts `rows` [1, T].

    answers: greedy ones of the rounded model.
    options: for the unrounded model's ``generate()``.
    """
    losses, predicted, agreeing = [0.0, 0.0], 0, 0
    for ids in rows:
        logits = [model(ids.to(model.device)).logits[0, :-1].float() for model in (unrounded, rounded)]
        next_ids = ids[0, 1:]
        for number, each in enumerate(logits):
            losses[number] += float(
                torch.nn.functional.cross_entropy(each.double(), next_ids.to(each.device), reduction="sum")
            )
        predicted += len(next_ids)
        agreeing += int((logits[0].argmax(dim=-1).cpu() == logits[1].argmax(dim=-1).cpu()).sum())
    same: list[int | None] = []
    for ids, answer in zip(rows, answers):
        output = unrounded.generate(ids.to(unrounded.device), **{**options, "do_sample": False})
        before = output[0, ids.shape[1] :].tolist()
        shorter = None if before == answer else min(len(before), len(answer))
        position = first_unequal(before, answer)
        same.append(shorter if position is None else position)
    before, after = (math.exp(loss / predicted) for loss in losses)
    return Rounding(predicted, (before, after), agreeing, same)
