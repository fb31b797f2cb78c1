"""`build`: loads a model, wraps it, and makes the application that serves it."""

import json
import logging
import os
import re
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.middleware.cors import CORSMiddleware
from transformers import AutoConfig, AutoProcessor, AutoTokenizer, BitsAndBytesConfig, ContinuousBatchingConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from ..api import speculate
from ..errors import check_int, did_you_mean
from . import FLAGS, MAX_QUEUE
from .anthropic import MessagesEndpoint, TokenCounts
from .call import CallMiddleware, HttpCall
from .door import KeyMiddleware, Keys, Policy
from .endpoint import Endpoint, Service
from .errors import MESSAGES_PATH, Refusal, add_handlers, refuse
from .fields import TEXT, record
from .followers import Followers
from .generation import Requests
from .handlers import Chat, Completion, Detokenize, Tokenize
from .infill import Infill
from .loras import ServedAdapters, add_lora_routes, read_modules
from .responses import Responses

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@+-]{0,127}")
MODEL_NAMES = "a letter or digit, and at most 127 letters, digits and ._/:@+- after it"
METRICS = "/metrics"
QUANTIZATIONS = {
    "bnb-4bit": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "bnb-8bit": {"load_in_8bit": True},
}
"""Arguments of BitsAndBytesConfig for each value of the flag `quantization`."""
REASONING = {"auto": {}, "on": {"enable_thinking": True}, "off": {"enable_thinking": False}}
"""Variables of chat templates for each value of the flag `reasoning`."""


def load(
    name: str, device: str = "auto", dtype: str | None = "auto", attn_implementation: str | None = None,
    quantization: str | None = None, trust_remote_code: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """A model and its processor or tokenizer.

    name: a directory, or a name on the model hub; NAME@REVISION, and NAME:FILE.gguf for a file of GGUF
    device: "auto" is one GPU if there is one; with several ranks each takes its own
    """
    if dtype not in ("auto", None) and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype: expected auto or a dtype of torch such as bfloat16, got {dtype!r}")
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization: expected {' or '.join(QUANTIZATIONS)}, got {quantization!r}")
    if device == "auto":  # transformers would spread a model over all GPUs
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    shared: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    before, _, file = name.rpartition(":")
    if before and file.endswith(".gguf"):
        name, shared["gguf_file"] = before, file
    if not os.path.exists(name):
        name, _, revision = name.partition("@")
        shared["revision"] = revision or "main"
    processor = (AutoTokenizer if "gguf_file" in shared else AutoProcessor).from_pretrained(name, **shared)
    config = AutoConfig.from_pretrained(name, **shared)
    if config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        kind = transformers.AutoModelForMultimodalLM
    else:  # a class of the model's own code is not there
        kind = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
    if quantization is not None:
        shared["quantization_config"] = BitsAndBytesConfig(**QUANTIZATIONS[quantization])
    placed = {
        "attn_implementation": attn_implementation,
        "dtype": dtype,
        "device_map": int(device) if device.isdigit() else device,
    }
    return kind.from_pretrained(name, **shared, **placed), processor


class LoadModel(Endpoint):
    """POST /load_model, which `transformers chat` asks before it begins.

    Answers with the last event of a load: the one model is ready, or another cannot be loaded.
    """

    fields, prompt_field, generates = record("model", model=TEXT), "model", False

    def _check(self, call: HttpCall) -> None:
        """Another model is told in the event."""

    async def _respond(self, call: HttpCall) -> Response:
        event = {"status": "ready", "model": call.fields["model"], "cached": True}
        try:
            super()._check(call)
        except Refusal as refusal:
            event = {"status": "error", "model": call.fields["model"], "message": refusal.detail}
        return Response(f"data: {json.dumps(event)}\n\n", media_type="text/event-stream")


ENDPOINTS: dict[str, type[Endpoint]] = {
    "/v1/chat/completions": Chat, "/v1/completions": Completion, "/v1/responses": Responses,
    MESSAGES_PATH: MessagesEndpoint, f"{MESSAGES_PATH}/count_tokens": TokenCounts, "/tokenize": Tokenize,
    "/detokenize": Detokenize, "/load_model": LoadModel, "/infill": Infill,
}  # fmt: skip
"""By the path of POST."""
UNSERVED = dict.fromkeys(
    ("/v1/embeddings", "/v1/rerank", "/v1/score", "/v1/moderations"), "a model that generates text; use a server of "
    "models for it, such as text-embeddings-inference"
) | dict.fromkeys(
    ("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/images/generations", "/v1/batches", "/v1/files"),
    "a model that generates text; use /v1/chat/completions",
)  # fmt: skip
"""Paths that clients of OpenAI's know, and what is here instead."""


class Server:
    """A server that is ready: its ASGI app, uvicorn's config, its `Requests`, and its `Keys`."""

    def __init__(self, app: FastAPI, service: Service, host: str, port: int):
        self.app, self.service, self.requests, self.keys = app, service, service.requests, Keys(())
        self.config = uvicorn.Config(app, host=host, port=port, log_level="info")

    @property
    def model(self) -> Any:
        """The speculative model."""
        return self.requests.model


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
    """Load a model, wrap it, compile its rounds, and put a server around it, which does not listen yet.

    model: a directory, or a name on the model hub
    options: arguments of `speculate`
    slots, max_queue: requests that are answered at once, and requests that may wait for a slot
    tensor_parallel: GPUs that share the model; a process is started for each but the first
    served_model_name: the clients' name of the model (default: `model`)
    lora_modules: LoRA adapters that requests may choose, each NAME=PATH; later ones may change the layers that one of
        these changes. `max_loras` of `speculate` is their number unless `options` says it
    follows: True in a process that was started for a further GPU
    flags: fields of `Policy`, and those in `FLAGS`, such as port=8000

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
    adapters, ranks = ServedAdapters(name, loras, policy.lora_root), nullcontext()
    if tensor_parallel > 1 and not follows:
        arguments = {"model": str(model), "algo": algo, "tensor_parallel": tensor_parallel}
        arguments["options"] = options = options | {"tensor_parallel": tensor_parallel}
        ranks = Followers(tensor_parallel, arguments | sizes | flags)
    with ranks as followers:
        server = _build(str(model), algo, options, sizes, flags, adapters)
    server.requests.followers = followers
    _settle(server, policy)
    if policy.allow_runtime_lora_updating:
        add_lora_routes(server.app, adapters, server.model)
    return server


def _settle(server: Server, policy: Policy) -> None:
    """Let clients do what the policy says."""
    server.keys, server.requests.policy = policy.keys, policy
    server.requests.shadow.start(policy.shadow)
    server.app.add_middleware(KeyMiddleware, keys=server.keys)
    if policy.enable_cors or policy.allowed_origins:
        # Without credentials: pages need not send cookies, which nothing here reads.
        told, origins = ["X-Request-Id", "Retry-After"], policy.allowed_origins or ["*"]
        server.app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=policy.allowed_methods or ["*"],
            allow_headers=policy.allowed_headers or ["*"], expose_headers=told,
        )  # fmt: skip


def _build(name: str, algo: str, options: dict, sizes: dict, flags: dict, adapters: ServedAdapters) -> Server:
    """A rank's server; see `build`."""
    flags = {"reasoning": "auto", "host": "localhost", "port": 8000, "log_level": "warning"} | flags
    variables = json.loads(flags.get("chat_template_kwargs") or "{}")
    if not isinstance(variables, dict) or flags["reasoning"] not in REASONING:
        raise ValueError("chat_template_kwargs: expected a JSON object; reasoning: expected auto, on or off")
    if flags.get("default_seed") is not None:
        torch.manual_seed(flags["default_seed"])
    logging.getLogger("transformers").setLevel(flags["log_level"].upper())
    parts = ("device", "dtype", "attn_implementation", "quantization", "trust_remote_code")
    model, processor = load(name, **{part: flags[part] for part in parts if part in flags})
    adapters.load_into(model)
    config = ContinuousBatchingConfig()
    config.max_requests_per_batch, config.max_queue_size = sizes["slots"], sizes["max_queue"]
    requests = Requests(speculate(model.eval(), algo=algo, **options), processor, config)
    service = Service(requests, adapters, variables | REASONING[flags["reasoning"]])
    return Server(_app(service), service, flags["host"], flags["port"])


def _app(service: Service) -> FastAPI:
    """The application: all endpoints, errors in the form of each, and the end of calls whose clients leave."""
    app, requests = FastAPI(), service.requests
    for path, endpoint in ENDPOINTS.items():
        app.post(path)(endpoint(service).answer)
    for path, what in UNSERVED.items():
        app.post(path)(partial(_refuse_path, path, what))

    @app.api_route("/v1/models", methods=["GET", "OPTIONS"])
    async def list_models() -> JSONResponse:
        cards = service.cards()
        pages = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}  # Anthropic's
        return JSONResponse({"object": "list", "data": cards} | pages)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> JSONResponse:
        for card in service.cards():
            if card["id"] == name:
                return JSONResponse(card)
        raise refuse("model", f"there is no model {name[:200]!r} here", 404, "model_not_found")

    @app.api_route("/", methods=["GET", "HEAD"])  # clients ask whether somebody is there
    async def root() -> JSONResponse:
        return JSONResponse({"object": "server", "owned_by": "spec_compile"})

    @app.get("/health")
    async def health() -> JSONResponse:
        ailment = requests.ailment()
        if ailment is not None:
            return JSONResponse({"status": "unhealthy", "reason": ailment}, 503)
        return JSONResponse({"status": "ok"})

    app.get(METRICS)(requests.metrics.answer)
    add_handlers(app)
    app.add_middleware(CallMiddleware, cancel=requests.manager.cancel_request)
    return app


async def _refuse_path(path: str, what: str) -> None:
    raise Refusal(404, f"{path} is not served: this is {what}", code="unknown_url")
