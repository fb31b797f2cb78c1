"""`Constraint`: permits the next tokens of a row, by a grammar of xgrammar or a thinking budget."""

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ...errors import RequestError

REUSED = "it has served a call, whose tokens its grammars have followed; make a new one for every generate()"


class Constraint(Protocol):
    """Permits the next tokens of one row. xgrammar's GrammarMatcher is one."""

    def is_terminated(self) -> bool:
        """True after the last token that it decides; what follows is under the mask before that token."""

    def accept_token(self, token: int) -> bool:
        """Accept the row's next token if it is legal; returns True if it is."""

    def rollback(self, count: int = 1) -> None:
        """Take back the last tokens."""

    def fill_next_token_bitmask(self, bits: Tensor, index: int = 0) -> Any:
        """Write the mask of the next token to ``bits[index]``; see `Constraints.bitmask`."""


def is_grammar(processor: Any) -> bool:
    """True if a logits processor is xgrammar's, by name, because xgrammar need not be installed."""
    cls = type(processor)
    return (cls.__module__, cls.__name__) == ("xgrammar.contrib.hf", "LogitsProcessor")


def check_grammars(processors: list, batch: int, vocab_size: int) -> None:
    """Raise ValueError if one of xgrammar's processors does not fit a call.

    batch: rows. vocab_size: tokens of the model's logits. A mask of fewer tokens would leave the rest allowed.
    """
    for processor in filter(is_grammar, processors):
        name, compiled = "logits_processor: xgrammar's LogitsProcessor", processor.compiled_grammars
        if processor.prefilled:
            raise ValueError(f"{name}: {REUSED}")
        if len(compiled) not in (1, batch):
            raise ValueError(f"{name}: expected one grammar, or one for each of {batch} rows, got {len(compiled)}")
        sizes = {grammar.tokenizer_info.vocab_size for grammar in compiled}
        if sizes != {vocab_size}:
            raise ValueError(
                f"{name}: its vocabulary has {', '.join(map(str, sorted(sizes)))} tokens and the model's logits have "
                f"{vocab_size}; pass vocab_size={vocab_size} to TokenizerInfo.from_huggingface()"
            )
        bits = torch.zeros(1, words_of(vocab_size), dtype=torch.int32)
        for number, grammar in enumerate(compiled):
            make_matcher(grammar).fill_next_token_bitmask(bits)
            if not bits.any():
                raise ValueError(f"{name}: grammar {number} allows no first token; look at the grammar")


def make_matcher(grammar: Any, field: str | None = None) -> Constraint:
    """xgrammar's matcher of a compiled grammar. field: of the client that sent it, whose steps have a deadline."""
    from xgrammar import GrammarMatcher  # which is installed, because the grammar is one of its objects

    return GrammarMatcher(grammar) if field is None else TimedConstraint(partial(GrammarMatcher, grammar), field)


def matchers_of(processor: Any, batch: int) -> list[Constraint]:
    """A matcher for each row of a batch [B], made of the grammars of xgrammar's processor, which is used up."""
    compiled, field = processor.compiled_grammars, getattr(processor, "field", None)
    processor.prefilled = True
    return [make_matcher(grammar, field) for grammar in (compiled * batch if len(compiled) == 1 else compiled)]


def words_of(vocab_size: int) -> int:
    """Numbers of 32 bits in the mask of a vocabulary."""
    return -(-vocab_size // 32)


class Constraints(LogitsProcessor):
    """A logits processor that lets each row of a batch go on with the tokens that its constraint permits.

    matchers: the constraint of each row [B].
    vocab_size: tokens of the model's logits.
    gained: tokens of each row [B lists], to which the caller adds.
    rows: [R] int64, the rows of the scores that `__call__` gets; see `host.OF_ROWS`.
    bitmask: [B, ceil(V / 32)] int32 on the CPU. Bit t % 32 of number t // 32 is 1 if token t may come next: token 70 is
        bit 6 of number 2. After a row's grammar has ended, the mask before its last token stays, as with xgrammar.
    """

    def __init__(self, matchers: Sequence[Constraint], vocab_size: int, gained: list[list[int]]):
        batch = len(gained)
        self.gained, self.followed = gained, [0] * batch  # tokens of each row that its matcher has accepted
        self.ahead = [0] * batch  # the last ones of them, which are drafts
        self.matchers = matchers
        self.bitmask = torch.full((batch, words_of(vocab_size)), -1, dtype=torch.int32)
        self.rows = torch.arange(batch)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores [R, V] of tokens that follow what `rows` have gained, with -inf for those that are illegal."""
        for row in self.rows.tolist():
            self.follow(row)
            self.fill(row)
        return forbid(scores, self.bitmask[self.rows])

    def follow(self, row: int) -> None:
        """Accept the row's new tokens. RuntimeError if one before the grammar's end is illegal."""
        for token in self.gained[row][self.followed[row] :]:
            if not self.accept(row, token) and not self.matchers[row].is_terminated():
                raise RequestError(
                    f"logits_processor: the grammar of row {row} does not allow token {token}, because no token was "
                    "legal there, or another logits processor has undone the mask"
                )

    def accept(self, row: int, token: int) -> bool:
        """Accept a token if it is legal after those accepted so far; returns True if it is."""
        matcher = self.matchers[row]
        if matcher.is_terminated():
            legal = bool(self.bitmask[row, token // 32] >> (token % 32) & 1)
        else:
            legal = matcher.accept_token(token)
            if legal and matcher.is_terminated():  # keep the mask of this token, which may not be filled yet
                matcher.rollback(1)
                self.fill(row)
                matcher.accept_token(token)
        self.followed[row] += legal
        return legal

    def look_ahead(self, row: int, token: int) -> bool:
        """Accept a draft, which comes after the row's tokens and other drafts, until `come_back`.

        Returns False if it is illegal. After the grammar's end the mask stays, so that nothing has to be accepted.
        """
        if self.matchers[row].is_terminated():
            return True
        legal = self.accept(row, token)
        self.ahead[row] += legal
        return legal

    def come_back(self, row: int) -> None:
        """Take back the drafts of `look_ahead`."""
        self.rewind(row, self.ahead[row])  # guard: grammar-looks-ahead
        self.ahead[row] = 0

    def rewind(self, row: int, count: int) -> None:
        """Take back the last tokens that the row's matcher has accepted, none of them after its grammar's end."""
        if count:
            self.matchers[row].rollback(count)
            self.followed[row] -= count

    def fill(self, row: int, bits: Tensor | None = None, index: int = 0) -> None:
        """Write the mask of the row's next token to its row of `bitmask`, or to ``bits[index]``."""
        if not self.matchers[row].is_terminated():
            self.matchers[row].fill_next_token_bitmask(*(self.bitmask, row) if bits is None else (bits, index))
        elif bits is not None:
            bits[index] = self.bitmask[row]


def forbid(scores: Tensor, bits: Tensor) -> Tensor:
    """The scores [R, V] with -inf for tokens whose bit in `bits` [R, ceil(V / 32)] int32, on the CPU, is 0."""
    bits = bits.to(scores.device, non_blocking=True)[:, :, None]
    legal = bits >> torch.arange(32, device=scores.device) & 1
    return scores.masked_fill(legal.flatten(1)[:, : scores.shape[1]] == 0, -torch.inf)


# Time of a processor that one step of a client's grammar may take. Bounded lengths of texts take 0.02 with 150,000
# tokens. All steps together may take the first of the other two figures, and the second for each step.
STEP_SECONDS = 0.25
FIRST_SECONDS, SECONDS_A_STEP = 1.0, 0.03
TOO_SLOW = "its grammar takes too long to follow; send a simpler one, without nested or ambiguous repetitions"


class _Thread(threading.Thread):
    """Runs one step after the other. xgrammar lets go of the interpreter, so a long step stops no other thread."""

    def __init__(self) -> None:
        super().__init__(name="spec_compile grammar", daemon=True)
        self._steps, self._results = SimpleQueue[Callable[[], Any] | None](), SimpleQueue[tuple[Any, Any]]()
        self.start()
        self._clock = time.pthread_getcpuclockid(self.ident or 0)

    def run(self) -> None:
        outcome: tuple[Any, BaseException | None]
        for step in iter(self._steps.get, None):
            try:
                outcome = step(), None
            except BaseException as error:
                outcome = None, error
            self._results.put(outcome)
            del step, outcome  # while it waits, nothing keeps a grammar

    def run_step(self, step: Callable[[], Any]) -> tuple[Any, BaseException | None, float]:
        """The result or the error of a step, and the seconds of a processor that it took. TimeoutError after
        `STEP_SECONDS`."""
        begin = time.clock_gettime(self._clock)
        self._steps.put(step)
        left = STEP_SECONDS
        while True:
            try:
                result, error = self._results.get(timeout=left)
                break
            except Empty:  # perhaps only because other threads ran
                left = begin + STEP_SECONDS - time.clock_gettime(self._clock)
                if left <= 0:
                    raise TimeoutError from None
        return result, error, time.clock_gettime(self._clock) - begin

    def give_up(self) -> None:
        """Let the thread end after its step, which goes on with the time that nobody else needs."""
        self._steps.put(None)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self.native_id or 0, 19)


_free: list[_Thread] = []  # threads that wait for a step
_given_up: list[_Thread] = []
os.register_at_fork(after_in_child=_free.clear)
os.register_at_fork(after_in_child=_given_up.clear)


def given_up() -> int:
    """Steps that took too long, and still run."""
    _given_up[:] = [thread for thread in _given_up if thread.is_alive()]
    return len(_given_up)


class TimedConstraint:
    """The constraint of a client's grammar: steps that take too long end their request by a RequestError.

    Steps run in threads, because nothing stops one of xgrammar's. make: returns xgrammar's matcher. field: the
    request's, for errors.
    """

    def __init__(self, make: Callable[[], Any], field: str):
        self._field, self._left = field, FIRST_SECONDS
        self._matcher = self._run(make)

    def is_terminated(self) -> bool:
        return self._matcher.is_terminated()

    def accept_token(self, token: int) -> bool:
        return self._run(partial(self._matcher.accept_token, token))

    def rollback(self, count: int = 1) -> None:
        self._run(partial(self._matcher.rollback, count))

    def fill_next_token_bitmask(self, bits: Any, index: int = 0) -> bool:
        return self._run(partial(self._matcher.fill_next_token_bitmask, bits, index))

    def _run(self, step: Callable[[], Any]) -> Any:
        if self._left < 0:
            raise RequestError(f"{self._field}: {TOO_SLOW}", field=self._field)
        try:
            thread = _free.pop()
        except IndexError:
            thread = _Thread()
        try:
            result, error, seconds = thread.run_step(step)
        except TimeoutError:
            thread.give_up()
            _given_up.append(thread)
            self._left = -1.0
            raise RequestError(f"{self._field}: {TOO_SLOW}", field=self._field) from None
        _free.append(thread)
        if error is not None:
            raise error
        self._left = min(FIRST_SECONDS, self._left + SECONDS_A_STEP - seconds)
        return result
