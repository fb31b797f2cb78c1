"""The inventory of a model: its configurations, and its parameters and buffers as its modules hold them.

Some layers make tensors when they are read (see `quantised.held`). Nothing here reads those.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn


class Held(NamedTuple):
    """A parameter or buffer: its full path, and the dictionary and the name under which its module holds it."""

    path: str
    holder: dict[str, Tensor | None]
    name: str
    tensor: Tensor


def held(module: nn.Module, prefix: str = "") -> Iterator[Held]:
    """Every parameter and buffer of a module and its parts. prefix: begins the paths, such as "draft."."""
    for path, part in module.named_modules(prefix=prefix.removesuffix(".")):
        for holder in (part._parameters, part._buffers):
            for name, tensor in held_items(holder):
                if tensor is not None:
                    yield Held(f"{path}.{name}" if path else name, holder, name, tensor)


def held_items(holder: Any) -> Iterable[tuple[str, Tensor | None]]:
    """Names and tensors of a module's parameters or buffers. compressed-tensors puts its own mappings there."""
    return dict.items(holder) if isinstance(holder, dict) else holder.items()


def held_tensors(module: nn.Module) -> Iterator[Tensor]:
    """The tensors of `held`."""
    return (each.tensor for each in held(module))


def held_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters among `held_tensors`."""
    return (tensor for tensor in held_tensors(module) if isinstance(tensor, nn.Parameter))


def configs_of(model: nn.Module) -> list[Any]:
    """The configurations of a model and its parts, each once."""
    return [*{id(part.config): part.config for part in model.modules() if hasattr(part, "config")}.values()]


def set_in_configs(model: nn.Module, name: str, value: str) -> list[tuple[Any, str]]:
    """Set an attribute in every configuration that has it; return these configurations with what each had before."""
    before = [(config, getattr(config, name)) for config in configs_of(model) if hasattr(config, name)]
    for config, _ in before:
        setattr(config, name, value)
    return before


@contextmanager
def configured(model: nn.Module, name: str, value: str) -> Iterator[None]:
    """A context in which every configuration of `model` that has the attribute `name` has this value of it."""
    before = set_in_configs(model, name, value)
    try:
        yield
    finally:
        for config, was in before:
            setattr(config, name, was)
