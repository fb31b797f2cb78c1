"""Functions in place of a model's own: by ``torch.compile``, by a user, or by a class outside transformers."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule, external_utils
from transformers import GenerationMixin

PREFIX = "_orig_mod."
"""The part that an `OptimizedModule` adds to the names of its tensors and modules."""


def underlying(value: Any) -> Any:
    """The function or module under all layers of ``torch.compile`` and ``torch.compiler.disable``. Any other value is
    returned unchanged."""
    while True:
        if isinstance(value, OptimizedModule):
            value = value._orig_mod
        elif hasattr(value, "_torchdynamo_orig_callable"):
            value = value._torchdynamo_orig_callable
        elif getattr(value, "__globals__", None) is vars(external_utils) and hasattr(value, "__wrapped__"):
            value = value.__wrapped__  # Dynamo's frame around functions of PyTorch's, such as those in no_grad()
        else:
            return value


def is_compiled(model: nn.Module) -> bool:
    """True if calls of the model, or of a module inside, go through ``torch.compile``."""
    return any(
        isinstance(part, OptimizedModule)
        or vars(part).get("_compiled_call_impl") is not None
        or underlying(forward := vars(part).get("forward")) is not forward
        for part in model.modules()
    )


def strip(copied: nn.Module, original: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """`copied`, a deep copy of `original`, without ``torch.compile``.

    A compiled function refers to its module, so a copy of the module would still run the original.
    memo: the memo of the deep copy, which binds the function that was compiled to the copied module.
    """
    for part in original.modules():
        forward = vars(part).get("forward")
        inner = underlying(forward)
        if inner is not forward and not isinstance(part, OptimizedModule):
            vars(memo[id(part)])["forward"] = copy.deepcopy(inner, memo)
    copied = underlying(copied)
    for part in [*copied.modules()]:
        vars(part).pop("_compiled_call_impl", None)
        for name, child in part._modules.items():
            part._modules[name] = underlying(child)
    return copied


# Methods that transformers' decoding loop calls and rounds do not. A model that overrides one is left to that loop.


HOOKS = ("_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""The methods of the loop. It does not include ``_prepare_*``, ``_get_logits_processor`` and
``_expand_inputs_for_generation``, which are called before it, and ``_reorder_cache``, which only beam search calls."""
METHODS = [name for name, value in vars(GenerationMixin).items() if isinstance(value, FunctionType)]
"""The methods of ``generate()`` and of everything that it calls."""
OF_CLASSES = {"generate", "_sample", "_beam_search", "_assisted_decoding"}
"""The `METHODS` that transformers looks up in a model's class, not on the object; and ``generate()``, which is looked
up at every call."""
TRUSTED = ("transformers", "torch", "spec_compile")
"""Packages whose overrides stay served: `check_generation` compares what they do with the captured graph."""


def overridden(model, names: tuple[str, ...] = HOOKS) -> str | None:
    """The first of the methods that the object itself or a class outside transformers replaces, and where."""
    for name in names:
        if name in vars(model) and name != "_sample":  # transformers looks up `_sample` only in the class
            return f"{name} (set on the {type(model).__name__} object)"
        for cls in type(model).__mro__:
            if name in vars(cls) and not is_trusted(cls, vars(cls)[name]):
                return f"{name} (overridden by {cls.__name__})"
            if name in vars(cls) and not cls.__module__.startswith("spec_compile."):
                break
    return None


def replaced_generate(model) -> Callable | None:
    """The function that was set on a model in place of its class's ``generate()``; None if there is none.

    Functions of this package lead back here, so they replace nothing: `custom_generate.generate`, and the
    ``generate()`` of a speculative model.
    """
    function = underlying(vars(model).get("generate"))
    if function in (None, type(model).generate.__get__(model)):
        return None
    inner = function.func if isinstance(function, partial) else function
    return None if _package(getattr(inner, "__module__", None) or "") == "spec_compile" else function  # guard: own-code


def is_trusted(cls: type, function: Callable) -> bool:
    """True if the class, the method and all functions that it wraps are from `TRUSTED` packages."""
    return _package(cls.__module__) in TRUSTED and all(_package(module) in TRUSTED for module in _modules(function))


def _modules(function: Callable) -> Iterator[str]:
    function = getattr(function, "__func__", function)
    while function is not None:
        yield getattr(function, "__globals__", {}).get("__name__", getattr(function, "__module__", None) or "")
        function = getattr(function, "__wrapped__", None)


def _package(module: str) -> str:
    return module.partition(".")[0]
