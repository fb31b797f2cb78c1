"""PEFT: adapters that are part of the captured model, and models wrapped by peft (which need not be installed)."""

import copy
from collections.abc import Callable
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule, external_utils

from ..errors import UnsupportedModelError
from ..inventory import held_tensors
from ..quantised.held import Restoring
from .experts import library_tensors
from .followed import FollowedConfig, FollowsGenerationConfig, follow, followed

NO_LORAS = (
    "adapter_names: the active adapters were captured by speculate(); pass max_loras to speculate() for a batch of "
    "several adapters, or call the original model's generate()"
)


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


def twin(model: nn.Module, shared_objects: dict[int, Any] | None = None) -> nn.Module:
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


# Models that ``torch.compile`` was applied to: the functions and modules under it are the ones to capture.


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
    memo: of the deep copy. It binds the function that was compiled to the copied module.
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
