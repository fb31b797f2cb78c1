"""The body of a request: read up to a bound, and decoded as strict JSON."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from .call import CURRENT, REQUEST_ID, HttpCall
from .errors import Refusal

DEEPEST = 64
"""Lists and objects of a body that may lie in each other."""
SECONDS, LEAST_RATE = 10.0, 1 << 14
"""A body must come within these seconds, and one more for every `LEAST_RATE` bytes of it."""
MOST_IN_FLIGHT = 256 << 20
"""Bytes of all bodies together until their prompts are made, unless four of the largest have more."""
TOO_LARGE = "the body has more than {} bytes, which this server does not read; send less"
NO_ROOM = "the server reads too many bytes of bodies; try again later"


class Bodies:
    """The bodies of requests that are read or prepared: each has a time in which it must come, all together a size."""

    def __init__(self, most: int, seconds: float = SECONDS):
        """most: bytes of one. seconds: see `SECONDS`."""
        self.most, self.seconds = max(MOST_IN_FLIGHT, 4 * most), seconds
        self._sizes: dict[HttpCall, int] = {}
        self._timers: dict[HttpCall, asyncio.Timeout] = {}  # of those that are still read, the oldest first

    @asynccontextmanager
    async def reading(self, request: Request, most: int) -> AsyncIterator[bytes]:
        """The bytes of a body, which count until `drop`, or until the context closes.

        Raises Refusal: 415 if its type is not JSON, 413 if it has more than `most` bytes, and 400 for a bad
        X-Request-Id, before it is read if that is possible; 408 if it comes too slowly; 429 if there is no room.
        If all bodies are larger than they may be, the oldest one that is still read makes room.
        """
        _check_head(request, most)
        me = CURRENT.get()
        try:
            yield await self._read(me, request, most)
        finally:
            self._sizes.pop(me, None)

    async def _read(self, me: HttpCall, request: Request, most: int) -> bytes:
        loop = asyncio.get_running_loop()
        begin, parts, size = loop.time(), [], 0
        try:
            async with asyncio.timeout(self.seconds) as timer:
                self._timers[me] = timer
                async for part in request.stream():
                    size += len(part)
                    if size > most:
                        raise Refusal(413, TOO_LARGE.format(most))
                    parts.append(part)
                    self._sizes[me] = size
                    self._make_room(me, loop.time())
                    if me in self._timers:
                        timer.reschedule(begin + self.seconds + size / LEAST_RATE)
            return b"".join(parts)
        except TimeoutError:
            if me not in self._timers:
                raise Refusal(429, NO_ROOM, code="queue_full", retries=True) from None
            reason = f"the body comes too slowly: {size} bytes in {loop.time() - begin:.0f} seconds"
            raise Refusal(408, reason, headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise Refusal(400, "the client has left") from None
        finally:
            self._timers.pop(me, None)

    def drop(self, call: HttpCall) -> None:
        """The body of a call is no longer held. Any thread may say so."""
        if call in self._sizes:
            self._sizes[call] = 0

    def _make_room(self, me: HttpCall, now: float) -> None:
        """End the oldest bodies that are still read until the rest has room. Refusal if that is the reader itself."""
        while sum(self._sizes.values()) > self.most:
            oldest = next(iter(self._timers))
            if oldest is me:
                raise Refusal(429, NO_ROOM, code="queue_full", retries=True)
            timer = self._timers.pop(oldest)
            if not timer.expired():
                timer.reschedule(now)
            self._sizes.pop(oldest, None)


async def read_body(request: Request, most: int) -> bytes:
    """The bytes of a small body; see `Bodies.reading`."""
    async with Bodies(most).reading(request, most) as data:
        return data


def _check_head(request: Request, most: int) -> None:
    """Refuse a request by what its headers say of its body."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not re.fullmatch(r"application/(.*\+)?json", media_type):
        raise Refusal(415, f"Content-Type: expected application/json, got {media_type[:80] or 'none'}")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 18 or int(length) > most:
        raise Refusal(413, TOO_LARGE.format(most))
    if not REQUEST_ID.fullmatch(request.headers.get("x-request-id", "")):
        raise Refusal(400, "X-Request-Id: expected at most 256 visible ASCII characters; send another, or none")


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
    if len(values) < len(pairs):  # guard: names-twice
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice[:80]!r} is there twice in an object")
    return values


def _constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def levels(value: Any) -> Iterator[list]:
    """The values of decoded JSON at each depth, the outermost first."""
    level = [value]
    while level:
        yield level
        containers = [each for each in level if isinstance(each, (dict, list))]
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]


def is_too_deep(body: dict) -> bool:
    """True if more than `DEEPEST` lists and objects lie in each other."""
    return any(islice(levels(body), DEEPEST, None))


def _check_text(body: dict) -> None:
    """Refuse halves of surrogate pairs, which no tokenizer takes."""
    for name, value in body.items():
        try:
            json.dumps([name, value], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            field = name.encode(errors="replace").decode()[:80]
            raise Refusal(400, f"{field}: expected Unicode text, got a half of a surrogate pair", field) from error
