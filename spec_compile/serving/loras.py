"""LoRA adapters over HTTP: the models BASE:ADAPTER, and vLLM's routes that load and unload adapters."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from ..capture.loras import BASE
from ..errors import UnsupportedModelError
from .body import decode_body, read_body
from .errors import Refusal, refuse
from .fields import FLAG, TEXT, check_object

LOAD = {"lora_name": TEXT, "lora_path": TEXT, "load_inplace": FLAG}
UNLOAD = {"lora_name": TEXT}
MOST_BYTES, MOST_CONTAINERS = 1 << 16, 16
"""Bounds of the body of a request to load or unload an adapter."""


def read_modules(modules: list[str]) -> dict[str, str]:
    """The paths of adapters by name. modules: each NAME=PATH, as for vLLM. ValueError for another form."""
    paths: dict[str, str] = {}
    for module in modules:
        name, _, path = module.partition("=")
        if not path or not _is_name(name) or name in paths:
            raise ValueError(
                f"lora_modules: expected NAME=PATH, each NAME once, without dots and not {BASE!r}, got {module!r}"
            )
        paths[name] = path
    return paths


def _is_name(name: str) -> bool:
    """True if peft can call an adapter so."""
    return bool(name) and "." not in name and name != BASE


class ServedAdapters:
    """The adapters of the served model, by the names of models that clients ask for.

    The adapter sql of the model tiny is the model tiny:sql. Clients of vLLM call it sql, which is answered, too.
    """

    def __init__(self, base: str, paths: dict[str, str]):
        """base: the name of the served model. paths: of adapters, by name."""
        self._base, self._paths = base, paths

    def load_into(self, model: PreTrainedModel) -> None:
        """Load all adapters into a model that has none yet."""
        for name, path in self._paths.items():
            model.load_adapter(path, adapter_name=name)

    def find(self, model: str) -> str | None:
        """The adapter that a model's name asks for; `BASE` for none, None if there is no such model."""
        name = model.removeprefix(f"{self._base}:")
        return BASE if model == self._base else name if name in self._paths else None

    def cards(self) -> list[dict]:
        """For each adapter what /v1/models tells of it."""
        paths = [*self._paths.items()]
        return [{"id": f"{self._base}:{name}", "root": path, "parent": self._base} for name, path in paths]

    def load(self, model: Any, body: dict) -> str:
        """Load an adapter while requests run, between two rounds; returns a sentence. Refusal if it cannot be."""
        from peft import PeftConfig

        fields = check_object(body, LOAD, ("lora_name", "lora_path"))
        name, path, engine = fields["lora_name"], fields["lora_path"], model.speculation.engine
        if not _is_name(name):
            raise refuse("lora_name", f"expected a name without dots that is not {BASE!r}")
        try:  # the hub may be slow, so rounds do not wait for it
            folder = path if Path(path).is_dir() else snapshot_download(path)
            config = PeftConfig.from_pretrained(folder)
        except (OSError, TypeError, ValueError) as error:
            raise refuse("lora_path", f"there is no adapter: {error}") from error
        with engine.turns, torch.inference_mode(False):
            if name in self._paths and not fields.get("load_inplace"):
                raise refuse("lora_name", f"the adapter {name!r} is loaded; send load_inplace: true to replace it")
            try:
                engine.loras.check_config(name, config)
            except UnsupportedModelError as error:
                raise refuse("lora_path", str(error)) from error
            self._unload(engine.original, name)
            try:
                engine.original.load_adapter(folder, adapter_name=name)
            except Exception as error:  # peft and transformers raise many kinds of them for files that do not fit
                self._unload(engine.original, name)
                raise refuse("lora_path", f"it cannot be loaded: {type(error).__name__}: {error}") from error
            self._paths[name] = path
        return f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, model: Any, body: dict) -> str:
        """Unload an adapter while requests run, between two rounds; returns a sentence. Refusal if there is none."""
        name, engine = check_object(body, UNLOAD, ("lora_name",))["lora_name"], model.speculation.engine
        with engine.turns:
            if name not in self._paths:
                raise Refusal(404, f"lora_name: there is no adapter {name[:200]!r} here", "lora_name", "not_found")
            self._unload(engine.original, name)
        return f"Success: LoRA adapter '{name}' removed successfully."

    def _unload(self, model: PreTrainedModel, name: str) -> None:
        from peft.functional import delete_adapter

        self._paths.pop(name, None)
        if model.peft_config.pop(name, None) is not None:
            delete_adapter(model, adapter_name=name, prefix="lora_")


def add_lora_routes(app: FastAPI, adapters: ServedAdapters, model: Any) -> None:
    """Add POST /v1/load_lora_adapter and /v1/unload_lora_adapter. model: the speculative one."""

    def add(path: str, change: Callable[[Any, dict], str]) -> None:
        @app.post(path)
        async def answer(request: Request) -> PlainTextResponse:
            body = decode_body(await read_body(request, MOST_BYTES), MOST_CONTAINERS)
            return PlainTextResponse(await asyncio.to_thread(change, model, body))

    add("/v1/load_lora_adapter", adapters.load)
    add("/v1/unload_lora_adapter", adapters.unload)
