"""A request as data, and the answer of an ASGI app to it in parts: how requests and answers cross processes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class HttpRequest:
    """An HTTP request.

    path: without the prefix at which the server is mounted
    query: the part after the question mark
    headers: names in lower case, and values
    keys: of the beginnings of its prompt, see `prompt_keys`
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

    answering = asyncio.ensure_future(app(_scope(sent), receive, send))
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


def _scope(sent: HttpRequest) -> dict[str, Any]:
    return {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
        "method": sent.method, "path": sent.path, "raw_path": None, "root_path": "", "query_string": sent.query,
        "headers": sent.headers, "client": None, "server": None, "state": {}, "extensions": {},
    }  # fmt: skip
