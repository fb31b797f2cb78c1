"""The commands of this folder: ``python -m spec_compile serve``."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers.cli.serve import Serve

from ..cli import json_object, parsed
from . import FLAGS, GRACE, MAX_QUEUE, require_packages

application = typer.Typer()

Texts = list[str] | None
Count = int | None


def _door(
    api_key: Annotated[
        Texts, typer.Option(help="A key that clients need; may be repeated. The process list shows it.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file of keys, one a line; SPEC_COMPILE_API_KEY may have some, too.")
    ] = None,
    allowed_hosts: Annotated[
        Texts, typer.Option(help="A name that clients may call the server by; may be repeated.")
    ] = None,
    metrics_port: Annotated[Count, typer.Option(help="Another port for /metrics.", min=0, max=65535)] = None,
    metrics_host: Annotated[str, typer.Option(help="The address of that port.")] = "127.0.0.1",
    max_connections: Annotated[Count, typer.Option(help="That are open; by default at most 4,096.", min=1)] = None,
    max_connections_per_address: Annotated[
        Count, typer.Option(help="Of one client; by default three quarters.", min=1)
    ] = None,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds for the headers of a request, and for a small body.", min=0.1)
    ] = 10.0,
    allowed_media_domains: Annotated[
        Texts, typer.Option(help="HOST or HOST:PORT that pictures are fetched from; may be repeated.")
    ] = None,
    allowed_local_media_path: Annotated[
        Path | None, typer.Option(help="A folder below which requests may name pictures as file:///...")
    ] = None,
    limit_mm_per_prompt: Annotated[
        dict, parsed(json_object, "JSON", "Pictures of a request: '{\"image\": 4}'.")
    ] = "{}",  # type: ignore[assignment]
    share_texts: Annotated[bool, typer.Option("--share-texts", help="Draft n-grams from all clients' texts.")] = False,
    isolate_prefixes: Annotated[
        bool, typer.Option("--isolate-prefixes", help="Let prompts of different API keys share nothing.")
    ] = False,
    allow_runtime_lora_updating: Annotated[
        bool, typer.Option("--allow-runtime-lora-updating", help="Let clients load and unload adapters.")
    ] = False,
    lora_root: Annotated[Path | None, typer.Option(help="The folder with the adapters that clients may load.")] = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    from .door import Keys
    from .runner import Limits

    limits = Limits(max_connections, max_connections_per_address, request_timeout)
    metrics = None if metrics_port is None else (metrics_host, metrics_port)
    policy = {
        "keys": Keys.read(api_key or (), api_key_file), "allowed_media_domains": allowed_media_domains,
        "allowed_local_media_path": allowed_local_media_path, "limit_mm_per_prompt": limit_mm_per_prompt,
        "share_texts": share_texts, "isolate_prefixes": isolate_prefixes,
        "allow_runtime_lora_updating": allow_runtime_lora_updating, "lora_root": lora_root,
    }  # fmt: skip
    return policy, {"limits": limits, "allowed_hosts": allowed_hosts or (), "metrics": metrics}


def read_door(flags: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of a server's `Policy` and the arguments of its `Runner`. Their flags are taken out of `flags`."""
    return _door(**{name: flags.pop(name) for name in inspect.signature(_door).parameters})


def with_server_flags(serve: Callable) -> Callable:
    """A command with its own parameters, and in place of ``**flags`` those of transformers' server in `FLAGS` and those
    that `read_door` takes."""
    parameters = [each for each in inspect.signature(serve).parameters.values() if each.kind is not each.VAR_KEYWORD]
    parameters += [each for name, each in inspect.signature(Serve.__init__).parameters.items() if name in FLAGS]
    parameters += inspect.signature(_door).parameters.values()
    serve.__signature__ = inspect.Signature(parameters)
    serve.__annotations__ = {each.name: each.annotation for each in parameters}
    return serve


@application.command("serve")
@with_server_flags
def _serve(
    model: Annotated[str, typer.Argument(help="A directory, or a name on the model hub.")],
    algo: Annotated[str, typer.Option(help="How drafts are made.")] = "ngram",
    draft: Annotated[str | None, typer.Option(help="The draft: a directory, or a name on the model hub.")] = None,
    options: Annotated[dict, parsed(json_object, "JSON", "Options of speculate().")] = "{}",
    slots: Annotated[int | None, typer.Option(help="Requests that are answered at once.", min=1)] = None,
    max_queue: Annotated[int, typer.Option(help="Requests that may wait; others get 429.", min=1)] = MAX_QUEUE,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that share the model.", min=1)] = 1,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model; by default as it is called here.")
    ] = None,
    lora_modules: Annotated[
        list[str] | None, typer.Option(help="A LoRA adapter that requests may choose: NAME=PATH; may be repeated.")
    ] = None,
    max_loras: Annotated[int | None, typer.Option(help="Adapters of rows in use; by default all.", min=1)] = None,
    max_lora_rank: Annotated[int | None, typer.Option(help="By default that of the adapters.", min=1)] = None,
    train_while_serving: Annotated[
        bool, typer.Option("--train-while-serving", help="Let the draft learn from answers; texts stay in memory.")
    ] = False,
    online_training: Annotated[dict, parsed(json_object, "JSON", "Such as '{\"share\": 0.05}'; trains, too.")] = "{}",
    grace: Annotated[float, typer.Option(help="Seconds that requests have to end after SIGTERM.", min=0)] = GRACE,
    **flags: Any,
) -> int:
    """Run an HTTP server with OpenAI's API: transformers' own, around speculative models and continuous batching.

    POST /v1/chat/completions, /v1/completions, /v1/responses; GET /v1/models, /health, /metrics.
    """
    require_packages()
    from .runner import Runner
    from .server import build

    options |= {} if draft is None else {"draft": draft}
    options |= {} if max_loras is None else {"max_loras": max_loras}
    options |= {} if max_lora_rank is None else {"max_lora_rank": max_lora_rank}
    sizes = {"slots": slots, "max_queue": max_queue, "tensor_parallel": tensor_parallel}
    names = {"served_model_name": served_model_name, "lora_modules": lora_modules}
    policy, door = read_door(flags)
    server = build(model, algo, options, **sizes, **names, **policy, **flags)
    if train_while_serving or online_training:
        from ..train import train_while_serving as learn  # the extra `train`, if a flag asks for it

        learn(server.models.the_one.model, **online_training)
    runner = Runner(server, grace, **door)
    runner.run()
    return int(runner.has_failed)
