"""A request's options are checked before anything is prepared or allocated for it; its stop strings."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria
from transformers.generation.stopping_criteria import StopStringCriteria

from ..errors import check_int, did_you_mean

COUNTS = {
    "max_new_tokens", "min_new_tokens", "max_length", "min_length", "top_k", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "num_beams", "prefill_chunk_size",
}  # fmt: skip
"""Options that are numbers of something."""
LARGEST = 1 << 31
MOST_NUMBERS = 4096
"""Numbers that the lists of all options may hold together: preparing more would keep other requests waiting."""
MOST_SEQUENCES = 1024
LONGEST_NGRAM = 64
"""Tokens of an n-gram that may not repeat: transformers lists all of a text in every step."""
LONGEST, MOST = 1024, 64
"""Characters of a stop string, and stop strings of a request, at most."""
PREFIX = "abcdef"
"""A text before a token, because some tokenizers decode the first token of a text otherwise."""


def check_config(name: str, config: Any) -> None:
    """TypeError unless `config` is a GenerationConfig."""
    if not isinstance(config, GenerationConfig):
        raise TypeError(f"{name}: expected a GenerationConfig, got {type(config).__name__}")


def check_known(options: dict[str, Any], known: set[str]) -> None:
    """TypeError, with the nearest known name, if an option is not known."""
    for name in options:
        if name not in known:
            raise TypeError(f"unknown option {name!r} of a request.{did_you_mean(name, sorted(known))}")


def check_values(values: dict[str, Any]) -> None:
    """TypeError or ValueError, naming the option, if a value can be served by no model.

    values: all fields of a GenerationConfig. transformers checks what is not checked here.
    """
    for name in COUNTS:
        if values.get(name) is not None:
            check_int(name, values[name], 0, LARGEST)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}: expected a finite number, got {value}")
    sizes = {name: _numbers(value) for name, value in values.items() if isinstance(value, (list, tuple, dict))}
    if sum(sizes.values()) > MOST_NUMBERS:  # guard: long-lists
        name = max(sizes, key=lambda name: sizes[name])
        raise ValueError(f"{name}: a request's lists hold at most {MOST_NUMBERS} numbers, got {sizes[name]}")


def bound_ngrams(config: GenerationConfig, prompt: int, room: int) -> None:
    """Take away n-gram sizes that no text reaches, before transformers lists as many; ValueError, naming the option,
    for others above `LONGEST_NGRAM`.

    prompt: tokens of it. room: tokens of a row
    """
    for name, longest in (("no_repeat_ngram_size", room), ("encoder_no_repeat_ngram_size", prompt)):
        size = getattr(config, name, None) or 0
        if size > longest:
            setattr(config, name, 0)
        elif size > LONGEST_NGRAM:
            raise ValueError(f"{name}: expected at most {LONGEST_NGRAM} in a request, got {size}")


def check_watermark(config: Any) -> None:
    """ValueError for a watermark that would keep other requests waiting. config: an object, a dict or None"""
    values = config if isinstance(config, dict) else vars(config) if config is not None else {}
    if values.get("seeding_scheme") == "selfhash":
        raise ValueError(
            "watermarking_config.seeding_scheme: selfhash mixes the vocabulary 41 times for a token, which only "
            "generate() does; expected lefthash"
        )


def find_culprit(config: GenerationConfig, prepare: Callable[[GenerationConfig], Any]) -> str:
    """The name of the first option of `config` that `prepare` fails with if it has no others."""
    defaults = vars(GenerationConfig())
    for name, value in vars(config).items():
        if not name.startswith("_") and value != defaults.get(name):
            try:
                only = GenerationConfig()
                setattr(only, name, value)
                prepare(only)
            except Exception:
                return name
    return "generation_config"


def read_sequences(*choices: Any) -> int:
    """The first of `num_return_sequences` that is given, or 1; TypeError or ValueError if it is no number of rows."""
    count = next((choice for choice in choices if choice is not None), 1)
    check_int("num_return_sequences", count, 1, MOST_SEQUENCES)
    return count


def _numbers(value: Any) -> int:
    """How many values a nest of lists, tuples and dictionaries holds; it is not counted far beyond the bound."""
    nests, count = [value], 0
    while nests and count <= MOST_NUMBERS:
        nest = nests.pop()
        items = [*nest.keys(), *nest.values()] if isinstance(nest, dict) else nest
        if len(items) > MOST_NUMBERS:
            return len(items)
        nests += (inner := [item for item in items if isinstance(item, (list, tuple, dict))])
        count += len(items) - len(inner)
    return count


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

    transformers' criterion compares every token of the vocabulary with every stop string before it starts, which takes
    a second for one string of a large vocabulary. Here the bytes of a token are found when it is first seen.

    The text of a row is the text of its tokens one after the other, the prompt's included. For the tokens "re", "turn",
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
