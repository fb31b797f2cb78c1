"""`Digest`: a SHA-256 of Python values and code that is the same in every process.

A function counts by its code, its defaults, and the values that it reads from outside. Addresses, the order of sets and
dicts, paths of files and numbers of lines do not count.
"""

import dataclasses
import functools
import hashlib
import sys
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

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
"""A tensor of so many elements at most counts by its values, too. Parameters and buffers never do."""
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
            self._add_tensor(value)
        elif isinstance(value, FunctionType):
            self._add_function(value)
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

    def _add_tensor(self, tensor: Tensor) -> None:
        self.add(layout_of(tensor))
        if tensor.numel() <= SMALL and not tensor.is_meta:
            self._text(repr(tensor.detach().cpu().tolist()))

    def _add_function(self, function: FunctionType) -> None:
        self.add(function.__code__, function.__defaults__, function.__kwdefaults__)
        for _, value in sorted(_read_by(function).items()):
            self.add(value if _is_whole(value) else name_of(type(value)))

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
    text = repr((code.co_code, code.co_exceptiontable, names, counts, [*map(_of_constant, code.co_consts)]))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _of_constant(value: Any) -> str:
    """A text for a constant of code. `repr` distinguishes 1, 1.0 and True."""
    if isinstance(value, CodeType):
        return _of_code(value)
    if isinstance(value, (tuple, frozenset)):
        return _of_member(value)
    return repr(value)
