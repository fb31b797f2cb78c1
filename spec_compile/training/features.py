"""What a draft learns from: hidden states and logits of the target, computed as they are needed."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..drafters.hidden_states import decoder_layers
from ..passes.tap_hidden_states import FINAL

LOGITS = 1 << 30
"""Bytes of the target's logits that are held at once, before what is wanted of them is kept."""


@dataclass(frozen=True)
class Features:
    """Of the target at ids [B, L].

    states: of each tap [B, L, h]. choices [B, L]: its likeliest next token. logits [B, L, K]: of the kept tokens, if
    any were asked for.
    """

    states: list[Tensor]
    choices: Tensor
    logits: Tensor | None = None


class TargetFeatures:
    """Runs the frozen target over ids."""

    def __init__(self, model: PreTrainedModel, taps: tuple[int, ...], kept: Tensor | None = None):
        """taps: as in `Head.taps`. kept [K]: ids of the tokens whose logits are wanted (None: of none)."""
        self.model, self.taps, self.kept = model, taps, kept
        self._vocab_size = model.get_output_embeddings().weight.shape[0]

    @torch.no_grad()
    def __call__(self, ids: Tensor) -> Features:
        """ids [B, L] int64, on the target's device; padding on the right changes nothing before it."""
        row_bytes = ids.shape[1] * self._vocab_size * self.model.dtype.itemsize
        parts = [self._run(some) for some in ids.split(max(1, LOGITS // row_bytes))]
        if len(parts) == 1:
            return parts[0]
        states = [torch.cat(tapped) for tapped in zip(*(part.states for part in parts))]
        logits = None if self.kept is None else torch.cat([part.logits for part in parts])
        return Features(states, torch.cat([part.choices for part in parts]), logits)

    def _run(self, ids: Tensor) -> Features:
        found: dict[int, Tensor] = {}

        def keep(tap: int, value: Tensor | tuple) -> None:
            found[tap] = value[0] if isinstance(value, tuple) else value

        layers = decoder_layers(self.model)
        with ExitStack() as hooks:
            for tap in set(self.taps):
                if tap in (0, FINAL):
                    module = layers[0] if tap == 0 else self.model.get_output_embeddings()
                    handle = module.register_forward_pre_hook(lambda module, args, tap=tap: keep(tap, args))
                else:
                    handle = layers[tap - 1].register_forward_hook(lambda module, args, out, tap=tap: keep(tap, out))
                hooks.callback(handle.remove)
            logits = self.model(input_ids=ids, use_cache=True).logits  # without a cache, transformers waits for the GPU
        wanted = None if self.kept is None else logits[..., self.kept]
        return Features([found[tap] for tap in self.taps], logits.argmax(dim=-1), wanted)
