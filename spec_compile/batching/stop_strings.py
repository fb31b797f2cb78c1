"""Stop strings of requests: transformers' rule, without its tables for every new string.

transformers' criterion compares every token of the vocabulary with every stop string before it starts, which takes a
second for one string of a large vocabulary. Here the bytes of a token are found when it is first seen.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.stopping_criteria import StopStringCriteria

LONGEST, MOST = 1024, 64
"""Characters of a stop string, and stop strings of a request, at most."""
PREFIX = "abcdef"
"""A text before a token, because some tokenizers decode the first token of a text otherwise."""


class TokenBytes:
    """The bytes that each token of a tokenizer stands for, as `StopStringCriteria` reads them."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._mode = StopStringCriteria._get_stop_string_matching_mode(tokenizer)
        self._letters = StopStringCriteria._byte_level_decoder() if self._mode == "byte_level" else None
        ids = tokenizer(PREFIX, add_special_tokens=False)["input_ids"]
        self._base = tokenizer.convert_ids_to_tokens(ids)
        self.of = lru_cache(maxsize=1 << 16)(self._of)

    def _of(self, token: int) -> bytes:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:  # an id that the tokenizer does not know
            return b""
        known = StopStringCriteria._token_to_bytes(name, self._mode, self._letters)
        if known is not None:
            return known
        text = self._tokenizer.convert_tokens_to_string([*self._base, name])
        return text[text.index(PREFIX) + len(PREFIX) :].encode()


class StopStrings(StoppingCriteria):
    """Ends a row whose text contains a stop string that ends in the row's last token.

    The text of a row is that of its tokens one after the other, the prompt's included. For the tokens "re", "turn",
    "s " and the stop string "turn", a row ends at its second token, and for "returns" at its third.
    """

    _tables: "WeakKeyDictionary[Any, TokenBytes]" = WeakKeyDictionary()

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        self._bytes_of = self._tables.setdefault(tokenizer, TokenBytes(tokenizer)).of
        self._stops = [stop.encode() for stop in stops]
        self._longest = max(map(len, self._stops))

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """True if each row [B] of `input_ids` [B, W] ends, on the CPU."""
        return torch.tensor([self._ends(row) for row in input_ids[:, -self._longest :].tolist()])

    def _ends(self, tokens: list[int]) -> bool:
        *others, last = map(self._bytes_of, tokens)
        before = b"".join(others)
        # A match that ends in the last token begins at most the stop's length before it.
        begins = [max(0, len(before) + 1 - len(stop)) for stop in self._stops]
        return bool(last) and any((before + last).find(stop, begin) >= 0 for stop, begin in zip(self._stops, begins))


def check_stops(stops: Any, tokenizer: Any) -> list[str]:
    """The stop strings of a request as a list; TypeError or ValueError if they cannot be served."""
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
        raise TypeError(f"stop_strings: expected a text or a list of texts, got {stops!r:.80}")
    if len(stops) > MOST:
        raise ValueError(f"stop_strings: expected at most {MOST}, got {len(stops)}; generate() takes any number")
    if not all(0 < len(stop) <= LONGEST for stop in stops):
        lengths = sorted(map(len, stops))
        raise ValueError(
            f"stop_strings: expected 1 to {LONGEST} characters each, got {lengths[0]} to {lengths[-1]}; generate() "
            "takes longer ones"
        )
    if stops and tokenizer is None:
        raise ValueError("stop_strings: pass tokenizer= as well, whose tokens make up the strings")
    return [*stops]
