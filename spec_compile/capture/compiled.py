"""Models that ``torch.compile`` was applied to: the functions and modules under it are the ones to capture."""

import copy
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule, external_utils

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
