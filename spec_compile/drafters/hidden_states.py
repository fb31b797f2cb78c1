"""The target's hidden states: those of a text by transformers' own forward, and the one that a drafter continues."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..capture.adapters import twin
from ..capture.quantised import mark
from ..capture.taps import tapped


def tapped_states(model: PreTrainedModel, taps: tuple[int, ...], ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """The tapped states [B, T, h] of the target at ids, and its choice of the next token at each [B, T]."""
    model = mark(twin(model))
    with tapped(model, taps) as states:
        logits = model(input_ids=ids, use_cache=False).logits
    return states, logits.argmax(dim=-1)


def keep_row(buffer: Tensor, states: Tensor, row: Tensor, present: Tensor) -> None:
    """Copy the state at row [B] of states [B, T, C] to buffer [B, C], for the sequences with present [B]."""
    index = row.clamp(0, states.shape[1] - 1)[:, None, None].expand(-1, 1, states.shape[2])
    buffer.copy_(torch.where(present[:, None], states.gather(1, index)[:, 0], buffer.clone()))
