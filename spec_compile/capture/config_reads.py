"""`config_reads`: the values of a model's configs on which its forward depends."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ..inventory import configs_of

CONFIG_BOOKKEEPING = {
    "dtype", "is_encoder_decoder", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "torch_dtype", "use_cache", "use_return_dict",
}  # fmt: skip
"""Values of configs that select outputs, on which logits do not depend."""


@contextmanager
def config_reads(model: nn.Module) -> Iterator[list[tuple[Any, set[str]]]]:
    """A context that adds, for each config of `model`, the names that are read to the set that it yields with it."""
    reads = [(config, set()) for config in configs_of(model) if isinstance(config, PreTrainedConfig)]
    classes = [type(config) for config, _ in reads]
    try:
        for config, names in reads:
            object.__setattr__(config, "__class__", _recording(type(config), names))
        yield reads
    finally:
        for (config, names), cls in zip(reads, classes):
            object.__setattr__(config, "__class__", cls)
            names -= CONFIG_BOOKKEEPING


def _recording(cls: type, names: set[str]) -> type:
    """A subclass of a config's class that adds to `names` each public name that is read."""

    def read(self, name: str):
        if not name.startswith("_"):
            names.add(name)
        return cls.__getattribute__(self, name)

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "__getattribute__": read})
