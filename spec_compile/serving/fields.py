"""Checks of the fields of a request's body, before anything is done for it.

transformers' server refuses fields that it does not know. A value of a wrong type would raise somewhere inside it, and
fields that it knows but does not serve would be ignored, although they change the answer.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig


@dataclass(frozen=True)
class Field:
    """What a field may be. accepts: tells it of a value. expected: says it in words."""

    accepts: Callable[[Any], bool]
    expected: str


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(low: float, high: float) -> Field:
    return Field(lambda value: _is_number(value) and low <= value <= high, f"a number from {low} to {high}")


def _is_texts(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(text, str) and text for text in texts)


def _is_biases(value: Any) -> bool:
    return isinstance(value, dict) and all(key.isdecimal() and _is_number(bias) for key, bias in value.items())


def _only(*neutral: Any) -> Field:
    """A field that would change the answer, but is not served."""
    return Field(lambda value: value in neutral, f"{json.dumps(neutral[0])}, because nothing else is served")


COUNT = Field(lambda value: _is_int(value) and value >= 1, "an int of 1 or more")
TEXT = Field(lambda value: isinstance(value, str), "a text")
OBJECT = Field(lambda value: isinstance(value, dict), "an object")
LIST = Field(lambda value: isinstance(value, list), "a list")
MESSAGES = Field(lambda value: isinstance(value, list) and len(value) > 0, "a list of at least one message")
FIELDS = {
    "model": TEXT,
    "prompt": TEXT,
    "suffix": TEXT,
    "messages": MESSAGES,
    "input": Field(
        lambda value: isinstance(value, (str, list)) and len(value) > 0, "a text, or a list that is not empty"
    ),
    "stream": Field(lambda value: isinstance(value, bool), "true or false"),
    "max_tokens": COUNT,
    "max_completion_tokens": COUNT,
    "max_output_tokens": COUNT,
    "temperature": Field(lambda value: _is_number(value) and value >= 0, "a number of 0 or more"),
    "top_p": Field(lambda value: _is_number(value) and 0 < value <= 1, "a number above 0, at most 1"),
    "frequency_penalty": _number(-2, 2),
    "seed": Field(_is_int, "an int"),
    "stop": Field(_is_texts, "a text, or a list of texts, none of them empty"),
    "logit_bias": Field(_is_biases, "an object of token ids and numbers"),
    "generation_config": TEXT,
    "chat_template_kwargs": OBJECT,
    "tools": LIST,
    "n": _only(1),
    "best_of": _only(1),
    "echo": _only(False),
    "logprobs": _only(False),
    "top_logprobs": _only(0),
    "presence_penalty": _only(0),
    "response_format": _only({"type": "text"}),
}
"""The fields whose values are checked. Others are left to transformers' server."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def check_fields(body: dict, required: str) -> None:
    """Raise ValueError, which names the field, if a body cannot be served.

    body: decoded JSON. required: the field that has the prompt. A field that is null counts as not given.
    """
    if body.get(required) is None:
        raise ValueError(f"{required}: expected {FIELDS[required].expected}; the request has none")
    for name, value in body.items():
        field = FIELDS.get(name)
        if field is not None and value is not None and not field.accepts(value):
            raise ValueError(f"{name}: expected {field.expected}, got {json.dumps(value)[:80]}")
    if body.get("generation_config") is not None:
        generation_config(body["generation_config"])


def generation_config(text: str) -> dict:
    """The object in the field `generation_config`, which is JSON. ValueError if it is none or has an unknown key."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"generation_config: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"generation_config: expected a JSON object, got {text[:80]}")
    unknown = sorted(set(values) - set(GenerationConfig().to_dict()))
    if unknown:
        raise ValueError(f"generation_config: unknown: {', '.join(unknown)}")
    return values


def has_own_limit(body: dict) -> bool:
    """Whether a body says how many tokens it wants."""
    config = generation_config(body["generation_config"]) if body.get("generation_config") is not None else {}
    return any(body.get(name) is not None for name in LIMITS) or config.get("max_new_tokens") is not None
