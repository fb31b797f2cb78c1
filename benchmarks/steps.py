"""What a token costs in generate(), of transformers and of ours, measured alike.

generate() runs for two numbers of new tokens; the difference of the times divided by that of the tokens is what a token
costs, without the prompt and without what a call costs. All systems take turns in one process, several times over.
"""

import time
from collections.abc import Callable

import torch
from common import LOOKUP, best_lookup, median_difference, synchronize
from torch import Tensor
from transformers import PreTrainedModel

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
    """plain: of ``num_draft_tokens=1``, whose rounds are steps of plain decoding. fast: with n-gram drafts."""

    def speculative(ids, **more):
        fast.speculation.ngram.reset()  # nothing is known but the prompt
        return fast.generate(ids, do_sample=False, **more)

    return {PLAIN: lambda ids, **more: plain.generate(ids, do_sample=False, **more), SPECULATIVE: speculative}


def step_times(
    systems: dict[str, Callable], ids: Tensor, lengths: tuple[int, int] = LENGTHS, repeats: int = 3
) -> dict[str, dict]:
    """Milliseconds a token of each system: the median over the repeats, and those of each repeat under "runs".

    Every system has been called at both lengths before, the longer one first: caches of fixed size then fit both.
    """
    for generate in systems.values():
        for count in reversed(lengths):
            generate(ids, max_new_tokens=count)
    times: dict[str, list] = {name: [] for name in systems}
    for _ in range(repeats):
        for name, generate in systems.items():
            times[name].append([_seconds(generate, ids, count) for count in lengths])
    return {name: median_difference(pairs) for name, pairs in times.items()}


def _seconds(generate: Callable, ids: Tensor, count: int) -> tuple[int, float]:
    """Tokens generated, and the seconds it took."""
    synchronize(ids.device)
    begin = time.perf_counter()
    output = generate(ids, max_new_tokens=count)
    synchronize(ids.device)
    return output.shape[1] - ids.shape[1], time.perf_counter() - begin


def steps(
    model: PreTrainedModel,
    plain: PreTrainedModel,
    fast: PreTrainedModel,
    ids: Tensor,
    tuning: list[Tensor],
    repeats: int,
    lengths: tuple[int, int] = LENGTHS,
) -> list[dict]:
    """A row for each way to generate after the prompt `ids`. tuning: prompts by which prompt lookup is set."""
    lookup, tried = best_lookup(model, tuning, dict(do_sample=False, max_new_tokens=lengths[0]))
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
    torch._dynamo.reset()  # what transformers compiled
    return rows
