"""OpenAI's field `logprobs` of a choice, whole or in the chunks of a stream."""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from ..batching.output import MOST_TOP, Output, TokenScore
from .call import HttpCall
from .errors import refuse

MOST_TOLD = 1 << 19
"""Log-probabilities that all choices of a request may have."""
LEAST = -9999.0
"""The log-probability of an impossible token, as in vLLM, because JSON has no infinity."""


def read_top(fields: dict) -> int | None:
    """The number of likeliest tokens that a request wants next to each token; None: it wants no log-probabilities.

    fields: the request's, checked. `logprobs` is a bool in chats, with `top_logprobs`, and an int in completions.

    Refusal for `top_logprobs` without `logprobs`.
    """
    wanted = fields.get("logprobs", False)
    if wanted is False and fields.get("top_logprobs"):
        raise refuse("top_logprobs", "it needs logprobs: true; send both, or leave it out")
    if isinstance(wanted, bool):
        return fields.get("top_logprobs", 0) if wanted else None
    return wanted


def check_told(call: HttpCall, top: int, tokens: int, row_tokens: int) -> None:
    """Refusal if the choices of a request may have more log-probabilities than one answer holds.

    call: one choice's
    top: likeliest tokens that it tells next to each of `tokens` tokens
    row_tokens: tokens of a row, one of which may tell the most in any case
    """
    call.told, most = tokens * (1 + top), max(MOST_TOLD, row_tokens * (1 + MOST_TOP))
    total = sum(each.told for each in call.choices)
    if total > most:
        reason = f"the choices may have {total} log-probabilities, and one answer holds {most}"
        raise refuse("logprobs", f"{reason}; ask for fewer choices, tokens or likeliest tokens")


class ChatLogprobs:
    """The log-probabilities of one choice of /v1/chat/completions.

    A chunk of a stream tells of all tokens since the chunk before it, so tokens that add no text wait for the next
    chunk: with the tokens "a", half of "é", the rest of "é" the first chunk has one, and the second one has two.
    """

    def __init__(self, tokenizer: Any, bytes_of: Callable[[int], bytes], echo: str | None = None):
        """tokenizer: the model's. bytes_of: returns the bytes of a token. echo: the text of the prompt, if the choice
        begins with it"""
        self._tokenizer, self._bytes_of, self._echo = tokenizer, bytes_of, echo
        self._places = _Places(tokenizer, len(echo or ""))
        self._waiting: list[TokenScore] = []
        self._chunks: deque[dict | None] = deque()

    def whole(self, output: Output) -> dict:
        """The field of a complete choice. output: its last one."""
        return self.write(output.scores)

    def add(self, scores: Sequence[TokenScore]) -> None:
        """Add the next tokens of a stream."""
        self._waiting += scores

    def end_chunk(self) -> None:
        """A chunk of the stream ends after the tokens so far."""
        self._chunks.append(self.write(self._waiting) if self._waiting else None)
        self._waiting = []

    def take(self) -> dict | None:
        """The field of the next chunk, or None if it has no tokens. The last chunk has all that is left."""
        if not self._chunks:
            self.end_chunk()
        return self._chunks.popleft()

    def write(self, scores: list[TokenScore]) -> dict:
        """The field of these tokens of the answer, which follow the last call's."""
        content = [
            self._entry(score.token, score.logprob) | {"top_logprobs": [self._entry(*each) for each in score.top]}
            for score in scores
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict:
        return {"token": self._text(token), "logprob": max(logprob, LEAST), "bytes": [*self._bytes_of(token)]}

    def _text(self, token: int) -> str:
        r"""The text of one token. Bytes that are no text by themselves are written as in OpenAI's answers: ``\xf0``."""
        return self._bytes_of(token).decode(errors="backslashreplace")


class CompletionLogprobs(ChatLogprobs):
    """The log-probabilities of one choice of /v1/completions.

    Entry i of `text_offset` is the number of characters of the choice's text before token i: the tokens "a", half of
    "é", the rest of "é" and "b" have 0, 1, 1 and 2.
    """

    def whole(self, output: Output) -> dict:
        answer = self.write(output.scores)
        if self._echo is None:
            return answer
        prompt = self.write_prompt(output)
        return {name: prompt[name] + answer[name] for name in answer}

    def write_prompt(self, output: Output) -> dict:
        """The field of the prompt's tokens. Nothing comes before the first one, which has null."""
        first = TokenScore(output.prompt_ids[0], math.nan)
        return self._columns([first, *output.prompt_scores], _Places(self._tokenizer, 0))

    def add_prompt(self, output: Output) -> None:
        """The first chunk of the stream has the prompt."""
        self._chunks.append(self.write_prompt(output))

    def write(self, scores: list[TokenScore]) -> dict:
        return self._columns(scores, self._places)

    def _columns(self, scores: list[TokenScore], places: "_Places") -> dict:
        return {
            "tokens": [self._text(score.token) for score in scores],
            "token_logprobs": [None if math.isnan(score.logprob) else max(score.logprob, LEAST) for score in scores],
            "top_logprobs": [None if math.isnan(score.logprob) else self._top(score) for score in scores],
            "text_offset": [*places.of(score.token for score in scores)],
        }

    def _top(self, score: TokenScore) -> dict[str, float]:
        """The likeliest tokens, and the token itself. If two have the same text, the likelier is told."""
        top: dict[str, float] = {}
        for token, logprob in (*score.top, (score.token, score.logprob)):
            top.setdefault(self._text(token), max(logprob, LEAST))
        return top


class _Places:
    """The places of tokens in a text that is decoded token by token."""

    def __init__(self, tokenizer: Any, start: int):
        self._tokenizer, self._place = tokenizer._tokenizer, start
        self._stream = DecodeStream([], skip_special_tokens=True)

    def of(self, tokens: Iterator[int]) -> Iterator[int]:
        """The place of each of the next tokens, in characters."""
        for token in tokens:
            yield self._place
            self._place += len(self._stream.step(self._tokenizer, token) or "")
