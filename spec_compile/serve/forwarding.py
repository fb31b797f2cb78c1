"""A request as data, and the answer of an ASGI app to it in parts: how requests and answers cross processes."""

import asyncio
import json
import random
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from .body import decode_body
from .errors import Refusal


@dataclass
class HttpRequest:
    """An HTTP request.

    path: without the prefix at which the server is mounted
    query: the part after the question mark
    headers: names in lower case, and values
    keys: beginnings of its prompt, see `prompt_keys`
    tried: replicas that it was sent to
    """

    method: str
    path: str
    query: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list, repr=False)  # a key may be among them
    body: bytes = field(default=b"", repr=False)
    keys: list[int] = field(default_factory=list)
    tried: list = field(default_factory=list)


@dataclass
class AnswerHead:
    """The beginning of an answer: its status and headers."""

    status: int
    headers: list[tuple[bytes, bytes]]


async def answer(app: Callable, sent: HttpRequest) -> AsyncIterator[AnswerHead | bytes]:
    """The head of an app's answer, and its body in parts. If the iterator is closed early, the app's client has left.

    Parts that are ready at the same time come as one.
    """
    parts: list[AnswerHead | bytes] = []
    has_body, is_gone, is_ready = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def receive() -> dict:
        if not has_body.is_set():
            has_body.set()
            return {"type": "http.request", "body": sent.body, "more_body": False}
        await is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        if message["type"] == "http.response.start":
            parts.append(AnswerHead(message["status"], [*message.get("headers", ())]))
        elif message.get("body"):
            parts.append(message["body"])
        is_ready.set()

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
        "method": sent.method, "path": sent.path, "raw_path": None, "root_path": "", "query_string": sent.query,
        "headers": sent.headers, "client": None, "server": None, "state": {}, "extensions": {},
    }  # fmt: skip
    answering = asyncio.ensure_future(app(scope, receive, send))
    answering.add_done_callback(lambda _: is_ready.set())
    try:
        while parts or not answering.done():
            await is_ready.wait()
            is_ready.clear()
            taken, parts[:] = parts[:], []
            if taken and isinstance(taken[0], AnswerHead):
                yield taken.pop(0)
            if taken:
                yield b"".join(taken)
        await answering  # raises the error of the app, if any
    finally:
        is_gone.set()
        await asyncio.wait({answering})


# `PrefixMap`: which replicas have read which beginnings of prompts, to send a request where its prompt is cached.

BLOCK, MOST_BLOCKS = 256, 1024
"""Characters of a block, and blocks of a prompt that are looked at."""
MOST_KEYS = 1 << 16
"""Beginnings that are kept, of all replicas together."""
MOST_BRACKETS = 1_000_000
"""Brackets of a body that is looked at."""
SHAPES = ("model", "tools", "chat_template_kwargs", "system", "instructions", "prompt", "messages", "input")
"""The fields that a prompt is made of, in the order in which templates write them."""


def prompt_keys(data: bytes, owner: str = "") -> list[int]:
    """A number for each beginning of a request's prompt, of 1, 2, ... blocks of characters. [] if it has no prompt.

    data: the body of a request of any endpoint
    owner: whoever shares keys and values with no other owner. So does a `cache_salt`

    Prompts that begin alike have the same first numbers: with blocks of 2, "abcdX" and "abcdY" have two numbers, which
    are equal, and "abXX" only has the first of them.
    """
    try:
        body = decode_body(data, MOST_BRACKETS)
    except Refusal:  # the replica says why
        return []
    first = hash((owner, json.dumps(body.get("cache_salt"))))
    text = "".join(json.dumps(body[name]) for name in SHAPES if name in body)
    count = min(len(text) // BLOCK, MOST_BLOCKS)
    blocks = [text[number * BLOCK : (number + 1) * BLOCK] for number in range(count)]
    return [*accumulate(blocks, lambda before, block: hash((before, block)), initial=first)][1:]


class PrefixMap:
    """Beginnings of prompts, and the replicas that have read each. The least recently used ones are dropped.

    most: beginnings that are kept
    """

    def __init__(self, most: int = MOST_KEYS):
        self.most = most
        self._readers: OrderedDict[int, set[Hashable]] = OrderedDict()

    def add(self, keys: Iterable[int], replica: Hashable) -> None:
        """Note that a replica reads the prompt with these keys."""
        for key in keys:
            self._readers.setdefault(key, set()).add(replica)
            self._readers.move_to_end(key)
        while len(self._readers) > self.most:
            self._readers.popitem(last=False)

    def keep(self, replicas: set) -> None:
        """Forget all other replicas."""
        for key, readers in [*self._readers.items()]:
            readers &= replicas
            if not readers:
                del self._readers[key]

    def lengths(self, keys: Sequence[int]) -> Counter:
        """For each replica the number of blocks from the beginning that it has read."""
        lengths: Counter[Any] = Counter()
        for number, key in enumerate(keys):
            readers = {each for each in self._readers.get(key, ()) if lengths[each] == number}
            if not readers:
                break
            lengths.update(readers)
        return lengths

    def rank(self, keys: Sequence[int], loads: dict[Hashable, int], most_ahead: int) -> list[list[Hashable]]:
        """Replicas in groups: the one that has read most of the prompt, then all others, in random order.

        loads: for each replica the number of its requests
        most_ahead: a replica with this many requests more than another one does not come first

        With loads {a: 5, b: 0} and a prompt that only `a` has read, the groups are [[a], [b]], and [[b, a]] or [[a, b]]
        if `most_ahead` is 4.
        """
        least, lengths = min(loads.values(), default=0), self.lengths(keys)
        readers = [each for each in loads if lengths[each] and loads[each] - least < most_ahead]
        first = [max(readers, key=lambda each: (lengths[each], -loads[each]))] if readers else []
        others = [each for each in loads if each not in first]
        random.shuffle(others)
        return [group for group in (first, others) if group]
