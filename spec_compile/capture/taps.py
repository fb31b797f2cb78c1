"""The hidden states that a draft reads, from transformers' own forwards."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..passes.tap_hidden_states import FINAL


@contextmanager
def tapped(model: PreTrainedModel, taps: tuple[int, ...]) -> Iterator[list[Tensor]]:
    """A context that yields a list. When it ends, the list holds for each tap the states [B, T, C] of all tokens that
    `model` has processed inside. Several forwards are chunks of one text.

    model: a twin, because it is given hooks.
    taps: numbered as in `passes.Settings`.
    """
    states, result = defaultdict(list), list[Tensor]()

    def keep(tap: int, value: Tensor | tuple) -> None:
        states[tap].append(value[0] if isinstance(value, tuple) else value)

    layers = decoder_layers(model)  # their inputs are read, because a picture may add to the output of the layer before
    handles = [
        *(
            layer.register_forward_pre_hook(lambda module, args, tap=tap: keep(tap, args))
            for tap, layer in enumerate(layers)
        ),
        layers[-1].register_forward_hook(lambda module, args, out: keep(len(layers), out)),
        model.get_output_embeddings().register_forward_pre_hook(lambda module, args: keep(FINAL, args)),
    ]
    try:
        yield result
    finally:
        for handle in handles:
            handle.remove()
    result += [torch.cat(states[tap], dim=1) for tap in taps]


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a model, in their order."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    return next(layers for layers in lists if len(layers) == count)
