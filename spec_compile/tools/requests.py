"""One request in many ways: in batches, again, continued, after a known prefix, among requests that are cancelled.

Every answer is compared, token for token, with the one that ``generate()`` gives to the request by itself.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, cycle, islice
from typing import Any

import torch
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from ..capture.yardstick import first_unequal
from ..passes.row_invariance import variant_parts

PREFIX = 600
"""Tokens of the prefix that prompts share, at most: more than one chunk on a CPU."""
MOST_ROWS = 64
"""Rows of the largest batch."""
CANCEL_AFTER = 0.02
"""Most seconds after which a request is cancelled."""
AGAIN = "by themselves, in another order"


@dataclass(frozen=True)
class Asked:
    """A request.

    prompt: token ids
    new_tokens: of its answer, at most
    seed: of its draws; None: greedy
    """

    prompt: list[int]
    new_tokens: int
    seed: int | None = None


@dataclass
class Manner:
    """The answers that requests had in one way, compared with those of each by itself.

    name: of the way. drawn: False if they were greedy. promised: True if equal answers are promised.
    of, equal: numbers of answers, and of those whose tokens, or log-probabilities, are all equal.
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
            position = first_unequal(ours, expected)
            position = min(len(ours), len(expected)) if position is None else position
            self.first_differences = sorted([*self.first_differences, position])


def promises(fast: Any) -> bool:
    """True if `fast` promises one answer to a request in every way: if the bits of rounds and of prompts depend on no
    other rows (see `passes.row_invariance`)."""
    runtime = fast.speculation.engine.runtime
    return not any(variant_parts(graph) for graph in (runtime.verify, runtime.prefill))


class InManyWays:
    """Asks a speculative model for the same answers in many ways.

    fast: the model. prompts: token ids. options: for ``generate()`` and requests, `max_new_tokens` among them. seed: of
    the first draw, the next request has the next; None: greedy.
    """

    def __init__(self, fast: Any, prompts: list[list[int]], options: dict[str, Any], seed: int | None = None):
        self.fast, self._options, self._is_drawn = fast, dict(options), seed is not None
        self._is_promised = promises(fast)
        self._new_tokens = self._options.pop("max_new_tokens")
        room = fast.speculation.engine.runtime.capacity(MOST_ROWS) - max(map(len, prompts)) - self._new_tokens - 1
        prefix = [*islice(cycle(chain(*prompts)), min(PREFIX, max(room, 0)))]
        self._random = random.Random(len(prompts))
        self._asked = [self._ask(prompt, seed, number) for number, prompt in enumerate(prompts)]
        self._prefixed = [self._ask(prefix + prompt, seed, number) for number, prompt in enumerate(prompts)]

    def run(self, batches: list[int], tell: Callable[[Manner], None] = lambda _: None) -> list[Manner]:
        """Every way, those of a batch in batches of so many rows each. tell: called with each as soon as it is done."""
        self._expected = [self._generate(asked) for asked in self._asked]
        manners = [self._manner(AGAIN)]
        for number in self._shuffled():
            manners[0].compare(self._generate(self._asked[number]), self._expected[number])
        tell(manners[0])
        prefixed = [self._generate(asked) for asked in self._prefixed]
        for rows in dict.fromkeys(batches):
            with self._managed(rows) as manager:
                for manner in self._in_batches(partial(self._answer, manager), prefixed):
                    manner.name += f", {rows} rows"
                    tell(manner)
                    manners.append(manner)
        if not self.fast.speculation.engine.runtime.verify.clamps_prompts:
            manners.append(self._compare_scores())
            tell(manners[-1])
        return manners

    def _compare_scores(self) -> Manner:
        """Log-probabilities that answers had, next to those of `Speculation.score`."""
        manner = self._manner("log-probabilities by score()")
        options = self._options | {"do_sample": self._is_drawn, "max_new_tokens": self._new_tokens}
        prompts = [asked.prompt for asked in self._asked]
        outputs = [*self.fast.generate_batch(prompts, warmup=False, logprobs=0, **options).values()]
        texts = [output.prompt_ids + output.generated_tokens for output in outputs]
        for output, scores in zip(outputs, self.fast.speculation.score(texts), strict=True):
            manner.compare(scores[len(output.prompt_ids) - 1 :].tolist(), output.logprobs)
        return manner

    def _in_batches(self, answer: Callable[..., list], prefixed: list[list[int]]) -> Iterator[Manner]:
        """The ways of one manager. answer: see `_answer`. prefixed: the answers with a prefix, each by itself."""
        pairs = [*zip(self._asked, self._expected)]
        yield self._compare("together", pairs, answer)
        yield self._compare("the same prompts again", pairs, answer)
        if not self._is_drawn:  # draws count from the beginning of an answer
            yield self._compare("with half of their answers", [*self._continued(pairs)], answer)
        yield self._compare("after a common prefix", [*zip(self._prefixed, prefixed)], answer)
        yield self._compare("among cancelled requests", pairs, partial(answer, cancelled=len(pairs)))

    def _compare(self, name: str, pairs: list[tuple[Asked, list[int]]], answer: Callable[..., list]) -> Manner:
        """Ask in random order. pairs: requests, and the answers that are expected."""
        manner, order = self._manner(name), self._random.sample(pairs, len(pairs))
        for output, (_, expected) in zip(answer([asked for asked, _ in order]), order, strict=True):
            if output.error is not None:
                raise RuntimeError(f"{name}: {output.error}")
            manner.compare(output.generated_tokens, expected)
            manner.reused += output.speculation.reused_prompt_tokens
        return manner

    def _manner(self, name: str) -> Manner:
        return Manner(name, self._is_drawn, self._is_promised)

    def _ask(self, prompt: list[int], seed: int | None, number: int) -> Asked:
        return Asked(prompt, self._new_tokens, None if seed is None else seed + number)

    def _shuffled(self) -> list[int]:
        return self._random.sample(range(len(self._asked)), len(self._asked))

    def _continued(self, pairs: list[tuple[Asked, list[int]]]) -> Iterator[tuple[Asked, list[int]]]:
        """Each prompt with the first half of its answer, and the other half.

        The prompt [5, 8] with the answer [3, 9, 2] gives [5, 8, 3] and [9, 2].
        """
        for asked, tokens in pairs:
            half = len(tokens) // 2
            if half:
                yield Asked(asked.prompt + tokens[:half], asked.new_tokens - half, asked.seed), tokens[half:]

    def _generate(self, asked: Asked) -> list[int]:
        """The answer of ``generate()`` to one request."""
        ids = torch.tensor([asked.prompt], device=self.fast.device)
        options = self._options | {"do_sample": self._is_drawn, "max_new_tokens": asked.new_tokens}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(asked.seed or 0)
            out = self.fast.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[0, ids.shape[1] :].tolist()

    @contextmanager
    def _managed(self, rows: int) -> Iterator[Any]:
        """A running manager of so many rows."""
        config = ContinuousBatchingConfig(max_requests_per_batch=rows)
        manager = self.fast.init_continuous_batching(continuous_batching_config=config)
        manager.start()
        try:
            yield manager
        finally:
            manager.destroy()
            self.fast.destroy_cached_continuous_batching_manager()

    def _answer(self, manager: Any, asked: list[Asked], cancelled: int = 0) -> list[Any]:
        """The last outputs of requests, in their order.

        cancelled: others that come between them, with a prompt each that is one of theirs turned round, and are
        cancelled a moment later.
        """
        names, options = list[str](), self._options | {"do_sample": self._is_drawn}
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
