"""LoRA adapters over HTTP: the models BASE:ADAPTER, and vLLM's routes that load and unload adapters."""

import asyncio
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel

from ..capture.loras import BASE, Loras
from ..errors import UnsupportedModelError, log
from .body import decode_body, read_body
from .errors import refuse
from .fields import FLAG, TEXT, Kind, check_fields, integer, is_list, is_number, record

LoadFields = record("lora_name", "lora_path", lora_name=TEXT, lora_path=TEXT, load_inplace=FLAG)
UnloadFields = record("lora_name", lora_name=TEXT)
MOST_BYTES, MOST_CONTAINERS = 1 << 16, 16
"""Bounds of the body of a request to load or unload an adapter."""
LONGEST_NAME, LONGEST_PATH, MOST_LOADED = 128, 1024, 64
"""Characters of an adapter's name and of its path, and adapters that the server has at once."""
LONGEST_CONFIG, MOST_NAMES = 1 << 16, 1024
"""Bytes of an adapter's configuration, and names or patterns in a list of it."""
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_/-]*")
NAME_WORDS = f"at most {LONGEST_NAME} letters, digits, '_', '-' and '/', and not {BASE!r}"
PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,256}")
"""The name of a module, or the end of one. peft reads other texts as regular expressions, which may never end."""
NO_PATH = "there is no adapter of this path in the folder of adapters; expected a path below it"


def _are_plain(value: Any) -> bool:
    return is_list(value, _is_plain, MOST_NAMES, 0)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str) and PLAIN.fullmatch(value) is not None


def _patterns_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and _are_plain([*value]) and all(map(check, value.values()))


NAMES = f"a list of at most {MOST_NAMES} names of modules, no regular expression"
LAYER = integer(0, (1 << 16) - 1)
RANK, ALPHA = integer(1, 1 << 16), Kind(lambda value: is_number(value) and abs(value) <= 1e6, "a number up to 1e6")
CONFIG = {
    "r": RANK, "lora_alpha": ALPHA, "use_rslora": FLAG, "fan_in_fan_out": FLAG,
    "target_modules": Kind(lambda value: value == "all-linear" or _are_plain(value), f"all-linear, or {NAMES}"),
    "exclude_modules": Kind(_are_plain, NAMES),
    "layers_to_transform": Kind(
        lambda value: LAYER.accepts(value) or is_list(value, LAYER.accepts, MOST_NAMES, 0),
        "a list of numbers of layers",
    ),
    "layers_pattern": Kind(lambda value: _is_plain(value) or _are_plain(value), NAMES),
    "rank_pattern": Kind(_patterns_of(RANK.accepts), "an object of names of modules, no regular expressions"),
    "alpha_pattern": Kind(_patterns_of(ALPHA.accepts), "an object of names of modules, no regular expressions"),
}  # fmt: skip
"""The entries of an adapter_config.json that are read."""
WITHOUT_EFFECT = {
    "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "task_type", "inference_mode",
    "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config", "init_lora_weights",
}  # fmt: skip
"""Entries that are not read. Others may only have a value that changes nothing."""


def _is_neutral(value: Any) -> bool:
    return value is None or value is False or value in ("none", "", [], {})


def read_modules(modules: list[str]) -> dict[str, str]:
    """The paths of adapters by name. modules: each NAME=PATH, as for vLLM. ValueError for another form."""
    paths: dict[str, str] = {}
    for module in modules:
        name, _, path = module.partition("=")
        if not path or not _is_name(name) or name in paths:
            raise ValueError(f"lora_modules: expected NAME=PATH, each NAME once, of {NAME_WORDS}, got {module[:200]!r}")
        paths[name] = path
    return paths


def _is_name(name: str) -> bool:
    """True if peft can call an adapter so, and a log or a list of models can show it."""
    return len(name) <= LONGEST_NAME and NAME.fullmatch(name) is not None and name != BASE


def find_folder(root: Path, path: str) -> Path:
    """The folder of an adapter, links resolved, below `root`. Refusal, the same for all other paths."""
    try:
        folder = (root / path).resolve() if len(path) <= LONGEST_PATH else root
        if folder.is_relative_to(root) and _file(root, folder, "adapter_config.json") is not None:
            return folder
    except (OSError, RuntimeError, ValueError):  # a path that cannot be, or a loop of links
        pass
    raise refuse("lora_path", NO_PATH)


def _file(root: Path, folder: Path, name: str, most: int = LONGEST_CONFIG) -> Path | None:
    """A regular file in a folder, links resolved; None if none of at most `most` bytes is there and below `root`."""
    file = (folder / name).resolve()
    return file if file.is_relative_to(root) and file.is_file() and file.stat().st_size <= most else None


def read_config(folder: Path) -> Any:
    """peft's LoraConfig of an adapter, of those entries that are read. Refusal for others that change what it does."""
    from peft import LoraConfig

    try:
        values = json.loads((folder / "adapter_config.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise refuse("lora_path", "its adapter_config.json is not JSON") from error
    if not isinstance(values, dict) or values.get("peft_type") != "LORA":
        raise refuse("lora_path", "its adapter_config.json is not of a LoRA")
    values = {name: value for name, value in values.items() if not _is_neutral(value)}
    if values.get("init_lora_weights", True) not in (True, "gaussian"):
        raise refuse("lora_path", "it changes the model's own weights (init_lora_weights); convert it to a plain LoRA")
    for name, value in values.items():
        if name in CONFIG and not CONFIG[name].accepts(value):
            expected = f"expected {CONFIG[name].expected}; name such an adapter in --lora-modules"
            raise refuse("lora_path", f"{name} of its adapter_config.json: {expected}")
        if name not in CONFIG and name not in WITHOUT_EFFECT:
            raise refuse("lora_path", f"it has {name[:80]!r}, which rows cannot choose")
    values = {name: value for name, value in values.items() if name in CONFIG}
    return LoraConfig(**values, inference_mode=True)


def read_weights(root: Path, folder: Path, loras: Loras) -> dict[str, Tensor]:
    """The matrices of an adapter. Refusal, before they are read, if they are larger than slots for `loras` are."""
    sizes = [(part.up.shape[1], part.down.shape[2]) for part in loras.parts.values()]
    largest = 1 + max(max(size) for size in sizes)
    most = 8 * loras.rank * sum(map(sum, sizes)) + (1 << 20)
    file = _file(root, folder, "adapter_model.safetensors", most)
    if file is None:
        raise refuse("lora_path", f"expected its weights in adapter_model.safetensors, of at most {most} bytes")
    try:
        with safe_open(file, "pt") as tensors:
            names = [*tensors.keys()]
            if len(names) > 2 * len(sizes):
                raise refuse("lora_path", f"it has {len(names)} matrices, and the model takes {2 * len(sizes)}")
            for name in names:
                shape = tensors.get_slice(name).get_shape()
                fits = len(shape) == 2 and 0 < min(shape) <= loras.rank and max(shape) < largest
                if not fits or not _is_plain(name) or not name.endswith((".lora_A.weight", ".lora_B.weight")):
                    raise refuse("lora_path", f"{name[:80]!r} in its weights fits no slot for adapters")
            return {name: tensors.get_tensor(name).clone() for name in names}
    except (OSError, SafetensorError, TypeError, ValueError) as error:
        log.warning("the adapter in %s cannot be read", folder, exc_info=error)
        raise refuse("lora_path", "it cannot be loaded, because its weights are no safetensors of matrices") from error


class ServedAdapters:
    """The adapters of the served model, by the names of models that clients ask for.

    The adapter sql of the model tiny is the model tiny:sql. Clients of vLLM call it sql, which is answered, too.
    """

    def __init__(self, base: str, paths: dict[str, str], root: Path | None = None):
        """base: the name of the served model. paths: of adapters, by name. root: has those that clients may load."""
        self.base, self._paths, self._root = base, paths, root
        self._loading = threading.Lock()

    def load_into(self, model: PreTrainedModel) -> None:
        """Load all adapters into a model that has none yet."""
        for name, path in self._paths.items():
            model.load_adapter(path, adapter_name=name)

    def find(self, model: str) -> str | None:
        """The adapter that a model's name asks for; `BASE` for none, None if there is no such model."""
        name = model.removeprefix(f"{self.base}:")
        return BASE if model == self.base else name if name in self._paths else None

    def cards(self) -> list[dict]:
        """For each adapter what /v1/models tells of it."""
        paths = [*self._paths.items()]
        return [{"id": f"{self.base}:{name}", "root": path, "parent": self.base} for name, path in paths]

    def load(self, model: Any, body: dict) -> str:
        """Load an adapter while requests run, between two rounds; returns a sentence. Refusal if it cannot be."""
        fields = check_fields(LoadFields, body)
        name, path, engine = fields["lora_name"], fields["lora_path"], model.speculation.engine
        if not _is_name(name):
            raise refuse("lora_name", f"expected {NAME_WORDS}")
        if not self._loading.acquire(blocking=False):
            raise refuse("lora_path", "another adapter is being loaded; try again later", 503, retries=True)
        try:  # all that may be slow, while rounds go on
            assert self._root is not None
            folder = find_folder(self._root, path)
            config = read_config(folder)
            engine.loras.check_config(name, config)
            weights = read_weights(self._root, folder, engine.loras)
            with engine.turns, torch.inference_mode(False):
                self._put(engine, name, config, weights, fields.get("load_inplace", False))
                self._paths[name] = path
        except UnsupportedModelError as error:
            raise refuse("lora_path", str(error)) from error
        finally:
            self._loading.release()
        return f"Success: LoRA adapter '{name}' added successfully."

    def _put(self, engine: Any, name: str, config: Any, weights: dict[str, Tensor], in_place: bool) -> None:
        """Put an adapter into the model, in a turn of the caller. Refusal if it does not fit."""
        if name in self._paths and not in_place:
            raise refuse("lora_name", f"the adapter {name!r} is loaded; send load_inplace: true to replace it")
        if name not in self._paths and len(self._paths) >= MOST_LOADED:
            raise refuse("lora_name", f"{MOST_LOADED} adapters are loaded; unload one of them")
        self._unload(engine.original, name)
        try:
            told = engine.original.load_adapter(adapter_name=name, peft_config=config, adapter_state_dict=weights)
            ends = tuple(f"lora_{side}.{name}.weight" for side in "AB")
            if lacking := [key for key in told.missing_keys if key.endswith(ends)]:
                raise ValueError(f"it lacks {lacking[0]}")
        except Exception as error:  # peft and transformers raise many kinds of them for weights that do not fit
            self._unload(engine.original, name)
            log.warning("the adapter %s cannot be loaded", name, exc_info=error)
            raise refuse("lora_path", "it cannot be loaded, because its weights do not fit the model") from error

    def unload(self, model: Any, body: dict) -> str:
        """Unload an adapter while requests run, between two rounds; returns a sentence. Refusal if there is none."""
        name, engine = check_fields(UnloadFields, body)["lora_name"], model.speculation.engine
        with self._loading, engine.turns:
            if name not in self._paths:
                raise refuse("lora_name", f"there is no adapter {name[:200]!r} here", 404, "not_found")
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
