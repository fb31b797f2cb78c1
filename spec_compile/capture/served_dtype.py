"""An older GPU's limits: one without bfloat16 serves float16 in its place, and trains no drafts."""

import logging

import torch
from torch import nn

from ..errors import UnsupportedModelError
from ..inventory import configs_of, held
from ..kernels.card import card_of
from .admit import admit
from .quantised import packed_layers

log = logging.getLogger("spec_compile")


def in_served_dtype(model: nn.Module, converts: bool) -> None:
    """Convert parameters and buffers of bfloat16 to float16, in place, on a GPU that has no bfloat16; log one warning.

    converts: the option `convert_bfloat16`; False refuses the model. UnsupportedModelError, before any change, also if
    the model is quantised, or if float16 cannot hold a weight.
    """
    card = card_of(next(model.parameters()).device)
    if not card.lacks_tensor_cores:
        return
    found = [each for each in held(model) if each.tensor.dtype == torch.bfloat16]
    if not found:
        return
    name = type(model).__name__
    why = f"{name} is in bfloat16, which {card.name} (compute capability {card.number}) does not compute"
    if not converts:
        raise UnsupportedModelError(f"model: {why}; load it with dtype=torch.float16, or pass convert_bfloat16=True")
    if packed_layers(model):
        raise UnsupportedModelError(f"model: {why}, and it is quantised; load it with dtype=torch.float16")
    largest = torch.finfo(torch.float16).max
    for each in found:
        if not (each.tensor.abs() <= largest).all():  # guard: float16-range
            raise UnsupportedModelError(
                f"model: {why}, and {each.path} has values beyond float16; load it with dtype=torch.float32"
            )
    for each in found:
        if isinstance(each.tensor, nn.Parameter):
            each.tensor.data = each.tensor.data.to(torch.float16)  # tied modules hold the same parameter
        else:
            each.holder[each.name] = each.tensor.to(torch.float16)
    for config in configs_of(model):
        if getattr(config, "dtype", None) == torch.bfloat16:
            config.dtype = torch.float16
    log.warning("%s; its weights were converted to float16 in place (convert_bfloat16=False refuses it)", why)


def admit_training(model: nn.Module) -> None:
    """`admit`, and UnsupportedModelError if the model's GPU serves models, but cannot train drafts for them."""
    admit(model)
    card = card_of(next(model.parameters()).device)
    if card.lacks_tensor_cores:
        raise UnsupportedModelError(
            f"model: {type(model).__name__} is on {card.name} (compute capability {card.number}), and drafts are "
            "trained by kernels that need 8.0 or later; move it to such a GPU, or model.to('cpu')"
        )
