"""The body of a request: read up to a bound, and decoded as strict JSON."""

import json
import re
from typing import Any

from fastapi import Request

from .errors import Refusal

DEEPEST = 64
"""Lists and objects of a body that may lie in each other."""
MOST_DRAINED = 64 << 20
"""Bytes of a body that are read at most before it is refused as too large, so that its client reads the reason."""
REQUEST_ID = re.compile(r"[!-~]{0,256}")
"""The header X-Request-Id, which every chunk of an answer repeats."""


async def read_body(request: Request, most: int) -> bytes:
    """The bytes of a body. Refusal with status 415 if its type is not JSON, 413 if it has more than `most` bytes.

    Refusal with status 400 for a bad X-Request-Id.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= most:
            parts.append(part)
        else:
            parts.clear()
            if size > MOST_DRAINED:
                break
    if not re.fullmatch(r"application/(.*\+)?json", media_type):
        raise Refusal(415, f"Content-Type: expected application/json, got {media_type[:80] or 'none'}")
    if size > most:
        raise Refusal(413, f"the body has more than {most} bytes, which this server does not read; send less")
    if not REQUEST_ID.fullmatch(request.headers.get("x-request-id", "")):
        raise Refusal(400, "X-Request-Id: expected at most 256 visible ASCII characters; send another, or none")
    return b"".join(parts)


def decode_body(data: bytes, most_containers: int) -> dict:
    """The object that a body is. Refusal with status 422 if it is not one.

    most_containers: lists and objects that it may have. The decoder stops all threads while it makes them, so brackets
    are counted before, including brackets within texts.

    An object with a name twice is refused, and so are NaN, Infinity, text that is not Unicode, and nesting deeper than
    `DEEPEST`.
    """
    containers = data.count(b"[") + data.count(b"{")
    if containers > most_containers:
        raise Refusal(413, f"the body has {containers} brackets; this server reads at most {most_containers}")
    try:
        text = data.decode()
        body = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError as error:
        raise Refusal(422, f"body: expected at most {DEEPEST} lists and objects in each other, got more") from error
    except UnicodeDecodeError as error:
        raise Refusal(422, f"body: not UTF-8: {error.reason} at byte {error.start}") from error
    except ValueError as error:
        raise Refusal(422, f"body: not JSON: {error}") from error
    if not isinstance(body, dict):
        raise Refusal(422, f"body: expected a JSON object, got {type(body).__name__}")
    if containers > DEEPEST and is_too_deep(body):
        raise Refusal(422, f"body: expected at most {DEEPEST} lists and objects in each other, got more")
    if b"\\ud" in data or b"\\uD" in data:
        _check_text(body)
    return body


def _object(pairs: list[tuple[str, Any]]) -> dict:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice[:80]!r} is there twice in an object")
    return values


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def is_too_deep(body: dict) -> bool:
    """True if more than `DEEPEST` lists and objects lie in each other."""
    level: list[Any] = [body]
    for _ in range(DEEPEST):
        containers = [each for each in level if isinstance(each, (dict, list))]
        level = [value for each in containers for value in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return False
    return True


def _check_text(body: dict) -> None:
    """Refuse halves of surrogate pairs, which no tokenizer takes."""
    for name, value in body.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            field = name.encode(errors="replace").decode()[:80]
            raise Refusal(400, f"{field}: expected Unicode text, got a half of a surrogate pair", field) from error
