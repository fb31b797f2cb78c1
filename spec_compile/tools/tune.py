"""The search for the settings of a draft on a user's prompts, for ``python -m spec_compile tune``."""

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from ..api import speculate
from ..config import Options, parse_options
from ..drafters import ALGORITHMS, check_draft, parse_algorithm
from ..tree import MAX_NODES

PLAIN = "plain steps"
FAST = 0.99
"""A rate of at least so much of the fastest fixed setting counts as its equal."""
TRIED = ("adaptive", "num_steps", "topk", "num_draft_tokens", "tree_choices")
"""Options that `search` chooses by itself, and the one that stands in place of them."""
DRAFTS_ONLY = ("adaptive", "num_draft_tokens", "artefact")
"""Options of every algorithm that plain steps do not take over. An artefact belongs to the start with the draft."""
ENGINE = frozenset(field.name for field in dataclasses.fields(Options)) - {*DRAFTS_ONLY}
"""Options that plain steps take over, so that both sides of a comparison run in the same engine."""


@dataclass(frozen=True)
class Setting:
    """The results of one way of drafting on the prompts, with all of generate() counted.

    options: what `speculate` was given; none for plain steps.
    chosen: tokens a second if each round chooses by cost (`adaptive=True`).
    fixed: tokens a second if every round drafts.
    drafting_share, mean_nodes: as in `Stats`, for the rounds that choose by cost.
    accept_length: tokens a round with the drafts of every round verified.
    needed: accept length at which its rounds would be as fast as plain steps.
    differing: answers that differ from the answers of plain steps, which only near-ties in 16 bits explain.
    """

    options: dict[str, int]
    chosen: float
    fixed: float
    drafting_share: float = 0.0
    mean_nodes: float = 1.0
    accept_length: float = 1.0
    needed: float = 1.0
    differing: int = 0

    @property
    def name(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.options.items()) or PLAIN


def combinations(algo: str, steps: list[int], topk: list[int], nodes: list[int]) -> Iterator[dict[str, int]]:
    """The options that make sense together, of an algorithm named as in `speculate`.

    N-grams take the nodes only. Other drafts take a chain for each depth, and trees. The depth of DFlash is fixed.
    steps = [1, 3], topk = [1, 4] and nodes = [16] give chains of 1 and 3 steps, 4 siblings, and a tree of 16 nodes.
    """
    known = _names(algo)
    if "topk" not in known:
        yield from (dict(num_draft_tokens=count) for count in nodes if count > 1)
        return
    if "num_steps" not in known:
        yield from (dict(topk=1) for width in topk if width == 1)
        yield from (dict(topk=width, num_draft_tokens=n) for width in topk if width > 1 for n in nodes if n > 1)
        return
    for depth, width in itertools.product(steps, topk):
        if width == 1 or depth == 1:
            yield dict(num_steps=depth, topk=width)
            continue
        most = 1 + width + (depth - 1) * width**2
        yield from (dict(num_steps=depth, topk=width, num_draft_tokens=n) for n in nodes if depth < n <= most)


def _names(algo: str) -> set[str]:
    """The names of the options of an algorithm."""
    return {field.name for field in dataclasses.fields(ALGORITHMS[parse_algorithm(algo)].options)}


def sort_out(
    algo: str, candidates: Iterable[dict[str, int]], options: dict[str, Any]
) -> tuple[list[dict[str, int]], list[str]]:
    """The candidates that `speculate` takes with the further `options`, and a line about each other one.

    Nothing is loaded. Raises TypeError or ValueError, naming the argument, if `options` are wrong by themselves, and
    ValueError if no candidate is left.
    """
    cls = ALGORITHMS[parse_algorithm(algo)].options
    for name in TRIED:
        if name in options:
            raise ValueError(
                f"options: {name!r} is fixed in them, but the settings that are tried differ in it; leave it out"
            )
    check_draft(algo, parse_options(cls, options))
    fitting, refused = [], []
    for setting in candidates:
        try:
            parse_options(cls, options | setting)
            fitting.append(setting)
        except (TypeError, ValueError) as error:
            refused.append(f"{Setting(setting, 0.0, 0.0).name} is left out: {error}")
    if not fitting:
        because = f" ({refused[-1]})" if refused else ""
        raise ValueError(f"{_demand(algo)}{because}")
    return fitting, refused


def _demand(algo: str) -> str:
    """The reason why no setting is left, and what would be one."""
    known = _names(algo)
    if "topk" not in known:
        return (
            f"--nodes: none of them is a draft of algo={algo!r}: the last token is a node, too, so drafts need 2 to "
            f"{MAX_NODES} nodes, as with --nodes 8"
        )
    if "num_steps" not in known:
        return (
            f"--topk, --nodes: none of their combinations is a draft of algo={algo!r}: a chain needs topk 1, and a "
            f"tree 2 to {MAX_NODES} nodes, as with --topk 1,8 --nodes 16"
        )
    return (
        f"--steps, --topk, --nodes: none of their combinations is a draft of algo={algo!r}: a tree needs more nodes "
        "than steps and at most 1 + topk + (steps - 1) * topk ** 2, as with --steps 3 --topk 4 --nodes 16; --topk 1 "
        "gives chains"
    )


def search(
    model: PreTrainedModel, algo: str, settings: list[dict[str, int]], prompts: list[Tensor], new_tokens: int,
    **options: Any,
) -> Iterator[Setting]:  # fmt: skip
    """Answer all prompts [1, T] greedily with plain steps and with each setting; yields the plain steps first.

    options: for every `speculate`, such as the draft. Plain steps take over the options in `ENGINE`. `check` is off
        unless it is given.
    Raises as `speculate` does, for a setting that does not suit the draft.
    """
    options = {"check": False} | options
    engine = {name: value for name, value in options.items() if name in ENGINE}
    plain = speculate(model, num_draft_tokens=1, **engine)
    answers, rate = _answer(plain, prompts, new_tokens)
    yield Setting({}, rate, rate)
    for setting in settings:
        # Once with the choice by cost, and once with drafts in every round.
        rates, stats, differing = [], [], 0
        for adaptive in (True, False):
            fast = speculate(model, algo, adaptive=adaptive, **options, **setting)
            outputs, own = _answer(fast, prompts, new_tokens)
            rates.append(own)
            stats.append(fast.speculation.stats)
            differing = max(differing, sum(not torch.equal(*pair) for pair in zip(outputs, answers)))
        chosen, length = stats[0], stats[1].accept_length
        yield Setting(
            setting, *rates, chosen.drafting_share, chosen.mean_nodes, length, length * rate / rates[1], differing
        )


def table(found: list[Setting]) -> Table:
    """A table of what `search` has found, the fastest first; rates are over the rate of plain steps."""
    rows, plain = Table(), found[0].chosen
    for name in (
        "setting", "tokens/s", "adaptive", "fixed", "rounds that draft", "nodes a round", "accept length", "that pays",
        "answers that differ",
    ):  # fmt: skip
        rows.add_column(name, justify="left" if name == "setting" else "right", overflow="fold")
    for each in sorted(found, key=lambda setting: -setting.chosen):
        rates = f"{each.chosen:.0f}", f"{each.chosen / plain:.2f}", f"{each.fixed / plain:.2f}"
        choices = f"{each.drafting_share:.0%}", f"{each.mean_nodes:.1f}"
        rows.add_row(
            each.name, *rates, *choices, f"{each.accept_length:.2f}", f"{each.needed:.2f}", str(each.differing)
        )
    return rows


def verdict(found: list[Setting]) -> str:
    """Sentences about which setting to take, what it chose, and from which accept length on it pays.

    found: as `search` yields them, with one setting at least.
    """
    plain, *drafts = found
    best = max(drafts, key=lambda each: each.chosen)
    fixed = max(drafts, key=lambda each: each.fixed)
    only = f"on texts like these only, {fixed.name} with adaptive=False gives {fixed.fixed / plain.chosen:.2f}"
    # Take the best setting that chooses by cost, if it pays; a fixed one that is faster is named, too.
    if best.chosen >= plain.chosen:
        told = f"take {best.name}: {best.chosen / plain.chosen:.2f} times plain steps"
        told += f"; {only}" if fixed.fixed * FAST > best.chosen else ""
    else:
        told = f"no setting is faster than plain steps here; {best.name} comes nearest"
        told += f"; {only}" if fixed.fixed > plain.chosen else ""
    return (
        f"{told}\nwith {best.name} {best.drafting_share:.0%} of the rounds drafted, {best.mean_nodes:.1f} nodes a "
        f"round; its drafts pay from an accept length of {best.needed:.2f} on and reach {best.accept_length:.2f}"
    )


def _answer(fast: Any, prompts: list[Tensor], new_tokens: int) -> tuple[list[Tensor], float]:
    """The answers to all prompts, and tokens a second. The first answer is given twice, to have everything compiled."""
    generate = partial(fast.generate, do_sample=False, max_new_tokens=new_tokens, pad_token_id=0)
    fast.speculation.warmup()
    # Compile everything, and forget what the first answer has counted and stored.
    generate(prompts[0], attention_mask=torch.ones_like(prompts[0]))
    fast.speculation.stats.reset()
    if (store := fast.speculation.engine.runtime.algorithm.store) is not None:
        store.reset()
    begin = time.perf_counter()
    outputs = [generate(ids, attention_mask=torch.ones_like(ids))[0, ids.shape[1] :].cpu() for ids in prompts]
    return outputs, sum(map(len, outputs)) / (time.perf_counter() - begin)
