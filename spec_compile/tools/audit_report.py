"""The report of `audit`: rows for tokens, logits and draws, with their verdicts, printed as tables."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..capture.quantised import output_matrix
from ..capture.yardstick import DEVIATIONS, LEAST_SPREAD, MORE_NOISE, NEAR_TIE
from .audit_requests import Manner, parting

SIGNIFICANCE = 1e-3
"""Sampling fails the audit if the target would give frequencies at least as far off with a smaller probability."""
EXPECTED = 5.0
"""Tokens expected more rarely than this are counted together, as the chi-square test needs."""
MIN_DRAWS = int(20 * EXPECTED)
"""Contexts drawn less often are not tested, because too few of their tokens would be counted one by one."""
LOSSLESS, NOT_LOSSLESS, NOT_TESTED = "lossless", "NOT LOSSLESS", "NOT TESTED"


@dataclass
class Greedy:
    """One prompt, decoded greedily by both.

    compared: tokens compared; 0 if no round was run.
    position: of the first difference, counted in generated tokens; None if all agree.
    plain, speculative: the tokens at that position; None if the answer had ended.
    logits: the target's logits of the two tokens in float32.
    noise: standard deviation of their difference over the target's orders of computation (see `audit_logits`), at that
        position or over all that were compared, whichever is larger.
    """

    compared: int
    position: int | None = None
    plain: int | None = None
    speculative: int | None = None
    logits: tuple[float, float] = (math.nan, math.nan)
    noise: float = 0.0

    @property
    def verdict(self) -> str:
        """ "same", "near-tie" (the two logits are as close as the target's noise), "DIFFERENT" or "NOT TESTED"."""
        if self.position is None:
            return "same" if self.compared else NOT_TESTED
        return "near-tie" if abs(self.logits[0] - self.logits[1]) <= NEAR_TIE * self.noise else "DIFFERENT"


@dataclass
class Logits:
    """How far the speculative logits of all prompts are from a float32 copy of the target, next to the target's logits.

    positions: number of positions that were compared.
    excess: mean of log(distance of the speculative logits from the copy / distance of the target's own from it).
    error: standard error of that mean.
    """

    positions: int
    excess: float
    error: float

    @classmethod
    def of(cls, excess: Tensor) -> "Logits":
        """From the excess at each position, [positions]: see `audit_logits.Scatter.excess`."""
        count = len(excess)
        spread = max(float(excess.std()), LEAST_SPREAD) if count > 1 else math.inf
        return cls(count, float(excess.mean()), spread / math.sqrt(count))

    @property
    def verdict(self) -> str:
        """ "same" if they are no farther from the float32 copy than the target's own, or else "DIFFERENT"."""
        return "same" if self.excess - DEVIATIONS * self.error <= math.log1p(MORE_NOISE) else "DIFFERENT"

    def __str__(self) -> str:
        ratio = math.exp(self.excess)
        distance = f"{ratio:.3f} (±{ratio * self.error:.3f}) times as far from float32 as the target's own"
        return f"{self.positions} positions: {distance}, {self.verdict}"


@dataclass
class Bits:
    """Speculative rounds compared with plain steps of the same engine, which draft nothing.

    answers: number of prompts that were decoded by both.
    same: number of answers whose tokens and logits are equal in every bit.
    largest: the largest difference of two logits.
    part: the first part of the graph that differs; "" if it is not known.
    promised: True if the graph promises the same bits (see `passes.row_invariance`).
    """

    answers: int = 0
    same: int = 0
    largest: float = 0.0
    part: str = ""
    promised: bool = False

    @property
    def verdict(self) -> str:
        """ "same", "other bits", or "DIFFERENT" if the same bits were promised."""
        if self.same == self.answers:
            return "same"
        return "DIFFERENT" if self.promised else "other bits"

    def __str__(self) -> str:
        text = f"{self.same} of {self.answers} answers with the same bits"
        if self.same < self.answers:
            text += f", logits up to {self.largest:.3g} apart" + (f", first in {self.part}" if self.part else "")
        return f"{text}, {'promised' if self.promised else 'not promised'}, {self.verdict}"


@dataclass
class Distance:
    """The mean and the largest distance of logits from a float32 copy of the model, for ours and transformers' own."""

    ours: tuple[float, float]
    theirs: tuple[float, float]

    @classmethod
    def of(cls, ours: Tensor, theirs: Tensor) -> "Distance":
        """From the mean and the largest distance at each position, [positions, 2]: see `Scatter.errors`."""
        pairs = [(float(each[:, 0].mean()), float(each[:, 1].max())) for each in (ours, theirs)]
        return cls(*pairs)

    def __str__(self) -> str:
        ours, theirs = (f"{mean:.3g} and {largest:.3g}" for mean, largest in (self.ours, self.theirs))
        return f"ours {ours}, transformers' {theirs}"


@dataclass
class Sampled:
    """The chi-square test of draws after one prompt: next tokens' frequencies against the target's probabilities.

    draws: number of sequences.
    contexts: number of prefixes that were drawn often enough to be tested.
    chi_square, freedom: the statistic and its degrees of freedom, summed over the contexts.
    untested: number of prefixes that were drawn too seldom.
    """

    draws: int
    contexts: int
    chi_square: float
    freedom: int
    untested: int = 0

    @property
    def p_value(self) -> float:
        """The probability that exact draws give frequencies at least as far off; nan if no context was tested."""
        if not self.contexts:
            return math.nan
        if not self.freedom:  # the target has a single possible token in every context
            return 0.0 if self.chi_square else 1.0
        half = torch.tensor([self.freedom / 2, self.chi_square / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1]))


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
    same = []
    for ids in prompts:
        options = {**options, "attention_mask": torch.ones_like(ids)}
        same.append(parting(*(greedy_answer(model, ids, options) for model in models)))
    return Rounding(predicted, (before, after), agreeing, same)


def greedy_answer(model: Any, ids: Tensor, options: dict) -> list[int]:
    """The answer to a prompt [1, T]. options: for ``generate()``."""
    moved = {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in options.items()}
    return model.generate(ids.to(model.device), **{**moved, "do_sample": False})[0, ids.shape[1] :].tolist()


@dataclass
class Report:
    """The result of `audit`; ``print(report)`` shows its tables.

    greedy, sampled: a row for each prompt.
    accept_length: of the speculative model since its start.
    logits: of the answers; None if logits were not compared, as with the next three.
    graph: logits of the rewritten graph without the compiler.
    bits: rounds compared with plain steps.
    distance: of logits from float32.
    lookup: number of answers by transformers' prompt lookup that equal its greedy ones; None if it was not run.
    requests: the ways in which the same requests were answered again, see `InManyWays`.
    rounding: how the model differs from itself before its weights were rounded; None if that was not compared.
    """

    greedy: list[Greedy] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    accept_length: float = 0.0
    logits: Logits | None = None
    graph: Logits | None = None
    bits: Bits | None = None
    distance: Distance | None = None
    lookup: int | None = None
    requests: list[Manner] = field(default_factory=list)
    rounding: Rounding | None = None

    @property
    def verdict(self) -> str:
        """ "lossless", "NOT LOSSLESS", or "NOT TESTED" if nothing differs but a prompt left nothing to compare."""
        # A report of many tests may have a small p by chance, so the level is divided among them (Bonferroni).
        unlikely = any(row.p_value < SIGNIFICANCE / len(self.sampled) for row in self.sampled)
        compared = [row.verdict for row in self.greedy]
        others = [row.verdict for row in (self.logits, self.graph, self.bits, *self.requests) if row]
        if unlikely or "DIFFERENT" in [*compared, *others]:
            return NOT_LOSSLESS
        if not compared or NOT_TESTED in compared or not all(row.contexts for row in self.sampled):
            return NOT_TESTED
        return LOSSLESS

    @property
    def lossless(self) -> bool:
        """True if every prompt was tested, nothing but near-ties differs, and logits and draws are the target's."""
        return self.verdict == LOSSLESS

    def __str__(self) -> str:
        lines = []
        if self.greedy:
            lines.append(f"{'prompt':>6} {'tokens':>7}  {'first difference':<30} {'logits of the two':<24} verdict")
            for number, row in enumerate(self.greedy):
                difference = tie = ""
                if row.position is not None:
                    difference = f"token {row.position}: {row.plain} | {row.speculative}"
                    tie = f"{row.logits[0]:.4f} | {row.logits[1]:.4f} (±{row.noise:.4f})"
                lines.append(f"{number:6} {row.compared:7}  {difference:<30} {tie:<24} {row.verdict}")
        if self.logits is not None:
            lines.append(f"logits, {self.logits}")
        if self.graph is not None:
            lines.append(f"logits without the compiler, {self.graph}")
        if self.distance is not None:
            lines.append(f"distance from float32, mean and largest: {self.distance}")
        if self.bits is not None:
            lines.append(f"beside our own plain steps: {self.bits}")
            if self.lookup is not None:
                lines.append(f"transformers' prompt lookup: {self.lookup} of {self.bits.answers} as its greedy answers")
        if self.requests:
            lines.append("requests, next to each by itself:")
            lines += [f"  {manner}" for manner in self.requests]
        if self.sampled:
            columns = f"{'prompt':>6} {'draws':>7} {'contexts':>9} {'too rare':>9} {'chi-square':>11}"
            lines.append(f"{columns} {'freedom':>8} {'p':>8}")
            for number, row in enumerate(self.sampled):
                counts = f"{number:6} {row.draws:7} {row.contexts:9} {row.untested:9}"
                lines.append(f"{counts} {row.chi_square:11.1f} {row.freedom:8} {row.p_value:8.4f}")
        if self.rounding is not None:
            lines.append(str(self.rounding))
        same = sum(row.verdict == "same" for row in self.greedy)
        counts = f"{same} of {len(self.greedy)} answers identical; " if self.greedy else ""
        return "\n".join([*lines, f"{self.verdict}: {counts}accept length {self.accept_length:.2f}"])
