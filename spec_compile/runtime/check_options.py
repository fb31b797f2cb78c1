"""Refusing options of ``generate()`` that no model can serve, by name and before any preparation."""

from collections.abc import Iterator
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

LONGEST = (1 << 31) - 1
"""Tokens of a text, at most."""
MOST_ROWS = 1 << 16
LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
NUMBERS = (*LENGTHS, "max_time", "top_p", "num_return_sequences", "num_beams")
TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id")


def check_options(model, options: dict[str, Any]) -> None:
    """TypeError or ValueError, naming the option, if a value is of a wrong type or beyond all bounds.

    model: its ``generation_config`` counts, too. options: the arguments of the call. transformers checks other values.
    """
    config = options.get("generation_config")
    if config is not None and not isinstance(config, GenerationConfig):
        raise TypeError(f"generation_config: expected a GenerationConfig, got {type(config).__name__}")
    for values in (options, *(vars(each) for each in (config, model.generation_config) if each is not None)):
        for name in NUMBERS:
            _check_number(name, values.get(name))
        for name in TOKENS:
            for token in _tokens(values.get(name)):
                if not isinstance(token, Number):
                    raise TypeError(f"{name}: expected token ids, got {type(token).__name__} ({token!r})")
                if abs(token) > torch.iinfo(torch.int64).max:
                    raise ValueError(f"{name}: expected token ids of 64 bits, got {token}")
        size = values.get("prefill_chunk_size")
        if size is not None and (isinstance(size, bool) or not hasattr(size, "__index__")):
            raise TypeError(f"prefill_chunk_size: expected an int, got {type(size).__name__} ({size!r})")


def _check_number(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, (Number, Tensor)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__} ({value!r})")
    most = LONGEST if name in LENGTHS else MOST_ROWS if name == "num_return_sequences" else None
    if most is not None and not value <= most:  # NaN is refused, too  # guard: longest-text
        raise ValueError(f"{name}: expected at most {most}, got {value}")


def _tokens(value: Any) -> Iterator[Any]:
    """The token ids in an option; those of tensors and arrays are numbers."""
    if isinstance(value, (list, tuple)):
        yield from value
    elif value is not None and not hasattr(value, "dtype"):
        yield value
