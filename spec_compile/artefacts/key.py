"""`model_key`: everything on which the artefact of a start depends, as one SHA-256.

The values of weights and the paths of files do not count.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
import transformers
from torch import nn
from transformers import AttentionInterface

from ..capture.watch import BOOKKEEPING, GLOBAL_HOOKS, INTERNALS, value_hooks
from ..compat import EXPERTS_INTERFACES
from ..config import Options
from ..inventory import configs_of, held_items, held_parameters
from ..kernels.attention import cpu_attention
from ..kernels.linear import few_rows
from .digest import Digest, layout_of

PACKAGE = Path(__file__).parents[1]
SOURCES = (".py", ".so", ".cpp", ".cu", ".h")
NAMES = {"_commit_hash", "_name_or_path", "architectures", "transformers_version"}
"""Fields of configs that say where a model is from. The versions are counted by themselves."""
NOT_COUNTED = {
    "artefact", "assistant_tokenizer", "cache", "draft", "prefix_cache_bytes", "prefix_cache_host_bytes",
    "tensor_parallel", "tokenizer", "trust_artefact",
}  # fmt: skip
"""Options that name places: folders, a checkpoint, processes. The draft and the ranks are counted by themselves. No
code depends on the memory for prefixes, or on tokenizers."""
FOLDERS = {"base_dir", "debug_dir_root"}
"""Settings of Dynamo that are paths."""


def model_key(model: nn.Module, draft: nn.Module | None, options: Options, name: str = "") -> str | None:
    """The key of a model's artefact: 64 hexadecimal digits, or None if there can be no artefact.

    model: the target, with its adapters.
    draft: the draft's module, None if the algorithm has none.
    options: of the algorithm.
    name: of the algorithm; several algorithms share a class of options.

    There is no artefact if a hook may change a value, because nobody knows on what a hook depends.
    """
    modules = [part for each in (model, draft) if each is not None for part in each.modules()]
    if any(value_hooks((part._forward_hooks, part._forward_pre_hooks)) for part in modules) or value_hooks(
        GLOBAL_HOOKS
    ):
        return None
    digest, device = Digest(), next(held_parameters(model)).device
    digest.add(name, type(options).__name__, _counted(options), options.ranks.rank, options.ranks.size)
    places: dict[int, int] = {}
    for each in (model, draft):
        digest.add(each is None)
        if each is not None:
            _add_module(digest, each, places)
    digest.add(package_digest(), versions(), _machine(device), _plans(device), _settings())
    return digest.hex()


def about(model: nn.Module) -> dict[str, Any]:
    """The facts of an artefact that a list of artefacts shows: the model's class, its device, the versions."""
    device = next(held_parameters(model)).device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return {"model": type(model).__name__, "device": where, "versions": versions()}


@functools.cache
def package_digest() -> str:
    """The digest of the package's own files, read once a process."""
    total = hashlib.sha256()
    for path in sorted(path for path in PACKAGE.rglob("*") if path.suffix in SOURCES):
        data = path.read_bytes()
        total.update(f"{path.relative_to(PACKAGE)}:{len(data)}:".encode() + data)
    return total.hexdigest()


def versions() -> dict[str, str]:
    """The versions of everything that traces, compiles and runs; "" for CUDA or Triton if there is none."""
    return {
        "python": platform.python_version(),
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "transformers": transformers.__version__,
        "triton": _triton_version(),
        "cuda": torch.version.cuda or "",
    }


@functools.cache
def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _add_module(digest: Digest, module: nn.Module, places: dict[int, int]) -> None:
    """Add all parts of a module. places: the number of each address, so that tensors that are tied have one number."""
    for path, part in module.named_modules(remove_duplicate=False):
        digest.add(path, type(part), {name: each for name, each in vars(part).items() if _counts(name)})
        for holder in (part._parameters, part._buffers):
            for name, tensor in held_items(holder):
                place = None if tensor is None else _place(tensor, places)
                digest.add(name, place, None if tensor is None else layout_of(tensor))
    for config in configs_of(module):
        digest.add(*_of_config(config))


def _counts(name: str) -> bool:
    """True if an attribute of a module counts. Configs are counted by themselves."""
    return name not in INTERNALS and name not in BOOKKEEPING and name != "config"


def _place(tensor: torch.Tensor, places: dict[int, int]) -> int:
    """The number of a tensor's address: [a, b, a] have 0, 1, 0. Tensors without memory count by themselves."""
    address = 0 if tensor.is_meta or tensor.numel() == 0 else tensor.data_ptr()
    return places.setdefault(address or id(tensor), len(places))


def _of_config(config: Any) -> Iterator[Any]:
    """The class and the fields of a config, and the functions that its names of implementations choose."""
    fields = config.to_dict() if hasattr(config, "to_dict") else dict(vars(config))
    yield type(config).__qualname__
    yield _without_names(fields)
    for attribute, tables in (
        ("_attn_implementation", [AttentionInterface._global_mapping]),
        ("_experts_implementation", EXPERTS_INTERFACES),
    ):
        chosen = getattr(config, attribute, None)
        yield chosen
        yield [table.get(chosen) for table in tables]


def _without_names(value: Any) -> Any:
    """The fields of a config, and of the configs in it, without `NAMES`."""
    if isinstance(value, dict):
        return {name: _without_names(each) for name, each in value.items() if name not in NAMES}
    return [*map(_without_names, value)] if isinstance(value, (list, tuple)) else value


def _counted(options: Options) -> dict[str, Any]:
    fields = dataclasses.fields(options)
    return {field.name: getattr(options, field.name) for field in fields if field.name not in NOT_COUNTED}


def _machine(device: torch.device) -> list[Any]:
    """The facts of a device for which code is compiled."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return [device, facts.name, facts.major, facts.minor, facts.multi_processor_count]
    levels = few_rows.BEST, cpu_attention.BEST, few_rows.SUPPORTED
    torch_level = torch.backends.cpu.get_cpu_capability()
    return [platform.machine(), _cpu_flags(), torch_level, levels, torch.get_num_threads()]


@functools.cache
def _cpu_flags() -> str:
    """The instruction sets of the CPU as the system names them."""
    try:
        with open("/proc/cpuinfo") as file:
            return next((line for line in file if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        return platform.processor()


def _plans(device: torch.device) -> bytes:
    """The plans that tune-kernels has found for this GPU."""
    if device.type != "cuda":
        return b""
    from ..kernels.linear.small_m import tuned_file

    path = tuned_file(device)
    return path.read_bytes() if path.exists() else b""


def _settings() -> list[Any]:
    """The settings of the process that change compiled code or its numbers."""
    dynamo = {name: value for name, value in dynamo_config.save_config_portable().items() if name not in FOLDERS}
    return [
        inductor_config.save_config_portable(),
        dynamo,
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.backends.cudnn.allow_tf32,
    ]
