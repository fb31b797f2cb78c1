"""`FollowedConfig`: the generation config of a model that speculates, which follows that of the original."""

import copy
import threading
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig

ABSENT = object()
SCALARS = (type(None), bool, int, float, str)


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
    """A base before a model's own class. Its ``generation_config`` is that of its `FollowedConfig`."""

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
    """A copy that == compares, also if there are objects inside that have no equality of their own."""
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
