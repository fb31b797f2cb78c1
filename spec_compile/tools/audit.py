"""`audit` tests that speculation is lossless on this machine: it compares tokens, logits and draws with plain decoding.

From the command line it is ``python -m spec_compile audit``.
"""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..api import speculate
from ..capture.yardstick import NEAR_TIE
from ..passes.row_invariance import variant_parts
from .audit_answers import InManyWays, Manner, Rounding, check_unrounded, compare_rounding, greedy_answer, parting
from .audit_logits import (
    Distance,
    Logits,
    Reference,
    first_difference,
    gap_noise,
    graph_logits,
    plain_steps,
    speculative_logits,
)

LOOKUP_TOKENS = 10
"""Tokens that transformers' prompt lookup drafts at a time, its usual setting."""
FEW_PROMPTS, BATCHES = 8, [4]
"""Most prompts that are asked for in many ways, and the rows of the batches in which they are."""
SIGNIFICANCE = 1e-3
"""Sampling fails the audit if the target would give frequencies at least as far off with a smaller probability."""
EXPECTED = 5.0
"""Tokens expected more rarely than this are counted together, as the chi-square test needs."""
MIN_DRAWS = int(20 * EXPECTED)
"""Contexts drawn less often are not tested, because too few of their tokens would be counted one by one."""
LOSSLESS, NOT_LOSSLESS, NOT_TESTED = "lossless", "NOT LOSSLESS", "NOT TESTED"


@torch.no_grad()
def audit(
    model: PreTrainedModel,
    prompts: Sequence,
    tokenizer: Any = None,
    *,
    max_new_tokens: int = 64,
    samples: int = 0,
    sample_tokens: int = 3,
    logits: bool = True,
    requests: bool = False,
    unrounded: PreTrainedModel | None = None,
    **generate_options: Any,
) -> "Report":
    """Decode prompts plainly and speculatively, and compare the two.

    model: a result of `speculate`, or a transformers model, which is audited with the n-gram algorithm.
    prompts: token ids, or texts with a `tokenizer`.
    max_new_tokens: tokens of each greedy answer. The answers are compared token by token.
    samples: draws of `sample_tokens` tokens for each prompt; 0 for none. In every context that was drawn often enough,
        the next tokens' frequencies are compared with the target's probabilities after the same logits processors.
    logits: compare the logits of the speculative answers with a float32 copy of the model. They may be as far from it
        as the target's are. So may the logits of the rewritten graph without the compiler, because the compiler's
        fusions round less and would hide small errors. Answers and logits are also compared bit for bit with plain
        steps of the same engine, and transformers' prompt lookup with its greedy answers.
    requests: ask for the first answers in many ways: in batches, again, continued, after a common prefix, among
        requests that are cancelled. With `samples` they are also drawn. Each is compared with the answer to the request
        by itself. Equal ones are promised on a GPU, unless `explain()` names parts that prevent it.
    unrounded: for a model with rounded weights (the option `weights`), the same model before it was rounded. The report
        then has the perplexity of the prompts by both, and how many greedy answers are equal. These do not count for
        the verdict, which is about the rounded model.
    generate_options: for both ``generate()``.

    Raises TypeError or ValueError if a prompt is no text or ids, or samples are too few, before anything is decoded.
    """
    # Check all arguments, before anything is decoded.
    check_samples(samples, sample_tokens)
    fast: Any = model if hasattr(model, "speculation") else speculate(model)
    if fast.speculation.engine.loras is not None:
        raise ValueError("max_loras: an audit compares one adapter; make it the active one and leave out max_loras")
    plain = fast.speculation.original
    rows = [_ids(number, prompt, tokenizer, plain) for number, prompt in enumerate(prompts)]
    if not rows:
        raise ValueError("prompts: expected at least one")
    if unrounded is not None:
        check_unrounded(unrounded, plain, rows)
    pads = [plain.generation_config.pad_token_id, *_ends(plain, {}), 0]
    options = {"pad_token_id": next(token for token in pads if token is not None), **generate_options}
    greedy = {"max_new_tokens": max_new_tokens, **options}

    # Greedy answers and their logits, draws, requests, and the model before its weights were rounded.
    report = Report([_greedy(plain, fast, ids, greedy) for ids in rows])
    _weigh(report, plain, fast, greedy if logits else None)
    if samples:
        report.sampled = [_sampled(plain, fast, ids, samples, sample_tokens, options) for ids in rows]
    if requests:
        report.requests = _in_many_ways(fast, rows[:FEW_PROMPTS], greedy, [None, 0] if samples else [None])
    if unrounded is not None:
        report.rounding = compare_rounding(unrounded, plain, rows, rows, greedy)
    report.accept_length = fast.speculation.stats.accept_length
    return report


def _in_many_ways(fast: Any, rows: list[Tensor], options: dict, seeds: list[int | None]) -> list[Manner]:
    """The answers after each of `rows` [1, T] in many ways, for each seed of `InManyWays`."""
    options = {name: value for name, value in options.items() if name != "do_sample"}
    prompts = [ids[0].tolist() for ids in rows]
    return [manner for seed in seeds for manner in InManyWays(fast, prompts, options, seed).run(BATCHES)]


def check_samples(samples: int, sample_tokens: int = 1) -> None:
    """TypeError or ValueError if `samples` draws of `sample_tokens` tokens cannot be tested."""
    for name, value in (("samples", samples), ("sample_tokens", sample_tokens)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}: expected an integer, got {value!r}")
    if samples != 0 and samples < MIN_DRAWS:
        raise ValueError(
            f"samples: expected 0 or at least {MIN_DRAWS}, got {samples}; a context that is drawn fewer than "
            f"{MIN_DRAWS} times (20 times the {EXPECTED:g} draws that each count needs) is not tested"
        )
    if sample_tokens < 1:
        raise ValueError(f"sample_tokens: expected at least 1, got {sample_tokens}")


def _ids(number: int, prompt: Any, tokenizer: Any, model: PreTrainedModel) -> Tensor:
    """The token ids of prompt `number`, int64 [1, T] on the model's device."""
    if model.config.is_encoder_decoder:
        raise ValueError("model: an audit reads prompts of causal language models, not sources of an encoder-decoder")
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError(f"prompts[{number}] is text: pass its tokenizer, audit(model, prompts, tokenizer)")
        prompt = tokenizer(prompt).input_ids
    ids = torch.as_tensor(prompt)
    if ids.is_floating_point() or ids.numel() == 0 or ids.dim() > 2 or (ids.dim() == 2 and ids.shape[0] != 1):
        raise ValueError(f"prompts[{number}]: expected token ids of one sequence, got {ids.dtype} {tuple(ids.shape)}")
    return ids.reshape(1, -1).to(device=model.device, dtype=torch.int64)


def _ends(model: Any, options: dict) -> list[int]:
    """The tokens that end a sequence."""
    eos = options.get("eos_token_id", model.generation_config.eos_token_id)
    return [] if eos is None else eos if isinstance(eos, list) else [eos]


# The report: rows of results with their verdicts.


@dataclass
class Greedy:
    """One prompt, decoded greedily by both.

    compared: tokens compared; 0 if no round was run.
    position: where the first difference is, counted in generated tokens; None if all agree.
    plain, speculative: the tokens at that position; None if the answer had ended.
    logits: the target's logits of the two tokens in float32.
    noise: standard deviation of their difference over the target's orders of computation (see `audit_logits`), at that
        position or over all that were compared, whichever is larger.
    ids, answers: the prompt [1, T], and the answers of transformers and of rounds.
    """

    compared: int
    position: int | None = None
    plain: int | None = None
    speculative: int | None = None
    logits: tuple[float, float] = (math.nan, math.nan)
    noise: float = 0.0
    ids: Tensor = field(default_factory=lambda: torch.empty(1, 0, dtype=torch.int64), repr=False)
    answers: tuple[list[int], list[int]] = field(default=([], []), repr=False)

    @property
    def verdict(self) -> str:
        """ "same", "near-tie" (the two logits are as close as the target's noise), "DIFFERENT" or "NOT TESTED"."""
        if self.position is None:
            return "same" if self.compared else NOT_TESTED
        return "near-tie" if abs(self.logits[0] - self.logits[1]) <= NEAR_TIE * self.noise else "DIFFERENT"

    def __str__(self) -> str:
        difference = tie = ""
        if self.position is not None:
            difference = f"token {self.position}: {self.plain} | {self.speculative}"
            tie = f"{self.logits[0]:.4f} | {self.logits[1]:.4f} (±{self.noise:.4f})"
        return f"{self.compared:7}  {difference:<30} {tie:<24} {self.verdict}"


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

    def __str__(self) -> str:
        counts = f"{self.draws:7} {self.contexts:9} {self.untested:9}"
        return f"{counts} {self.chi_square:11.1f} {self.freedom:8} {self.p_value:8.4f}"


@dataclass
class Report:
    """The result of `audit`; ``print(report)`` shows its tables.

    greedy, sampled: a row for each prompt.
    accept_length: the speculative model's since its start.
    logits: the answers' logits; None if logits were not compared, as with the next three.
    graph: logits of the rewritten graph without the compiler.
    bits: rounds compared with plain steps.
    distance: how far logits are from float32.
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
        lines, counts = [], ""
        if self.greedy:
            lines.append(f"{'prompt':>6} {'tokens':>7}  {'first difference':<30} {'logits of the two':<24} verdict")
            lines += [f"{number:6} {row}" for number, row in enumerate(self.greedy)]
            same = sum(row.verdict == "same" for row in self.greedy)
            counts = f"{same} of {len(self.greedy)} answers identical; "
        for name, each in (
            ("logits, ", self.logits),
            ("logits without the compiler, ", self.graph),
            ("distance from float32, mean and largest: ", self.distance),
            ("beside our own plain steps: ", self.bits),
        ):
            lines += [] if each is None else [f"{name}{each}"]
        if self.lookup is not None and self.bits is not None:
            lines.append(f"transformers' prompt lookup: {self.lookup} of {self.bits.answers} as its greedy answers")
        if self.requests:
            lines += ["requests, next to each by itself:", *(f"  {manner}" for manner in self.requests)]
        if self.sampled:
            columns = f"{'prompt':>6} {'draws':>7} {'contexts':>9} {'too rare':>9} {'chi-square':>11}"
            lines.append(f"{columns} {'freedom':>8} {'p':>8}")
            lines += [f"{number:6} {row}" for number, row in enumerate(self.sampled)]
        lines += [] if self.rounding is None else [str(self.rounding)]
        return "\n".join([*lines, f"{self.verdict}: {counts}accept length {self.accept_length:.2f}"])


# Greedy answers, and the logits of these.


def _greedy(plain: Any, fast: Any, ids: Tensor, options: dict) -> Greedy:
    """The greedy answers after `ids` [1, T], compared."""
    answer, stats = greedy_answer(plain, ids, options), fast.speculation.stats
    before = stats.steps
    answers = answer, greedy_answer(fast, ids, options)
    # If no step was counted, transformers' own loop has run, and nothing of ours was compared.
    compared = min(map(len, answers)) if stats.steps > before else 0
    row = Greedy(compared, parting(*answers), ids=ids, answers=answers)
    if row.position is not None:  # one answer may go on where the other has ended
        row.plain, row.speculative = (dict(enumerate(each)).get(row.position) for each in answers)
    return row


def _weigh(report: Report, plain: Any, fast: Any, options: dict | None) -> None:
    """Add to `report` the distances of logits from the float32 copy, and the noise where tokens differ.

    options: for ``generate()``; None adds only the noise where tokens differ.
    """
    tested = [] if options is None else [row for row in report.greedy if row.compared]
    differing = [
        (row, (row.plain, row.speculative))
        for row in report.greedy
        if row.plain is not None and row.speculative is not None
    ]
    if not differing and not tested:
        return
    reference, nearby = Reference(plain), []
    gaps = [] if options is None or not tested else _weigh_answers(report, reference, fast, tested, options)
    # At each first difference: the two tokens' logits in float32, and the noise of their difference.
    for row, tokens in differing:
        same = row.answers[0][: row.position]
        prefix = torch.cat([row.ids, row.ids.new_tensor([same])], dim=1)
        scatter = reference.scatter(prefix, len(same) + 1, tokens)
        row.logits = float(scatter.exact[-1, tokens[0]]), float(scatter.exact[-1, tokens[1]])
        row.noise = gap_noise(scatter.gaps[:, -1:], scatter.floor)
        nearby.append(scatter.gaps)
    # One position tells little about noise, so the noise over all compared positions counts if it is larger.
    for row, _ in differing:
        row.noise = max(row.noise, gap_noise(torch.cat(gaps or nearby, dim=1)))


def _weigh_answers(
    report: Report, reference: Reference, fast: Any, tested: list[Greedy], options: dict
) -> list[Tensor]:
    """Add to `report` the comparisons of all answers' logits and bits, and of transformers' lookup.

    Returns the gaps of each answer's `Scatter`.
    """
    verify = fast.speculation.engine.runtime.verify
    gaps, excesses, errors, bits = [], [], [], Bits(promised=not variant_parts(verify))
    for row in tested:
        # The logits of a speculative answer, and the rewritten graph's over the same text.
        sequence, logits = speculative_logits(fast, row.ids, options)
        text = sequence[:, :-1]
        scatter = reference.scatter(text, len(logits))
        gaps.append(scatter.gaps)
        excesses.append((scatter.excess(logits), scatter.excess(graph_logits(verify, text, len(logits)))))
        errors.append((scatter.errors(logits), scatter.errors(scatter.steps)))
        _compare_bits(bits, fast, row, sequence, logits, options)
    report.logits, report.graph = (Logits.of(torch.cat(excess)) for excess in zip(*excesses))
    report.bits, report.distance = bits, Distance.of(*(torch.cat(error) for error in zip(*errors)))
    # Transformers' own prompt lookup, which refuses some models, such as those with a cache that cannot be cropped.
    options = {**options, "prompt_lookup_num_tokens": LOOKUP_TOKENS}
    try:
        report.lookup = sum(greedy_answer(reference.model, row.ids, options) == row.answers[0] for row in tested)
    except (ValueError, NotImplementedError):
        report.lookup = None
    return gaps


def _compare_bits(bits: Bits, fast: Any, row: Greedy, sequence: Tensor, logits: Tensor, options: dict) -> None:
    """Add to `bits` the comparison of a speculative answer with plain steps of the same engine.

    sequence: [1, T]; the prompt and the answer of rounds that also return logits.
    logits: [positions, V]; of that answer.
    """
    engine, begin = fast.speculation.engine, row.ids.shape[1]
    with plain_steps(engine):
        steps, steps_logits = speculative_logits(fast, row.ids, options)
    bits.answers += 1
    answers = [answer.tolist() for answer in (steps[0, begin:], sequence[0, begin:])]
    if answers[0] == answers[1] == row.answers[1] and torch.equal(logits, steps_logits):
        bits.same += 1
        return
    # Logits are comparable up to the first token that differs, and at it, because the text before it is the same.
    position = parting(*answers)
    alike = len(logits) if position is None else position
    pair = [each[: alike + 1][: min(len(logits), len(steps_logits))] for each in (logits, steps_logits)]
    unequal = pair[0] != pair[1]
    if unequal.any():
        bits.largest = max(bits.largest, float((pair[0] - pair[1])[unequal].abs().max()))
        first = int(unequal.any(dim=-1).nonzero()[0])
        bits.part = bits.part or first_difference(engine, sequence[:, : begin + first])


# Draws.


def _sampled(plain: Any, fast: Any, ids: Tensor, samples: int, tokens: int, options: dict) -> Sampled:
    """The chi-square test of `samples` draws of `tokens` tokens after `ids` [1, T]."""
    options = {**options, "do_sample": True}
    chi_square, freedom, contexts, untested = 0.0, 0, 0, 0
    reference = functools.cache(lambda: Reference(plain))  # a copy in float32, which few prompts need
    # A test of the draws after each context that was drawn often enough.
    for context, counts in _followers(plain, fast, ids, samples, tokens, options).items():
        total = counts.total()
        if total < MIN_DRAWS:
            untested += 1
            continue
        # The target's probabilities of the next token, after the same logits processors.
        prefix = torch.cat([ids, ids.new_tensor(context, dtype=torch.int64)[None]], dim=1)
        step = plain.generate(prefix, **options, max_new_tokens=1, return_dict_in_generate=True, output_scores=True)
        scores = step.scores[0][0].double().cpu()
        expected = scores.softmax(dim=-1) * total
        drawn = torch.zeros_like(expected)
        drawn[list(counts)] = torch.tensor(list(counts.values()), dtype=drawn.dtype)
        if not all(_nearly_kept(reference(), prefix, scores, token) for token in counts if expected[token] == 0):
            chi_square = math.inf  # the target never draws such a token
        # A cell for each token that is expected often enough, and one for all the others together.
        cells = [(float(mean), float(hits)) for mean, hits in zip(expected, drawn) if mean >= EXPECTED]
        rest = total - sum(mean for mean, _ in cells), total - sum(hits for _, hits in cells)
        if rest[0] >= EXPECTED or not cells:
            cells.append(rest)
        else:  # the others are too rare for a cell: the first takes them
            cells[0] = cells[0][0] + rest[0], cells[0][1] + rest[1]
        chi_square += sum((hits - mean) ** 2 / mean for mean, hits in cells)
        freedom += len(cells) - 1
        contexts += 1
    return Sampled(samples, contexts, chi_square, freedom, untested)


def _nearly_kept(reference: Reference, prefix: Tensor, scores: Tensor, token: int) -> bool:
    """True if only rounding decided that `token` was cut off: it and the last token that was kept are a near-tie.

    scores: [V]; the target's after `prefix` [1, T], with -inf for tokens that its settings (top_k=50) cut off.
    """
    kept = int(scores.masked_fill(scores.isneginf(), math.inf).argmin())
    scatter = reference.scatter(prefix, prefix.shape[1], (kept, token))
    noise = max(gap_noise(scatter.gaps[:, -1:], scatter.floor), gap_noise(scatter.gaps))
    return abs(float(scatter.exact[-1, kept] - scatter.exact[-1, token])) <= NEAR_TIE * noise


def _followers(
    plain: Any, fast: Any, ids: Tensor, samples: int, tokens: int, options: dict
) -> dict[tuple[int, ...], Counter]:
    """The counts of each next token that the speculative model drew, by context (the tokens drawn so far)."""
    followers: dict[tuple[int, ...], Counter] = {}
    ends = _ends(plain, options)
    for drawn in range(0, samples, 64):
        count = min(64, samples - drawn)
        out = fast.generate(ids, **options, max_new_tokens=tokens, num_return_sequences=count)
        for row in out[:, ids.shape[1] :].tolist():
            for depth, token in enumerate(row):
                followers.setdefault(tuple(row[:depth]), Counter())[token] += 1
                if token in ends:
                    break
    return followers
