"""Is it lossless here? `audit` compares speculative with plain decoding: tokens, logits, and draws.

``python -m spec_compile audit`` does it from the command line.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .api import speculate
from .cache import PAGE, Cache
from .graph import ModelGraph
from .report.audit import EXPECTED, MIN_DRAWS, Greedy, Logits, Report, Sampled
from .report.noise import Reference, gap_noise


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
    **generate_options: Any,
) -> Report:
    """Decode `prompts` plainly and speculatively, and compare.

    model: a result of `speculate` (or a transformers model, audited with the n-gram algorithm). prompts: texts (with
    `tokenizer`) or token ids. generate_options: given to both ``generate()``.

    Greedily, `max_new_tokens` a prompt; and the logits behind the speculative answers are held against a copy of the
    model in float32, from which they may be as far as the target's own. The rewritten graph is held against it in the
    same way without the compiler, whose fusions round less and would hide an error that small. With `logits` False only
    tokens are compared. With `samples` > 0 also so many draws of `sample_tokens` tokens a prompt, whose frequencies,
    in every context that was drawn often enough, are held against the target's probabilities after the same logits
    processors.

    Raises TypeError or ValueError for bad prompts or too few samples before anything is decoded.
    """
    check_samples(samples, sample_tokens)
    fast: Any = model if hasattr(model, "speculation") else speculate(model)
    plain = fast.speculation.original
    rows = [_ids(number, prompt, tokenizer, plain) for number, prompt in enumerate(prompts)]
    if not rows:
        raise ValueError("prompts: expected at least one")
    options = {"pad_token_id": _pad(plain), **generate_options}
    report, limit = Report(), {"max_new_tokens": max_new_tokens}
    answers = []
    for ids in rows:
        row, answer = _greedy(plain, fast, ids, {**limit, **options})
        report.greedy.append(row)
        answers.append(answer)
    _weigh(report, plain, fast, rows, answers, {**limit, **options} if logits else None)
    for ids in rows if samples else []:
        report.sampled.append(_sampled(plain, fast, ids, samples, sample_tokens, options))
    report.accept_length = fast.speculation.stats.accept_length
    return report


def check_samples(samples: int, sample_tokens: int = 1) -> None:
    """Raise TypeError or ValueError if so many draws of so many tokens cannot be tested."""
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
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError(f"prompts[{number}] is text: pass its tokenizer, audit(model, prompts, tokenizer)")
        prompt = tokenizer(prompt).input_ids
    ids = torch.as_tensor(prompt)
    if ids.is_floating_point() or ids.numel() == 0 or ids.dim() > 2 or (ids.dim() == 2 and ids.shape[0] != 1):
        raise ValueError(f"prompts[{number}]: expected token ids of one sequence, got {ids.dtype} {tuple(ids.shape)}")
    return ids.reshape(1, -1).to(device=model.device, dtype=torch.int64)


def _pad(model: Any) -> int:
    config = model.generation_config
    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    return next((token for token in (config.pad_token_id, eos) if token is not None), 0)


def _greedy(plain: Any, fast: Any, ids: Tensor, options: dict) -> tuple[Greedy, list[int]]:
    """The comparison of tokens, and plain decoding's answer."""
    options, stats = {**options, "do_sample": False}, fast.speculation.stats
    want = plain.generate(ids, **options)[0, ids.shape[1] :].tolist()
    before = stats.steps
    got = fast.generate(ids, **options)[0, ids.shape[1] :].tolist()
    compared = min(len(want), len(got)) if stats.steps > before else 0  # no steps: transformers' own loop ran
    place = next((place for place, pair in enumerate(zip(want, got)) if pair[0] != pair[1]), None)
    if place is not None:
        return Greedy(compared, place, want[place], got[place]), want
    if len(want) == len(got):
        return Greedy(compared), want
    place = min(len(want), len(got))
    tokens = (want[place], None) if len(want) > place else (None, got[place])
    return Greedy(compared, place, *tokens), want


def _weigh(
    report: Report, plain: Any, fast: Any, rows: list[Tensor], answers: list[list[int]], options: dict | None
) -> None:
    """Fill in ``report.logits`` (unless `options` is None), and logits and noise of the differing tokens."""
    tested = [ids for ids, row in zip(rows, report.greedy) if row.compared]
    differing = [
        (ids, row, answer, row.plain, row.speculative) for ids, row, answer in zip(rows, report.greedy, answers)
        if row.plain is not None and row.speculative is not None
    ]  # fmt: skip
    if not differing and (options is None or not tested):
        return
    reference, gaps, excesses = Reference(plain), [], []
    if options is not None:
        for ids in tested:
            text, logits = _speculative_logits(fast, ids, options)
            scatter = reference.scatter(text, len(logits))
            gaps.append(scatter.gaps)
            graph = _graph_logits(fast.speculation._engine.runtime.verify, text, len(logits))
            excesses.append((scatter.excess(logits), scatter.excess(graph)))
    if excesses:
        report.logits, report.graph = (Logits.of(torch.cat(some)) for some in zip(*excesses))
    nearby = []
    for ids, row, answer, plain_token, other_token in differing:
        same = answer[: row.place]
        prefix = torch.cat([ids, ids.new_tensor([same])], dim=1)
        scatter = reference.scatter(prefix, len(same) + 1, (plain_token, other_token))
        row.logits = float(scatter.exact[-1, plain_token]), float(scatter.exact[-1, other_token])
        row.noise = gap_noise(scatter.gaps[:, -1:], scatter.floor)
        nearby.append(scatter.gaps)
    for _, row, *_ in differing:
        row.noise = max(row.noise, gap_noise(torch.cat(gaps or nearby, dim=1)))


def _speculative_logits(fast: Any, ids: Tensor, options: dict) -> tuple[Tensor, Tensor]:
    """A speculative answer [1, T] behind its prompt, less the last token; the logits [places, V] it was chosen by."""
    options = {**options, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    output = fast.generate(ids, **options)
    return output.sequences[:, :-1], torch.cat(output.logits)


def _graph_logits(verify: ModelGraph, text: Tensor, places: int) -> Tensor:
    """Logits [places, V] of the rewritten graph, not compiled, at the last places of `text` [1, T]."""
    length = text.shape[1]
    cache = Cache(verify, 1, -(-length // PAGE) * PAGE).tensors  # of whole pages, as a session's
    positions = torch.arange(length, device=text.device)[None]
    return verify.gm(text, positions, text.new_zeros(1), None, cache, length)[0][0, -places:]


def _sampled(plain: Any, fast: Any, ids: Tensor, samples: int, tokens: int, options: dict) -> Sampled:
    options = {**options, "do_sample": True}
    followers: dict[tuple, Counter] = {}
    drawn, ends = 0, _ends(plain, options)
    while drawn < samples:
        count = min(64, samples - drawn)
        out = fast.generate(ids, **options, max_new_tokens=tokens, num_return_sequences=count)
        for row in out[:, ids.shape[1] :].tolist():
            for place in range(len(row)):
                followers.setdefault(tuple(row[:place]), Counter())[row[place]] += 1
                if row[place] in ends:
                    break
        drawn += count
    chi_square, freedom, contexts, untested = 0.0, 0, 0, 0
    for context, counts in followers.items():
        total = counts.total()
        if total < MIN_DRAWS:
            untested += 1
            continue
        prefix = torch.cat([ids, ids.new_tensor(context, dtype=torch.int64)[None]], dim=1)
        step = plain.generate(prefix, **options, max_new_tokens=1, return_dict_in_generate=True, output_scores=True)
        expected = step.scores[0][0].double().softmax(dim=-1).cpu() * total
        seen = torch.zeros_like(expected)
        seen[list(counts)] = torch.tensor(list(counts.values()), dtype=seen.dtype)
        if float(seen[expected == 0].sum()) > 0:
            chi_square = math.inf  # a token that the target never gives
        cells = [(float(e), float(h)) for e, h in zip(expected, seen) if e >= EXPECTED]
        rest = total - sum(e for e, _ in cells), total - sum(h for _, h in cells)
        if rest[0] >= EXPECTED or not cells:
            cells.append(rest)
        else:  # too few for a cell of their own
            cells[0] = cells[0][0] + rest[0], cells[0][1] + rest[1]
        chi_square += sum((hits - mean) ** 2 / mean for mean, hits in cells)
        freedom += len(cells) - 1
        contexts += 1
    return Sampled(samples, contexts, chi_square, freedom, untested)


def _ends(model: Any, options: dict) -> list[int]:
    eos = options.get("eos_token_id", model.generation_config.eos_token_id)
    return [] if eos is None else eos if isinstance(eos, list) else [eos]
