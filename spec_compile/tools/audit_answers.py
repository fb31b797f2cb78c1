"""Answers that `audit` compares: to one request in many ways, and of a model before its weights were rounded."""

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, cycle, islice, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ..capture.quantised import output_matrix
from ..passes.row_invariance import variant_parts

PREFIX = 600
"""Tokens of the prefix that prompts share, at most: more than one chunk on a CPU."""
MOST_ROWS = 64
"""Rows of the largest batch."""
CANCEL_AFTER = 0.02
"""Most seconds after which a request is cancelled."""
AGAIN = "by themselves, in another order"


def parting(ours: list, theirs: list) -> int | None:
    """The position at which two answers part, or at which the shorter one ends; None if they are equal."""
    return next((n for n, (a, b) in enumerate(zip_longest(ours, theirs)) if a != b), None)


def greedy_answer(model: Any, ids: Tensor, options: dict) -> list[int]:
    """The answer to a prompt [1, T]. options: for ``generate()``."""
    moved = {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in options.items()}
    return model.generate(ids.to(model.device), **{**moved, "do_sample": False})[0, ids.shape[1] :].tolist()


class Asked(NamedTuple):
    """A request. prompt: token ids. new_tokens: most tokens of the answer. seed: of its draws; None for greedy."""

    prompt: list[int]
    new_tokens: int
    seed: int | None = None


@dataclass
class Manner:
    """The answers that requests had in one way, compared with the answer to each by itself.

    name: the way. drawn: False if the answers were greedy. promised: True if equal answers are promised.
    of, equal: number of answers, and of answers whose tokens, or log-probabilities, are all equal.
    reused: prompt tokens whose keys and values another request had left.
    first_differences: the first position of each answer that differs, ascending.
    """

    name: str
    drawn: bool
    promised: bool
    of: int = 0
    equal: int = 0
    reused: int = 0
    first_differences: list[int] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """ "same", "other answers", or "DIFFERENT" if equal ones were promised."""
        if self.equal == self.of:
            return "same"
        return "DIFFERENT" if self.promised else "other answers"

    def __str__(self) -> str:
        drawn, promised = "drawn, " if self.drawn else "", "promised" if self.promised else "not promised"
        return f"{drawn}{self.name}: {self.equal} of {self.of} equal, {promised}, {self.verdict}"

    def compare(self, ours: list, expected: list) -> None:
        """Count an answer."""
        self.of += 1
        if ours == expected:  # guard: other-answers
            self.equal += 1
        else:
            self.first_differences = sorted([*self.first_differences, parting(ours, expected)])


def promises(fast: Any) -> bool:
    """True if `fast` promises one answer to a request in every way: if the bits of rounds and of prompts depend on no
    other rows (see `passes.row_invariance`)."""
    runtime = fast.speculation.engine.runtime
    return not any(variant_parts(graph) for graph in (runtime.verify, runtime.prefill))


class InManyWays:
    """Asks a speculative model for the same answers in many ways.

    The ways are: in batches, again, continued, after a common prefix, and among requests that are cancelled. Every
    answer is compared, token for token, with the one that ``generate()`` gives to the request by itself.

    fast: the model.
    prompts: token ids.
    options: for ``generate()`` and requests, `max_new_tokens` among them.
    seed: the first request's, and each further one has the next; None: greedy.
    """

    def __init__(self, fast: Any, prompts: list[list[int]], options: dict[str, Any], seed: int | None = None):
        self.fast, self._options = fast, options | {"do_sample": seed is not None}
        new_tokens = self._options.pop("max_new_tokens")
        self._manner = partial(Manner, drawn=seed is not None, promised=promises(fast))
        self._random = random.Random(len(prompts))
        room = fast.speculation.engine.runtime.capacity(MOST_ROWS) - max(map(len, prompts)) - new_tokens - 1
        prefix = [*islice(cycle(chain(*prompts)), min(PREFIX, max(room, 0)))]
        self._asked, self._prefixed = (
            [Asked(begin + ids, new_tokens, None if seed is None else seed + n) for n, ids in enumerate(prompts)]
            for begin in ([], prefix)
        )

    def run(self, batches: list[int]) -> Iterator[Manner]:
        """Every way, as soon as it is done. batches: rows of each manager that is asked."""
        # Each request by itself: these answers are expected of all other ways.
        expected, prefixed = ([self._generate(asked) for asked in each] for each in (self._asked, self._prefixed))
        pairs = [*zip(self._asked, expected)]
        again = self._manner(AGAIN)
        for asked, answer in self._random.sample(pairs, len(pairs)):
            again.compare(self._generate(asked), answer)
        yield again
        for rows in dict.fromkeys(batches):
            config = ContinuousBatchingConfig(max_requests_per_batch=rows)
            made = self.fast.continuous_batching_context_manager(continuous_batching_config=config, warmup=False)
            with made as manager:
                for name, some in (
                    ("together", pairs),
                    ("the same prompts again", pairs),
                    # Draws count from the beginning of an answer, so one that is drawn is not continued.
                    ("with half of their answers", [] if again.drawn else [*_continued(pairs)]),
                    ("after a common prefix", [*zip(self._prefixed, prefixed)]),
                    ("among cancelled requests", pairs),
                ):
                    if some:
                        yield self._compare(f"{name}, {rows} rows", some, manager, len(pairs) * ("cancelled" in name))
            self.fast.destroy_cached_continuous_batching_manager()  # gives back the memory of its rows
        if not self.fast.speculation.engine.runtime.verify.clamps_prompts:
            yield self._compare_scores()

    def _compare_scores(self) -> Manner:
        """Log-probabilities that answers had, next to what `Speculation.score` gives."""
        manner, prompts = self._manner("log-probabilities by score()"), [asked.prompt for asked in self._asked]
        options = self._options | {"max_new_tokens": self._asked[0].new_tokens}
        outputs = [*self.fast.generate_batch(prompts, warmup=False, logprobs=0, **options).values()]
        texts = [output.prompt_ids + output.generated_tokens for output in outputs]
        for output, scores in zip(outputs, self.fast.speculation.score(texts), strict=True):
            manner.compare(scores[len(output.prompt_ids) - 1 :].tolist(), output.logprobs)
        return manner

    def _compare(self, name: str, pairs: list[tuple[Asked, list[int]]], manager: Any, cancelled: int) -> Manner:
        """Ask a manager, in random order. pairs: requests and expected answers. cancelled: see `_answer`."""
        manner, pairs = self._manner(name), self._random.sample(pairs, len(pairs))
        for output, (_, expected) in zip(self._answer(manager, [each for each, _ in pairs], cancelled), pairs):
            if output.error is not None:
                raise RuntimeError(f"{name}: {output.error}")
            manner.compare(output.generated_tokens, expected)
            manner.reused += output.speculation.reused_prompt_tokens
        return manner

    def _generate(self, asked: Asked) -> list[int]:
        """The answer of ``generate()`` to one request."""
        ids = torch.tensor([asked.prompt], device=self.fast.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(asked.seed or 0)
            options = self._options | {"max_new_tokens": asked.new_tokens}
            out = self.fast.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[0, ids.shape[1] :].tolist()

    def _answer(self, manager: Any, asked: list[Asked], cancelled: int = 0) -> list[Any]:
        """The last outputs of requests, in their order.

        cancelled: others that come between them, with a prompt each that is one of theirs turned round, and are
        cancelled a moment later.
        """
        names, options = list[str](), dict(self._options)
        if options.get("eos_token_id", 0) is None:
            options["eos_token_id"] = -1  # of a request, None leaves it to the config
        for number, each in enumerate(asked):
            if number < cancelled:
                other = manager.add_request(each.prompt[::-1], max_new_tokens=each.new_tokens, do_sample=False)
            name = manager.add_request(each.prompt, max_new_tokens=each.new_tokens, seed=each.seed, **options)
            names.append(name)
            if number < cancelled:
                time.sleep(CANCEL_AFTER * self._random.random())
                manager.cancel_request(other)
        open_names, outputs = set(names), {}
        while open_names:
            output = manager.get_result(timeout=1)
            if output is None and not manager.is_running():
                raise RuntimeError("the manager has ended") from manager.background_thread_status.fatal_error
            if output is not None and output.is_finished() and output.request_id in open_names:
                open_names.remove(output.request_id)
                outputs[output.request_id] = output
        return [outputs[name] for name in names]


def _continued(pairs: list[tuple[Asked, list[int]]]) -> Iterator[tuple[Asked, list[int]]]:
    """Each prompt with the first half of its answer, and the other half.

    The prompt [5, 8] with the answer [3, 9, 2] gives [5, 8, 3] and [9, 2].
    """
    for asked, tokens in pairs:
        half = len(tokens) // 2
        if half:
            yield Asked(asked.prompt + tokens[:half], asked.new_tokens - half, asked.seed), tokens[half:]


# A model whose weights were rounded, next to the same model before that.


@dataclass
class Rounding:
    """A rounded model next to the unrounded one.

    predicted: tokens of the texts that both predicted, all but the first of each.
    perplexity: over these tokens, of the unrounded model and of the rounded one.
    agreeing: how many of these tokens both models predict with the same most probable token.
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
