"""Fields of requests: the base of their pydantic models, and the values of single fields.

A known field with a bad value is refused by its name. A field that would change the answer and that is not served may
only have a value that changes nothing. Names that nobody knows here are ignored, with one line of the log each.
"""

import json
import math
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, ClassVar

from pydantic import BaseModel, Field, ValidationError, ValidationInfo, WrapValidator, create_model, model_validator
from pydantic_core import PydanticCustomError, core_schema

from ..errors import did_you_mean, log
from .errors import refuse, shown

MOST_STOPS, LONGEST_STOP = 16, 256
"""Stop strings of a request, and characters of each."""
MOST_BIASES = 1024
"""Entries of `logit_bias`."""
MOST_ENDS = 1024
"""Entries of `stop_token_ids`."""
MOST_CHOICES, MOST_PROMPTS = 128, 1024
"""Answers to one prompt, and prompts of one request."""
MOST_WORDS = 64
"""Entries of `bad_words`, each of which costs time in every step."""
LOGPROBS = "message.output_text.logprobs"
"""This value of `include` is not served. Its other values are about tools of OpenAI's servers, and have no effect."""
LONGEST_SALT = 256
"""Characters of `cache_salt`."""
COLDEST, HOTTEST = 1e-5, 1e5
"""Temperatures above 0 by which logits can be divided in float32."""
MOST_NOTED = 256
"""Things without effect that the log tells. Clients choose them, so there is a bound."""
NOTED: set[str] = set()
"""Things that the log has told."""


class Kind:
    """The values that a field may have, which is the annotation of the field in a model.

    accepts: returns True for such a value
    expected: describes them
    """

    def __init__(self, accepts: Callable[[Any], bool], expected: str):
        self.accepts, self.expected = accepts, expected

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._validated)

    def _validated(self, value: Any) -> Any:
        if not self.accepts(value):
            raise expected(self.expected)
        return value


def expected(words: str) -> PydanticCustomError:
    """The error of a validator for another value than these words describe."""
    return PydanticCustomError("expected", "{words}", {"words": words})


def wrong(field: str, reason: str) -> PydanticCustomError:
    """The error of a model about one of its fields, or a path within the model."""
    return PydanticCustomError("wrong", "{reason}", {"field": field, "reason": reason})


class Fields(BaseModel):
    """A model of an object in JSON. Validation gives the plain object without nulls and unknown names, in its order.

    needed: names that it must have
    by_type: by the value of `type`, further names that it must have
    empty: by name, values that count as not given
    hosted: what such objects are, and the types of those that only OpenAI's or Anthropic's own servers can serve: of
        these only the type is given, and the log tells it once
    """

    needed: ClassVar[tuple[str, ...]] = ()
    by_type: ClassVar[dict[str, tuple[str, ...]]] = {}
    empty: ClassVar[dict[str, tuple]] = {}
    hosted: ClassVar[tuple[str, re.Pattern] | None] = None

    @model_validator(mode="wrap")
    @classmethod
    def _plain(cls, value: Any, handler: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            raise expected("an object")
        kind = value.get("type")
        if cls.hosted is not None and isinstance(kind, str) and cls.hosted[1].fullmatch(kind):  # guard: hosted-tools
            note_ignored(f"{cls.hosted[0]} of the type {kind}", "which have no effect, because no client runs them")
            return {"type": kind}
        names, given = attributes(cls), {}
        for name, each in value.items():
            if name not in names:
                note_unknown(name, names)
            elif each is not None and each not in cls.empty.get(name, ()):
                given[name] = each
        for name in cls.needed:
            cls.need(given, name)
        made = handler(given)
        values = {name: getattr(made, names[name]) for name in given}
        for name in cls.by_type.get(values["type"], ()) if cls.by_type else ():
            cls.need(values, name)
        cls._check_all(values, info.context or {})
        return values

    @classmethod
    def need(cls, values: dict, name: str) -> None:
        """Refuse an object without this name."""
        if name not in values:
            kind = cls.model_fields[attributes(cls)[name]].annotation
            words = kind.expected if isinstance(kind, Kind) else "a value"
            raise wrong(name, f"expected {words}; there is none")

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        """Refuse fields that do not go together. context: of `check_fields`."""


def record(*needed: str, **kinds: Any) -> type[Fields]:
    """A model of an object with these fields. needed: names that it must have"""
    # A model's own methods, such as `json`, keep their names.
    named = {f"{name}_" if hasattr(BaseModel, name) else name: name for name in kinds}
    fields: dict[str, Any] = {own: (kinds[name], Field(None, alias=name)) for own, name in named.items()}
    model = create_model("Record", __base__=Fields, **fields)
    model.needed = needed
    return model


@cache
def attributes(fields: type[Fields]) -> dict[str, str]:
    """The attribute of a model for each name in JSON."""
    return {each.alias or name: name for name, each in fields.model_fields.items()}


def note_unknown(name: str, known: Iterable[str]) -> None:
    """Tell the log of the name of a field that is ignored, once."""
    name = name[:80]
    what = f"a field {name!a}"
    if len(NOTED) < MOST_NOTED and what not in NOTED:  # the search for a name like it takes time
        note_ignored(what, f"which is ignored.{did_you_mean(name, known)}")


def note_ignored(what: str, reason: str) -> None:
    """Tell the log of something in requests that has no effect, once."""
    if what not in NOTED and len(NOTED) < MOST_NOTED:
        NOTED.add(what)
        log.warning("requests have %s, %s", what, reason)


def check_fields(fields: type[Fields], body: Any, **context: Any) -> dict:
    """The fields of a body without nulls and unknown names. Refusal that names a field with a bad value.

    body: decoded JSON
    context: what decides about some values, such as pictures=True for a model that reads pictures
    """
    try:
        return fields.model_validate(body, context=context)  # type: ignore[return-value]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    path = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"])
    if first["type"] == "wrong":
        path, reason = f"{path}.{first['ctx']['field']}", first["msg"]
    else:
        words = {"expected": first["msg"], "list_type": "a list"}.get(first["type"], "another value")
        reason = f"expected {words}, got {shown(first['input'])}"
    raise refuse(path.removeprefix("."), reason)


def present(names: Iterable[str], values: dict) -> list[str]:
    """The names that are among the values."""
    return [name for name in names if name in values]


# Values of single fields.


def is_number(value: Any) -> bool:
    """True for a finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return isinstance(value, int) or math.isfinite(value)


def number(low: float, high: float) -> Kind:
    """Numbers from `low` to `high`."""
    return Kind(lambda value: is_number(value) and low <= value <= high, f"a number from {low:g} to {high:g}")


def integer(low: int, high: int = (1 << 63) - 1) -> Kind:
    """Ints from `low` to `high`."""
    words = f"an int of {low} or more" if high == (1 << 63) - 1 else f"an int from {low} to {high}"
    return Kind(lambda value: type(value) is int and low <= value <= high, words)


def only(*neutral: Any) -> Kind:
    """A field that is not served: only values that change nothing."""
    words = " or ".join(shown(value) for value in neutral) or "no value"
    accepts = [(type(value), value) for value in neutral]
    return Kind(lambda value: (type(value), value) in accepts, f"{words}, because nothing else is served")


def one_of(*words: str) -> Kind:
    """One of these texts."""
    return Kind(lambda value: isinstance(value, str) and value in words, f"{', '.join(words[:-1])} or {words[-1]}")


def is_list(value: Any, accepts: Callable[[Any], bool], most: float = math.inf, least: int = 1) -> bool:
    """True for a list of `least` to `most` entries, each of which is accepted."""
    return isinstance(value, list) and least <= len(value) <= most and all(map(accepts, value))


def text(longest: int) -> Kind:
    """Texts of 1 to `longest` characters."""
    return Kind(lambda value: TEXT.accepts(value) and 0 < len(value) <= longest, f"a text of 1 to {longest} characters")


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
    are_named = is_list(allowed.get("tools"), _names_tool)
    return are_named and allowed.keys() == {"mode", "tools"} and allowed["mode"] in ("auto", "required")


def _names_tool(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("type") not in ("function", "custom"):
        return False
    kind = value["type"]
    named = value.get(kind, value)
    has_name = isinstance(named, dict) and isinstance(named.get("name"), str)
    names = {"type", kind} if named is not value else {"type", "name"}
    return has_name and value.keys() == names and named.keys() <= {"type", "name"}


def _are_ids(value: Any) -> bool:
    return is_list(value, ID.accepts)


def _is_prompt(value: Any) -> bool:
    is_one = TEXT.accepts(value) or _are_ids(value)
    return is_one or any(is_list(value, accepts, MOST_PROMPTS) for accepts in (TEXT.accepts, _are_ids))


def read_object(text: str) -> dict | None:
    """The object that a text is in JSON, or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_json_object(value: Any) -> bool:
    """True for an object, or the JSON of one."""
    return isinstance(value, dict) or (isinstance(value, str) and read_object(value) is not None)


ANY = Kind(lambda value: True, "a value")
COUNT = integer(1)
SIZE = ID = integer(0, (1 << 31) - 1)
SHARE = number(0, 1)
POSITIVE = number(1e-5, 1e5)
FRACTION = Kind(lambda value: is_number(value) and 0 < value <= 1, "a number above 0, at most 1")
TEXT = Kind(lambda value: isinstance(value, str), "a text")
FLAG = Kind(lambda value: isinstance(value, bool), "true or false")
OBJECT = Kind(lambda value: isinstance(value, dict), "an object")
LIST = Kind(lambda value: isinstance(value, list), "a list")
STOP = text(LONGEST_STOP)
STOPS = Kind(
    lambda value: STOP.accepts(value) or is_list(value, STOP.accepts, MOST_STOPS),
    f"a text, or a list of at most {MOST_STOPS} texts, of 1 to {LONGEST_STOP} characters each",
)
TEMPERATURE = Kind(
    lambda value: is_number(value) and (value == 0 or COLDEST <= value <= HOTTEST),
    f"0, or a number from {COLDEST:g} to {HOTTEST:g}",
)
SPECULATION = Kind(
    lambda value: (
        value is False
        or (
            isinstance(value, dict) and value.keys() <= {"num_draft_tokens"} and all(map(COUNT.accepts, value.values()))
        )
    ),
    'false, or an object {"num_draft_tokens": n} with n of 1 or more',
)
SALT = text(LONGEST_SALT)
BIASES = Kind(_is_biases, f"an object of at most {MOST_BIASES} token ids, each with a number from -100 to 100")
ENDS = Kind(lambda value: is_list(value, ID.accepts, MOST_ENDS, 0), f"a list of at most {MOST_ENDS} token ids")
IDS = Kind(_are_ids, "a list of token ids, not empty")
LENGTH = Kind(lambda value: value == -1 or COUNT.accepts(value), "an int of 1 or more, or -1 for all that fit")
WORDS = Kind(
    lambda value: is_list(value, lambda word: TEXT.accepts(word) and STOP.accepts(word.strip()), MOST_WORDS, 0),
    f"a list of at most {MOST_WORDS} texts of 1 to {LONGEST_STOP} characters",
)
EFFORT = one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")
VERBOSITY, SUMMARY = one_of("low", "medium", "high"), one_of("auto", "concise", "detailed")
INCLUDED = Kind(
    lambda value: is_list(value, lambda each: TEXT.accepts(each) and each != LOGPROBS, least=0),
    f"a list of texts without {LOGPROBS}, which is not served",
)
SCHEMA = Kind(lambda value: isinstance(value, (str, dict)), "a JSON schema, an object or its text")
CHOICE = Kind(
    _is_choice,
    'none, auto, required, {"type": "function", "function": {"name": ...}}, or {"type": "allowed_tools", '
    '"allowed_tools": {"mode": "auto" or "required", "tools": [...]}}',
)
PROMPTS = Kind(
    _is_prompt, f"a text, a list of token ids, or a list of at most {MOST_PROMPTS} texts or lists of token ids"
)


def text_or(words: str, is_empty_served: bool = True, is_text_served: bool = True) -> WrapValidator:
    """Lets a text through, and validates lists. words: describe the values"""

    def read(value: Any, handler: Any) -> Any:
        is_text = isinstance(value, str) and is_text_served
        if not (is_text or isinstance(value, list)) or not (value or is_empty_served):
            raise expected(words)
        return value if is_text else handler(value)

    return WrapValidator(read)


SOME_MESSAGES = text_or("a list of at least one message", is_empty_served=False, is_text_served=False)
