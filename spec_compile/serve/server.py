"""transformers' server, some of whose parts are replaced by ours."""

import importlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from transformers.cli.serve import Serve
from transformers.cli.serving.model_manager import ModelManager

from ..api import speculate
from ..errors import check_int, did_you_mean
from . import FLAGS, MAX_QUEUE
from .anthropic import add_messages
from .call import CallMiddleware
from .door import KeyMiddleware, Keys, Policy
from .errors import Refusal, add_handlers
from .fields import TEXT, check_fields
from .followers import Followers
from .generation import Requests, SpeculativeState
from .handlers import HANDLERS, Chat
from .loras import ServedAdapters, add_lora_routes, read_modules
from .tokens import Detokenize, Tokenize

MODULES = {
    "ChatCompletionHandler": "chat_completion",
    "CompletionHandler": "completion",
    "ResponseHandler": "response",
    "ModelManager": "model_manager",
    "GenerationState": "utils",
}
"""The modules from which transformers' server imports the classes that ours replace."""
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,127}")
MODEL_NAMES = "a letter or digit, and at most 127 letters, digits and ._/:@+- after it"
REPLACED_ROUTES = {
    "/health", "/load_model", "/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/responses",
}  # fmt: skip
METRICS = "/metrics"
REMOVED_ROUTES = {"/reset", "/v1/audio/transcriptions", "/v1/systemone"}
"""The first would drop the model; the others need models that do other things."""


class Models(ModelManager):
    """transformers' manager of models, for the one model that is served, wrapped by `speculate`.

    served_name: what clients call it. adapters: its LoRA adapters.
    """

    def __init__(
        self, algo: str, options: dict, served_name: str, adapters: ServedAdapters, device: str = "auto",
        **settings: Any,
    ):  # fmt: skip
        self.served_name, self.adapters = served_name, adapters
        self._speculate = partial(speculate, algo=algo, **options)
        self._since = int(time.time())
        if device == "auto":  # transformers would spread a model over all GPUs
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        super().__init__(device=device, **settings)

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        model = super()._load_model(*args, **kwargs)
        self.adapters.load_into(model)
        return self._speculate(model.eval())

    @property
    def the_one(self) -> Any:
        """The model and its processor."""
        return next(iter(self.loaded_models.values()))

    def get_gen_models(self, cache_dir: str | None = None) -> list[dict]:
        """The one model and its adapters, in OpenAI's form with vLLM's `root` and `parent`."""
        common = {"object": "model", "created": self._since, "owned_by": "spec_compile"}
        return [{"id": self.served_name} | common, *(card | common for card in self.adapters.cards())]


class LoadModel(Chat):
    """POST /load_model, which `transformers chat` asks before it begins.

    Answers with the last event of a load: the one model is ready, or another cannot be loaded.
    """

    required, generates = "model", False

    def _read(self, body: dict) -> dict:
        return check_fields(body, {"model": TEXT}, "model")

    def _check(self, body: dict) -> dict:
        return body

    async def handle_request(self, body: dict, request_id: str) -> Any:
        """A stream of one event, in the form of transformers."""
        event = {"status": "ready", "model": body["model"], "cached": True}
        try:
            self._check_model(body)
        except Refusal as refusal:
            event = {"status": "error", "model": body["model"], "message": refusal.detail}
        return Response(f"data: {json.dumps(event)}\n\n", media_type="text/event-stream")


class _Unstarted(Serve):
    """transformers' server, which does not run yet when it is made."""

    def start_server(self) -> None:
        """Does nothing; the caller runs the app."""


class Server:
    """A server that is ready: its ASGI app, uvicorn's config, its `Requests`, its `Models`, and its `Keys`."""

    def __init__(self, built: Serve, requests: Requests, models: Models):
        self.config, self.models, self.keys = built.server.config, models, Keys(())
        self.app, self.requests = self.config.app, requests


def build(
    model: str | Path,
    algo: str = "ngram",
    options: dict | None = None,
    *,
    slots: int | None = None,
    max_queue: int = MAX_QUEUE,
    tensor_parallel: int = 1,
    served_model_name: str | None = None,
    lora_modules: list[str] | None = None,
    follows: bool = False,
    **flags: Any,
) -> Server:
    """Load a model, wrap it, compile its rounds, and put transformers' server around it, which does not listen yet.

    model: a directory, or a name on the model hub
    options: of `speculate`
    slots, max_queue: requests that are answered at once, and requests that may wait for a slot
    tensor_parallel: GPUs that share the model; a process is started for each but the first
    served_model_name: the clients' name of the model (default: `model`)
    lora_modules: LoRA adapters that requests may choose, each NAME=PATH; later ones may change the layers that one of
        these changes. `max_loras` of `speculate` is their number unless `options` says it
    follows: True in a process that was started for a further GPU
    flags: fields of `Policy`, and arguments of transformers' `Serve` that are in `FLAGS`, such as port=8000

    Raises what `speculate` raises, ValueError if the model cannot be loaded, and TypeError for an unknown flag.
    """
    check_int("tensor_parallel", tensor_parallel, 1, 8)
    policy = Policy(**{each.name: flags.pop(each.name) for each in fields(Policy) if each.name in flags})
    for name in flags:
        if name not in FLAGS:
            raise TypeError(f"{name}: expected one of {', '.join(FLAGS)}.{did_you_mean(name, FLAGS)}")
    if served_model_name is not None and not MODEL_NAME.fullmatch(served_model_name):
        raise ValueError(f"served_model_name: expected {MODEL_NAMES}, got {served_model_name[:200]!r}")
    name = str(model) if served_model_name is None else served_model_name
    sizes, options, loras = {"slots": slots, "max_queue": max_queue}, options or {}, read_modules(lora_modules or [])
    if loras:
        options = {"max_loras": len(loras)} | options
    elif options.get("max_loras") or policy.allow_runtime_lora_updating:
        raise ValueError(
            "lora_modules: rows choose among the adapters of a model that has one; give at least one as NAME=PATH"
        )
    if loras and tensor_parallel > 1:
        raise ValueError("lora_modules: adapters are chosen for each row in one process; leave out tensor_parallel")
    if tensor_parallel == 1 or follows:
        adapters = ServedAdapters(name, loras, policy.lora_root)
        server = _build(model, algo, options, sizes, flags, adapters)
        _settle(server, policy)
        if policy.allow_runtime_lora_updating:
            add_lora_routes(server.app, server.models.adapters, server.models.the_one.model)
        return server
    arguments = {"model": str(model), "algo": algo, "tensor_parallel": tensor_parallel}
    arguments["options"] = options = options | {"tensor_parallel": tensor_parallel}
    with Followers(tensor_parallel, arguments | sizes | flags) as followers:
        server = _build(model, algo, options, sizes, flags, ServedAdapters(name, {}))
    server.requests.followers = followers
    _settle(server, policy)
    return server


def _settle(server: Server, policy: Policy) -> None:
    """Let clients do what the policy says."""
    server.keys, server.requests.policy = policy.keys, policy
    server.app.add_middleware(KeyMiddleware, keys=server.keys)
    if policy.enable_cors:  # transformers would also let pages send the user's cookies, which nothing here reads
        told = ["X-Request-Id", "Retry-After"]
        server.app.add_middleware(
            CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"], expose_headers=told
        )


def _build(
    model: str | Path, algo: str, options: dict, sizes: dict, flags: dict, adapters: ServedAdapters
) -> Server:  # fmt: skip
    """A rank's server; see `build`."""
    parts: dict[str, Callable] = HANDLERS | {
        "ModelManager": partial(Models, algo, options, adapters.base, adapters),
        "GenerationState": SpeculativeState,
    }
    flags = flags | {"continuous_batching": True, "compile": False}  # `speculate` compiles the rounds
    with _replaced(parts):
        built = _Unstarted(str(model), non_blocking=True, **flags)
    state, models = built._generation_state, built._model_manager
    state.open(models.the_one.model, models.the_one.processor, **sizes)
    app, template_kwargs = built.server.config.app, built._chat_handler.chat_template_kwargs

    def make(cls: type) -> Any:
        return cls(models, state, template_kwargs)

    handlers = {
        "/v1/chat/completions": built._chat_handler,
        "/v1/completions": built._completion_handler,
        "/v1/responses": built._response_handler,
        "/tokenize": make(Tokenize),
        "/detokenize": make(Detokenize),
        "/load_model": make(LoadModel),
    }
    _add_routes(app, state.requests, models, handlers)
    add_messages(app, make)
    return Server(built, state.requests, models)


@contextmanager
def _replaced(parts: dict[str, Callable]) -> Iterator[None]:
    """A context in which transformers' server is built of `parts`, which have the names of the classes they replace."""
    modules = {name: importlib.import_module(f"transformers.cli.serving.{MODULES[name]}") for name in parts}
    originals = {name: getattr(module, name) for name, module in modules.items()}
    try:
        for name, module in modules.items():
            setattr(module, name, parts[name])
        yield
    finally:
        for name, module in modules.items():
            setattr(module, name, originals[name])


def _add_routes(app: FastAPI, requests: Requests, models: Models, handlers: dict[str, Any]) -> None:
    """Replace transformers' routes; add /metrics, errors in OpenAI's form, and the end of calls whose clients leave.

    handlers: by the path of POST
    """
    gone = REPLACED_ROUTES | REMOVED_ROUTES
    app.router.routes[:] = [route for route in app.router.routes if route.path not in gone]
    for path, handler in handlers.items():
        app.post(path)(handler.answer)

    @app.api_route("/v1/models", methods=["GET", "OPTIONS"])
    async def list_models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": models.get_gen_models()})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        for each in models.get_gen_models():
            if each["id"] == name:
                return JSONResponse(each)
        raise Refusal(404, f"model: there is no model {name[:200]!r} here", "model", "model_not_found")

    @app.get("/health")
    async def health() -> JSONResponse:
        ailment = requests.ailment()
        if ailment is not None:
            return JSONResponse({"status": "unhealthy", "reason": ailment}, 503)
        return JSONResponse({"status": "ok"})

    app.get(METRICS)(metrics_of(requests))
    add_handlers(app)
    app.add_middleware(CallMiddleware, cancel=requests.manager.cancel_request)


def metrics_of(requests: Requests) -> Callable:
    """The endpoint that tells the metrics."""

    def metrics(request: Request) -> Response:
        return Response(requests.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    return metrics
