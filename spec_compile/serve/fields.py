"""The fields of a request's body: fields that are served, and fields of OpenAI's that only a neutral value may have.

Nothing that a client sends is dropped: a request with a field that is not in its endpoint's table is refused.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..batching.output import MOST_TOP
from ..errors import did_you_mean
from .errors import Refusal, refuse, shown

MOST_STOPS, LONGEST_STOP = 16, 256
"""Stop strings of a request, and characters of each."""
MOST_BIASES = 1024
"""Entries of `logit_bias`."""
MOST_ENDS = 1024
"""Entries of `stop_token_ids`."""
MOST_CHOICES, MOST_PROMPTS = 128, 1024
"""Answers to one prompt, and prompts of one request."""
LONGEST_SALT = 256
"""Characters of `cache_salt`."""
COLDEST, HOTTEST = 1e-5, 1e5
"""Temperatures above 0 by which logits can be divided in float32."""


@dataclass(frozen=True)
class Field:
    """The values that a field may have.

    accepts: returns True for such a value
    expected: describes them
    """

    accepts: Callable[[Any], bool]
    expected: str

    def check(self, name: str, value: Any) -> None:
        """Refuse a value that the field `name` may not have."""
        if not self.accepts(value):
            raise refuse(name, f"expected {self.expected}, got {shown(value)}")


def is_number(value: Any) -> bool:
    """True for a finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return isinstance(value, int) or math.isfinite(value)


def number(low: float, high: float) -> Field:
    """Numbers from `low` to `high`."""
    return Field(lambda value: is_number(value) and low <= value <= high, f"a number from {low:g} to {high:g}")


def integer(low: int, high: int = (1 << 63) - 1) -> Field:
    """Ints from `low` to `high`."""
    words = f"an int of {low} or more" if high == (1 << 63) - 1 else f"an int from {low} to {high}"
    return Field(lambda value: type(value) is int and low <= value <= high, words)


def only(*neutral: Any) -> Field:
    """A field that is not served: only values that change nothing."""
    words = " or ".join(shown(value) for value in neutral) or "no value"
    accepts = [(type(value), value) for value in neutral]
    return Field(lambda value: (type(value), value) in accepts, f"{words}, because nothing else is served")


def _is_stops(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    if not 0 < len(texts) <= MOST_STOPS:
        return False
    return all(isinstance(text, str) and 0 < len(text) <= LONGEST_STOP for text in texts)


def _is_biases(value: Any) -> bool:
    if not isinstance(value, dict) or len(value) > MOST_BIASES:
        return False
    ids = all(key.isascii() and key.isdecimal() and key == str(int(key[:20])) for key in value)
    return ids and all(is_number(bias) and -100 <= bias <= 100 for bias in value.values())


def _is_choice(value: Any) -> bool:
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        allowed = value.get("allowed_tools", {name: value[name] for name in value if name != "type"})
        is_whole = "allowed_tools" not in value or value.keys() == {"type", "allowed_tools"}
        return is_whole and isinstance(allowed, dict) and _are_allowed(allowed)
    return _names_tool(value) or (isinstance(value, str) and value in ("none", "auto", "required"))


def _are_allowed(allowed: dict) -> bool:
    tools = allowed.get("tools")
    is_list = isinstance(tools, list) and len(tools) > 0 and all(map(_names_tool, tools))
    return is_list and allowed.keys() == {"mode", "tools"} and allowed["mode"] in ("auto", "required")


def _names_tool(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    named = value.get("function", value)
    names = {"type", "function"} if named is not value else {"type", "name"}
    has_name = isinstance(named, dict) and isinstance(named.get("name"), str)
    return has_name and value.keys() == names and value["type"] == "function" and named.keys() <= {"type", "name"}


def _is_ends(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MOST_ENDS and all(map(ID.accepts, value))


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(map(ID.accepts, value))


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str) or _are_ids(value):
        return True
    if not isinstance(value, list) or not 0 < len(value) <= MOST_PROMPTS:
        return False
    return all(isinstance(each, str) for each in value) or all(map(_are_ids, value))


def list_prompts(prompt: str | list) -> list:
    """The prompts in the field `prompt`, which is checked: texts and lists of token ids."""
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    return [prompt] if is_one else prompt


def object_of(**fields: Field) -> Callable[[Any], bool]:
    """A function that returns True for an object with no other names than these; null counts as not given."""

    def accepts(value: Any) -> bool:
        return isinstance(value, dict) and all(
            name in fields and (each is None or fields[name].accepts(each)) for name, each in value.items()
        )

    return accepts


_is_own_limit = object_of(num_draft_tokens=integer(1))
ANY = Field(lambda value: True, "a value")
CHOICES = integer(1, MOST_CHOICES)
PROMPTS = Field(
    _is_prompt, f"a text, a list of token ids, or a list of at most {MOST_PROMPTS} texts or lists of token ids"
)
COUNT = integer(1)
SIZE = ID = integer(0, (1 << 31) - 1)
SHARE = Field(lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1")
POSITIVE = Field(lambda value: is_number(value) and 1e-5 <= value <= 1e5, "a number from 1e-05 to 100000")
FRACTION = Field(lambda value: is_number(value) and 0 < value <= 1, "a number above 0, at most 1")
TEXT = Field(lambda value: isinstance(value, str), "a text")
FLAG = Field(lambda value: isinstance(value, bool), "true or false")
OBJECT = Field(lambda value: isinstance(value, dict), "an object")
LIST = Field(lambda value: isinstance(value, list), "a list")
MESSAGES = Field(lambda value: isinstance(value, list) and len(value) > 0, "a list of at least one message")
PLAIN = Field(object_of(type=only("text")), '{"type": "text"}, because nothing else is served')
SAMPLING = {
    "model": TEXT,
    "stream": FLAG,
    "temperature": Field(
        lambda value: is_number(value) and (value == 0 or COLDEST <= value <= HOTTEST),
        f"0, or a number from {COLDEST:g} to {HOTTEST:g}",
    ),
    "top_p": FRACTION,
    "seed": integer(-(1 << 63), (1 << 64) - 1),
    "generation_config": Field(lambda value: isinstance(value, str), "a text that is a JSON object"),
    "speculation": Field(
        lambda value: value is False or _is_own_limit(value),
        'false, or an object {"num_draft_tokens": n} with n of 1 or more',
    ),
    "cache_salt": Field(
        lambda value: isinstance(value, str) and 0 < len(value) <= LONGEST_SALT, "a text of 1 to 256 characters"
    ),
}
"""The fields of all endpoints: what changes the answer, and `cache_salt`."""
PENALTIES = {
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "stop": Field(
        _is_stops, f"a text, or a list of at most {MOST_STOPS} texts, of 1 to {LONGEST_STOP} characters each"
    ),
    "logit_bias": Field(
        _is_biases, f"an object of at most {MOST_BIASES} token ids, each with a number from -100 to 100"
    ),
    "max_tokens": COUNT,
}
VLLM = {
    "repetition_penalty": POSITIVE,
    "min_p": SHARE,
    "top_k": integer(-1, (1 << 31) - 1),
    "stop_token_ids": Field(_is_ends, f"a list of at most {MOST_ENDS} token ids"),
    "bad_words": only([]),
    "include_stop_str_in_output": FLAG,
    "ignore_eos": FLAG,
    "min_tokens": SIZE,
    "thinking_token_budget": SIZE,
    "structured_outputs": OBJECT,
    "guided_json": Field(lambda value: isinstance(value, (str, dict)), "a JSON schema, an object or its text"),
    "guided_regex": TEXT,
    "guided_choice": LIST,
    "guided_grammar": TEXT,
}
"""Fields of vLLM's that its clients send to the endpoints of completions and chats."""
TEMPLATE = {
    "tools": LIST,
    "tool_choice": Field(
        _is_choice,
        'none, auto, required, {"type": "function", "function": {"name": ...}}, or {"type": "allowed_tools", '
        '"allowed_tools": {"mode": "auto" or "required", "tools": [...]}}',
    ),
    "parallel_tool_calls": FLAG,
    "chat_template_kwargs": OBJECT,
}
"""The fields of endpoints with a chat template."""
WITHOUT_EFFECT = {
    "user": TEXT,
    "metadata": OBJECT,
    "store": FLAG,
    "service_tier": TEXT,
    "safety_identifier": TEXT,
    "prompt_cache_key": TEXT,
    "prompt_cache_retention": TEXT,
    "prompt_cache_options": OBJECT,
}
"""Fields of OpenAI's that are accepted, because they cannot change an answer."""
STREAM_OPTIONS = Field(
    object_of(include_usage=FLAG, include_obfuscation=only(False), continuous_usage_stats=only(False)),
    "an object with include_usage and nothing else",
)
COMPLETION = SAMPLING | PENALTIES | VLLM | {
    "prompt": PROMPTS,
    "suffix": TEXT,
    "prediction": OBJECT,
    "n": CHOICES,
    "best_of": CHOICES,
    "echo": FLAG,
    "max_tokens": Field(SIZE.accepts, "an int of 1 or more, or 0 with echo"),
    "logprobs": integer(0, MOST_TOP),
    "stream_options": STREAM_OPTIONS,
    "user": TEXT,
}  # fmt: skip
CHAT = SAMPLING | PENALTIES | VLLM | TEMPLATE | WITHOUT_EFFECT | {
    "messages": MESSAGES,
    "max_completion_tokens": COUNT,
    "prediction": OBJECT,
    "n": CHOICES,
    "logprobs": FLAG,
    "top_logprobs": integer(0, MOST_TOP),
    "response_format": OBJECT,
    "modalities": only(["text"]),
    "functions": only([]),
    "function_call": only("none", "auto"),
    "verbosity": only("medium"),
    "stream_options": STREAM_OPTIONS,
} | dict.fromkeys(("audio", "moderation", "reasoning_effort", "web_search_options"), only())  # fmt: skip
RESPONSE = SAMPLING | TEMPLATE | WITHOUT_EFFECT | {
    "input": Field(lambda value: isinstance(value, (str, list)) and len(value) > 0, "a text or a list, not empty"),
    "instructions": TEXT,
    "max_output_tokens": COUNT,
    "background": only(False),
    "include": only([]),
    "reasoning": Field(
        object_of(effort=only(), summary=only(), generate_summary=only()),
        "an object without effort and summary, because nothing else is served",
    ),
    "text": Field(
        object_of(format=PLAIN, verbosity=only("medium")),
        '{"format": {"type": "text"}}, because nothing else is served',
    ),
    "top_logprobs": only(0),
    "truncation": only("disabled"),
    "stream_options": Field(object_of(include_obfuscation=only(False)), "an object without include_obfuscation"),
} | dict.fromkeys(
    ("access_programs", "background_options", "context_management", "conversation", "image", "max_tool_calls",
     "moderation", "previous_response_id", "prompt"), only()
)  # fmt: skip
EMPTY: dict[str, tuple] = {
    "stop": ("", []), "logit_bias": ({},), "stream_options": ({},), "instructions": ("",),
    "context_management": ([], {}), "mcp_servers": ([],),
}  # fmt: skip
"""Values of fields that count as not given, as in the public APIs. Other empty values have no effect in any case."""
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
"""The fields with the number of tokens that the client wants; a request has one of them at most."""


def check_object(value: Any, fields: dict[str, Field], required: Iterable[str] = (), path: str = "") -> dict:
    """An object without its nulls. Refusal if it is no object, lacks a required name, or has an unknown one.

    path: to the object, empty for the body
    """
    OBJECT.check(path, value)
    prefix = f"{path}." if path else ""
    values = {name: each for name, each in value.items() if each is not None}
    for name in values:
        if name not in fields:
            raise refuse(f"{prefix}{name[:80]}", "it is not served; leave it out")
    for name in required:
        if name not in values:
            raise refuse(f"{prefix}{name}", f"expected {fields[name].expected}; there is none")
    for name, each in values.items():
        fields[name].check(f"{prefix}{name}", each)
    return values


def check_fields(body: dict, fields: dict[str, Field], required: str) -> dict:
    """The fields of a body without its nulls. Refusal that names the field if the body cannot be served.

    body: decoded JSON
    fields: all that the endpoint knows
    required: name of the field with the prompt
    """
    for name in body:
        if name not in fields:
            near = did_you_mean(name[:80], fields)
            raise Refusal(422, f"{name[:80]}: there is no such field.{near}", name[:80])
    given = {name: value for name, value in body.items() if value not in EMPTY.get(name, ())}
    values = check_object(given, fields, (required,))
    if "stream_options" in values and not values.get("stream"):
        raise refuse("stream_options", "only a stream has them; leave them out, or send stream: true")
    limits = present(LIMITS, values)
    if len({values[name] for name in limits}) > 1:
        raise refuse(limits[0], f"{' and '.join(limits)} differ; give one of them")
    return values


def present(names: Iterable[str], values: dict) -> list[str]:
    """The names that are among the values."""
    return [name for name in names if name in values]
