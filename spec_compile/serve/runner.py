"""`Runner`, which runs a server until a signal, answers all admitted requests, and ends when the worker dies."""

import asyncio
import gc
import os
import re
import resource
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..errors import log
from . import GRACE
from .door import OPEN, HostMiddleware, is_loopback
from .errors import DEAD, RETRY_SECONDS, Refusal, error_at, error_response
from .server import METRICS, Server

WATCH = 0.2
"""Seconds between two looks at the worker."""
FAREWELL = 2.0
"""Seconds for which /health still tells that the worker has died."""
OPEN_TO_ALL = (
    "the server listens at {} without an API key, so everybody who reaches it may use it: give --api-key-file or "
    "SPEC_COMPILE_API_KEY, or listen at --host 127.0.0.1"
)
SWITCH = 0.0005
"""Seconds for which a thread that prepares a request keeps the interpreter: a tenth of Python's default."""

# Bounds of a server's connections, and the protocol that keeps them; nobody locks others out.

MOST_CONNECTIONS = 4096
"""Open connections by default, if there are descriptors for them."""
SPARE_FILES = 64
"""Descriptors that are left for files."""
BESIDE = 16
"""Connections beyond the bound, of which one may ask for /health."""
UNREAD_SECONDS, READ_BYTES = 30.0, 1 << 16
"""A client that reads less than these bytes of a waiting answer in this time is left."""
CRUMB, MOST_CRUMBS = re.compile(rb"\r\n[0-9a-fA-F]{1,2}[ \t]*(?:;[^\r\n]*)?\r\n"), 1000
"""Chunks of less than 256 bytes that a request may have. The parser takes about 15 microseconds for each."""
MOST_DRAINED = 64 << 20
"""Bytes of a body that are read at most after its answer, so that its client reads the answer."""


def _raw(status: int, reason: str) -> bytes:
    """An answer to a client whose request was not read."""
    body = error_response(Refusal(status, reason)).body
    lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"Content-Length: {len(body)}"]
    lines += ["Content-Type: application/json", "Connection: close", f"Retry-After: {RETRY_SECONDS}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


BUSY = _raw(503, "the server has too many connections; try again later")
MANY = _raw(429, "there are too many connections from this address; close some, or use each for several requests")
SMALL = _raw(400, "the chunks of the body are too small; send larger ones, or Content-Length")
LATE = _raw(408, "the headers come too slowly")


@dataclass
class Limits:
    """Bounds of a server's connections.

    connections: that may be open; None: `MOST_CONNECTIONS`, or as many as there are descriptors
    from_one_address: how many may come from one address; None: three quarters
    seconds: in which the headers of a request must come, and the rest of a body that nobody reads
    """

    connections: int | None = None
    from_one_address: int | None = None
    seconds: float = 10.0

    def settle(self) -> int:
        """Raise the limit of descriptors as far as this process may, and fill in the bounds. Returns the backlog."""
        files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY and files != most:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        room = 1 << 20 if most == resource.RLIM_INFINITY else most - len(os.listdir("/proc/self/fd")) - SPARE_FILES
        backlog = max(16, min(1024, room // 4))  # this many are accepted at once, before the first of them is seen
        room -= backlog + BESIDE
        wanted = MOST_CONNECTIONS if self.connections is None else self.connections
        if room < 1 or (self.connections is not None and wanted > room):
            raise ValueError(
                f"max_connections: this process may open {most} files, which leaves {max(room, 0)} connections; "
                "raise the limit (ulimit -n), or ask for fewer"
            )
        self.connections = min(wanted, room)
        if self.from_one_address is None:
            self.from_one_address = max(1, self.connections * 3 // 4)
        return backlog


class Connections:
    """The open connections of a server.

    A new one always finds a place as long as others only wait: the one that has waited longest is closed for it, first
    of those that have never sent a request, then of those between two requests, then of those that send a body.
    """

    def __init__(self, limits: Limits):
        """limits: settled."""
        self.limits = limits
        self._by_address: Counter[str] = Counter()
        self.silent: dict[Any, None] = {}
        self.between: dict[Any, None] = {}
        self.sending: dict[Any, None] = {}
        self.all: set[Any] = set()

    @property
    def is_full(self) -> bool:
        """True if there are as many connections as may be."""
        return len(self.all) > self.limits.connections

    def enter(self, new: Any) -> bytes:
        """Take a new connection; returns b"", or the answer with which it is closed if there is no place."""
        self.all.add(new)
        self._by_address[new.address] += 1
        if self._by_address[new.address] > self.limits.from_one_address:
            if not self._close_one(lambda each: each.address == new.address):
                return MANY
        elif self.is_full and not self._close_one(lambda each: True):
            return b"" if len(self.all) <= self.limits.connections + BESIDE else BUSY
        return b""

    def _close_one(self, may_be: Callable[[Any], bool]) -> bool:
        """Close the connection that has waited longest; returns False if none waits."""
        for group in (self.silent, self.between, self.sending):
            if (found := next(filter(may_be, group), None)) is not None:
                found.transport.abort()
                self.leave(found)
                return True
        return False

    def leave(self, old: Any) -> None:
        """A connection is closed."""
        if old in self.all:
            self.all.remove(old)
            self._by_address[old.address] -= 1
            if not self._by_address[old.address]:
                del self._by_address[old.address]
        self.place(old, None)

    def place(self, connection: Any, group: dict | None) -> None:
        """Put a connection into the group of those that wait for the same."""
        if group is None or connection not in group:
            for each in (self.silent, self.between, self.sending):
                each.pop(connection, None)
            if group is not None and connection in self.all:
                group[connection] = None

    def sweep(self) -> None:
        """Close the connections whose time is over."""
        now = time.monotonic()
        for connection in [*self.all]:
            connection.check(now)


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol, within the bounds of `Connections`.

    guard: the server's, set in the class that each server makes of this one
    """

    guard: Connections

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._since, self._drained, self._crumbs, self._has_served = time.monotonic(), 0, 0, False
        self._unread: tuple[float, int] | None = None
        self._served, self.app = self.app, self._serve
        if answer := self.guard.enter(self):
            transport.write(answer)
            transport.close()
        self._is_beside = self.guard.is_full
        self._place()

    def connection_lost(self, exc: Exception | None) -> None:
        self.guard.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._crumbs += len(CRUMB.findall(data))
        if self._crumbs > MOST_CRUMBS:
            self.transport.write(SMALL)
            self.transport.close()
            return
        drains = self._is_answered and self.conn.their_state is h11.SEND_BODY
        self._drained += len(data) if drains else 0
        begins = not drains and self.timeout_keep_alive_task is not None
        super().data_received(data)
        if begins or (drains and self.conn.their_state is not h11.SEND_BODY):
            self._since = time.monotonic()
        self._place()

    def on_response_complete(self) -> None:
        self._since, self._drained, self._crumbs, self._has_served = time.monotonic(), 0, 0, True
        super().on_response_complete()
        self._place()

    async def _serve(self, scope: dict, receive: Callable, send: Callable) -> None:
        """The app, or while all connections are taken only its /health."""
        if self._is_beside and self.guard.is_full and scope["path"] != OPEN:
            reason = "the server has too many connections; try again later"
            refusal = Refusal(503, reason, retries=True, headers={"Connection": "close"})
            await error_at(scope["path"], refusal)(scope, receive, send)
        else:
            await self._served(scope, receive, send)

    @property
    def _is_answered(self) -> bool:
        """True unless a request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def _place(self) -> None:
        guard = self.guard
        if not self._is_answered:
            guard.place(self, guard.sending if self.cycle.more_body else None)
        else:
            guard.place(self, guard.between if self._has_served else guard.silent)

    def check(self, now: float) -> None:
        """Close the connection if its time is over."""
        size = self.transport.get_write_buffer_size()
        if size and (self.flow.write_paused or self.transport.is_closing()):
            if self._unread is None or size <= self._unread[1] - READ_BYTES:
                self._unread = now, size
            elif now - self._unread[0] > UNREAD_SECONDS:
                self.transport.abort()
            return
        self._unread = None
        if not self._is_answered or self.transport.is_closing():
            return  # the reader of a body has its own time
        is_late = now - self._since > self.guard.limits.seconds
        if self.conn.their_state is h11.SEND_BODY:  # nobody reads this body
            if is_late or self._drained > MOST_DRAINED:
                self.transport.abort()
        elif is_late and self.timeout_keep_alive_task is None:
            if self.conn.trailing_data[0]:
                self.transport.write(LATE)
            self.transport.close()


class Runner(uvicorn.Server):
    """uvicorn's server. At a signal new requests get 503 and others have `grace` seconds; a second signal ends."""

    def __init__(
        self, server: Server, grace: float = GRACE, limits: Limits | None = None, allowed_hosts: Iterable[str] = (),
        metrics: tuple[str, int] | None = None,
    ):  # fmt: skip
        """limits: of connections. allowed_hosts: names that requests may have in Host; without any, and with keys or an
        address beyond loopback, all names are allowed. metrics: the host and port of /metrics, if these are others.

        Raises ValueError if there are fewer descriptors than `limits` needs.
        """
        config, limits, hosts = server.config, limits or Limits(), [*allowed_hosts]
        config.backlog = limits.settle()
        config.timeout_graceful_shutdown = 5  # for clients that read slowly what is ready
        config.server_header, config.ws, config.proxy_headers = False, "none", False
        self.connections = Connections(limits)
        config.http = type("Protocol", (GuardedProtocol,), {"guard": self.connections})
        super().__init__(config)
        self.requests, self.grace = server.requests, grace
        self.requests.bodies.seconds = limits.seconds
        self._metrics = metrics
        if metrics is not None:
            server.app.router.routes[:] = [each for each in server.app.router.routes if each.path != METRICS]
        if hosts or (is_loopback(config.host) and not server.keys):
            server.app.add_middleware(HostMiddleware, hosts=hosts, origins=server.requests.policy.allowed_origins or ())
        if not (is_loopback(config.host) or server.keys):
            log.warning(OPEN_TO_ALL.format(config.host))
        self.has_failed = False
        self._is_over = threading.Event()

    def run(self, sockets: list | None = None) -> None:
        """Serve until a signal, or until the worker dies."""
        threading.Thread(target=self._watch, daemon=True).start()
        interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH)
        gc.collect()
        gc.freeze()  # a collection that goes through all of torch and transformers stops every thread for 0.3 seconds
        try:
            super().run(sockets)
        finally:
            self._is_over.set()
            gc.unfreeze()
            sys.setswitchinterval(interval)
            self.requests.stop()
            self.requests.workers.close()

    async def startup(self, sockets: list | None = None) -> None:
        """Listen, also where the metrics are if that is elsewhere."""
        others = [] if self._metrics is None else [await self._serve_metrics(*self._metrics)]
        await super().startup(sockets)
        self.servers += others

    async def _serve_metrics(self, host: str, port: int) -> asyncio.Server:
        app: Any = Starlette(routes=[Route(METRICS, self.requests.metrics.answer)])
        if is_loopback(host):
            app = HostMiddleware(app, ())
        config = uvicorn.Config(app, http=self.config.http, ws="none", log_config=None, server_header=False)
        made = partial(self.config.http, config=config, server_state=self.server_state, app_state={})
        return await asyncio.get_running_loop().create_server(made, host, port)

    async def on_tick(self, counter: int) -> bool:
        """See uvicorn, which calls it ten times a second."""
        if counter % 5 == 0:
            self.connections.sweep()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list | None = None) -> None:
        """End the requests that still run by an error, which their clients get, and close the connections."""
        await asyncio.to_thread(self.requests.stop)  # guard: requests-end-first
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: object) -> None:
        """A signal: stop admitting, and end once nothing runs."""
        if self.requests.is_draining:
            super().handle_exit(sig, frame)
        else:
            self.requests.is_draining = True
            self.requests.shadow.close()
            threading.Thread(target=self._drain, args=(sig, frame), daemon=True).start()

    def _drain(self, sig: int, frame: object) -> None:
        end = time.monotonic() + self.grace
        while self.requests.is_alive() and self.requests.active() and time.monotonic() < end:
            time.sleep(WATCH)
        self.requests.stop()
        super().handle_exit(sig, frame)

    def _watch(self) -> None:
        """End the server if its worker dies."""
        while self.requests.is_alive():
            if self._is_over.wait(WATCH):
                return
        self.has_failed = True
        log.error("the server ends: %s", self.requests.ailment())
        self.requests.end_all(DEAD)  # for a request that came in while it died
        time.sleep(FAREWELL)
        self.should_exit = True
