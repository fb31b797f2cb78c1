"""`Shadow`: a server answers a share of its requests again by plain steps while it is idle, and counts what differs."""

import copy
import random
import threading
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig

from ..batching.output import MOST_TOP, Output
from ..errors import log
from .call import HttpCall

MOST_WAITING = 64
"""Answers that wait for idle time. Further ones are left out, the oldest first."""
POLL = 0.05
"""Seconds between two looks at whether the server is idle."""
LONGEST = 600.0
"""Seconds after which a second answer is given up."""


@dataclass
class Answered:
    """A request that has its answer.

    ids: its prompt. tokens: the answer's. seed: of its draws. config: its settings, as they were before it began
    options: makes the options of `add_request` anew, because processors of an answer's form keep a state
    """

    call: HttpCall
    ids: list[int]
    tokens: list[int]
    seed: int
    config: GenerationConfig
    options: Callable[[], dict[str, Any]]


class Shadow:
    """Compares answers with what plain steps give.

    checked, mismatches: tokens of plain answers, and places where a served answer has another token or none. With the
    answers [1, 2, 3] and [1, 5], 3 tokens are checked and 2 differ.
    """

    def __init__(self, manager: Any):
        self._manager, self._share = manager, 0.0
        self.checked = self.mismatches = 0
        self._waiting: deque[Answered] = deque(maxlen=MOST_WAITING)
        self._wakes, self._ends, self._has_told = threading.Event(), threading.Event(), False

    def start(self, share: float) -> None:
        """Answer a share of the next requests again, from 0 to 1."""
        self._share = share
        if share:
            threading.Thread(target=self._run, name="spec_compile shadow", daemon=True).start()

    def wants(self) -> bool:
        """True if the next request shall be answered twice."""
        return random.random() < self._share

    def take(self, answered: Answered) -> None:
        """Compare an answer in idle time."""
        self._waiting.append(answered)
        self._wakes.set()

    def close(self) -> None:
        """End the thread."""
        self._ends.set()
        self._wakes.set()

    def _run(self) -> None:
        while not self._ends.is_set():
            self._wakes.wait()
            self._wakes.clear()
            while self._waiting and not self._ends.wait(POLL):
                if self._manager.active_requests == 0:
                    answered = self._waiting.popleft()
                    try:
                        self._compare(answered)
                    except Exception:
                        log.exception("shadow: an answer could not be compared")

    def _compare(self, answered: Answered) -> None:
        plain = self._again(answered, False)
        if plain is None:
            return self.take(answered)
        # Count the places that differ, and those that only one of the answers has.
        pairs = [*zip(answered.tokens, plain.generated_tokens)]
        longer = abs(len(answered.tokens) - len(plain.generated_tokens))
        different = [place for place, (ours, theirs) in enumerate(pairs) if ours != theirs]
        self.checked += len(plain.generated_tokens)
        self.mismatches += len(different) + longer  # guard: shadow-counts
        if (different or longer) and not self._has_told:
            self._has_told = True
            self._tell(answered, plain, different[0] if different else len(pairs))

    def _tell(self, answered: Answered, plain: Output, place: int) -> None:
        """Log the first token that differs, with its logits by plain steps and by rounds."""
        # The answer is made twice more, because no logits of the first one are kept.
        ours, theirs = ([*tokens, None][place] for tokens in (answered.tokens, plain.generated_tokens))
        told = []
        for speculation in (False, None):
            output = self._again(answered, speculation, logprobs=MOST_TOP)
            scores = {} if output is None or place >= len(output.scores) else dict(output.scores[place].top)
            told.append({token: scores.get(token) for token in (ours, theirs)})
        log.error(
            "shadow: token %d after a prompt of %d tokens is %s by rounds and %s by plain steps; log-probabilities of "
            "both by plain steps %s, by rounds %s", place, len(answered.ids), ours, theirs, *told,
        )  # fmt: skip

    def _again(self, answered: Answered, speculation: bool | None, **more: Any) -> Output | None:
        """Another answer to a request, which shares nothing with others; None if others came, so that it ended.
        RuntimeError if it fails or takes too long."""
        name, done, call = f"shadow-{uuid.uuid4().hex}", Future[Output](), answered.call
        handlers = self._manager.output_router.result_handlers

        def take(output: Output) -> None:
            if output.is_finished() and not done.done():
                handlers.pop(name, None)
                done.set_result(output)

        # Its own salt and owner keep it from others' keys, values and texts, and others from its own.
        handlers[name] = (take, call.loop)
        apart = {"client": "shadow", "cache_salt": name, "share_text": name, "speculation": speculation}
        options = answered.options() | apart | more
        options.pop("reference", None)
        try:
            self._manager.add_request(
                answered.ids, name, generation_config=copy.deepcopy(answered.config), seed=answered.seed, **options
            )
        except Exception:
            handlers.pop(name, None)
            raise
        # It ends as soon as others wait. After it is cancelled its handler takes the last output.
        for _ in range(int(LONGEST / POLL)):
            with suppress(TimeoutError):
                output = done.result(POLL)
                if output.finish_reason not in ("stop", "length"):
                    raise RuntimeError(f"the second answer ended by {output.finish_reason}: {output.error}")
                return output
            if self._manager.active_requests > 1 or self._ends.is_set():
                self._manager.cancel_request(name)
                return None
        self._manager.cancel_request(name)
        raise RuntimeError(f"the second answer took more than {LONGEST:.0f} s")
