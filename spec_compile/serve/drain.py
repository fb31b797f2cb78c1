"""`Runner`, which runs a server until a signal, answers all admitted requests, and ends when the worker dies."""

import asyncio
import gc
import logging
import sys
import threading
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route

from . import GRACE
from .connections import Connections, GuardedProtocol, Limits
from .door import HostMiddleware, is_loopback
from .errors import DEAD
from .server import METRICS, Server, metrics_of

log = logging.getLogger("spec_compile")

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
            server.app.add_middleware(HostMiddleware, hosts=hosts)
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
        app: Any = Starlette(routes=[Route(METRICS, metrics_of(self.requests))])
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
