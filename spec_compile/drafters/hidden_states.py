"""The target's hidden states: all of a text by transformers' own forward, and the one that a drafter goes on from."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..capture.adapters import twin
from ..capture.quantised import mark
from ..passes.tap_hidden_states import FINAL


def tapped_states(model: PreTrainedModel, taps: tuple[int, ...], ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """The tapped states [B, T, h] of the target at ids, and its choice of the next token at each [B, T]."""
    model, states = mark(twin(model)), {}

    def keep(tap: int, value: Tensor | tuple) -> None:
        states[tap] = value[0] if isinstance(value, tuple) else value

    layers = decoder_layers(model)
    handles = [
        layers[0].register_forward_pre_hook(lambda module, args: keep(0, args)),
        model.get_output_embeddings().register_forward_pre_hook(lambda module, args: keep(FINAL, args)),
        *(
            layer.register_forward_hook(lambda module, args, out, tap=tap: keep(tap, out))
            for tap, layer in enumerate(layers, 1)
        ),
    ]
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return [states[tap] for tap in taps], logits.argmax(dim=-1)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers of a model, in their order."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    return next(layers for layers in lists if len(layers) == count)


def keep_row(buffer: Tensor, states: Tensor, row: Tensor, present: Tensor) -> None:
    """Copy of states [B, T, C] the one at row [B] to buffer [B, C], for the sequences that have it: present [B]."""
    index = row.clamp(0, states.shape[1] - 1)[:, None, None].expand(-1, 1, states.shape[2])
    buffer.copy_(torch.where(present[:, None], states.gather(1, index)[:, 0], buffer.clone()))
