"""The target's hidden states and logits, from which a draft learns, computed for each batch."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..capture.taps import decoder_layers
from ..passes.tap_hidden_states import FINAL

LOGITS = 1 << 30
"""Bytes of the target's logits in memory at a time, before the kept tokens are selected."""


@dataclass(frozen=True)
class Features:
    """What the target computes for ids [B, L].

    states: for each tap, [B, L, h]. choices int64 [B, L]: the likeliest next token at each position. logits [B, L, K]:
    those of the kept tokens, or None if there are no such tokens.
    """

    states: list[Tensor]
    choices: Tensor
    logits: Tensor | None = None


class TargetFeatures:
    """Runs the frozen target over ids."""

    def __init__(self, model: PreTrainedModel, taps: tuple[int, ...], kept: Tensor | None = None):
        """taps: as in `Head.taps`. kept int64 [K]: the tokens whose logits are returned (None: no logits are)."""
        self.model, self.taps, self.kept = model, taps, kept
        self._vocab_size = model.get_output_embeddings().weight.shape[0]

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Features:
        """The features of ids [B, L] int64, on the target's device.

        Padding on the right needs no mask, because causal layers do not see it from the tokens before it.
        """
        row_bytes = ids.shape[1] * self._vocab_size * self.model.dtype.itemsize
        parts = [self._run(rows) for rows in ids.split(max(1, LOGITS // row_bytes))]
        if len(parts) == 1:
            return parts[0]
        states = [torch.cat(tapped) for tapped in zip(*(part.states for part in parts))]
        logits = None if self.kept is None else torch.cat([part.logits for part in parts])
        return Features(states, torch.cat([part.choices for part in parts]), logits)

    def _run(self, ids: Tensor) -> Features:
        """The features of rows whose logits fit in memory, in one forward of the target with hooks at the taps."""
        tapped: dict[int, Tensor] = {}

        def keep(tap: int, value: Tensor | tuple) -> None:
            tapped[tap] = value[0] if isinstance(value, tuple) else value

        layers = decoder_layers(self.model)
        with ExitStack() as hooks:
            for tap in set(self.taps):
                # Tap 0 is the first layer's input, tap i the output of layer i, FINAL the input of the output matrix.
                if tap in (0, FINAL):
                    module = layers[0] if tap == 0 else self.model.get_output_embeddings()
                    handle = module.register_forward_pre_hook(lambda module, args, tap=tap: keep(tap, args))
                else:
                    handle = layers[tap - 1].register_forward_hook(lambda module, args, out, tap=tap: keep(tap, out))
                hooks.callback(handle.remove)
            logits = self.model(input_ids=ids, use_cache=True).logits  # without a cache, transformers waits for the GPU
        kept = None if self.kept is None else logits[..., self.kept]
        return Features([tapped[tap] for tap in self.taps], logits.argmax(dim=-1), kept)
