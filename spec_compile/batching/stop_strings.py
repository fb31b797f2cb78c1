"""Stop strings of requests: transformers' rule, without its tables for every new string.

transformers' criterion compares every token of the vocabulary with every stop string before it starts, which takes a
second for one string of a large vocabulary. Here the texts of tokens are read once for a tokenizer.
"""

import inspect
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.stopping_criteria import StopStringCriteria

LONGEST, MOST = 1024, 64
"""Characters of a stop string, and stop strings of a request, at most."""

Text = str | bytes
_texts: "WeakKeyDictionary[Any, tuple[str | None, dict[int, Text]]]" = WeakKeyDictionary()
_lock = threading.Lock()


class StopStrings(StoppingCriteria):
    """Ends a row whose text contains a stop string that ends in the row's last token.

    The text of a row is that of its tokens one after the other, the prompt's included. For the tokens "re", "turn",
    "s " and the stop string "turn", a row ends at its second token, and for "returns" at its third.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        mode, self._texts = token_texts(tokenizer)
        self._stops = [stop if mode is None else stop.encode() for stop in stops]
        self._longest = max(map(len, self._stops))
        self._empty = self._stops[0][:0]

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Whether each row [B] of `input_ids` [B, W] ends."""
        return torch.tensor([self._ends(row) for row in input_ids[:, -self._longest :].tolist()])

    def _ends(self, tokens: list[int]) -> bool:
        texts = [self._texts.get(token, self._empty) for token in tokens]
        text, last = self._empty.join(texts), len(texts[-1])
        before = len(text) - last
        return any(text.find(stop, max(0, before - len(stop) + 1)) >= 0 for stop in self._stops) if last else False


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


def token_texts(tokenizer: Any) -> tuple[str | None, dict[int, Text]]:
    """How transformers matches stop strings (a mode of its own, or None), and the text of each token, by id."""
    with _lock:
        if tokenizer not in _texts:
            find_mode = getattr(StopStringCriteria, "_get_stop_string_matching_mode", lambda tokenizer: None)
            mode, clean = find_mode(tokenizer), StopStringCriteria.clean_tokenizer_vocab
            has_modes = "stop_string_matching_mode" in inspect.signature(clean).parameters
            texts, ids = clean(tokenizer, stop_string_matching_mode=mode) if has_modes else clean(tokenizer)
            _texts[tokenizer] = mode, dict(zip(ids, texts))
        return _texts[tokenizer]
