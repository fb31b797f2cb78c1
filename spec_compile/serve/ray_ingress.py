"""`Ingress`: takes HTTP requests for replicas on Ray, and asks another replica if the first dies before it answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from .door import KeyMiddleware, Keys
from .errors import MESSAGES_PATH, RETRY_SECONDS, Refusal, error_at, error_message, error_object, error_response
from .forwarding import AnswerHead, HttpRequest, PrefixMap, prompt_keys
from .generation import FULL

ATTEMPTS = 4
"""Replicas that a request is sent to at most."""
MOST_BYTES = 128 << 20
"""Bytes of a body that are sent on at most. A replica reads less than that, and refuses such a body."""
METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
KEY_HEADERS = ("authorization", "x-api-key")
"""Headers with the client's API key."""
METRICS_SECONDS = 5.0
"""Time that replicas have to tell their metrics."""
DIED = "the replica died; send the request again"


class Ingress:
    """An ASGI app that passes requests to replicas, whatever their path, and their answers to clients.

    A request whose replica dies before the first part of its body has come is sent to another one, and so is a POST
    that a replica refuses with 503. A stream that has begun ends in an error event. /metrics has all replicas' metrics.
    """

    def __init__(self, replicas: DeploymentHandle, keys: Keys | None = None, isolates_prefixes: bool = False):
        """keys: of which every request but to /health needs one

        isolates_prefixes: whether prompts with different API keys share no keys and values
        """
        self._replicas, self._keys, self._isolates = replicas, keys or Keys(()), isolates_prefixes
        self._asks = replicas.options(stream=True)

    def __serve_build_asgi_app__(self) -> Starlette:
        metrics = Route("/metrics", self._metrics, methods=["GET"])
        door = Middleware(KeyMiddleware, keys=self._keys, lets_preflights=True)  # replicas answer those
        return Starlette(routes=[metrics, Route("/{path:path}", self._pass_on, methods=METHODS)], middleware=[door])

    async def _pass_on(self, request: Request) -> Response:
        sent, deaths = await _read(request, self._isolates), 0
        while deaths < ATTEMPTS:
            try:
                response = await self._ask(sent)
            except BackPressureError:
                response = _refusal(sent, 429, FULL, "queue_full")
            except RayActorError:
                deaths += 1
                continue
            if response.status_code == 503 and sent.method == "POST":
                deaths += 1
            elif response.status_code != 429 or not deaths:
                return response
            if deaths == ATTEMPTS:
                return response
            await asyncio.sleep(RETRY_SECONDS)  # it was admitted once, so it waits for a place
        return _refusal(sent, 503, f"{ATTEMPTS} replicas have died while they prepared the answer; try again later")

    async def _ask(self, sent: HttpRequest) -> Response:
        """The answer of one replica. RayActorError if it dies before the first part of the body."""
        parts = self._asks.answer.remote(sent)
        try:
            head = await anext(parts)
            first = await anext(parts, b"")
        except asyncio.CancelledError:  # the client has left
            parts.cancel()
            raise
        response = StreamingResponse(_rest(first, parts, head, sent), head.status)
        response.raw_headers = [header for header in head.headers if header[0] != b"x-request-id"]  # Ray adds it
        return response

    async def _metrics(self, request: Request) -> Response:
        try:
            pages = await self._replicas.broadcast("metrics").results_async(timeout_s=METRICS_SECONDS)
        except (RayActorError, TimeoutError) as error:
            return error_response(503, f"a replica does not tell its metrics: {type(error).__name__}")
        return Response(merge(dict(pages)), media_type=CONTENT_TYPE_LATEST)


async def _read(request: Request, isolates_prefixes: bool) -> HttpRequest:
    """The request as data."""
    owner = "".join(request.headers.get(name, "") for name in KEY_HEADERS) if isolates_prefixes else ""
    body = bytearray()
    async for part in request.stream():
        body += part[: MOST_BYTES - len(body)]
    data = bytes(body)
    keys = await asyncio.to_thread(prompt_keys, data, owner) if data else []
    path, query = f"/{request.path_params['path']}", request.scope["query_string"]
    return HttpRequest(request.method, path, query, [*request.headers.raw], data, keys)


async def _rest(first: bytes, parts: Any, head: AnswerHead, sent: HttpRequest) -> AsyncIterator[bytes]:
    """The body of an answer whose first part has come."""
    is_over = False
    try:
        yield first
        async for part in parts:
            yield part
        is_over = True
    except RayActorError:
        if not any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in head.headers):
            raise
        is_over = True
        yield _error_event(sent)
    finally:
        if not is_over:  # the client has left
            parts.cancel()


def _error_event(sent: HttpRequest) -> bytes:
    """The last event of a stream whose replica has died, in the form of its endpoint."""
    if sent.path.startswith(MESSAGES_PATH):
        return f"event: error\ndata: {json.dumps(error_message(500, DIED, ''))}\n\n".encode()
    return f"data: {json.dumps({'error': error_object(500, DIED)})}\n\n".encode()


def _refusal(sent: HttpRequest, status: int, reason: str, code: str | None = None) -> JSONResponse:
    """An error of the ingress itself, in the form of the endpoint."""
    return error_at(sent.path, Refusal(status, reason, code=code, retries=True))


def merge(pages: dict[str, bytes]) -> bytes:
    """One page for Prometheus of several, whose samples get the label `replica`.

    pages: by the name of the replica
    """
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in text_string_to_metric_families(page.decode()):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = sample.labels | {"replica": replica}
                merged.samples.append(sample._replace(labels=labels))
    registry = CollectorRegistry()
    registry.register(_Collected([*families.values()]))
    return generate_latest(registry)


class _Collected:
    """prometheus_client's interface of collectors, for families that are there already."""

    def __init__(self, families: list[Metric]):
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


# `PrefixRouter`: Ray Serve sends a request to the replica that has read most of its prompt.


class PrefixRouter(RequestRouter):
    """Ray's interface of routers; see `PrefixMap.rank`. The first argument of each request is an `HttpRequest`.

    Ray's own `PrefixCacheAffinityRouter` needs vLLM or SGLang to be installed, and asks an actor for each request.
    """

    def initialize_state(self, most_ahead: int) -> None:
        """Ray calls this with the arguments of the router."""
        self._most_ahead, self._prefixes = most_ahead, PrefixMap()
        self._running: dict[str, ReplicaID] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas; Ray takes the least busy one of the first group with a free place.

        Replicas that the request was sent to before come last.
        """
        replicas = {each.replica_id: each for each in candidate_replicas}
        if pending_request is None or not pending_request.args:
            return [candidate_replicas]
        sent, running = pending_request.args[0], [*self._running.values()]
        pending_request.routing_context.should_backoff = True
        loads = {each: running.count(each) for each in replicas if each not in sent.tried}
        groups = self._prefixes.rank(sent.keys, loads, self._most_ahead)
        groups.append([each for each in replicas if each in sent.tried])
        return [[replicas[each] for each in group] for group in groups if group]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Ray calls this when a replica has taken a request."""
        if pending_request.args:
            sent = pending_request.args[0]
            sent.tried.append(replica_id)
            self._prefixes.add(sent.keys, replica_id)
            self._running[pending_request.metadata.internal_request_id] = replica_id

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ray calls this when a request has ended."""
        self._running.pop(internal_request_id, None)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Ray calls this when a replica has died; another one that has its name starts with an empty cache."""
        super().on_replica_actor_died(replica_id)
        self._prefixes.keep({*self.curr_replicas})

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Ray calls this when replicas have started or ended."""
        super().update_replicas(replicas)
        self._prefixes.keep({*self.curr_replicas})
