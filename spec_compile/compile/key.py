"""`Digest`: a SHA-256 of Python values and code that is the same in every process.

A function counts by its code, its defaults, and the values that it reads from outside. Addresses, the order of sets and
dicts, paths of files and numbers of lines do not count.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from pathlib import Path, PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
import torch._inductor.config as inductor_config
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface

from ..capture.changes import BOOKKEEPING, GLOBAL_HOOKS, INTERNALS, value_hooks
from ..compat import EXPERTS_INTERFACES
from ..config import Options
from ..inventory import configs_of, held_items, held_parameters
from ..kernels.attention import cpu_attention
from ..kernels.linear import cpu_gemm

PLAIN = (type(None), bool, int, float, complex, str, bytes, PurePath, torch.dtype, torch.device, torch.layout)
WHOLE = (*PLAIN, Tensor, FunctionType, MethodType, partial, type, list, tuple, set, frozenset)
METHODS = (FunctionType, staticmethod, classmethod, property)
FIXED = {*sys.stdlib_module_names, "numpy", "spec_compile", "torch", "transformers", "triton"}
"""Packages whose versions a key has. The names that their functions read are not followed, but see `FOLLOWED`."""
FOLLOWED = tuple(f"transformers.{name}" for name in ("activations", "masking_utils", "modeling_rope_utils", "models."))
"""Modules of fixed packages whose names are followed all the same, because users patch and edit them."""
NOTES = "_cached_value"
"""Attributes of classes in which transformers keeps results while a model is used end so."""
SMALL = 1 << 12
"""A tensor of at most this many elements counts by its values, too. Parameters and buffers never do."""
DEEPEST = 3
"""Objects inside objects count by their attributes down to this depth, below it by their classes."""


class Digest:
    """Adds up values, in order. It keeps them while it lives, because it recognises them by their addresses."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []
        self._depth = 0

    def hex(self) -> str:
        """The digest of all that was added, as 64 digits."""
        return hashlib.sha256("".join(self._texts).encode("utf-8", "surrogatepass")).hexdigest()

    def add(self, *values: Any) -> None:
        """Add each value and the values inside it."""
        for value in values:
            if isinstance(value, PLAIN):
                self._text(type(value).__name__, repr(value))
            elif isinstance(value, CodeType):
                self._text("code", _of_code(value))
            elif isinstance(value, (set, frozenset)):
                self._text("set", *sorted(map(_of_member, value)))
            elif isinstance(value, (list, tuple)):
                self._text(type(value).__name__, str(len(value)))
                self.add(*value)
            elif id(value) in self._seen:  # it was added before, or it leads back to itself
                self._text("again", str(self._seen[id(value)]))
            else:
                self._see(value)
                self._add_new(value)

    def add_items(self, values: dict[Any, Any]) -> None:
        """Add names and values, in the order of the names."""
        self._text("items", str(len(values)))
        for name in sorted(values, key=_of_member):
            self._text(_of_member(name))
            self.add(values[name])

    def _see(self, value: Any) -> None:
        self._seen.setdefault(id(value), len(self._seen))
        self._kept.append(value)

    def _add_new(self, value: Any) -> None:
        self._text(type(value).__name__)
        if isinstance(value, dict):  # a subclass may make values when they are read, as ACT2FN of transformers does
            self.add_items({name: dict.__getitem__(value, name) for name in dict.__iter__(value)})
        elif isinstance(value, Tensor):
            self.add(layout_of(value))
            if value.numel() <= SMALL and not value.is_meta:
                self._text(repr(value.detach().cpu().tolist()))
        elif isinstance(value, FunctionType):
            self.add(value.__code__, value.__defaults__, value.__kwdefaults__)
            for _, read in sorted(_read_by(value).items()):
                self.add(read if _is_whole(read) else name_of(type(read)))
        elif isinstance(value, MethodType):
            self.add(value.__func__, type(value.__self__))
        elif isinstance(value, partial):
            self.add(value.func, value.args, value.keywords)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, (staticmethod, classmethod)):
            self.add(value.__func__)
        elif isinstance(value, property):
            self.add(value.fget)
        elif isinstance(value, (ModuleType, BuiltinFunctionType)):
            self._text(value.__name__)
        else:
            self._add_object(value)

    def _add_object(self, value: Any) -> None:
        """Add an object by its class and attributes, and a module, which is no part of the model, by its class."""
        self._text(name_of(type(value)))
        if isinstance(value, Enum):
            self._text(value.name)
        elif dataclasses.is_dataclass(value):
            self.add_items({field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)})
        elif self._depth < DEEPEST and not isinstance(value, nn.Module):
            self._depth += 1
            self.add_items(getattr(value, "__dict__", {}))
            self._depth -= 1

    def _add_class(self, cls: type) -> None:
        for base in cls.__mro__[:-1]:
            self._text(name_of(base))
            if base is not cls and id(base) in self._seen:
                continue
            self._see(base)
            for name, value in sorted(vars(base).items()):
                is_value = _is_whole(value) and not name.startswith("__") and not name.endswith(NOTES)
                if isinstance(value, METHODS) or is_value:
                    self._text(name)
                    self.add(value)

    def _text(self, *parts: str) -> None:
        self._texts += [f"{len(part)}:{part}" for part in parts]


def layout_of(tensor: Tensor) -> tuple:
    """Type, dtype, device, shape and strides of a tensor."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return name_of(type(tensor)), tensor.dtype, tensor.device, tuple(tensor.shape), strides


def name_of(cls: type) -> str:
    """The name of a class with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_whole(value: Any) -> bool:
    """True if a value that a class or a function holds counts whole. Other objects count by their classes, and so do
    registries, which grow while models are used."""
    return isinstance(value, WHOLE) or type(value) is dict


def _of_member(value: Any) -> str:
    """A text that orders and distinguishes the members of a set, or the names of a dict."""
    if isinstance(value, (tuple, frozenset)):
        members = [*map(_of_member, value)]
        return f"{type(value).__name__} {members if isinstance(value, tuple) else sorted(members)}"
    is_plain = isinstance(value, (*PLAIN, Enum))
    return f"{type(value).__name__} {value!r}" if is_plain else getattr(value, "__qualname__", name_of(type(value)))


def _read_by(function: FunctionType) -> dict[str, Any]:
    """The values that a function encloses, and the global ones that it names if they are followed."""
    read = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        try:
            read[name] = cell.cell_contents
        except ValueError:  # the cell is empty
            read[name] = None
    module = function.__module__ or ""
    if module.partition(".")[0] not in FIXED or module.startswith(FOLLOWED):
        globals_ = function.__globals__
        read |= {name: globals_[name] for name in _names(function.__code__) if name in globals_}  # guard: called-code
    return read


@functools.lru_cache(1 << 13)
def _names(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes in code and in the code inside it."""
    return frozenset(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, CodeType)))


@functools.lru_cache(1 << 13)
def _of_code(code: CodeType) -> str:
    """The digest of code, without its place in a file."""
    names = code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_flags, code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount
    constants = [  # `repr` distinguishes 1, 1.0 and True
        _of_code(x) if isinstance(x, CodeType) else _of_member(x) if isinstance(x, (tuple, frozenset)) else repr(x)
        for x in code.co_consts
    ]
    text = repr((code.co_code, code.co_exceptiontable, names, counts, constants))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


# The key of an artefact.

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


def artefact_key(modules: Sequence[nn.Module | None], options: Options, name: str = "") -> str | None:
    """The key of an artefact: 64 hexadecimal digits, or None if there can be no artefact.

    modules: the target and the draft's module; None for an algorithm without one.
    options: the options of the algorithm.
    name: the algorithm; several algorithms share a class of options.

    There is no artefact if a hook may change a value, because nobody knows on what a hook depends.
    """
    parts = [part for each in filter(None, modules) for part in each.modules()]
    if any(map(value_hooks, [GLOBAL_HOOKS, *((part._forward_hooks, part._forward_pre_hooks) for part in parts)])):
        return None
    digest, device = Digest(), next(held_parameters(parts[0])).device
    counted = [field.name for field in dataclasses.fields(options) if field.name not in NOT_COUNTED]
    digest.add(name, type(options).__name__, {each: getattr(options, each) for each in counted})
    digest.add(options.ranks.rank, options.ranks.size)
    places: dict[int, int] = {}
    for each in modules:
        digest.add(each is None)
        if each is not None:
            _add_module(digest, each, places)
    digest.add(package_digest(), versions(), _machine(device), _plans(device), _settings())
    return digest.hex()


def about(name: str, device: torch.device) -> dict[str, Any]:
    """The facts of an artefact that a list of artefacts shows: the model's class, its device, the versions."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"
    return {"model": name, "device": where, "versions": versions()}


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
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("triton")
    return ""


def _add_module(digest: Digest, module: nn.Module, places: dict[int, int]) -> None:
    """Add all parts of a module.

    places: the number of each address, so that tensors that are tied have one number: [a, b, a] have 0, 1, 0.
    """
    for path, part in module.named_modules(remove_duplicate=False):
        # Configs are counted by themselves.
        not_counted = {*INTERNALS, *BOOKKEEPING, "config"}
        digest.add(path, type(part), {name: each for name, each in vars(part).items() if name not in not_counted})
        for holder in (part._parameters, part._buffers):
            for name, tensor in held_items(holder):
                if tensor is None:
                    digest.add(name, None, None)
                    continue
                # Tensors without memory count by themselves.
                address = 0 if tensor.is_meta or tensor.numel() == 0 else tensor.data_ptr()
                digest.add(name, places.setdefault(address or id(tensor), len(places)), layout_of(tensor))
    for config in configs_of(module):
        digest.add(*_of_config(config))


def _of_config(config: Any) -> Iterator[Any]:
    """The class and the fields of a config, and the functions that its names of implementations choose."""
    fields = config.to_dict() if hasattr(config, "to_dict") else dict(vars(config))
    yield type(config).__qualname__
    yield _without_names(fields)
    for attribute, tables in (
        ("_attn_implementation", [AttentionInterface._global_mapping]),
        ("_experts_implementation", EXPERTS_INTERFACES),
    ):
        chosen: Any = getattr(config, attribute, None)
        yield chosen
        yield [table.get(chosen) for table in tables]


def _without_names(value: Any) -> Any:
    """The fields of a config, and of the configs in it, without `NAMES`."""
    if isinstance(value, dict):
        return {name: _without_names(each) for name, each in value.items() if name not in NAMES}
    return [*map(_without_names, value)] if isinstance(value, (list, tuple)) else value


def _machine(device: torch.device) -> list[Any]:
    """The facts of a device for which code is compiled."""
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        return [device, facts.name, facts.major, facts.minor, facts.multi_processor_count]
    levels = cpu_gemm.BEST, cpu_attention.BEST, cpu_gemm.SUPPORTED
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
    from ..kernels.linear.skinny_gemm import tuned_file

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
