"""Thinking budgets: after a number of tokens of thinking, the next tokens of an answer are the end of thinking."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList

from ...errors import check_int
from .constraint import Constraint, Constraints, check_grammars, forbid, is_grammar, matchers_of, words_of
from .processors import ROWWISE, is_known

# Texts that open and close thinking in models that are known.
PAIRS = (
    ("<think>", "</think>"), ("<thinking>", "</thinking>"), ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"), ("◁think▷", "◁/think▷"), ("<|channel>thought\n", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
)  # fmt: skip
# Names of the part with thinking in a tokenizer's `response_template`.
FIELDS = ("reasoning_content", "thinking", "reasoning")


def find_marks(tokenizer: Any) -> tuple[str, str]:
    """The texts with which a model begins and ends to think; ValueError that says where they were looked for.

    They are `open` and `close` of the thinking in the tokenizer's `response_template`, or else the first of `PAIRS`
    that is in its chat template or of which both are single tokens.
    """
    fields = (getattr(tokenizer, "response_template", None) or {}).get("fields", {})
    for name in FIELDS:
        opened, closed = (fields.get(name, {}).get(key) for key in ("open", "close"))
        closed = closed[0] if isinstance(closed, list) and closed else closed
        if isinstance(opened, str) and isinstance(closed, str):
            return opened, closed
    template, vocab = str(getattr(tokenizer, "chat_template", None) or ""), tokenizer.get_vocab()
    for pair in PAIRS:
        if all(mark in template for mark in pair) or all(mark in vocab for mark in pair):
            return pair
    raise ValueError(
        f"the tokenizer shows no thinking: its response_template has none of {', '.join(FIELDS)}, and neither its chat "
        f"template nor its tokens have one of {', '.join(' ... '.join(pair).replace(chr(10), '') for pair in PAIRS)}"
    )


class ThinkingMarks:
    """The marks that begin and end thinking, as texts and as tokens. A mark may be several tokens.

    start, end: texts
    start_ids, end_ids: their tokens, as the tokenizer writes them

    Marks in a text are found by the texts of its tokens, without spaces, because a model may write a mark with other
    tokens than the tokenizer does: ".</", "think", ">\\n" have the mark "</think>".
    """

    _tables: "WeakKeyDictionary[Any, dict[int, str]]" = WeakKeyDictionary()

    def __init__(self, tokenizer: Any, start: str, end: str):
        self._tokenizer, self._texts = tokenizer, self._tables.setdefault(tokenizer, {})
        self.start, self.end = (mark.replace(" ", "") for mark in (start, end))
        self.start_ids, self.end_ids = self._encode("start", start), self._encode("end", end)

    def __deepcopy__(self, memo: dict) -> "ThinkingMarks":
        return self  # it remembers nothing of an answer

    def _encode(self, name: str, mark: str) -> list[int]:
        ids = self._tokenizer(mark, add_special_tokens=False)["input_ids"]
        if not mark.strip() or mark.replace(" ", "") not in "".join(map(self.text, ids)):
            raise ValueError(f"{name}: expected a text that the tokenizer can write, got {mark!r}")
        return ids

    def text(self, token: int) -> str:
        """The text of a token without spaces; "" for a token that the tokenizer does not know."""
        if token not in self._texts:
            known = token < len(self._tokenizer)
            self._texts[token] = self._tokenizer.decode([token]).replace(" ", "") if known else ""
        return self._texts[token]


@dataclass(frozen=True)
class ThinkingPlace:
    """A place in a text.

    thinks: True between the two marks
    count: tokens since the first mark
    tail: the end of the text since the last mark, as long as a mark that is not complete
    last: the last tokens since the first mark, fewer than the end has
    """

    thinks: bool = False
    count: int = 0
    tail: str = ""
    last: tuple[int, ...] = ()

    def after(self, token: int, marks: ThinkingMarks) -> "ThinkingPlace":
        """The place after one more token."""
        tail, mark = self.tail + marks.text(token), marks.end if self.thinks else marks.start
        if mark in tail:
            return ThinkingPlace(not self.thinks)
        tail = tail[max(0, len(tail) - len(mark) + 1) :]
        if not self.thinks:
            return ThinkingPlace(tail=tail)
        kept = len(marks.end_ids) - 1
        return ThinkingPlace(True, self.count + 1, tail, (*self.last, token)[-kept:] if kept else ())

    def forced(self, marks: ThinkingMarks, budget: int) -> int | None:
        """The only token that may come next, or None.

        It is the first token of the end that is not written yet: the end [7, 8, 9] after the tokens [.., 3, 7, 8] goes
        on with 9, after [.., 7, 3] with 7.
        """
        if not self.thinks or self.count < budget:  # guard: end-of-thinking
            return None
        end = marks.end_ids
        written = next(
            size for size in range(len(end) - 1, -1, -1) if self.last[len(self.last) - size :] == tuple(end[:size])
        )
        return end[written]


class ThinkingConstraint:
    """The `Constraint` of a thinking budget.

    While the row thinks every token is legal, and from the budget on only the next token of the end. After that every
    token is legal, or a grammar begins. A row with a grammar may begin to think with its first token.

    marks, budget: see `ThinkingBudget`
    prompt: the row's token ids
    grammar: the constraint of the answer after the thinking, or None
    """

    def __init__(self, marks: ThinkingMarks, budget: int, prompt: list[int], grammar: Constraint | None = None):
        self.marks, self.budget, self.grammar = marks, budget, grammar
        self.place = ThinkingPlace()
        for token in prompt:
            self.place = self.place.after(token, marks)
        self._opened = 0  # tokens of the start that a row with a grammar has written
        self._is_first = grammar is not None and not self.place.thinks
        self._before: list[tuple[ThinkingPlace, int, bool, bool]] = []

    @property
    def _active_grammar(self) -> Constraint | None:
        return None if self.place.thinks or self._opened else self.grammar

    def is_terminated(self) -> bool:
        """True once the grammar has ended; without one it never does."""
        grammar = self._active_grammar
        return grammar is not None and grammar.is_terminated()

    def accept_token(self, token: int) -> bool:
        forced, start = self.place.forced(self.marks, self.budget), self.marks.start_ids
        place, opened, in_grammar = self.place, self._opened, False
        if forced is not None and token != forced:
            return False
        if place.thinks or self.grammar is None:
            place = place.after(token, self.marks)
        elif opened == 0 and self.grammar.accept_token(token):
            in_grammar = True
        elif (opened or self._is_first) and token == start[opened]:
            opened += 1
            if opened == len(start):
                place, opened = ThinkingPlace(thinks=True), 0
        else:
            return False
        self._before.append((self.place, self._opened, self._is_first, in_grammar))
        self.place, self._opened, self._is_first = place, opened, False
        return True

    def rollback(self, count: int = 1) -> None:
        for _ in range(count):
            self.place, self._opened, self._is_first, in_grammar = self._before.pop()
            if in_grammar and self.grammar is not None:
                self.grammar.rollback(1)

    def fill_next_token_bitmask(self, bits: Tensor, index: int = 0) -> None:
        only = self.place.forced(self.marks, self.budget)
        if self._opened:
            only = self.marks.start_ids[self._opened]
        if only is not None:
            bits[index] = 0
            permit(bits, index, only)
        elif (grammar := self._active_grammar) is not None:
            grammar.fill_next_token_bitmask(bits, index)
            if self._is_first:
                permit(bits, index, self.marks.start_ids[0])
        else:
            bits[index] = -1


def permit(bits: Tensor, index: int, token: int) -> None:
    """Set the bit of a token in ``bits[index]``: token 70 is bit 6 of number 2. Bit 31 is the sign of an int32."""
    bit = token % 32
    bits[index, token // 32] |= (1 << bit) - (1 << 32 if bit == 31 else 0)


class ThinkingBudget(LogitsProcessor):
    """A logits processor that ends the thinking of an answer after a number of tokens.

    tokenizer: the model's
    budget: tokens that each stretch of thinking may have, between its two marks. Then the rest of the end follows, as
        far as it is not written yet, and after it all is free. Thinking that the prompt begins counts from there.
    start, end: texts that begin and end thinking; None finds them, see `find_marks`.
    then: xgrammar's LogitsProcessor, whose grammar begins after the thinking. A processor with it serves one call.

    It serves ``generate()`` of spec_compile and of transformers, and requests. Drafts stay on, and the tokens are those
    without them. Raises ValueError or TypeError that names the argument.
    """

    def __init__(
        self, tokenizer: Any, budget: int, *, start: str | None = None, end: str | None = None, then: Any = None
    ):
        check_int("budget", budget, 0, (1 << 31) - 1)
        if (start is None) != (end is None):
            raise ValueError("start, end: expected both or none of them")
        if then is not None and not is_grammar(then):
            raise TypeError(f"then: expected xgrammar's LogitsProcessor, got {type(then).__name__}")
        if start is None or end is None:
            start, end = find_marks(tokenizer)
        self.marks, self.budget, self.then = ThinkingMarks(tokenizer, start, end), budget, then
        self.vocab_size = 0  # tokens of the model's logits, set by `check_processors`
        self._seen: list[list[int]] = []
        self._matchers: list[ThinkingConstraint] = []
        self._bits = torch.empty(0)

    def matchers(self, prompts: list[list[int]]) -> list[ThinkingConstraint]:
        """A matcher for each row. `then` is used up."""
        grammars: Sequence[Constraint | None] = [None] * len(prompts)
        if self.then is not None:
            grammars = matchers_of(self.then, len(prompts))
        return [ThinkingConstraint(self.marks, self.budget, ids, each) for ids, each in zip(prompts, grammars)]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores [B, V] of the token after each row of `input_ids` [B, L], as plain decoding asks for them."""
        rows = input_ids.tolist()
        if len(rows) != len(self._seen) or any(row[:-1] != seen for row, seen in zip(rows, self._seen)):
            self._matchers = self.matchers(rows)
            self._bits = torch.full((len(rows), words_of(scores.shape[1])), -1, dtype=torch.int32)
        else:
            for row, matcher in zip(rows, self._matchers):
                if not matcher.is_terminated():
                    matcher.accept_token(row[-1])  # rows that have ended go on with padding, which may be illegal
        self._seen = rows
        for row, matcher in enumerate(self._matchers):
            if not matcher.is_terminated():  # else the mask before its last token stays, as with xgrammar
                matcher.fill_next_token_bitmask(self._bits, row)
        return forbid(scores, self._bits)


def check_processors(processors: list, batch: int, vocab_size: int) -> None:
    """Raise ValueError if a grammar or a thinking budget does not fit a call; see `check_grammars`.

    It tells budgets the size of the vocabulary.
    """
    budgets = [each for each in processors if isinstance(each, ThinkingBudget)]
    check_grammars([*processors, *(each.then for each in budgets if each.then is not None)], batch, vocab_size)
    for budget in budgets:
        if max(*budget.marks.start_ids, *budget.marks.end_ids) >= vocab_size:
            raise ValueError("ThinkingBudget: the marks of thinking are tokens that the model does not have")
        budget.vocab_size = vocab_size


def follow_rows(answer: Any, processors: LogitsProcessorList) -> LogitsProcessorList:
    """The processors, where `Constraints` stand for grammars of xgrammar and thinking budgets, unless another processor
    needs rows in lockstep.

    answer: an `Answer`, whose rows they follow
    """
    followed = [is_grammar(each) or isinstance(each, ThinkingBudget) for each in processors]
    if not all(fits or is_known(each, ROWWISE) for fits, each in zip(followed, processors)):
        return processors
    prompts = answer.ids[:, : answer.prompt_width].tolist() if any(followed) else []

    def follow(processor: Any) -> Any:
        if isinstance(processor, ThinkingBudget):
            return Constraints(processor.matchers(prompts), processor.vocab_size, answer.rows)
        if not is_grammar(processor):
            return processor
        vocab_size = processor.compiled_grammars[0].tokenizer_info.vocab_size
        constraints = Constraints(matchers_of(processor, answer.batch), vocab_size, answer.rows)
        processor.matchers, processor.batch_size = constraints.matchers, answer.batch  # it is used up
        processor.token_bitmask = constraints.bitmask
        return constraints

    return type(processors)(map(follow, processors))
