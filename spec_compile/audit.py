"""Is it lossless here? `audit` compares speculative with plain decoding, token for token and draw for draw.

``python -m spec_compile audit`` does it from the command line.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .api import speculate

SIGNIFICANCE = 1e-3
"""Sampling fails the audit if its frequencies would be so unlikely, or less likely, of the target."""
EXPECTED = 5.0
"""Tokens expected more rarely than this are counted together, as the chi-square test needs."""


@dataclass
class Greedy:
    """One prompt decoded greedily by both.

    compared: tokens compared. place: how many generated tokens agree before the first difference (None: all do).
    plain, speculative: the tokens there (None: the output had ended). logits: the target's for the two. noise: how far
    two ways of running the target itself, over the whole text and with a cache, differ there.
    """

    compared: int
    place: int | None = None
    plain: int | None = None
    speculative: int | None = None
    logits: tuple[float, float] = (math.nan, math.nan)
    noise: float = 0.0

    @property
    def verdict(self) -> str:
        """"same", "near-tie" (the two logits are as close as the target's own noise) or "DIFFERENT"."""
        if self.place is None:
            return "same"
        return "near-tie" if abs(self.logits[0] - self.logits[1]) <= 2 * self.noise else "DIFFERENT"


@dataclass
class Sampled:
    """Draws after one prompt: chi-square of the next tokens' frequencies against the target's probabilities."""

    draws: int
    contexts: int
    chi_square: float
    freedom: int

    @property
    def p_value(self) -> float:
        """The probability of frequencies at least as far off, if the target was sampled exactly."""
        half = torch.tensor([self.freedom / 2, self.chi_square / 2], dtype=torch.float64)
        return float(torch.special.gammaincc(half[0], half[1])) if self.freedom else 1.0


@dataclass
class Report:
    """What `audit` found. ``print(report)`` shows the tables."""

    greedy: list[Greedy] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    accept_length: float = 0.0

    @property
    def lossless(self) -> bool:
        """Nothing but near-ties differs, and the draws are the target's."""
        unlikely = any(row.p_value < SIGNIFICANCE / len(self.sampled) for row in self.sampled)
        return not unlikely and all(row.verdict != "DIFFERENT" for row in self.greedy)

    def __str__(self) -> str:
        lines = []
        if self.greedy:
            lines.append(f"{'prompt':>6} {'tokens':>7}  {'first difference':<30} {'logits of the two':<24} verdict")
            for number, row in enumerate(self.greedy):
                where = tie = ""
                if row.place is not None:
                    where = f"token {row.place}: {row.plain} | {row.speculative}"
                    tie = f"{row.logits[0]:.4f} | {row.logits[1]:.4f} (±{row.noise:.4f})"
                lines.append(f"{number:6} {row.compared:7}  {where:<30} {tie:<24} {row.verdict}")
        if self.sampled:
            lines.append(f"{'prompt':>6} {'draws':>7} {'contexts':>9} {'chi-square':>11} {'freedom':>8} {'p':>8}")
            for number, row in enumerate(self.sampled):
                counts = f"{number:6} {row.draws:7} {row.contexts:9}"
                lines.append(f"{counts} {row.chi_square:11.1f} {row.freedom:8} {row.p_value:8.4f}")
        same = sum(row.verdict == "same" for row in self.greedy)
        counts = f"{same} of {len(self.greedy)} answers identical; " if self.greedy else ""
        verdict = "lossless" if self.lossless else "NOT LOSSLESS"
        return "\n".join([*lines, f"{verdict}: {counts}accept length {self.accept_length:.2f}"])


@torch.no_grad()
def audit(
    model,
    prompts: Sequence,
    tokenizer=None,
    *,
    max_new_tokens: int = 64,
    samples: int = 0,
    sample_tokens: int = 3,
    **generate_options,
) -> Report:
    """Decode `prompts` plainly and speculatively, and compare.

    model: a result of `speculate` (or a transformers model, audited with the n-gram algorithm). prompts: texts (with
    `tokenizer`) or token ids. generate_options: given to both ``generate()``.

    Greedily, `max_new_tokens` a prompt. With `samples` > 0 also so many draws of `sample_tokens` tokens a prompt, whose
    frequencies, in every context that was drawn often enough, are held against the target's probabilities after the
    same logits processors.

    Raises TypeError or ValueError for bad prompts before anything is decoded.
    """
    fast = model if hasattr(model, "speculation") else speculate(model)
    plain = fast.speculation.original
    rows = [_ids(number, prompt, tokenizer, plain) for number, prompt in enumerate(prompts)]
    if not rows:
        raise ValueError("prompts: expected at least one")
    options = {"pad_token_id": _pad(plain), **generate_options}
    report = Report()
    for ids in rows:
        report.greedy.append(_greedy(plain, fast, ids, {"max_new_tokens": max_new_tokens, **options}))
    if samples:
        for ids in rows:
            report.sampled.append(_sampled(plain, fast, ids, samples, sample_tokens, options))
    report.accept_length = fast.speculation.stats.accept_length
    return report


def _ids(number: int, prompt, tokenizer, model) -> Tensor:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError(f"prompts[{number}] is text: pass its tokenizer, audit(model, prompts, tokenizer)")
        prompt = tokenizer(prompt).input_ids
    ids = torch.as_tensor(prompt)
    if ids.is_floating_point() or ids.numel() == 0 or ids.dim() > 2 or (ids.dim() == 2 and ids.shape[0] != 1):
        raise ValueError(f"prompts[{number}]: expected token ids of one sequence, got {ids.dtype} {tuple(ids.shape)}")
    return ids.reshape(1, -1).to(device=model.device, dtype=torch.int64)


def _pad(model) -> int:
    config = model.generation_config
    eos = config.eos_token_id[0] if isinstance(config.eos_token_id, list) else config.eos_token_id
    return next((token for token in (config.pad_token_id, eos) if token is not None), 0)


def _greedy(plain, fast, ids: Tensor, options: dict) -> Greedy:
    options = {**options, "do_sample": False}
    want, got = (model.generate(ids, **options)[0, ids.shape[1] :].tolist() for model in (plain, fast))
    compared = min(len(want), len(got))
    place = next((place for place in range(compared) if want[place] != got[place]), None)
    if place is None:
        if len(want) == len(got):
            return Greedy(compared)
        longer, place = (want, compared) if len(want) > compared else (got, compared)
        tokens = (longer[place], None) if longer is want else (None, longer[place])
        return Greedy(compared, place, *tokens)
    prefix = torch.cat([ids, ids.new_tensor([want[:place]])], dim=1)
    whole = plain(prefix).logits[0, -1].double()
    past = plain(prefix[:, :-1], use_cache=True).past_key_values if prefix.shape[1] > 1 else None
    step = plain(prefix[:, -1:], past_key_values=past).logits[0, -1].double()
    rounding = torch.finfo(plain.dtype).eps * whole.abs().max()
    noise = float(torch.maximum((whole - step).abs().max(), rounding))
    tokens = want[place], got[place]
    return Greedy(compared, place, *tokens, (float(whole[tokens[0]]), float(whole[tokens[1]])), noise)


def _sampled(plain, fast, ids: Tensor, samples: int, tokens: int, options: dict) -> Sampled:
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
    chi_square, freedom, contexts = 0.0, 0, 0
    for context, counts in followers.items():
        total = counts.total()
        if total < 20 * EXPECTED:
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
    return Sampled(samples, contexts, chi_square, freedom)


def _ends(model, options: dict) -> list[int]:
    eos = options.get("eos_token_id", model.generation_config.eos_token_id)
    return [] if eos is None else eos if isinstance(eos, list) else [eos]
