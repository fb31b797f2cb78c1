"""Second objects over one model: copies to trace, wrappers of peft, and a generation config that follows the model's.

peft need not be installed.
"""

import copy
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import GenerationConfig

from ..errors import UnsupportedModelError
from ..inventory import held_tensors
from ..quantised.held import Restoring
from .experts import library_tensors
from .replaced import strip

M = TypeVar("M", bound=nn.Module)

NO_LORAS = (
    "adapter_names: the active adapters were captured by speculate(); pass max_loras to speculate() for a batch of "
    "several adapters, or call the original model's generate()"
)
ABSENT = object()
SCALARS = (type(None), bool, int, float, str)
STAND_INS: list[Callable[[Any], Any]] = []
"""Each returns the model to serve in place of a user's, or the same; `contrib` adds some."""
ORIGINS: WeakKeyDictionary[nn.Module, nn.Module] = WeakKeyDictionary()
"""A model that is served in place of a user's -> the user's, whose changes count, too."""


class FollowedConfig:
    """A copy of a model's generation config. It follows changes of the original, and its changes stay with it.

    A value that is changed in the copy no longer follows. All others do, after changes of the original in place and
    after its replacement. A config that is assigned takes the copy's place until the original's is assigned.
    """

    def __init__(self, original: nn.Module):
        """original: the model whose ``generation_config`` is followed."""
        self._original, self._lock = original, threading.Lock()
        self._begin()

    def get(self) -> GenerationConfig:
        """The config, always the same object until another is assigned."""
        if self._assigned is not None:
            return self._assigned
        source = self._original.generation_config
        if self._is_new(source):
            with self._lock:  # because another thread would take a value that was just updated for one set by the user
                self._follow(source)
        return self._copy

    def set(self, config: GenerationConfig | None) -> None:
        """Take another config. The original's, or the copy that follows it, starts to follow again."""
        if config is self._original.generation_config:
            self._begin()
        else:
            self._assigned = None if config is self._copy else config

    def own(self) -> tuple[GenerationConfig | None, dict[str, Any]]:
        """The config that was assigned, if there is one, and the values that were changed in the copy."""
        with self._lock:
            self._follow(self._original.generation_config)
            ours = _values(self._copy)
            return self._assigned, {name: ours[name] for name in sorted(self._own) if name in ours}

    def restore(self, assigned: GenerationConfig | None, values: dict[str, Any]) -> None:
        """Take over the result of `own` for another model."""
        self._assigned = assigned
        _values(self._copy).update(values)

    def _begin(self) -> None:
        source = self._original.generation_config
        self._copy, self._assigned = copy.deepcopy(source), None
        self._own = set[str]()
        self._remember(source)

    def _is_new(self, source: GenerationConfig) -> bool:
        """True if the original's config was replaced, or has other values, since it was last looked at."""
        values = _values(source)
        try:
            if source is not self._source or values != self._plain:
                return True
            return any(_frozen(values[name]) != self._seen[name] for name in self._objects)
        except Exception:  # a value that cannot be compared was replaced
            return True

    def _remember(self, source: GenerationConfig) -> None:
        values = _values(source)
        self._source, self._seen = source, _frozen(values)
        self._plain = {name: copy.deepcopy(each) if _is_container(each) else each for name, each in values.items()}
        self._objects = [name for name, each in values.items() if not isinstance(each, SCALARS)]

    def _follow(self, source: GenerationConfig) -> None:
        """Bring the copy up to date."""
        now, ours = _values(source), _values(self._copy)
        self._own |= {name for name in self._seen.keys() | ours.keys() if _differs(ours, self._seen, name)}
        for name in (self._seen.keys() | now.keys()) - self._own:
            if name not in now:
                ours.pop(name, None)
            elif _differs(now, self._seen, name):
                ours[name] = copy.deepcopy(now[name])
        if type(source) is not type(self._source):
            self._copy.__class__ = type(source)
        self._remember(source)


class FollowsGenerationConfig:
    """A base before a model's own class. Its ``generation_config`` comes from its `FollowedConfig`."""

    @property
    def generation_config(self) -> GenerationConfig:
        """The original's, with what was changed here."""
        return vars(self)["_followed_config"].get()

    @generation_config.setter
    def generation_config(self, config: GenerationConfig | None) -> None:
        vars(self)["_followed_config"].set(config)


def follow(model: nn.Module, followed: FollowedConfig) -> None:
    """Give `model`, of a class with `FollowsGenerationConfig`, a generation config that follows another model's."""
    vars(model).pop("generation_config", None)
    vars(model)["_followed_config"] = followed


def followed(model: nn.Module) -> FollowedConfig:
    """The config that `follow` gave to a model."""
    return vars(model)["_followed_config"]


def _values(config: GenerationConfig | None) -> dict[str, Any]:
    return {} if config is None else vars(config)


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, dict))


def _frozen(value: Any) -> Any:
    """A copy that == compares, also if there are objects inside that define no equality."""
    if isinstance(value, (list, tuple)):
        return type(value), [*map(_frozen, value)]
    if isinstance(value, dict):
        return {name: _frozen(each) for name, each in value.items()}
    if hasattr(value, "__dict__") and not isinstance(value, (type, Tensor, nn.Module)) and not callable(value):
        return type(value), _frozen(vars(value))
    return copy.copy(value) if isinstance(value, set) else value


def _differs(values: dict[str, Any], frozen: dict[str, Any], name: str) -> bool:
    """True if a value differs from the frozen one. Values that cannot be compared differ if they were replaced."""
    now, was = _frozen(values[name]) if name in values else ABSENT, frozen.get(name, ABSENT)
    try:
        return now is not was and (type(now) is not type(was) or bool(now != was))
    except Exception:
        return True


# Models that peft wraps: their adapters are captured with the layers.


def is_wrapped(model) -> bool:
    """True if `model` is a peft ``PeftModel`` around a transformers model, or a result of `wrap_alike`."""
    return isinstance(model, nn.Module) and hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(wrapped: nn.Module) -> nn.Module:
    """The transformers model inside, with its adapters; UnsupportedModelError if they are not part of its layers."""
    for name, config in wrapped.peft_config.items():
        label = f"model: the adapter {name!r} ({type(config).__name__})"
        if config.is_prompt_learning:
            raise UnsupportedModelError(f"{label} adds virtual tokens to each step; only adapters of layers are exact")
        if getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedModelError(f"{label} starts inside the text; only adapters that always act are exact")
    return wrapped.get_base_model()


def wrap_alike(wrapped: nn.Module, fast: nn.Module) -> nn.Module:
    """Another object like `wrapped` around `fast`, a speculative version of its base model."""
    wrapped = wrapped.__dict__.get("_original", wrapped)
    tuner = shallow(wrapped.base_model)
    tuner._modules["model"] = fast
    cls = type(wrapped)
    outer = shallow(wrapped, type(cls.__name__, (_Generates, cls), {"__module__": cls.__module__}))
    following = FollowedConfig(wrapped)
    outer._modules["base_model"] = tuner
    outer.__dict__["_original"] = wrapped
    for each in (outer, fast):  # peft's generate() assigns the wrapper's config to the model inside
        follow(each, following)
    return outer


class _Generates(FollowsGenerationConfig):
    def generate(self, *args, **kwargs):
        if self.speculation.engine.loras is not None:  # each row has an adapter, so peft must not hook the layers
            return self.base_model.model.generate(*args, **kwargs)
        if kwargs.get("adapter_names") is not None:
            raise NotImplementedError(NO_LORAS)
        return super().generate(*args, **kwargs)

    def __reduce_ex__(self, protocol):
        return rebuild, (self.speculation.engine.rebuild, self.__dict__["_original"], followed(self).own())


def rebuild(make: Callable, original: nn.Module, own: tuple) -> nn.Module:
    """``make(original)`` with the generation config of another such model; own: as `FollowedConfig.own` returned it."""
    made = make(original)
    followed(made).restore(*own)
    return made


def shared_copy(model: M, shared_objects: dict[int, Any] | None = None) -> M:
    """A copy of all modules and configurations that shares the tensors, without ``torch.compile``. It can be traced, or
    be given hooks, while other threads run `model`.

    shared_objects: by the ids of parts of `model`, the objects that the copy has in their place.
    """
    shared = [*library_tensors(model), *held_tensors(model)]
    for part in model.modules():
        shared += [holder for holder in (part._parameters, part._buffers) if isinstance(holder, Restoring)]
    memo: dict[int, Any] = {id(each): each for each in shared} | (shared_objects or {})
    return strip(copy.deepcopy(model, memo), model, memo)


def shallow(module: nn.Module, cls: type | None = None) -> nn.Module:
    """A second object over the same state. Replacing its modules does not change the first."""
    other = object.__new__(cls or type(module))
    other.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        other.__dict__[name] = dict(module.__dict__[name])
    return other
