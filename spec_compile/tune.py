"""The search for the settings of a draft on a user's prompts, for ``python -m spec_compile tune``."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from .api import speculate

PLAIN = "plain steps"
FAST = 0.99
"""A rate of at least so much of the fastest fixed setting counts as its equal."""


@dataclass(frozen=True)
class Setting:
    """The results of one way of drafting on the prompts, with all of generate() counted.

    options: of `speculate`; none for plain steps.
    chosen: tokens a second if each round chooses by cost (`adaptive=True`).
    fixed: tokens a second if every round drafts.
    accept_length: tokens a round with the drafts of every round verified.
    needed: accept length at which its rounds would be as fast as plain steps.
    differing: answers that differ from those of plain steps, which only near-ties in 16 bits explain.
    """

    options: dict[str, int]
    chosen: float
    fixed: float
    accept_length: float
    needed: float
    differing: int

    @property
    def name(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.options.items()) or PLAIN


def combinations(is_ngram: bool, steps: list[int], topk: list[int], nodes: list[int]) -> Iterator[dict[str, int]]:
    """The options that make sense together: the nodes of n-grams; of other drafts a chain for each depth, and trees.

    steps = [1, 3], topk = [1, 4] and nodes = [16] give chains of 1 and 3 steps, 4 siblings, and a tree of 16 nodes.
    """
    if is_ngram:
        yield from (dict(num_draft_tokens=count) for count in nodes)
        return
    for depth, width in itertools.product(steps, topk):
        if width == 1 or depth == 1:
            yield dict(num_steps=depth, topk=width)
            continue
        most = 1 + width + (depth - 1) * width**2
        yield from (dict(num_steps=depth, topk=width, num_draft_tokens=n) for n in nodes if depth < n <= most)


def search(
    model: PreTrainedModel, algo: str, settings: list[dict[str, int]], prompts: list[Tensor], new_tokens: int,
    **options: Any,
) -> Iterator[Setting]:  # fmt: skip
    """Answer all prompts [1, T] greedily with plain steps and with each setting; yields the plain steps first.

    options: of every `speculate`, such as the draft.
    Raises as `speculate` does, for a setting that does not suit the draft.
    """
    plain = speculate(model, num_draft_tokens=1, check=False)
    answers, rate = _answer(plain, prompts, new_tokens)
    yield Setting({}, rate, rate, 1.0, 1.0, 0)
    for setting in settings:
        rates, differing = [], 0
        for adaptive in (True, False):
            fast = speculate(model, algo, check=False, adaptive=adaptive, **options, **setting)
            outputs, own = _answer(fast, prompts, new_tokens)
            rates.append(own)
            differing = max(differing, sum(not torch.equal(*pair) for pair in zip(outputs, answers)))
        length = fast.speculation.stats.accept_length
        yield Setting(setting, *rates, length, length * rate / rates[-1], differing)


def table(found: list[Setting]) -> Table:
    """A table of what `search` has found, the fastest first; rates are over those of plain steps."""
    rows, plain = Table(), found[0].chosen
    for name in ("setting", "tokens/s", "adaptive", "fixed", "accept length", "that pays", "answers that differ"):
        rows.add_column(name, justify="left" if name == "setting" else "right", overflow="fold")
    for each in sorted(found, key=lambda setting: -setting.chosen):
        rates = f"{each.chosen:.0f}", f"{each.chosen / plain:.2f}", f"{each.fixed / plain:.2f}"
        rows.add_row(each.name, *rates, f"{each.accept_length:.2f}", f"{each.needed:.2f}", str(each.differing))
    return rows


def verdict(found: list[Setting]) -> str:
    """A sentence about which setting to take. found: as `search` yields them."""
    plain, *drafts = found
    best = max(drafts, key=lambda each: each.chosen)
    if best.chosen < plain.chosen:
        return f"no setting is faster than plain steps here; {best.name} comes nearest"
    fixed = max(drafts, key=lambda each: each.fixed)
    told = f"take {best.name}: {best.chosen / plain.chosen:.2f} times plain steps"
    if fixed.fixed * FAST > best.chosen:
        told += f"; on texts like these only, {fixed.name} with adaptive=False gives {fixed.fixed / plain.chosen:.2f}"
    return told


def _answer(fast: Any, prompts: list[Tensor], new_tokens: int) -> tuple[list[Tensor], float]:
    """The answers to all prompts, and tokens a second. The first answer is given twice, to have everything compiled."""
    generate = partial(fast.generate, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)
    fast.speculation.warmup()
    generate(prompts[0], attention_mask=torch.ones_like(prompts[0]))
    fast.speculation.stats.reset()
    if (store := fast.speculation.engine.runtime.algorithm.store) is not None:
        store.reset()
    begin = time.perf_counter()
    outputs = [generate(ids, attention_mask=torch.ones_like(ids))[0, ids.shape[1] :].cpu() for ids in prompts]
    return outputs, sum(map(len, outputs)) / (time.perf_counter() - begin)
