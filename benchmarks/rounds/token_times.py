"""The time of a token in generate(), transformers' and ours, measured in the same way.

generate() runs for two numbers of new tokens. The difference of the times, divided by the difference of the tokens, is
the time of a token, without the prompt and the fixed cost of a call. All systems take turns in one process.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.common import LOOKUP, best_lookup, median_difference, timed

LENGTHS = (16, 144)
"""Numbers of new tokens."""
EAGER, STATIC = "HF eager", "HF static + compile"
PLAIN, SPECULATIVE = "ours, plain steps", "ours, n-gram"


def transformers_ways(model: PreTrainedModel, lookup: dict) -> dict[str, Callable]:
    """Name -> generate(ids, max_new_tokens=...) of transformers' own ways. lookup: settings of its prompt lookup."""

    def way(**options):
        return lambda ids, **more: model.generate(ids, do_sample=False, **options, **more)

    return {EAGER: way(), LOOKUP: way(**lookup), STATIC: way(cache_implementation="static")}


def our_ways(plain: PreTrainedModel, fast: PreTrainedModel) -> dict[str, Callable]:
    """plain: with ``num_draft_tokens=1``, so that each round is a step of plain decoding. fast: with n-gram drafts."""

    def speculative(ids, **more):
        fast.speculation.ngram.reset()  # only the prompt is known
        return fast.generate(ids, do_sample=False, **more)

    return {PLAIN: lambda ids, **more: plain.generate(ids, do_sample=False, **more), SPECULATIVE: speculative}


def step_times(
    systems: dict[str, Callable], ids: Tensor, lengths: tuple[int, int] = LENGTHS, repeats: int = 3
) -> dict[str, dict]:
    """Milliseconds a token of each system: the median over the repeats, and each repeat's under "runs".

    Every system is first called at both lengths, the longer one first, so that caches of fixed size fit both.
    """
    for generate in systems.values():
        for count in reversed(lengths):
            generate(ids, max_new_tokens=count)
    times: dict[str, list] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, generate in systems.items():
            runs = (timed(partial(generate, max_new_tokens=count), ids) for count in lengths)
            times[name].append([(len(answer), seconds) for answer, seconds in runs])
    return {name: median_difference(pairs) for name, pairs in times.items()}


def steps(
    model: PreTrainedModel,
    plain: PreTrainedModel,
    fast: PreTrainedModel,
    ids: Tensor,
    tuning: list[Tensor],
    repeats: int,
    lengths: tuple[int, int] = LENGTHS,
) -> list[dict]:
    """A row for each way to generate after the prompt `ids`. tuning: prompts that choose prompt lookup's setting."""
    lookup, tried = best_lookup(model, tuning, dict(do_sample=False, max_new_tokens=lengths[1] // 2))
    systems = transformers_ways(model, lookup) | our_ways(plain, fast)
    fast.speculation.stats.reset()
    rows = []
    for name, times in step_times(systems, ids, lengths, repeats).items():
        row = {"system": name, "prompt_tokens": ids.shape[1], "new_tokens": list(lengths), **times}
        if name == LOOKUP:
            row |= {"lookup": lookup, "tried": tried}
        if name == SPECULATIVE:
            row["accept_length"] = fast.speculation.stats.accept_length
        rows.append(row)
    torch._dynamo.reset()  # drops the code that transformers compiled
    return rows
