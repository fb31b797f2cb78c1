"""Checks of a request's options, before anything is prepared or allocated for it."""

import math
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig

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
