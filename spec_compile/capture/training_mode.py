"""The effects of training mode on the answers of a model.

Training mode changes no answer if every number that drops or adds noise is 0: dropout, stochastic depth, the jitter of
routers. The methods of a class show their names, as ``self.attention_dropout`` and ``self.config.hidden_dropout``.
"""

import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin

NOISE = re.compile("drop|jitter|noise|prob|^p$")
"""In the names of numbers that are 0 if nothing is dropped and no noise is added."""
NOT_READ = {nn.Module, object, *PreTrainedModel.__mro__, *GenerationMixin.__mro__}
"""Classes that compute no values."""
NOT_FORWARD = {"__init__", "train", "eval"}
"""Methods that a forward does not call."""
OF_GRADIENTS = {"gradient_checkpointing"}
OF_CACHES = {"cache", "cache_params", "past_key_values", "use_cache"}
"""Names that stand next to `training` if a method only asks how gradients are kept, or whether to make a cache. The
second counts in transformers' own code only."""


def effects(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[str]:
    """The reasons why training mode may change answers, each a clause such as "lm_head.dropout is 0.1".

    modules: paths and modules. Modules in evaluation mode have no effect.
    """
    for path, part in modules:
        if not part.training:
            continue
        reads = _reads(type(part))
        found = {name: _number(part, name) for name in sorted(frozenset().union(*(read.noise for read in reads)))}
        for name, (owner, value) in found.items():
            if value is not ... and value > 0:  # guard: dropout
                yield f"{'.'.join(filter(None, [path, owner, name]))} is {value}"
        is_known = {name for name, (_, value) in found.items() if value is not ...}
        if any(read.of_training and not read.is_harmless and not read.noise & is_known for read in reads):
            yield f"the code of {path or 'the model'} ({type(part).__name__}) reads `training`"


class _Read:
    """The names that one method reads."""

    def __init__(self, names: set[str], module: str):
        """names: of everything in the method's code. module: of the method's class."""
        self.of_training = "training" in names
        self.noise = frozenset(name for name in names if NOISE.search(name))
        harmless = OF_GRADIENTS | OF_CACHES if module.startswith("transformers.") else OF_GRADIENTS
        self.is_harmless = bool(names & harmless)


@functools.lru_cache(maxsize=1 << 10)
def _reads(cls: type) -> list[_Read]:
    """The reads of each method that a class has or inherits. The cache is bounded: each `shadow` has a class."""
    return [
        _Read(_names(function.__code__), each.__module__)
        for each in cls.__mro__
        if each not in NOT_READ
        for name, value in vars(each).items()
        if name not in NOT_FORWARD
        for function in _functions(value)
    ]


def _functions(value: Any) -> Iterator[FunctionType]:
    """The function of a class attribute, and the functions that its decorators wrap."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    while inspect.isfunction(value):
        yield value
        value = getattr(value, "__wrapped__", None)


def _names(code: CodeType) -> set[str]:
    """The names of attributes, variables and arguments in a function and the functions inside it, also those in texts,
    as in ``getattr(self, "gradient_checkpointing", False)``."""
    names = {*code.co_names, *code.co_varnames, *code.co_freevars}
    names.update(each for each in code.co_consts if isinstance(each, str) and each.isidentifier())
    return names.union(*(_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def _number(part: nn.Module, name: str) -> tuple[str, Any]:
    """Owner and value of a number: ("", 0.1) for an attribute, ("config", 0.1) for a field of the module's config.

    A module counts as 0, because it is examined by itself, and None does. Without such a number the value is ``...``.
    """
    for owner, holder in (("", part), ("config", getattr(part, "config", None))):
        value = getattr(holder, name, ...)
        if value is None or isinstance(value, nn.Module):
            return owner, 0
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return owner, value
    return "", ...
