"""`Runner`, which runs a server until a signal, answers all admitted requests, and ends when the worker dies."""

import asyncio
import gc
import sys
import threading
import time

import uvicorn

from . import GRACE
from .server import Server

WATCH = 0.2
"""Seconds between two looks at the worker."""
FAREWELL = 2.0
"""Seconds for which /health still tells that the worker has died."""
SWITCH = 0.0005
"""Seconds for which a thread that prepares a request keeps the interpreter: a tenth of Python's default."""


class Runner(uvicorn.Server):
    """uvicorn's server. At a signal new requests get 503 and others have `grace` seconds; a second signal ends."""

    def __init__(self, server: Server, grace: float = GRACE):
        server.config.timeout_graceful_shutdown = 5  # for clients that read slowly what is ready
        server.config.http = "h11"  # it bounds the bytes of headers, which httptools does not
        super().__init__(server.config)
        self.requests, self.grace = server.requests, grace
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

    async def shutdown(self, sockets: list | None = None) -> None:
        """End the requests that still run by an error, which their clients get, and close the connections."""
        await asyncio.to_thread(self.requests.stop)
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
        self.requests.end_all("the worker died")  # for a request that came in while it died
        time.sleep(FAREWELL)
        self.should_exit = True
