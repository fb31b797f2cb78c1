"""Methods that transformers' decoding loop calls and a round does not: a model with its own is left to that loop."""

from collections.abc import Callable, Iterator
from types import FunctionType

from transformers import GenerationMixin

HOOKS = ("_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""What the loop consists of. transformers calls what prepares a request before the loop (``_prepare_*``,
``_get_logits_processor``, ``_expand_inputs_for_generation``), and beam search alone calls ``_reorder_cache``."""
METHODS = [name for name, value in vars(GenerationMixin).items() if isinstance(value, FunctionType)]
"""Methods of ``generate()`` and all that it calls."""
OF_CLASSES = {"generate", "_sample", "_beam_search", "_assisted_decoding"}
"""Those of `METHODS` that transformers looks up in a model's class alone, and ``generate()``, which is looked up at
every call."""
TRUSTED = ("transformers", "torch", "spec_compile")
"""Packages whose overrides stay served: `check_generation` compares what they do with the captured graph."""


def overridden(model, names: tuple[str, ...] = HOOKS) -> str | None:
    """The first of the methods that a class outside transformers, or the object itself, has replaced, and where."""
    for name in names:
        if name in vars(model) and name != "_sample":  # transformers looks up `_sample` in the class alone
            return f"{name} (set on the {type(model).__name__} object)"
        for cls in type(model).__mro__:
            if name in vars(cls) and not is_trusted(cls, vars(cls)[name]):
                return f"{name} (overridden by {cls.__name__})"
            if name in vars(cls) and not cls.__module__.startswith("spec_compile."):
                break
    return None


def is_trusted(cls: type, function: Callable) -> bool:
    """Whether a method and all that it wraps were written in the packages that are trusted, the class included."""
    return _package(cls.__module__) in TRUSTED and all(_package(module) in TRUSTED for module in _modules(function))


def _modules(function: Callable) -> Iterator[str]:
    function = getattr(function, "__func__", function)
    while function is not None:
        yield getattr(function, "__globals__", {}).get("__name__", getattr(function, "__module__", None) or "")
        function = getattr(function, "__wrapped__", None)


def _package(module: str) -> str:
    return module.partition(".")[0]
