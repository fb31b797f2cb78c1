"""Messages between ranks as plain data: JSON with the fields of known dataclasses, and a checksum."""

import dataclasses
import enum
import functools
import json
import types
import typing
import zlib
from typing import Any

import numpy as np

MOST_BYTES = 1 << 28
"""Most bytes of a message."""


def to_json(value: Any) -> bytes:
    """Dataclasses, dicts by str, lists, tuples, str, bool, None and numbers. TypeError, naming the type, otherwise."""
    return json.dumps(value, default=_fields, separators=(",", ":")).encode()


def from_json(data: bytes, kind: Any, name: str) -> Any:
    """The value that `to_json` was given.

    kind: its type, with the types of its items; a dataclass by its fields.
    name: names the message in errors.

    ValueError that names the part which is of another type, missing or unknown, or the message if it is no JSON.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name}: it is damaged ({error})") from None
    return _read(kind, value, name)


def pack(value: Any) -> list[int]:
    """A message as integers, for `Ranks.lead`: its bytes, its checksum and its words. ValueError if it is too long."""
    data = to_json(value)
    if len(data) > MOST_BYTES:
        raise ValueError(f"a message to the other ranks takes {len(data)} bytes, more than {MOST_BYTES}")
    words = np.frombuffer(data.ljust(-(-len(data) // 8) * 8), dtype=np.int64)
    return [len(data), zlib.crc32(data), *words.tolist()]


def unpack(numbers: list[int], kind: Any, name: str) -> Any:
    """The value that `pack` was given. kind, name, errors: see `from_json`."""
    length, checksum, *words = numbers if len(numbers) > 1 else (-1, 0)
    data = np.array(words, dtype=np.int64).tobytes()[: max(length, 0)]
    if not (0 <= length <= MOST_BYTES and len(words) == -(-length // 8) and zlib.crc32(data) == checksum):
        raise ValueError(f"{name}: it is damaged (its length or checksum is wrong)")
    return from_json(data, kind, name)


def _fields(value: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        raise TypeError(f"a message to the other ranks: expected plain data, got {type(value).__name__}")
    return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}


_types = functools.cache(typing.get_type_hints)


def _read(kind: Any, value: Any, name: str) -> Any:
    """A value that JSON has given, as a `kind`."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        chosen = [each for each in inner if (each is types.NoneType) == (value is None)]
        kind = next((each for each in chosen if each is type(value)), chosen[0] if chosen else inner[0])
        return _read(kind, value, name)
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, name)
    if origin is dict and type(value) is dict:
        return {key: _read(inner[1], each, f"{name}.{key}") for key, each in value.items()}
    if origin in (list, tuple) and type(value) is list:
        if inner == (int,) and {*map(type, value)} <= {int}:  # long texts
            return value
        if origin is list or inner[1:] == (...,):
            return origin(_read(inner[0], each, f"{name}[{at}]") for at, each in enumerate(value))
        if len(value) == len(inner):
            return tuple(_read(each, item, f"{name}[{at}]") for at, (each, item) in enumerate(zip(inner, value)))
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and value in [each.value for each in kind]:
        return kind(value)
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{name}: expected {getattr(kind, '__name__', kind)}, got {type(value).__name__}")


def _read_fields(kind: type, value: Any, name: str) -> Any:
    if type(value) is not dict:
        raise ValueError(f"{name}: expected the fields of {kind.__name__}, got {type(value).__name__}")
    hints = _types(kind)
    names = [each.name for each in dataclasses.fields(kind)]
    for part in [*(each for each in value if each not in names), *(each for each in names if each not in value)]:
        raise ValueError(f"{name}.{part[:100]}: {'missing' if part in names else 'an unknown name'}; restart all ranks")
    return kind(**{each: _read(hints[each], value[each], f"{name}.{each}") for each in names})
