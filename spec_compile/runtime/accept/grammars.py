"""Grammars of xgrammar that follow the tokens of each row of a batch."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from ...errors import RequestError
from .timed_matcher import TimedMatcher

REUSED = "it has served a call, whose tokens its grammars have followed; make a new one for every generate()"


def is_grammar(processor) -> bool:
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


def make_matcher(grammar, field: str | None = None) -> Any:
    """xgrammar's matcher of a compiled grammar. field: of the client that sent it, whose steps have a deadline."""
    from xgrammar import GrammarMatcher  # which is installed, because the grammar is one of its objects

    return GrammarMatcher(grammar) if field is None else TimedMatcher(partial(GrammarMatcher, grammar), field)


def matchers_of(processor, batch: int) -> list:
    """A matcher for each row of a batch [B], made of the grammars of xgrammar's processor, which is used up."""
    compiled = processor.compiled_grammars
    processor.prefilled = True
    return [
        make_matcher(grammar, getattr(processor, "field", None))
        for grammar in (compiled * batch if len(compiled) == 1 else compiled)
    ]


def words_of(vocab_size: int) -> int:
    """Numbers of 32 bits in the mask of a vocabulary."""
    return -(-vocab_size // 32)


class Grammars(LogitsProcessor):
    """xgrammar's processor for rows of different lengths.

    matchers: a GrammarMatcher of each row [B], or an object with its methods.
    vocab_size: tokens of the model's logits.
    gained: tokens of each row [B lists], to which the caller adds.
    rows: [R] int64, the rows of the scores that `__call__` gets; see `processors.OF_ROWS`.
    bitmask: [B, ceil(V / 32)] int32 on the CPU. Bit t % 32 of number t // 32 is 1 if token t may come next: token 70 is
        bit 6 of number 2. After a row's grammar has ended, the mask before its last token stays, as with xgrammar.
    """

    def __init__(self, matchers: list, vocab_size: int, gained: list[list[int]]):
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


def follow_xgrammar(processor, gained: list[list[int]]) -> Grammars:
    """`Grammars` in place of xgrammar's processor, which is used up.

    processor: checked by `check_grammars`. gained: see `Grammars`.
    """
    vocab_size = processor.compiled_grammars[0].tokenizer_info.vocab_size
    grammars = Grammars(matchers_of(processor, len(gained)), vocab_size, gained)
    processor.matchers, processor.batch_size, processor.token_bitmask = grammars.matchers, len(gained), grammars.bitmask
    return grammars


def forbid(scores: Tensor, bits: Tensor) -> Tensor:
    """The scores [R, V] with -inf for tokens whose bit in `bits` [R, ceil(V / 32)] int32, on the CPU, is 0."""
    bits = bits.to(scores.device, non_blocking=True)[:, :, None]
    legal = bits >> torch.arange(32, device=scores.device) & 1
    return scores.masked_fill(legal.flatten(1)[:, : scores.shape[1]] == 0, -torch.inf)
