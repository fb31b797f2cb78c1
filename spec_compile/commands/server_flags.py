"""The flags of transformers' server, and our flags about clients, among the options of a command."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from transformers.cli.serve import Serve

from ..serving import FLAGS
from .values import json_object, parsed

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
    from ..serving.connections import Limits
    from ..serving.door import Keys

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
