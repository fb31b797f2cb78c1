"""`HttpCall`, one HTTP request, and the middleware that ends it when its client leaves."""

import asyncio
import inspect
import re
import threading
import uuid
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Any
from weakref import WeakValueDictionary

from ..capture.loras import BASE
from .answers import StopCut
from .errors import failed, failure, refuse

CURRENT: ContextVar["HttpCall"] = ContextVar("CURRENT")
"""The call that the running task serves. Tasks that are started for it share the object."""

REQUEST_ID = re.compile(r"[!-~]{0,256}")  # guard: request-ids
"""The header X-Request-Id, which every chunk of an answer repeats."""
OWNER = "spec_compile.owner"
"""The entry of an ASGI scope with `HttpCall.owner`."""


@dataclass(eq=False)
class HttpCall:
    """One HTTP request.

    loop: the event loop that serves it
    owner: who sent it, as a digest of its API key; empty if the server has no keys
    address: where its client is on the network
    name: that no other call has; its choices share it
    adapter: the LoRA adapter that it asks for
    fields: its body's, checked
    http_id: its name for the client, who may choose it
    prompt_field: name of the field with the prompt
    limit_field: name of the field with the number of tokens that the client wants, or None
    prediction: token ids of the answer that the client expects, or None
    tool_calls: the calls that the answer shall have, a `ToolCalls`, or None
    clamps_limit: True if the client's limit is a bound, and not a wish
    told_tokens: tokens of the answer that chunks have told, see `new_tokens`
    sign: breaks control tokens in the texts of its chat, see `ChatText`; empty if there are none
    pictures: that its prompt shows, by name, until it is made
    choices: the calls of the choices, this one included if there is no other; empty before they are made
    index: its choice's
    inputs: go to the model; `input_ids` has the token ids of its prompt
    echo: the text of the prompt, if the answer begins with it, or None
    drops_answer: True if only the prompt is wanted, so that the one token of the answer is dropped
    logprobs: the log-probabilities that the answer shall have, a `ChatLogprobs`, or None
    told: log-probabilities that its choice may tell
    cut: ends its text at a stop string
    is_prepared: True once its prompt is made
    request_id: the manager's name of the request that was added for it, or None
    output: the last output that the manager delivered, or None
    is_gone: True once nobody waits for the answer
    """

    loop: asyncio.AbstractEventLoop
    owner: str = ""
    address: str = ""
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    http_id: str = ""
    adapter: str = BASE
    fields: dict = field(default_factory=dict)
    prompt_field: str = "prompt"
    limit_field: str | None = None
    prediction: list[int] | None = None
    tool_calls: Any = None
    clamps_limit: bool = False
    told_tokens: int = 0
    sign: str = ""
    pictures: dict[str, Any] = field(default_factory=dict)
    choices: "list[HttpCall]" = field(default_factory=list)
    index: int = 0
    inputs: dict[str, Any] = field(default_factory=dict)
    echo: str | None = None
    drops_answer: bool = False
    logprobs: Any = None
    told: int = 0
    cut: StopCut = field(default_factory=lambda: StopCut(()))
    is_prepared: bool = False
    request_id: str | None = None
    output: Any = None
    is_gone: bool = False

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

    def skips_special_tokens(self, parser: Any) -> bool:
        """True if the text of its answer has no special tokens. parser: reads them, or None"""
        return parser is None and self.fields.get("skip_special_tokens", True)

    @property
    def continues(self) -> bool:
        """True if the answer goes on with the last message of its prompt."""
        return self.fields.get("continue_final_message", False)

    def new_tokens(self) -> list[int]:
        """The tokens of the answer since the last call."""
        tokens = self.output.generated_tokens[self.told_tokens :]
        self.told_tokens += len(tokens)
        return tokens

    @property
    def prompt_length(self) -> int:
        """Tokens of its prompt."""
        return len(self.inputs["input_ids"])


def digest(*parts: str) -> str:
    """A name of some texts that is short and tells none of them; empty if all are."""
    return sha256(repr(parts).encode()).hexdigest() if any(parts) else ""


class CallMiddleware:
    """ASGI middleware: sets `CURRENT` and the request's id; when the client leaves it stops the answer and cancels the
    manager's requests. Starlette notices only in streams that a client has left."""

    def __init__(self, app: Callable, cancel: Callable[[str], None]):
        """cancel: called with each request_id of a call that ends before its requests."""
        self.app, self.cancel = app, cancel

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        address = (scope.get("client") or ("",))[0]
        call = HttpCall(asyncio.get_running_loop(), scope.get(OWNER, ""), address=address)
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
        call.http_id = given if given and REQUEST_ID.fullmatch(given) else str(uuid.uuid4())
        scope.setdefault("state", {})["request_id"] = call.http_id
        CURRENT.set(call)
        client = _Client(receive, send, call.http_id)
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
        await failure(scope["path"], error)(scope, receive, send)


class _Client:
    """The ASGI channels of one request, with the moment at which the client leaves."""

    def __init__(self, receive: Callable, send: Callable, request_id: str):
        """request_id: told in a header of the answer"""
        self._receive, self._send, self._id = receive, send, request_id.encode()
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
        self.is_answering = True
        if message["type"] == "http.response.start":
            message = message | {"headers": [*message.get("headers", ()), (b"x-request-id", self._id)]}
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self._is_answered = True
        else:
            await asyncio.sleep(0)  # uvicorn does not wait for a client that has left, and `leaves` must run

    async def leaves(self) -> None:
        """Return when the client has left before its answer was complete."""
        await self._has_body.wait()
        while not self._is_gone.is_set():
            if (await self._receive())["type"] == "http.disconnect":
                self._is_gone.set()
        if self._is_answered:  # servers report the end of an answer in the same way
            await asyncio.Event().wait()


# `Workers`: a few threads in which the handlers of requests run, so that the event loop only passes tokens on.

WORKERS, MOST_IDLE = 2, 62
"""Threads that work at once, and others that may wait for a child process. More would take the interpreter from the
rounds for longer, and tokenizers use all cores by themselves."""


class Waiting:
    """A future or a coroutine of the event loop, in the form that a coroutine in `Workers` can await. Errors that it
    raises end the request, and the coroutine in `Workers` does not see them."""

    def __init__(self, future: Awaitable):
        self.future = future

    def __await__(self) -> Generator[Awaitable, Any, Any]:
        return (yield self.future)


class _Seats:
    """A semaphore that threads pass in the order in which they came; in `threading.Semaphore` later ones overtake."""

    def __init__(self, free: int):
        self._lock, self._free = threading.Lock(), free
        self._waiting: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            mine = threading.Event()
            self._waiting.append(mine)
        mine.wait()

    def __exit__(self, *error: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().set()  # hands over the place
            else:
                self._free += 1


class Workers:
    """Runs coroutines in threads, and awaits their futures on the event loop. Clients take turns: of each only as many
    coroutines as there are threads begin at a time.

    busy: number of coroutines that have not reached their first `Waiting` or their end
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(WORKERS + MOST_IDLE, thread_name_prefix="spec_compile requests")
        self._free = _Seats(WORKERS)
        self.busy = 0
        self._busy: Counter[str] = Counter()
        """The same by client."""
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def has_room(self, most: int) -> bool:
        """True if one more coroutine may begin for the current call: of each client an equal share of `most`. Together
        they may be more, if the first ones had all of it."""
        others = {client: count for client, count in self._busy.items() if client != _client()}
        return self.busy - sum(others.values()) < most // (1 + len(others))

    async def drive(self, coroutine: Coroutine) -> Any:
        """The result of a coroutine that only awaits `Waiting`. Each of its steps runs in one of the threads."""
        loop, client = asyncio.get_running_loop(), _client()
        step = partial(loop.run_in_executor, self._pool, copy_context().run, self._step, coroutine)
        turn = self._turns.setdefault(client, asyncio.Semaphore(WORKERS))
        self.busy += 1
        self._busy[client] += 1
        try:
            async with turn:
                is_over, value = await step(None)
        finally:
            self.busy -= 1
            self._busy[client] -= 1
            self._busy += Counter()  # drops those without any
            if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                coroutine.close()  # cancelled before a thread was free
        while not is_over:
            is_over, value = await step(await value)
        return value

    def _step(self, coroutine: Coroutine, value: Any) -> tuple[bool, Any]:
        """Run a coroutine to its next `Waiting`: (True, its result) if it has ended, else (False, the future)."""
        with self._free:
            try:
                return False, coroutine.send(value)
            except StopIteration as end:
                return True, end.value

    @contextmanager
    def waits(self) -> Iterator[None]:
        """A context in which one of the threads only waits, so that another one may work."""
        self._free.__exit__()
        try:
            yield
        finally:
            self._free.__enter__()

    def close(self) -> None:
        """End the threads once they are done."""
        self._pool.shutdown(wait=False)


def _client() -> str:
    call = CURRENT.get(None)
    return "" if call is None else call.client


# The choices of one HTTP request: `n` answers to each of its prompts, each with its `HttpCall`.


def split_choices(call: HttpCall, prompts: Sequence[tuple[dict, str | None]], most: int) -> list[HttpCall]:
    """The calls of the choices, n for each prompt in turn; the request's own call if there is one choice.

    prompts: the inputs of each, and the text that `echo` tells, or None
    most: choices that one request may have

    With two prompts, n = 3 and seed = 7, choice 4 is the second one of the second prompt and has seed 8. Refusal if
    there are too many choices.
    """
    n = call.fields.get("n", 1)
    count = n * len(prompts)
    if count > most:
        field = "prompt" if len(prompts) > 1 else "n"
        raise refuse(field, f"{count} choices are more than the {most} requests that may wait here; ask for fewer")
    calls = [replace(call) for _ in range(count)] if count > 1 else [call]
    for index, each in enumerate(calls):
        prompt, number = divmod(index, n)
        inputs, each.echo = prompts[prompt]
        each.index, each.inputs = index, dict(inputs)
        if number and "seed" in call.fields:
            each.fields = call.fields | {"seed": call.fields["seed"] + number}
        each.choices = calls
    call.choices = calls
    for each in calls:  # the client may have left before it could be told to them
        each.is_gone |= call.is_gone
    return calls
