"""`audit` tests that speculation is lossless on this machine: it compares tokens, logits and draws with plain decoding.

From the command line it is ``python -m spec_compile audit``.
"""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..api import speculate
from ..cache import PAGE, Cache
from ..capture.yardstick import NEAR_TIE
from ..graph import ModelGraph
from ..passes.row_invariance import variant_parts
from .audit_logits import Reference, first_difference, gap_noise, plain_steps
from .audit_report import (
    EXPECTED,
    MIN_DRAWS,
    Bits,
    Distance,
    Greedy,
    Logits,
    Report,
    Sampled,
    check_unrounded,
    compare_rounding,
    greedy_answer,
)
from .audit_requests import InManyWays, Manner, parting

LOOKUP_TOKENS = 10
"""Tokens that transformers' prompt lookup drafts at a time, its usual setting."""
FEW_PROMPTS, BATCHES = 8, [4]
"""Prompts that are asked for in many ways, at most, and the rows of the batches in which they are."""


@dataclass
class Decoded:
    """A prompt `ids` [1, T], transformers' greedy answer, that of rounds, and their comparison."""

    ids: Tensor
    row: Greedy
    plain: list[int]
    speculative: list[int]


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
) -> Report:
    """Decode prompts plainly and speculatively, and compare the two.

    model: a result of `speculate`, or a transformers model, which is audited with the n-gram algorithm.
    prompts: token ids, or texts with a `tokenizer`.
    max_new_tokens: tokens of each greedy answer. The answers are compared token by token.
    samples: draws of `sample_tokens` tokens for each prompt; 0 for none. In every context that was drawn often enough,
        the next tokens' frequencies are compared with the target's probabilities after the same logits processors.
    logits: compare the logits of the speculative answers with those of a float32 copy of the model. They may be as far
        from it as the target's are. So may those of the rewritten graph without the compiler, because the compiler's
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
    limit = {"max_new_tokens": max_new_tokens}
    decoded = [_greedy(plain, fast, ids, {**limit, **options}) for ids in rows]
    report = Report([each.row for each in decoded])
    _weigh(report, plain, fast, decoded, {**limit, **options} if logits else None)
    for ids in rows if samples else []:
        report.sampled.append(_sampled(plain, fast, ids, samples, sample_tokens, options))
    if requests:
        report.requests = _in_many_ways(fast, rows[:FEW_PROMPTS], {**limit, **options}, bool(samples))
    if unrounded is not None:
        report.rounding = compare_rounding(unrounded, plain, rows, rows, {**limit, **options})
    report.accept_length = fast.speculation.stats.accept_length
    return report


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
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError(f"prompts[{number}] is text: pass its tokenizer, audit(model, prompts, tokenizer)")
        prompt = tokenizer(prompt).input_ids
    ids = torch.as_tensor(prompt)
    if ids.is_floating_point() or ids.numel() == 0 or ids.dim() > 2 or (ids.dim() == 2 and ids.shape[0] != 1):
        raise ValueError(f"prompts[{number}]: expected token ids of one sequence, got {ids.dtype} {tuple(ids.shape)}")
    return ids.reshape(1, -1).to(device=model.device, dtype=torch.int64)


def _greedy(plain: Any, fast: Any, ids: Tensor, options: dict) -> Decoded:
    """The greedy answers after `ids` [1, T], compared."""
    answer, stats = greedy_answer(plain, ids, options), fast.speculation.stats
    before = stats.steps
    speculative = greedy_answer(fast, ids, options)
    # If no step was counted, transformers' own loop has run, and nothing of ours was compared.
    compared = min(len(answer), len(speculative)) if stats.steps > before else 0
    row, position = Greedy(compared), parting(answer, speculative)
    if position is not None:  # one answer may go on where the other has ended
        row.position = position
        row.plain, row.speculative = (
            each[position] if position < len(each) else None for each in (answer, speculative)
        )
    return Decoded(ids, row, answer, speculative)


def _weigh(report: Report, plain: Any, fast: Any, decoded: list[Decoded], options: dict | None) -> None:
    """Add to `report` the distances of logits from the float32 copy, and the noise where tokens differ.

    options: for ``generate()``; None adds only the noise where tokens differ.
    """
    tested = [each for each in decoded if each.row.compared]
    differing = [
        (each, (each.row.plain, each.row.speculative)) for each in decoded
        if each.row.plain is not None and each.row.speculative is not None
    ]  # fmt: skip
    if not differing and (options is None or not tested):
        return
    reference, gaps = Reference(plain), []
    if options is not None and tested:
        gaps = _weigh_answers(report, reference, fast, tested, options)
    # At each first difference: the two tokens' logits in float32, and the noise of their difference.
    nearby = []
    for each, tokens in differing:
        same = each.plain[: each.row.position]
        prefix = torch.cat([each.ids, each.ids.new_tensor([same])], dim=1)
        scatter = reference.scatter(prefix, len(same) + 1, tokens)
        each.row.logits = float(scatter.exact[-1, tokens[0]]), float(scatter.exact[-1, tokens[1]])
        each.row.noise = gap_noise(scatter.gaps[:, -1:], scatter.floor)
        nearby.append(scatter.gaps)
    # One position tells little about noise, so the noise over all compared positions counts if it is larger.
    for each, _ in differing:
        each.row.noise = max(each.row.noise, gap_noise(torch.cat(gaps or nearby, dim=1)))


def _weigh_answers(
    report: Report, reference: Reference, fast: Any, tested: list[Decoded], options: dict
) -> list[Tensor]:
    """Add to `report` the comparisons of all answers' logits and bits, and of transformers' lookup.

    Returns the gaps of each answer's `Scatter`.
    """
    verify = fast.speculation.engine.runtime.verify
    gaps, excesses, errors, bits = [], [], [], Bits(promised=not variant_parts(verify))
    for each in tested:
        # The logits of a speculative answer, and those of the rewritten graph over the same text.
        sequence, logits = _speculative_logits(fast, each.ids, options)
        text = sequence[:, :-1]
        scatter = reference.scatter(text, len(logits))
        gaps.append(scatter.gaps)
        excesses.append((scatter.excess(logits), scatter.excess(_graph_logits(verify, text, len(logits)))))
        errors.append((scatter.errors(logits), scatter.errors(scatter.steps)))
        _compare_bits(bits, fast, each, sequence, logits, options)
    report.logits, report.graph = (Logits.of(torch.cat(excess)) for excess in zip(*excesses))
    report.bits, report.distance = bits, Distance.of(*(torch.cat(error) for error in zip(*errors)))
    report.lookup = _same_by_lookup(reference.model, tested, options)
    return gaps


def _compare_bits(bits: Bits, fast: Any, decoded: Decoded, sequence: Tensor, logits: Tensor, options: dict) -> None:
    """Add to `bits` the comparison of a speculative answer with plain steps of the same engine.

    decoded: its ``speculative`` is the answer of rounds that accept on the device.
    sequence: [1, T]; the prompt and the answer of rounds that also return logits.
    logits: [positions, V]; of that answer.
    """
    engine, begin = fast.speculation.engine, decoded.ids.shape[1]
    with plain_steps(engine):
        steps, steps_logits = _speculative_logits(fast, decoded.ids, options)
    bits.answers += 1
    answers = [answer.tolist() for answer in (steps[0, begin:], sequence[0, begin:])]
    if answers[0] == answers[1] == decoded.speculative and torch.equal(logits, steps_logits):
        bits.same += 1
        return
    # Logits are comparable up to those of the first token that differs, because the text before it is the same.
    position = parting(*answers)
    alike = len(logits) if position is None else position
    pair = [each[: alike + 1][: min(len(logits), len(steps_logits))] for each in (logits, steps_logits)]
    unequal = pair[0] != pair[1]
    if unequal.any():
        bits.largest = max(bits.largest, float((pair[0] - pair[1])[unequal].abs().max()))
        first = int(unequal.any(dim=-1).nonzero()[0])
        bits.part = bits.part or first_difference(engine, sequence[:, : begin + first])


def _in_many_ways(fast: Any, rows: list[Tensor], options: dict, drawn: bool) -> list[Manner]:
    """The answers after each of `rows` [1, T] in many ways: greedy ones, and drawn ones if `drawn`."""
    options = {name: value for name, value in options.items() if name != "do_sample"}
    prompts = [ids[0].tolist() for ids in rows]
    seeds = [None, 0] if drawn else [None]
    return [manner for seed in seeds for manner in InManyWays(fast, prompts, options, seed).run(BATCHES)]


def _same_by_lookup(plain: Any, decoded: list[Decoded], options: dict) -> int | None:
    """The number of answers by transformers' prompt lookup that equal its greedy ones; None if it refuses the model."""
    options = {**options, "prompt_lookup_num_tokens": LOOKUP_TOKENS}
    same = 0
    for each in decoded:
        try:
            answer = greedy_answer(plain, each.ids, options)
        except (ValueError, NotImplementedError):  # such as a sliding cache, which cannot be cropped
            return None
        same += answer == each.plain
    return same


def _speculative_logits(fast: Any, ids: Tensor, options: dict) -> tuple[Tensor, Tensor]:
    """A prompt with its speculative answer, [1, T], and the answer's logits [positions, V]."""
    options = {**options, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    output = fast.generate(ids, **options)
    return output.sequences, torch.cat(output.logits)


def _graph_logits(verify: ModelGraph, text: Tensor, count: int) -> Tensor:
    """Logits [count, V] of the rewritten graph, not compiled, at the last `count` positions of `text` [1, T]."""
    length = text.shape[1]
    cache = Cache(verify, 1, -(-length // PAGE) * PAGE).argument  # a multiple of pages, as a session's
    positions = torch.arange(length, device=text.device)[None]
    return verify.gm(text, positions, text.new_zeros(1), None, cache, length)[0][0, -count:]


def _sampled(plain: Any, fast: Any, ids: Tensor, samples: int, tokens: int, options: dict) -> Sampled:
    """The chi-square test of `samples` draws of `tokens` tokens after `ids` [1, T]."""
    options = {**options, "do_sample": True}
    chi_square, freedom, contexts, untested = 0.0, 0, 0, 0
    reference = functools.cache(lambda: Reference(plain))  # a copy in float32, which few prompts need
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

    scores: [V]; those of the target after `prefix` [1, T], with -inf for tokens that its settings (top_k=50) cut off.
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
    drawn, ends = 0, _ends(plain, options)
    while drawn < samples:
        count = min(64, samples - drawn)
        out = fast.generate(ids, **options, max_new_tokens=tokens, num_return_sequences=count)
        for row in out[:, ids.shape[1] :].tolist():
            for depth, token in enumerate(row):
                followers.setdefault(tuple(row[:depth]), Counter())[token] += 1
                if token in ends:
                    break
        drawn += count
    return followers


def _ends(model: Any, options: dict) -> list[int]:
    """The tokens that end a sequence."""
    eos = options.get("eos_token_id", model.generation_config.eos_token_id)
    return [] if eos is None else eos if isinstance(eos, list) else [eos]
