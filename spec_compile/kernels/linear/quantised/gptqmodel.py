"""Requirements that gptqmodel's layers of GPTQ and of AWQ share."""

import torch
from torch import nn

from .layout import require

LIBRARY = "gptqmodel.nn_modules.qlinear."


def require_4_bits(module: nn.Module) -> None:
    """UnreadError unless the layer is plain and of 4 bits."""
    require(module.bits == 4, f"has {module.bits} bits, where 4 are read")
    require(not getattr(module, "adapter", None), "has an adapter inside")


def require_words(module: nn.Module, shape: tuple[int, int]) -> None:
    """UnreadError unless the packed weights are int32 of this shape."""
    words = module.qweight
    require(tuple(words.shape) == shape, "has packed weights of another shape")
    require(words.dtype == torch.int32, f"has packed weights of {words.dtype}, expected torch.int32")
