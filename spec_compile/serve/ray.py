"""Replicas on Ray: `app`, an application for Ray Serve of an `Ingress` and replicas, and `Answers`, for ``map_batches``
of Ray Data."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..api import speculate
from .door import KeyMiddleware, Keys
from .errors import MESSAGES_PATH, RETRY_SECONDS, Refusal, error_at, error_response
from .forwarding import AnswerHead, HttpRequest, PrefixMap, answer, prompt_keys
from .generation import FULL

SLOTS = 32
"""Requests that a replica answers at once, by default."""
MAX_QUEUE = 64
"""Requests that wait in a replica, and again as many before all replicas, by default."""
INGRESS = {"num_replicas": 1, "max_ongoing_requests": 10_000, "ray_actor_options": {"num_cpus": 0}}
"""Options of the ingress's deployment."""
DEPLOYMENT = {
    "num_replicas": 1,
    "health_check_period_s": 5,
    "health_check_timeout_s": 60,
    "graceful_shutdown_timeout_s": 30,
}
"""Options of Ray's deployment that differ from its own defaults."""
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
            return error_response(Refusal(503, f"a replica does not tell its metrics: {type(error).__name__}"))
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
    name = b"event: error\n" if sent.path.startswith(MESSAGES_PATH) else b""
    return name + b"data: " + error_at(sent.path, Refusal(500, DIED)).body + b"\n\n"


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
    return generate_latest(SimpleNamespace(collect=families.values))


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


class Replica:
    """One model with its manager and its server, in its own process."""

    def __init__(self, model: str, algo: str, options: dict, settings: dict):
        """See `app`. settings: arguments of `server.build`."""
        from .server import build

        self.server = build(model, algo, options, **settings)

    async def answer(self, sent: HttpRequest) -> AsyncIterator[AnswerHead | bytes]:
        """The server's answer to a request in parts."""
        async with aclosing(answer(self.server.app, sent)) as parts:
            async for part in parts:
                yield part

    async def metrics(self) -> tuple[str, bytes]:
        """The name of the replica, and its page for Prometheus."""
        return serve.get_replica_context().replica_id.unique_id, self.server.requests.metrics.page()

    def check_health(self) -> None:
        """Raise RuntimeError if the replica cannot answer; Ray then starts another."""
        ailment = self.server.requests.ailment()
        if ailment is not None:
            raise RuntimeError(ailment)


def app(
    model: str,
    algo: str = "ngram",
    *,
    options: dict | None = None,
    device: str = "cuda",
    slots: int = SLOTS,
    max_queue: int = MAX_QUEUE,
    tensor_parallel: int = 1,
    flags: dict | None = None,
    api_key: list[str] | None = None,
    api_key_file: str | None = None,
    ingress: dict | None = None,
    **deployment: Any,
) -> serve.Application:
    """An application for ``ray.serve.run``: replicas of the server, and an ingress that sends them requests.

    model: a directory that every machine has, or a name on the model hub
    options: arguments of `speculate`
    device: "cuda" gives each replica a GPU, "cpu" gives it none
    slots: requests that a replica answers at once
    max_queue: requests that wait in a replica, and as many again before all replicas; others get 429 with Retry-After
    tensor_parallel: GPUs of one machine that share the model in each replica, which has a process for each
    flags: further arguments of `server.build`, such as share_texts=True and dtype="bfloat16"
    api_key, api_key_file: keys, and a file with one a line, of which every request but to /health needs one; the
        variable SPEC_COMPILE_API_KEY may have keys, too
    ingress: options of Ray's deployment of the ingress, such as num_replicas
    deployment: options of Ray's deployment of the replicas, such as num_replicas and autoscaling_config

    """
    keys = Keys.read(api_key or (), api_key_file)
    settings = {
        "slots": slots, "max_queue": max_queue, "device": device, "tensor_parallel": tensor_parallel, "keys": keys
    } | (flags or {})  # fmt: skip
    actor = {"num_gpus": 0 if device == "cpu" else tensor_parallel} | deployment.pop("ray_actor_options", {})
    merged = DEPLOYMENT | {
        # One more than the replica takes, so that the replica itself refuses it with the reason.
        "max_ongoing_requests": slots + max_queue + 1,
        "max_queued_requests": max_queue,
        "request_router_config": RequestRouterConfig(
            request_router_class=PrefixRouter, request_router_kwargs={"most_ahead": max(1, slots // 2)}
        ),
    } | deployment  # fmt: skip
    if "autoscaling_config" in merged:
        merged.pop("num_replicas")
    replica = serve.deployment(Replica, name="Replica", ray_actor_options=actor, **merged)
    door = serve.deployment(serve.ingress()(Ingress), name="Ingress", **INGRESS | (ingress or {}))
    isolates = settings.get("isolate_prefixes", False)
    return door.bind(replica.bind(str(model), algo, options or {}, settings), keys, isolates)


class Answers:
    """For ``map_batches``: takes batches with prompts, and adds answers. The model is loaded once in each actor."""

    def __init__(
        self, model: str, algo: str = "ngram", options: dict | None = None, device: str = "cuda", dtype: str = "auto",
        **settings: Any,
    ):  # fmt: skip
        """model, algo, options, device: as for `app`. settings: fields of GenerationConfig, such as max_new_tokens."""
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
        self.settings = settings
        self.manager = speculate(loaded, algo, **(options or {})).init_continuous_batching()
        self.manager.warmup()
        self.manager.start()

    def __call__(self, batch: dict) -> dict:
        """Answer a batch, each prompt independently of the others. RuntimeError if the worker dies.

        batch: columns, of which "prompt" has texts

        Returns the batch with three more columns: "answer", texts; "accept_length", tokens a step; and "error", the
        reason why there is no answer, or "".
        """
        names = [self._add(prompt) for prompt in batch["prompt"]]
        outputs = {name: None for name in names if isinstance(name, str)}
        while None in outputs.values():
            output = self.manager.get_result(timeout=1)
            if output is not None:
                outputs[output.request_id] = output
            elif not self.manager.is_running():
                raise RuntimeError(f"the worker died: {self.manager.background_thread_status.fatal_error}")
        rows = [self._row(outputs[name]) if isinstance(name, str) else ("", 0.0, str(name)) for name in names]
        columns = map(list, zip(*rows))
        return dict(batch) | dict(zip(("answer", "accept_length", "error"), columns))

    def _add(self, prompt: str) -> str | Exception:
        """The name of the request for a prompt, or the error with which it was refused."""
        try:
            return self.manager.add_request(
                self.tokenizer(prompt)["input_ids"], tokenizer=self.tokenizer, **self.settings
            )
        except ValueError as error:
            return error

    def _row(self, output: Any) -> tuple[str, float, str]:
        answer = self.tokenizer.decode(output.generated_tokens, skip_special_tokens=True)
        return answer, len(output.generated_tokens) / max(1, output.speculation.steps), output.error or ""
