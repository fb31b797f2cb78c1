"""`HttpCall`, one HTTP request, and the middleware that ends it when its client leaves."""

import asyncio
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from ..batching.stop_strings import StopCut
from ..capture.loras import BASE
from .errors import Refusal, failed, failure

CURRENT: ContextVar["HttpCall"] = ContextVar("CURRENT")
"""The call that the running task serves. Tasks that are started for it share the object."""

OWNER = "spec_compile.owner"
"""The entry of an ASGI scope with `HttpCall.owner`."""


@dataclass(eq=False)
class HttpCall:
    """One HTTP request.

    loop: the event loop that serves it
    owner: who sent it, as a digest of its API key; empty if the server has no keys
    address: of its client on the network
    name: that no other call has; its choices share it
    adapter: the LoRA adapter that it asks for
    fields: of its body, checked
    prompt_field: name of the field with the prompt
    limit_field: name of the field with the number of tokens that the client wants, or None
    prediction: token ids of the answer that the client expects, or None
    tool_calls: the calls that the answer shall have, a `ToolCalls`, or None
    sign: breaks control tokens in the texts of its chat, see `ChatText`; empty if there are none
    pictures: that its prompt shows, by name, until it is made
    prompts: of a completion, each with token ids and the text that `echo` tells, if it is wanted
    choices: the calls of the choices, this one included if there is no other; empty before they are made
    index: of its choice
    prompt: token ids of its prompt if it is a completion, or None
    usage: of its choice, once that is complete, or None
    echo: the text of the prompt, if the answer begins with it, or None
    drops_answer: True if only the prompt is wanted, so that the one token of the answer is dropped
    logprobs: the log-probabilities that the answer shall have, a `ChatLogprobs`, or None
    told: log-probabilities that its choice may tell
    cut: ends its text at a stop string
    is_prepared: True once its prompt is made
    request_id: the manager's name of the request that was added for it, or None
    output: the last output that the manager delivered, or None
    is_gone: True once nobody waits for the answer
    failure: the error by which its stream has ended, or None
    """

    loop: asyncio.AbstractEventLoop
    owner: str = ""
    address: str = ""
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    adapter: str = BASE
    fields: dict = field(default_factory=dict)
    prompt_field: str = "prompt"
    limit_field: str | None = None
    prediction: list[int] | None = None
    tool_calls: Any = None
    sign: str = ""
    pictures: dict[str, Any] = field(default_factory=dict)
    prompts: list[tuple[list[int], str | None]] = field(default_factory=list)
    choices: "list[HttpCall]" = field(default_factory=list)
    index: int = 0
    prompt: list[int] | None = None
    usage: dict | None = None
    echo: str | None = None
    drops_answer: bool = False
    logprobs: Any = None
    told: int = 0
    cut: StopCut = field(default_factory=lambda: StopCut(()))
    is_prepared: bool = False
    request_id: str | None = None
    output: Any = None
    is_gone: bool = False
    failure: Refusal | None = None

    @property
    def client(self) -> str:
        """Who takes turns with others: the owner of the key, or else the address. A client chooses all else itself."""
        return self.owner or self.address

    def belonging(self, shares_texts: bool, isolates_prefixes: bool) -> dict[str, str]:
        """Options of `add_request` that say whose the request is.

        The owner of its text is the key's owner, `user` and `cache_salt` together; nobody if there is none of them.
        Prompts with the same salt share keys and values. With `isolates_prefixes` the salt is of one key, and without a
        key and a `cache_salt` of one call.
        """
        salt = self.fields.get("cache_salt", "")
        owner = digest(self.owner, self.fields.get("user", ""), salt)
        salt = (digest(self.owner, salt) or self.name) if isolates_prefixes else salt
        return {"client": self.client, "cache_salt": salt} | ({} if shares_texts else {"share_text": owner})

    @property
    def is_open(self) -> bool:
        """True while the manager works on its request."""
        return self.request_id is not None and not (self.output is not None and self.output.is_finished())

    @property
    def finish_reason(self) -> str:
        """Why its answer, which is complete, has ended."""
        return "stop" if self.cut.found is not None else self.output.finish_reason

    @property
    def error(self) -> Refusal | None:
        """The error by which its stream, or the stream of one of its choices, has ended."""
        return next((each.failure for each in self.choices or [self] if each.failure is not None), None)

    @property
    def wants_usage(self) -> bool:
        """True if its stream shall end with a chunk that has the usage."""
        return self.fields.get("stream_options", {}).get("include_usage", False)


def digest(*parts: str) -> str:
    """A name of some texts that is short and tells none of them; empty if all are."""
    return sha256(repr(parts).encode()).hexdigest() if any(parts) else ""


class CallMiddleware:
    """ASGI middleware: sets `CURRENT`; when the client leaves it stops the answer and cancels the manager's request.

    Starlette notices only in streams that a client has left, and transformers' handlers cancel only within a stream.
    """

    def __init__(self, app: Callable, cancel: Callable[[str], None]):
        """cancel: called with each request_id of a call that ends before its requests."""
        self.app, self.cancel = app, cancel

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        address = (scope.get("client") or ("",))[0]
        call = HttpCall(asyncio.get_running_loop(), scope.get(OWNER, ""), address=address)
        CURRENT.set(call)
        client = _Client(receive, send)
        answering = asyncio.ensure_future(self.app(scope, client.receive, client.send))
        leaving = asyncio.ensure_future(client.leaves())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()  # does nothing if the task has ended
            await asyncio.gather(answering, leaving, return_exceptions=True)
            call.is_gone = True  # set before `choices` is read: a thread that makes them reads it afterwards
            for each in call.choices or [call]:
                each.is_gone = True  # set before `is_open` is read: a thread that adds a request reads it afterwards
                if each.is_open:
                    self.cancel(each.request_id)
        error = None if answering.cancelled() else answering.exception()
        if error is None:
            return
        if client.is_answering:
            raise RuntimeError(failed(error)) from None  # the server closes the connection
        await failure(error)(scope, receive, send)


class _Client:
    """The ASGI channels of one request, with the moment at which the client leaves."""

    def __init__(self, receive: Callable, send: Callable):
        self._receive, self._send = receive, send
        self._has_body, self._is_gone = asyncio.Event(), asyncio.Event()
        self.is_answering, self._is_answered = False, False

    async def receive(self) -> dict:
        """The body, and http.disconnect once the client has left."""
        if self._has_body.is_set():
            await self._is_gone.wait()
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "http.disconnect":
            self._is_gone.set()
        if not message.get("more_body", False):
            self._has_body.set()
        return message

    async def send(self, message: dict) -> None:
        """Send a part of the answer."""
        self.is_answering = True
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_answered = True

    async def leaves(self) -> None:
        """Return when the client has left before its answer was complete."""
        await self._has_body.wait()
        while not self._is_gone.is_set():
            if (await self._receive())["type"] == "http.disconnect":
                self._is_gone.set()
        if self._is_answered:  # servers report the end of an answer in the same way
            await asyncio.Event().wait()
