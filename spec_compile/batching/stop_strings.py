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

    begin: tokens at the beginning of a row that do not count
    """

    _tables: "WeakKeyDictionary[Any, TokenBytes]" = WeakKeyDictionary()

    def __init__(self, tokenizer: Any, stops: Sequence[str], begin: int = 0):
        self._begin = begin
        self._bytes_of = self._tables.setdefault(tokenizer, TokenBytes(tokenizer)).of
        self._stops = [stop.encode() for stop in stops]
        self._longest = max(map(len, self._stops))

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """True if each row [B] of `input_ids` [B, W] ends, on the CPU."""
        begin = max(self._begin, input_ids.shape[1] - self._longest)
        return torch.tensor([self._ends(row) for row in input_ids[:, begin:].tolist()])

    def _ends(self, tokens: list[int]) -> bool:
        *others, last = map(self._bytes_of, tokens)
        before = b"".join(others)
        # A match that ends in the last token begins at most the stop's length before it.
        begins = [max(0, len(before) + 1 - len(stop)) for stop in self._stops]
        return bool(last) and any((before + last).find(stop, begin) >= 0 for stop, begin in zip(self._stops, begins))


class StopCut:
    """Ends a text that comes in pieces at the first stop string, as if it came character by character.

    stops: the stop strings
    keeps_stop: True if the text ends after the stop string, False if before
    found: the one that was found, or None

    With the stop "END", the pieces "aE", "N", "Db" give "a", "", "": the "E" waits until it is known to be no stop.
    If two stops end at one place, the one that begins first counts.
    """

    def __init__(self, stops: Sequence[str], keeps_stop: bool = False):
        self.stops, self.keeps_stop = stops, keeps_stop
        self.found: str | None = None
        self._held = ""

    def feed(self, piece: str) -> str:
        """The text that is known to belong to the answer."""
        if self.found is not None:
            return ""
        text = self._held + piece
        places = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self.stops if stop in text]
        if places:
            end, length, self.found = min(places)
            self._held = ""
            return text[: end if self.keeps_stop else end + length]
        sizes = (size for stop in self.stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        held = max(sizes, default=0)  # guard: held-text
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """The text that waited, once nothing follows it."""
        held, self._held = self._held, ""
        return held

    def whole(self, text: str) -> str:
        """A whole text up to its end."""
        self.found = None
        return self.feed(text) + self.rest()


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
