"""The command of this folder: ``python -m spec_compile serve``."""

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from ..cli import json_object, parsed
from . import FLAGS, GRACE, MAX_QUEUE, require_packages

application = typer.Typer()

Text, Texts, Count = str | None, list[str] | None, int | None


def _json(help: str) -> Any:
    return parsed(json_object, "JSON", help)


OPTIONS: dict[str, tuple] = {
    "algo": (str, "ngram", "How drafts are made."),
    "draft": (Text, None, "The draft: a directory, or a name on the model hub."),
    "options": (dict, "{}", _json("Options of speculate().")),
    "slots": (Count, None, "Requests that are answered at once.", 1),
    "max_queue": (int, MAX_QUEUE, "Requests that may wait; others get 429.", 1),
    "tensor_parallel": (int, 1, "GPUs that share the model.", 1),
    "served_model_name": (Text, None, "What clients call the model; by default as it is called here."),
    "lora_modules": (Texts, None, "A LoRA adapter that requests may choose: NAME=PATH; may be repeated."),
    "max_loras": (Count, None, "Adapters of rows in use; by default all.", 1),
    "max_lora_rank": (Count, None, "By default the largest of the adapters.", 1),
    "train_while_serving": (bool, False, "Let the draft learn from answers; texts stay in memory."),
    "online_training": (dict, "{}", _json("Such as '{\"share\": 0.05}'; trains, too.")),
    "shadow": (float, 0.0, "Share of requests that plain steps answer again; metrics count differences.", 0, 1),
    "grace": (float, GRACE, "Seconds that requests have to end after SIGTERM.", 0),
    # How the model is loaded, and where the server listens.
    "device": (str, "auto", "Such as cpu or cuda:0; auto is one GPU if there is one."),
    "dtype": (str, "auto", "Such as bfloat16; auto is the dtype of the weights."),
    "attn_implementation": (Text, None, "transformers' attention, such as flash_attention_2."),
    "quantization": (Text, None, "bnb-4bit or bnb-8bit."),
    "trust_remote_code": (bool, False, "Run the model's own code."),
    "reasoning": (str, "auto", "on, off, or auto: as the chat template has it."),
    "chat_template_kwargs": (Text, None, "JSON of variables of the chat template, which requests may change."),
    "host": (str, "localhost", "The address at which the server listens."),
    "port": (int, 8000, "The port.", 0, 65535),
    "enable_cors": (bool, False, "Let web pages of other origins read answers."),
    "allowed_origins": (Texts, None, "Only of this origin, such as https://example.org; may be repeated."),
    "allowed_methods": (Texts, None, "A method that such pages may use; by default all; may be repeated."),
    "allowed_headers": (Texts, None, "A header that such pages may send; by default all; may be repeated."),
    "log_level": (str, "warning", "Of transformers, such as info."),
    "default_seed": (Count, None, "The seed of torch at the start."),
    # Who may call the server, and what clients may do.
    "api_key": (Texts, None, "A key that clients need; may be repeated. The process list shows it."),
    "api_key_file": (Path | None, None, "A file of keys, one a line; SPEC_COMPILE_API_KEY may have some, too."),
    "allowed_hosts": (Texts, None, "A name that clients may call the server by; may be repeated."),
    "metrics_port": (Count, None, "Another port for /metrics.", 0, 65535),
    "metrics_host": (str, "127.0.0.1", "The address of that port."),
    "max_connections": (Count, None, "That are open; by default at most 4,096.", 1),
    "max_connections_per_address": (Count, None, "Of one client; by default three quarters.", 1),
    "request_timeout": (float, 10.0, "Seconds for the headers of a request, and for a small body.", 0.1),
    "allowed_media_domains": (Texts, None, "HOST or HOST:PORT that pictures are fetched from; may be repeated."),
    "allowed_local_media_path": (Path | None, None, "A folder below which requests may name pictures as file:///..."),
    "limit_mm_per_prompt": (dict, "{}", _json("Pictures of a request: '{\"image\": 4}'.")),
    "share_texts": (bool, False, "Draft n-grams from all clients' texts."),
    "isolate_prefixes": (bool, False, "Let prompts of different API keys share nothing."),
    "allow_runtime_lora_updating": (bool, False, "Let clients load and unload adapters."),
    "lora_root": (Path | None, None, "The folder with the adapters that clients may load."),
}
"""For each flag its type, its default, what its help says, and the least and the largest value, if there are some."""


def _parameter(name: str, kind: Any, default: Any, told: Any, *bounds: float) -> inspect.Parameter:
    """A parameter of the command; see `OPTIONS`."""
    if isinstance(told, str):
        words = [f"--{name.replace('_', '-')}"] if kind is bool else []
        told = typer.Option(*words, help=told, **dict(zip(("min", "max"), bounds)))
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, told])


def _serve(model: Annotated[str, typer.Argument(help="A directory, or a name on the model hub.")], **flags: Any) -> int:
    """Run an HTTP server with the APIs of OpenAI and Anthropic around speculative models and continuous batching.

    POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages; GET /v1/models, /health, /metrics.
    """
    require_packages()
    from .door import Keys, Policy
    from .runner import Limits, Runner
    from .server import build

    more = {name: flags[name] for name in ("draft", "max_loras", "max_lora_rank") if flags[name] is not None}
    keys = Keys.read(flags["api_key"] or (), flags["api_key_file"])
    names = {*inspect.signature(build).parameters, *(each.name for each in fields(Policy)), *FLAGS}
    built = {name: flag for name, flag in flags.items() if name in names}
    server = build(model, keys=keys, **built | {"options": flags["options"] | more})
    if flags["train_while_serving"] or flags["online_training"]:
        from ..train import train_while_serving  # the extra `train`, if a flag asks for it

        train_while_serving(server.model, **flags["online_training"])
    limits = Limits(flags["max_connections"], flags["max_connections_per_address"], flags["request_timeout"])
    metrics = None if flags["metrics_port"] is None else (flags["metrics_host"], flags["metrics_port"])
    runner = Runner(server, flags["grace"], limits=limits, allowed_hosts=flags["allowed_hosts"] or (), metrics=metrics)
    runner.run()
    return int(runner.has_failed)


_PARAMETERS = [
    inspect.signature(_serve).parameters["model"], *(_parameter(name, *each) for name, each in OPTIONS.items())
]  # fmt: skip
_serve.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
_serve.__annotations__ = {each.name: each.annotation for each in _PARAMETERS}
application.command("serve")(_serve)
